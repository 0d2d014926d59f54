"""What compiled code would get wrong or could not do, told from the user's code without running it."""

from __future__ import annotations

import inspect
import types
from collections import deque
from collections.abc import Callable, Iterator

from torch import nn

_FRAMEWORKS = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "lightning_hotcompile")
_DEPTH = 3


def holds_bounded_deque(module: nn.Module) -> bool:
    """Whether an attribute is a ``deque`` with ``maxlen``: Dynamo (2.13) traces it as one without."""
    return any(isinstance(v, deque) and v.maxlen is not None for v in vars(module).values())


def differentiates_twice(module: nn.Module) -> str | None:
    """The method of the module, or of one below it, that asks for ``create_graph``; ``None`` if none does.

    Compiled code has no second derivative: the backward through it would raise in mid-step, when it
    is too late to go back to eager. Looks at the code of the classes and at functions that it calls
    by name; a call by position or through a variable is not seen.
    """
    for kind in dict.fromkeys(type(m) for m in module.modules()):
        for name, function in _own_methods(kind):
            if _mentions(function, "create_graph", _DEPTH, set()):
                return f"{kind.__name__}.{name}"
    return None


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


def _mentions(function: types.FunctionType, keyword: str, depth: int, seen: set[int]) -> bool:
    seen.add(id(function))
    codes = list(_codes(function.__code__))
    if any(keyword in names for code in codes for names in code.co_consts if isinstance(names, tuple)):
        return True
    called = (function.__globals__.get(name) for code in codes for name in code.co_names)
    return depth > 0 and any(
        _mentions(other, keyword, depth - 1, seen)
        for other in called
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
