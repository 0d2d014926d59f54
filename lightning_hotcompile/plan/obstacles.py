"""What compiled code would get wrong or could not do, told from the user's code without running it."""

from __future__ import annotations

import inspect
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from torch import nn

from lightning_hotcompile.plan.switched_off import is_switched_off

_FRAMEWORKS = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "lightning_hotcompile")
_DEPTH = 3
_KEYWORD = "create_graph"


def holds_bounded_deque(module: nn.Module) -> bool:
    """Whether an attribute is a ``deque`` with ``maxlen``: Dynamo (2.13) traces it as one without."""
    return any(isinstance(v, deque) and v.maxlen is not None for v in vars(module).values())


def differentiates_twice(module: nn.Module, beside: Iterable[object] = ()) -> str | None:
    """The method of the module, or of one below it, that asks for ``create_graph``; ``None`` if none does.

    Compiled code has no second derivative: the backward through it would raise in mid-step, when it
    is too late to go back to eager. Looks at the code of the classes and at functions that it calls
    by name; a call by position or through a variable is not seen. What hyperparameters or switches keep
    from running does not count.

    Args:
        module: of the training.
        beside: what else has methods that may turn a switch of the module's: the callbacks.
    """
    owners: dict[type, list[nn.Module]] = {}
    for owner in module.modules():
        owners.setdefault(type(owner), []).append(owner)
    kinds = {*owners, *map(type, beside)}
    for kind, instances in owners.items():
        for name, method in _own_methods(kind):
            itself = _names(method, _KEYWORD) and not all(
                is_switched_off(method, _KEYWORD, owner, kinds) for owner in instances
            )
            if itself or _calls_one_with(method, _KEYWORD, _DEPTH, set()):
                return f"{kind.__name__}.{name}"
    return None


_METRICS = frozenset(["callback_metrics", "logged_metrics", "progress_bar_metrics"])


def reads_metrics(module: nn.Module, step: str) -> bool:
    """Whether a step reads metrics of the Trainer, by itself or in what it calls by name.

    That is methods and properties of the module, and functions of the user's, at most three calls deep. What
    other modules do with the Trainer is not seen.

    Args:
        module: has the step.
        step: the name of its method.
    """
    seen = set[types.FunctionType]()
    level = [_function_of(getattr(module, step))]
    for _ in range(_DEPTH + 1):
        functions = {each for each in level if each is not None} - seen
        seen |= functions
        called = [(each, set(_names_in(each))) for each in functions]
        if any(not _METRICS.isdisjoint(names) for _, names in called):
            return True
        level = [_function_of(value) for each, names in called for value in _values_of(names, module, each)]
    return False


def _names_in(function: types.FunctionType) -> Iterator[str]:
    return (name for code in _codes(function.__code__) for name in code.co_names)


def _values_of(names: set[str], module: nn.Module, function: types.FunctionType) -> Iterator[object]:
    """What a function may mean by these names: of the module, of a class of its, or of its own file."""
    places = (vars(module), *map(vars, type(module).__mro__), function.__globals__)
    return (place[name] for place in places for name in names & place.keys())


def _function_of(value: object) -> types.FunctionType | None:
    """The user's function behind a method or property, whatever decorates it."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, (classmethod, staticmethod, types.MethodType)):
        value = value.__func__
    function = _unwrapped(value) if callable(value) else None
    if not isinstance(function, types.FunctionType) or _package_of(function) in _FRAMEWORKS:
        return None
    return function


def _own_methods(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    for base in kind.__mro__:
        if _package_of(base) in (*_FRAMEWORKS, "builtins"):
            continue
        for name, value in vars(base).items():
            function = _unwrapped(value) if callable(value) else None
            if isinstance(function, types.FunctionType):
                yield name, function


def _package_of(defined: type | types.FunctionType) -> str:
    """The first part of its ``__module__``, which the user may have set to ``None``."""
    return str(defined.__module__).partition(".")[0]


def _unwrapped(value: Callable[..., object]) -> object:
    """What a decorator was put around; ``None`` for an object that answers to ``__wrapped__`` without end."""
    try:
        return inspect.unwrap(value)
    except Exception:  # noqa: BLE001  # ValueError, or whatever a __getattr__ of the user's raises
        return None


def _names(function: types.FunctionType, keyword: str) -> bool:
    codes = _codes(function.__code__)
    return any(keyword in names for code in codes for names in code.co_consts if isinstance(names, tuple))


def _calls_one_with(function: types.FunctionType, keyword: str, depth: int, seen: set[int]) -> bool:
    seen.add(id(function))
    return depth > 0 and any(
        _names(other, keyword) or _calls_one_with(other, keyword, depth - 1, seen)
        for other in map(function.__globals__.get, _names_in(function))
        if isinstance(other, types.FunctionType)
        and id(other) not in seen
        and _package_of(other) not in _FRAMEWORKS
    )


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of those inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
