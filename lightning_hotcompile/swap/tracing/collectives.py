"""Collectives of ``torch.distributed`` are called by Python, once and in the order of the step.

Dynamo would put another operation in place of ``all_reduce`` and the like. Its backward reduces once more,
which eager's does not; one of a constant (``torch.tensor(8.0)``) runs while it is traced; and a comparison
runs it several times. The other ranks, which may run this step eagerly, meet their next collective meanwhile.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables.functions import CollectiveFunctionRewriteVariable

from lightning_hotcompile.swap.tracing.overrides import Override, end_graph


def overrides() -> list[Override]:
    """A collective ends the graph."""

    def call(prior: Any, variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        end_graph(
            "collective of torch.distributed",
            f"{variable}",
            "All ranks come to it in the same order, compiled or not.",
        )

    return [Override(CollectiveFunctionRewriteVariable, "call_function", call)]
