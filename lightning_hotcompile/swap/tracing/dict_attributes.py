"""A dict whose items are its attributes: ``class Config(dict): __getattr__ = dict.get``.

Settings are often kept so. Dynamo traces a ``__getattr__`` that is a function; where it is a method of
``dict`` it ended the graph at each attribute, and a loop that reads one (``for _ in range(self.cfg.layers)``)
left all of its function to eager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo.variables import UserDefinedObjectVariable

from lightning_hotcompile.swap.tracing.overrides import Override


def overrides() -> list[Override]:
    """The method of Dynamo's that this file overrides."""

    def asked(prior: Any, variable: Any) -> Any:
        found = prior(variable)
        for method, in_python in _IN_PYTHON:
            if found is method and _is_kept(type(variable.value), method):
                return in_python
        return found

    return [Override(UserDefinedObjectVariable, "_check_for_getattr", asked)]


def _item(items: dict[Any, Any], name: str) -> Any:
    return items[name]


def _item_or_none(items: dict[Any, Any], name: str) -> Any:
    return items.get(name)


_IN_PYTHON: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = (
    (dict.__getitem__, _item),
    (dict.get, _item_or_none),
)


def _is_kept(kind: type, method: Callable[..., Any]) -> bool:
    """Whether the class has left this method as it is: the function in Python would call its own."""
    return getattr(kind, method.__name__, None) is method
