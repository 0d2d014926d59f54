"""``torch.cond`` and its like are left to Python where a function that they are given breaks the graph.

Dynamo captures such an operation (``while_loop``, ``scan``) as a whole or not at all. Where it cannot, it
raises an error that it does not suppress, even in what comes after a graph break: by then the first part of
the step has run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch._dynamo.exc import UncapturedHigherOrderOpError, Unsupported
from torch._dynamo.variables.higher_order_ops import TorchHigherOrderOperatorVariable

from lightning_hotcompile.swap.tracing.overrides import Override, end_graph


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def call(prior: Any, variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return prior(variable, tx, *args, **kwargs)
        except UncapturedHigherOrderOpError:
            pass
        try:
            end_graph(
                "a function that breaks the graph, in an operation on functions",
                f"{variable}",
                f"{variable.value} is captured as a whole or not at all.",
            )
        except Unsupported as error:
            error.skip_frame = True  # torch.cond itself runs, and not what it calls while it is traced
            raise

    return [Override(kind, "call_function", call) for kind in _kinds(TorchHigherOrderOperatorVariable)]


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)
