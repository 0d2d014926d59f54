"""Lanes of a step: what is open, what is restored, whatever happened in between."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo

from lightning_hotcompile.errors import HotCompileError
from lightning_hotcompile.swap.gate import Gate, Lane

DYNAMO_LOG = logging.getLogger("torch._dynamo.convert_frame")


def outside() -> tuple[str, bool, bool, int]:
    """Everything that an open gate changes outside of itself."""
    config = torch._dynamo.config
    stance = torch._dynamo.eval_frame._stance.stance
    filters = len(DYNAMO_LOG.filters)
    return stance, config.suppress_errors, config.skip_nnmodule_hook_guards, filters


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    before = outside()
    yield
    assert outside() == before


def test_closed_is_eager() -> None:
    gate = Gate()
    assert (gate.lane, gate.takes("a")) == (Lane.EAGER, False)
    gate.close()


@pytest.mark.parametrize("lane", list(Lane))
def test_open_and_close(lane: Lane) -> None:
    gate, before = Gate(), outside()
    gate.open(lane)
    assert (gate.lane, gate.takes("a")) == (lane, lane is not Lane.EAGER)
    assert (outside() == before) is (lane is not Lane.COMPILE)
    gate.close()
    assert (gate.lane, outside()) == (Lane.EAGER, before)
    gate.close()


@pytest.mark.parametrize("suppress", [True, False])
def test_compiling_suppresses_errors_only_if_asked_for(suppress: bool) -> None:
    gate = Gate(suppress_errors=suppress)
    gate.open(Lane.COMPILE)
    assert torch._dynamo.config.suppress_errors is suppress
    assert torch._dynamo.config.skip_nnmodule_hook_guards is False
    gate.close()


@pytest.mark.parametrize("first", list(Lane))
@pytest.mark.parametrize("second", list(Lane))
def test_a_step_that_was_left_open_is_closed_by_the_next(first: Lane, second: Lane) -> None:
    gate, before = Gate(), outside()
    gate.open(first)  # and an exception: nobody closes it
    gate.open(second)
    assert gate.lane is second
    gate.close()
    assert outside() == before


@pytest.mark.parametrize("lane", [Lane.COMPILE, Lane.REUSE])
def test_what_the_user_set_is_restored(lane: Lane) -> None:
    with torch.compiler.set_stance("force_eager"):
        before = outside()
        gate = Gate()
        gate.open(lane)
        gate.close()
        assert outside() == before


@pytest.mark.parametrize("lanes", [(Lane.COMPILE, Lane.REUSE), (Lane.REUSE, Lane.COMPILE)])
def test_two_gates_inside_of_each_other(lanes: tuple[Lane, Lane]) -> None:
    outer, inner, before = Gate(), Gate(), outside()
    outer.open(lanes[0])
    between = outside()
    inner.open(lanes[1])
    inner.close()
    assert outside() == between
    outer.close()
    assert outside() == before


def test_a_frame_that_fails_is_told_and_runs_eagerly() -> None:
    def refuses(graph: object, inputs: object) -> object:
        raise RuntimeError("not today")

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 2 + 1, backend=refuses)
    gate = Gate()
    gate.open(Lane.COMPILE)
    try:
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    finally:
        gate.close()
    assert gate.failures == ["RuntimeError: not today"]
    torch._dynamo.reset()


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_reason_of_this_package_is_told_only_where_an_error_was_put_around_it(wrapped: bool) -> None:
    gate = Gate()
    try:
        try:
            raise HotCompileError("the step does not fit\nfrom user code: ...")
        except HotCompileError as error:
            raise RuntimeError(f"HotCompileError: {error}" if wrapped else "another thing") from None
    except RuntimeError as error:
        gate.failed(error)
    assert gate.failures == ["the step does not fit" if wrapped else "RuntimeError: another thing"]
