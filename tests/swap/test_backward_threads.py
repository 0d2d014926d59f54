"""What is compiled in a thread of autograd's own: that of an accelerator, which a backward runs in."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hotcompile.plan.scopes import Region
from lightning_hotcompile.swap.gate import Gate, Lane
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.swapped_region import SwappedRegion
from tests.elsewhere import threads_may_compile
from tests.models import Block

pytestmark = threads_may_compile


class Broken(nn.Module):
    """Two graphs."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x * 2


def called_in_a_thread(block: nn.Module, backend: Any) -> tuple[Tensor | None, Witness, BaseException | None]:
    """The first call of a compiled block, as a reentrant checkpoint makes it in a backward."""
    root, gate, witness = nn.Sequential(block), Gate(), Witness(backend)
    region = Region(name="region", kind="module", members=("0",), class_name=type(block).__name__)
    swapped = SwappedRegion(region, gate, witness, dynamic=None, fullgraph=False)
    swapped.put(root)
    found: list[Tensor] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            found.append(root(torch.ones(4, 8)))
        except Exception as error:  # what a thread raises nobody sees
            errors.append(error)

    gate.open(Lane.COMPILE)
    try:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    finally:
        gate.close()
        swapped.take_out()
    return next(iter(found), None), witness, next(iter(errors), None)


def test_the_compilers_settings_are_those_of_the_step() -> None:
    seen: list[tuple[bool, bool, bool]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        config = torch._dynamo.config
        names = ("suppress_errors", "allow_unspec_int_on_nn_module", "skip_nnmodule_hook_guards")
        first, second, third = (getattr(config, name) for name in names)
        seen.append((first, second, third))
        return graph.forward

    _, witness, error = called_in_a_thread(Block(8), backend)
    assert error is None
    assert seen == [(True, True, False)]
    assert witness.runs_of("region") == 1


def test_those_that_the_user_has_chosen_too() -> None:
    seen: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(torch._dynamo.config.capture_scalar_outputs)
        return graph.forward

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        called_in_a_thread(Block(8), backend)
    assert seen == [True]


@pytest.mark.parametrize("fails", [1, 2])
def test_a_compiler_that_fails_there_is_answered_by_eager(fails: int) -> None:
    """After a graph break, too, when a part of the block has run."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        if len(graphs) == fails:
            raise RuntimeError("no such instruction")
        return graph.forward

    found, witness, error = called_in_a_thread(Broken(), backend)
    assert error is None
    assert found is not None
    torch.testing.assert_close(found, torch.ones(4, 8).sin() * 2)
    assert "no such instruction" in str(witness.error_of("region"))


def test_a_step_that_is_over_has_no_settings() -> None:
    gate = Gate()
    gate.open(Lane.COMPILE)
    gate.close()
    seen: list[bool] = []
    thread = threading.Thread(
        target=lambda: gate.as_opened(lambda: seen.append(torch._dynamo.config.suppress_errors))
    )
    thread.start()
    thread.join()
    assert seen == [False]
