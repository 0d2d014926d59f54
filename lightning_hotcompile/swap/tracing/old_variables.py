"""``Variable(torch.rand(3))``, as programs from before torch 0.4 have it, is the tensor without its history.

Dynamo does not know how such a thing is made, so the graph ended at each.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables import TensorVariable, UserDefinedClassVariable
from torch.autograd import Variable

from lightning_hotcompile.swap.tracing.overrides import Override


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def made(prior: Any, kind: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if kind.value is not Variable or len(args) != 1 or not _asks_for_no_gradient(kwargs):
            return prior(kind, tx, args, kwargs)
        tensor = args[0].realize()
        if type(tensor) is not TensorVariable:  # of a subclass comes a plain tensor
            return prior(kind, tx, args, kwargs)
        return tensor.call_method(tx, "detach", [], {})

    return [Override(UserDefinedClassVariable, "call_function", made)]


def _asks_for_no_gradient(kwargs: dict[str, Any]) -> bool:
    known = [value.is_python_constant() and not value.as_python_constant() for value in kwargs.values()]
    return kwargs.keys() <= {"requires_grad"} and all(known)
