"""Calls in a method that its hyperparameters or switches keep from ever running, told from its source."""

from __future__ import annotations

import ast
import dis
import inspect
import operator
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeGuard

from torch import nn

from lightning_hotcompile.plan.source import parsed

_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_CALLS: Mapping[str, Callable[[Any], Any]] = {"len": len, "bool": bool}
_PLAIN = (type(None), bool, int, float, str, list, tuple, dict, set, frozenset)


class _Unknown(Exception):
    """What is not a hyperparameter, or not a plain value, may be another one later."""


def is_switched_off(
    method: types.FunctionType, keyword: str, owner: nn.Module, kinds: Collection[type] = ()
) -> bool:
    """Whether no call with this keyword asks for anything, as the owner's ``hparams`` and switches are.

    Each has a value that is false, or is in an ``if`` that they make false.

    ``if self.training and len(self.hparams.constraints) > 0:`` is one where there are no constraints.
    Hyperparameters are what a training is set up with, unless a method sets one later. So is a switch, an
    attribute that is ``False`` (``if self.derivative:``) and that ``__init__`` alone sets. Numbers, other
    attributes and arguments may change while it runs, so an ``if`` that needs them says nothing. A method
    that has an argument of the same name, which is false if nobody says otherwise, hands on what it is
    given: whoever gives it another value names it.

    Args:
        method: of the owner's class, as it was written.
        keyword: of the calls that are looked for.
        owner: the module.
        kinds: the classes of the model, and of callbacks, any of which may set a switch.
    """
    definition = _definition(method)
    if definition is None or not definition.args.args:
        return False
    values = _Values(definition.args.args[0].arg, owner, method.__globals__, {type(owner), *kinds})
    if any(isinstance(node, ast.Constant) and node.value == keyword for node in ast.walk(definition)):
        return False  # among arguments that are put together first
    handed_on = _is_handed_on(method, definition, keyword)
    found = [
        (each.value, tests)
        for call, tests in _calls(definition, ())
        for each in call.keywords
        if each.arg == keyword
    ]
    return bool(found) and all(
        any(map(values.is_false, (value, *tests))) or (handed_on and _is_name(value, keyword))
        for value, tests in found
    )


def _is_handed_on(method: types.FunctionType, definition: ast.FunctionDef, name: str) -> bool:
    """Whether a name is that of an argument, false by itself, for which the method sets no other value."""
    argument = inspect.signature(method).parameters.get(name)
    stores = (node for node in ast.walk(definition) if isinstance(getattr(node, "ctx", None), ast.Store))
    is_set = any(_is_name(node, name) for node in stores)
    return argument is not None and argument.default is False and not is_set


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _definition(method: types.FunctionType) -> ast.FunctionDef | None:
    found = parsed(method.__code__)
    if found is None:
        return None
    tree, _ = found
    return next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)


def _calls(node: ast.AST, tests: tuple[ast.expr, ...]) -> Iterator[tuple[ast.Call, tuple[ast.expr, ...]]]:
    """All calls below a node, each with the conditions of the bodies that it is in."""
    if isinstance(node, ast.Call):
        yield node, tests
    if isinstance(node, (ast.If, ast.IfExp)):
        yield from _calls(node.test, tests)
        for part in node.body if isinstance(node.body, list) else [node.body]:
            yield from _calls(part, (*tests, node.test))
        for part in node.orelse if isinstance(node.orelse, list) else [node.orelse]:
            yield from _calls(part, tests)
        return
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, tests)


class _Values:
    """Evaluates what consists of constants, hyperparameters and switches, and calls nothing of the user's."""

    def __init__(
        self, own_name: str, owner: nn.Module, namespace: Mapping[str, Any], kinds: Collection[type]
    ) -> None:
        self._own_name = own_name
        self._owner = owner
        self._namespace = namespace
        self._kinds = kinds

    def is_false(self, test: ast.expr) -> bool:
        """Whether the condition is known not to hold."""
        try:
            return not self._of(test)
        except Exception:  # noqa: BLE001  # unknown, or a comparison that raises in the step as well
            return False

    def _of(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self._of(node.operand)
        if isinstance(node, ast.BoolOp):
            return self._of_several(node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return _COMPARISONS[type(node.ops[0])](self._of(node.left), self._of(node.comparators[0]))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
            return self._call(node.func.id)(self._of(node.args[0]))
        if isinstance(node, ast.Attribute):
            return self._switch(node) if _is_name(node.value, self._own_name) else self._hyperparameter(node)
        raise _Unknown

    def _call(self, name: str) -> Callable[[Any], Any]:
        if name in self._namespace or name not in _CALLS:
            raise _Unknown
        return _CALLS[name]

    def _of_several(self, node: ast.BoolOp) -> bool:
        """One that is false decides an ``and``, whatever the others are."""
        if isinstance(node.op, ast.And) and any(self.is_false(value) for value in node.values):
            return False
        return (all if isinstance(node.op, ast.And) else any)(bool(self._of(value)) for value in node.values)

    def _switch(self, node: ast.Attribute) -> bool:
        if vars(self._owner).get(node.attr) is not False or _is_set(node.attr, self._kinds):
            raise _Unknown
        return False

    def _hyperparameter(self, node: ast.Attribute) -> Any:
        of = node.value
        if not (isinstance(of, ast.Attribute) and of.attr == "hparams" and isinstance(of.value, ast.Name)):
            raise _Unknown
        if of.value.id != self._own_name:
            raise _Unknown
        value = dict(self._owner.hparams)[node.attr]  # type: ignore[arg-type]
        if type(value) not in _PLAIN or _is_set(node.attr, [type(self._owner)]):
            raise _Unknown
        return value


def _is_set(name: str, kinds: Collection[type]) -> bool:
    """Whether a method of these classes may set an attribute or an item of this name."""
    functions = {f for kind in kinds for base in kind.__mro__ for f in vars(base).values() if _is_function(f)}
    return any(_sets(f.__code__, name) for f in functions if f.__name__ != "__init__")


def _is_function(value: Any) -> TypeGuard[types.FunctionType]:
    return isinstance(value, types.FunctionType)


def _sets(code: types.CodeType, name: str) -> bool:
    steps = list(dis.get_instructions(code))
    if any(step.opname == "STORE_ATTR" and step.argval == name for step in steps):
        return True
    by_name = any(step.opname == "STORE_SUBSCR" for step in steps) or "setattr" in code.co_names
    return by_name and name in code.co_consts
