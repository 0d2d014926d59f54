"""``isinstance(x, Kind)`` asks the kind, where its metaclass has an answer of its own.

Dynamo asks whether the class of a tensor, list or number is a subclass. It so took
``isinstance(x, Variable)``, which is true of each tensor, for false: the step took the other branch, and no
comparison of captured graphs can see that.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterator
from types import UnionType
from typing import Any

import torch
from torch._dynamo.variables import BuiltinVariable, TensorVariable, UserDefinedObjectVariable
from torch._dynamo.variables.base import VariableTracker
from torch.autograd import Variable

from lightning_hotcompile.swap.tracing.overrides import Override, end_graph

_AS_A_SUBCLASS: tuple[Any, ...] = (type.__instancecheck__, ABCMeta.__instancecheck__)
_KNOWN = ("pydantic", "torch", "typing", "typing_extensions")
"""Packages whose metaclasses answer alike, or are known to Dynamo."""


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def call(prior: Any, builtin: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if builtin.fn is not isinstance or len(args) != 2 or not args[1].realize().is_python_constant():
            return prior(builtin, tx, args, kwargs)
        kinds = args[1].realize().as_python_constant()
        asked = list(_flat(kinds))
        if any(kind is Variable for kind in asked) and _is_a_tensor(args[0].realize()):
            return VariableTracker.build(tx, True)
        for kind in asked:
            if _answers_itself(kind) and not (kind is kinds and _dynamo_asks(kind, args[0].realize())):
                end_graph(
                    "isinstance that a class answers itself",
                    str(kind),
                    f"the metaclass of {kind.__name__} has an __instancecheck__ of its own",
                )
        return prior(builtin, tx, args, kwargs)

    return [Override(BuiltinVariable, "call_function", call)]


def _is_a_tensor(asked: Any) -> bool:
    """A number or an array may be a tensor to Dynamo, too."""
    return isinstance(asked, TensorVariable) and issubclass(asked.python_type(), torch.Tensor)


def _dynamo_asks(kind: Any, asked: Any) -> bool:
    """Whether Dynamo itself asks the kind."""
    return isinstance(asked, UserDefinedObjectVariable) and "__instancecheck__" in vars(type(kind))


def _flat(kinds: Any) -> Iterator[Any]:
    if isinstance(kinds, UnionType):
        kinds = kinds.__args__
    if not isinstance(kinds, tuple):
        yield kinds
        return
    for kind in kinds:
        yield from _flat(kind)


def _answers_itself(kind: Any) -> bool:
    metaclass = type(kind)
    is_known = metaclass.__module__.partition(".")[0] in _KNOWN
    return isinstance(kind, type) and not is_known and metaclass.__instancecheck__ not in _AS_A_SUBCLASS
