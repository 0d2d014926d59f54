"""Inference mode is entered by Python, at the price of a graph break.

In the middle of a graph no backend can compile it, and one that tries fails in a way that leaves it switched
on. What is called within it is compiled by itself, as it is in a validation step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo.variables.ctx_manager import InferenceModeVariable

from lightning_hotcompile.swap.tracing.overrides import Override


def entered_by_python(break_the_graph: Callable[..., Any]) -> list[Override]:
    """What Dynamo does otherwise.

    Args:
        break_the_graph: Dynamo's function that ends a graph, with a reason in its four arguments.
    """

    def enter(prior: Any, variable: Any, tx: Any) -> Any:
        return break_the_graph(
            gb_type="inference mode within a step",
            context=f"inference_mode({variable.target_values[0]})",
            explanation="Backends cannot compile it in the middle of a graph.",
            hints=["Use torch.no_grad() there."],
        )

    return [Override(InferenceModeVariable, "enter", enter)]
