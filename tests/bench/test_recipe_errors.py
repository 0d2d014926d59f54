"""Errors of this package end a recipe with one line; all others arrive as they are."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lightning_hotcompile.bench.recipe_errors import refusals_in_one_line
from lightning_hotcompile.errors import ConfigError, PlanError, TargetError


def wrapped(cause: Exception | None) -> Exception:
    """``cause`` as Hydra hands it on."""
    hydra_errors = pytest.importorskip("hydra.errors")
    error: Exception = hydra_errors.InstantiationException("Error in call to target 'x'")
    error.__cause__ = cause
    return error


def ended_by(error: BaseException) -> Any:
    with pytest.raises(SystemExit) as caught, refusals_in_one_line():
        raise error
    assert caught.value.__suppress_context__, "no traceback of what was behind it"
    return caught.value.code


@pytest.mark.parametrize("kind", [ConfigError, PlanError, TargetError])
def test_an_error_of_this_package_is_one_line(kind: type[Exception]) -> None:
    assert ended_by(kind("threshold=-5 is not allowed")) == "threshold=-5 is not allowed"


def test_hydras_wrapper_is_taken_off_however_often_it_is_there() -> None:
    error = ConfigError("threshold=-5 is not allowed")
    assert ended_by(wrapped(error)) == "threshold=-5 is not allowed"
    assert ended_by(wrapped(wrapped(error))) == "threshold=-5 is not allowed"


@pytest.mark.parametrize("cause", [None, ValueError("not ours")], ids=["no cause", "another cause"])
def test_hydras_own_error_arrives_as_it_is(cause: Exception | None) -> None:
    error = wrapped(cause)
    with pytest.raises(type(error)) as caught, refusals_in_one_line():
        raise error
    assert caught.value is error


@pytest.mark.parametrize("error", [ValueError("not ours"), SystemExit(3)], ids=repr)
def test_all_other_errors_arrive_as_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, refusals_in_one_line():
        raise error
    assert caught.value is error


def test_who_stops_it_by_hand_reads_no_traceback() -> None:
    assert ended_by(KeyboardInterrupt()) == 130


def test_an_error_that_was_raised_because_of_ours_is_not_ours() -> None:
    error = ValueError("not ours")
    error.__cause__ = ConfigError("ours")
    with pytest.raises(ValueError, match="not ours"), refusals_in_one_line():
        raise error


def test_hydra_need_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hydra.errors", raising=False)
    assert ended_by(ConfigError("ours")) == "ours"
    with pytest.raises(ValueError, match="not ours"), refusals_in_one_line():
        raise ValueError("not ours")
    assert "hydra.errors" not in sys.modules


def test_without_an_error_nothing_happens() -> None:
    with refusals_in_one_line():
        done = True
    assert done
