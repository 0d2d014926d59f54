"""``copy.copy`` and ``copy.deepcopy`` of an object that says itself what a copy of it holds.

Dynamo follows both through ``object.__reduce_ex__``, for which it has a function of its own: a new object of
the class, and all that is in ``__dict__``. What a class does otherwise (``__reduce__``, ``__getstate__``,
``__getnewargs__``, slots, a base of Python's own such as a dict) it left out without a word, so the copy held
something else. These are copied by Python, and the graph ends there.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from lightning_hotcompile.swap.tracing.overrides import Override, end_graph

_HEAP_TYPE = 1 << 9
"""Of ``type.__flags__``: a class that is made by a statement, and not in C."""

_OWN_WAYS = (
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__setstate__",
    "__getnewargs__",
    "__getnewargs_ex__",
)


def overrides() -> list[Override]:
    """What Dynamo does otherwise."""

    def method(prior: Any, variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "__reduce_ex__" and not _is_plain(kind := variable.python_type()):
            end_graph(
                "copy of an object with its own way to be copied",
                f"{kind.__module__}.{kind.__qualname__}",
                "Dynamo copies what is in __dict__, and this class says otherwise.",
            )
        return prior(variable, tx, name, args, kwargs)

    return [Override(UserDefinedObjectVariable, "call_method", method)]


def _is_plain(kind: type) -> bool:
    """Whether all that there is to copy of its objects is in ``__dict__``."""
    bases = (each for each in kind.__mro__ if each is not object)
    if not all(each.__flags__ & _HEAP_TYPE and vars(each).get("__slots__", ()) == () for each in bases):
        return False
    return all(getattr(kind, name, None) is getattr(object, name, None) for name in _OWN_WAYS)
