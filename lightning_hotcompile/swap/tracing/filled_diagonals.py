"""``mask[:, start:].fill_diagonal_(0)``: the diagonal of a view.

Torch's own method goes by strides, and AOTAutograd can write by strides to a whole tensor only: for a view it
raises, and the frame is left to eager. Contrastive losses take away so what an example has in common with
itself.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.base import VariableTracker

from lightning_hotcompile.swap.tracing.overrides import Override


def overrides() -> list[Override]:
    """What Dynamo does otherwise: the diagonal of a matrix is a view of it, which is filled."""

    def call(prior: Any, variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name != "fill_diagonal_" or not _is_matrix(variable) or not _is_one_number(args, kwargs):
            return prior(variable, tx, name, args, kwargs)
        return VariableTracker.build(tx, _fill_diagonal).call_function(tx, [variable, *args], kwargs)

    return [Override(TensorVariable, "call_method", call)]


def _fill_diagonal(into: Tensor, fill_value: float) -> Tensor:
    into.diagonal().fill_(fill_value)
    return into


def _is_matrix(variable: Any) -> bool:
    if type(variable) is not TensorVariable:
        return False
    example = variable.as_proxy().node.meta["example_value"]
    return example.ndim == 2 and not (example.is_leaf and example.requires_grad)  # torch refuses a weight


def _is_one_number(args: Any, kwargs: Any) -> bool:
    """Whether it is all that the method is given: no ``wrap``."""
    given = [*args, *(value for key, value in kwargs.items() if key == "fill_value")]
    return len(given) == len(args) + len(kwargs) == 1 and isinstance(given[0].realize(), ConstantVariable)
