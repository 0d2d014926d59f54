"""Inference mode is entered by Python, at the price of a graph break.

In the middle of a graph no backend can compile it, and one that tries fails in a way that leaves it switched
on. What is called within it is compiled by itself, as it is in a validation step.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables.ctx_manager import InferenceModeVariable

from lightning_hotcompile.swap.tracing.overrides import Override, end_graph


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def enter(prior: Any, variable: Any, tx: Any) -> Any:
        end_graph(
            "inference mode within a step",
            f"inference_mode({variable.target_values[0]})",
            "Backends cannot compile it in the middle of a graph.",
            "Use torch.no_grad() there.",
        )

    return [Override(InferenceModeVariable, "enter", enter)]
