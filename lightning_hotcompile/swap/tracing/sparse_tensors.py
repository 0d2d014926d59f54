"""A sparse tensor is left to Python: the graph ends where a function of torch's is called with it.

Dynamo refuses to look at one, be it only to read ``self.graph`` for ``torch.sparse.mm(self.graph, x)``, where
no graph can end: all of the function from there on was left to eager.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables import GetAttrVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from lightning_hotcompile.swap.tracing.left_variable import LeftVariable
from lightning_hotcompile.swap.tracing.overrides import Override, end_graph

SPARSE = "sparse tensor"
_WHY = "No graph can have one as its input."
_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class _Sparse(LeftVariable):
    def var_getattr(self, tx: Any, name: str) -> Any:
        """A method, which ends the graph when it is called; what else it has ends it at once."""
        return GetAttrVariable(self, name) if callable(getattr(Tensor, name, None)) else self.ends_graph()

    tp_getattro_impl = var_getattr  # from torch 2.14 on


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def wrap(prior: Any, builder: Any, value: Any) -> Any:
        if type(value) is not Tensor or builder.tx.export or not _is_sparse(value):
            return prior(builder, value)
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        return _Sparse(Tensor, SPARSE, _WHY, source=builder.source)

    def call(prior: Any, function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if any(isinstance(each.unwrap(), _Sparse) for each in (*args, *kwargs.values())):
            end_graph(SPARSE, f"{function}", _WHY)
        return prior(function, tx, args, kwargs)

    return [
        Override(VariableBuilder, "_wrap", wrap),
        Override(TorchInGraphFunctionVariable, "call_function", call),
    ]


def _is_sparse(value: Tensor) -> bool:
    """Whether it is, or is what one has: Dynamo takes its ``values()`` for a view of another shape."""
    base = value._base if value._is_view() else None
    return value.layout in _LAYOUTS or (base is not None and base.layout in _LAYOUTS)
