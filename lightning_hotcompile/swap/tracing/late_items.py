"""What ``loss.item()`` gives in a loop is asked for once the graph has run.

``for name, loss in losses.items(): self.log(name, loss.item())`` is how losses are logged. Dynamo ends the
graph at ``item()``, and where that is in a loop, or in a function that a loop calls, all of the function is
left to eager. So there it goes on with a number that nobody knows yet: it may be kept, logged, written as a
text and computed with, all of which Python does after the graph. Whoever needs to know it (a comparison, a
branch, a tensor that is multiplied by it) ends the graph as ``item()`` does elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch._dynamo import config, utils
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import (
    BaseListVariable,
    BuiltinVariable,
    ConstantVariable,
    SliceVariable,
    TensorVariable,
    lists,
)
from torch._dynamo.variables.base import VariableTracker

from lightning_hotcompile.swap.tracing.number_texts import CONVERSIONS, text_of
from lightning_hotcompile.swap.tracing.numpy_numbers import NumpyNumber
from lightning_hotcompile.swap.tracing.overrides import Override, end_graph

_DIVIDES = frozenset(
    getattr(operator, name) for name in ("truediv", "floordiv", "mod", "itruediv", "ifloordiv", "imod")
)
_COMPUTES = frozenset(
    getattr(operator, name) for name in ("add", "sub", "mul", "neg", "pos", "iadd", "isub", "imul")
).union([abs, float])
"""What Python does with such numbers after the graph. None of it raises: a handler of the step's own would
not be there any longer."""

_CHOOSES = frozenset([min, max])
_FINDS = frozenset([operator.getitem, operator.setitem, operator.delitem])
_IS = {operator.is_: False, operator.is_not: True}
_TEXTS = {str: "!s", repr: "!r", format: ""}
_NEEDS_IT = frozenset(
    ["as_proxy", "call_method", "var_getattr", "call_obj_hasattr", "is_python_hashable", "is_python_equal"]
)
"""Methods of Dynamo's variables, beside those of the slots of Python's types."""

_KNOWN_TO_DYNAMO = frozenset([isinstance, type, str.format])


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def method(prior: Any, tensor: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "item" and not (args or kwargs) and _is_lost(tx) and is_a_number(tx, tensor):
            return item_of(tx, tensor)
        return prior(tensor, tx, name, args, kwargs)

    def call(prior: Any, function: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        given = [arg.unwrap() for arg in args]
        found = None
        if function.fn in _FINDS and any(map(_is_late, given[1:2])):
            _is_asked(f"{given[0]}[{given[1]}]")
        if any(isinstance(arg.unwrap(), LateNumber) for arg in (*given, *kwargs.values())):
            found = _outcome(function.fn, given, kwargs)
        elif function.fn is float and len(given) == 1 and _is_lost(tx) and is_a_number(tx, given[0]):
            found = LateNumber(float, [item_of(tx, given[0])], float)
        return prior(function, tx, args, kwargs) if found is None else found

    def formatted(prior: Any, tx: Any, spec: Any, flags: int) -> Any:
        if not (isinstance(tx.stack[-1].unwrap(), LateNumber) and _is_constant(spec.unwrap(), str)):
            return prior(tx, spec, flags)
        tx.stack[-1] = text_of(tx.stack[-1].unwrap(), spec.unwrap(), CONVERSIONS[flags & 3])
        return None

    def contains(prior: Any, items: Any, search: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        items = list(items)
        if any(isinstance(each.unwrap(), LateNumber) for each in (*items, search)):
            _is_asked(f"{search} in {items}")
        return prior(items, search, tx, *args, **kwargs)

    return [
        Override(TensorVariable, "call_method", method),
        Override(BuiltinVariable, "call_function", call),
        Override(InstructionTranslatorBase, "_format_value", formatted),
        *(Override(owner, "iter_contains", contains) for owner in (utils, lists)),
    ]


class LateNumber(VariableTracker):
    """A number that nobody knows while the graph is traced: what a function of Python's makes of others.

    Args:
        function: called after the graph, with what ``args`` are then.
        args: constants, numbers of this kind or, for ``Tensor.item``, a tensor of the graph.
        kind: of the number.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kind: type, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function, self.args, self.kind = function, list(args), kind

    def python_type(self) -> type:
        """Called by Dynamo."""
        return self.kind

    def reconstruct(self, codegen: Any) -> None:
        """Called by Dynamo for the code that is run after the graph."""
        codegen.add_push_null(
            lambda: codegen.append_output(codegen.create_load_const_unchecked(self.function))
        )
        for each in self.args:
            codegen(each)
        codegen.extend_output(create_call_function(len(self.args), False))

    def is_asked(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Called by Dynamo for all that needs the number: its truth, its hash, its methods and attributes."""
        _is_asked(str(self))


for _name in dir(VariableTracker):
    if _name.endswith("_impl") or _name in _NEEDS_IT:
        setattr(LateNumber, _name, LateNumber.is_asked)


def _is_asked(what: str) -> NoReturn:
    end_graph("use of a number of a tensor", what, "Tensor.item() in a loop is known once the graph has run.")


def _is_lost(tx: Any) -> bool:
    """Whether all of the function would be left to eager if the graph ended here."""
    known_at_once = tx.output.root_tx.one_graph or config.capture_scalar_outputs
    return not known_at_once and bool(tx.maybe_has_backedge())


def is_a_number(tx: Any, tensor: Any) -> bool:
    """Whether it has one number and is this graph's own: no input, and of no part of it (a checkpoint)."""
    if type(tensor) is not TensorVariable:
        return False
    value = tensor.as_proxy().node.meta.get("example_value")
    if tensor.source is not None or tensor.class_type not in (torch.Tensor, torch.nn.Parameter):
        return False
    if not isinstance(value, torch.Tensor) or not all(type(size) is int for size in value.shape):
        return False
    return value.numel() == 1 and not value.is_complex() and tx.output.current_tracer is tx.output.root_tracer


def item_of(tx: Any, tensor: Any) -> LateNumber:
    """Of a copy: the tensor may be changed in place by the time that it is asked for."""
    copy = tensor.call_method(tx, "detach", [], {}).call_method(tx, "clone", [], {})
    dtype = tensor.dtype
    kind = float if dtype.is_floating_point else bool if dtype is torch.bool else int
    return LateNumber(torch.Tensor.item, [copy], kind)


def _outcome(function: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Of a call with such a number; ``None`` where Dynamo knows it."""
    if function in _TEXTS and not kwargs and all(_is_constant(arg, str) for arg in args[1:]):
        return text_of(args[0], args[1] if len(args) > 1 else None, _TEXTS[function])
    if function in _IS and any(_is_constant(arg, type(None)) for arg in args):
        return ConstantVariable.create(_IS[function])
    if not kwargs and all(map(_is_number, args)) and (kind := _kind_of(function, args)) is not None:
        return LateNumber(function, args, kind)
    if function in _KNOWN_TO_DYNAMO or any(isinstance(arg, BaseListVariable) for arg in args):
        return None
    _is_asked(f"{function}({', '.join(map(str, args))})")


def _is_late(variable: Any) -> bool:
    """Such a number, or a slice that ends at one."""
    parts = variable.items if isinstance(variable, SliceVariable) else [variable]
    return any(isinstance(part.unwrap(), LateNumber) for part in parts)


def _is_constant(variable: Any, kind: Any) -> bool:
    return isinstance(variable, ConstantVariable) and isinstance(variable.value, kind)


def _is_number(variable: Any) -> bool:
    """Numbers of numpy's are not: what becomes of them is of another type."""
    is_pythons = _is_constant(variable, (int, float)) and not isinstance(variable, NumpyNumber)
    return isinstance(variable, LateNumber) or is_pythons


def _kind_of(function: Any, args: Sequence[Any]) -> type | None:
    """What a function makes of numbers; ``None`` where it may raise, or may give more than one kind."""
    kinds = {arg.python_type() for arg in args}
    kind = int if all(issubclass(each, int) for each in kinds) else float
    if function in _COMPUTES:
        return float if function is float else kind
    if function in _CHOOSES and len(args) > 1:
        return kinds.pop() if len(kinds) == 1 else None
    if function in _DIVIDES and _is_constant(args[1], (int, float)) and args[1].value:
        return float if function in (operator.truediv, operator.itruediv) else kind
    if function is round and len(args) == 2 and _is_constant(args[1], int):
        return kind
    return None
