"""The kinds of errors, and hints for misspelt names."""

from __future__ import annotations

import warnings

import pytest

from lightning_hotcompile import errors
from lightning_hotcompile.errors import (
    ConfigError,
    HotCompileError,
    HotCompileWarning,
    PlanError,
    TargetError,
    first_line,
    near_names,
    warn,
)


@pytest.mark.parametrize(
    ("kind", "builtin"), [(ConfigError, ValueError), (TargetError, LookupError), (PlanError, Exception)]
)
def test_every_error_is_a_hotcompile_error_and_its_builtin(kind: type[Exception], builtin: type) -> None:
    assert issubclass(kind, HotCompileError)
    assert issubclass(kind, builtin)


def test_no_error_is_left_out_of_the_base_class() -> None:
    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert {k for k in kinds if not issubclass(k, HotCompileError)} == {HotCompileWarning}
    assert issubclass(HotCompileWarning, UserWarning)


def test_messages_are_shown_as_written() -> None:
    # A KeyError would show the repr of its message, quotes and all.
    assert str(TargetError("targets='x' matches nothing")) == "targets='x' matches nothing"


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("blocs", ["blocks", "head"], "; did you mean 'blocks'?"),
        ("blck", ["block", "blocks"], "; did you mean 'block' or 'blocks'?"),
        ("xyz", ["blocks", "head"], ""),
        ("blocks", [], ""),
        ("", ["blocks"], ""),
    ],
)
def test_near_names(name: str, known: list[str], hint: str) -> None:
    assert near_names(name, known) == hint


def test_near_names_are_few_unique_and_in_the_same_order_for_any_input_order() -> None:
    known = [f"blocks.{i}" for i in range(9)] * 2
    hint = near_names("blocks.x", known)
    assert hint.count("blocks.") == 3
    assert hint == near_names("blocks.x", reversed(known))
    assert near_names("blocks.x", known, limit=1).count("blocks.") == 1


def test_near_names_takes_any_iterable() -> None:
    assert near_names("hed", (n for n in ["head"])) == "; did you mean 'head'?"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("one\ntwo"), "ValueError: one"),
        (ValueError("\n  one\n"), "ValueError: one"),
        (ValueError(), "ValueError"),
        (KeyError("k"), "KeyError: 'k'"),
    ],
)
def test_an_error_as_one_line(error: BaseException, expected: str) -> None:
    assert first_line(error) == expected


def test_a_warning_never_stops_a_training() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn("something was not done")


def test_a_warning_names_the_line_of_the_caller() -> None:
    with pytest.warns(HotCompileWarning, match="something was not done") as caught:
        warn("something was not done", stacklevel=1)
    assert caught[0].filename == __file__
