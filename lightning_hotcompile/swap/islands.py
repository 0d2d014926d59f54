"""Keep modules eager inside of compiled code, and let go of them again."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_hotcompile.errors import TargetError, near_names
from lightning_hotcompile.plan.islands import is_metric
from lightning_hotcompile.swap.covers import Cover, cover, uncover

_METRIC_METHODS = ("update", "compute", "reset")
_REASON = "kept eager as an island"


class IslandGuard:
    """Keeps the named modules of ``module`` eager, with all that they call, while it is put.

    Only attributes of the instances change: the keys of ``state_dict`` stay as they are, and copies and
    pickles are those of the module as it was. Metrics have their ``update``, ``compute`` and ``reset`` kept
    eager as well, which are called directly.

    Names are looked up at :meth:`put`, so modules that were replaced in the meantime are found.

    Args:
        module: the module that holds the islands.
        names: their dotted names; the empty name is ``module`` itself.
    """

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self._module = module
        self._names = tuple(names)
        self._put: list[tuple[nn.Module, Cover]] = []
        self._is_put = False

    def put(self) -> None:
        """Keep the islands eager; nothing happens where they are already.

        Raises:
            TargetError: a name is not there; then no module was changed.
        """
        if self._is_put:
            return
        for module, method in self._methods():
            own = vars(module)
            ours = _EagerCall(own[method]) if method in own else _bound(module, method)
            self._put.append((module, cover(module, {method: ours})))
        self._is_put = True

    def take_out(self) -> None:
        """Give the islands back what they had; nothing happens where none is put."""
        while self._put:
            uncover(*self._put.pop())
        self._is_put = False

    def _methods(self) -> list[tuple[nn.Module, str]]:
        pairs = [pair for name in self._names for pair in _eager_methods(self._find(name))]
        # By identity: metrics overload ``==``.
        return list({(id(module), method): (module, method) for module, method in pairs}.values())

    def _find(self, name: str) -> nn.Module:
        try:
            return self._module.get_submodule(name)
        except AttributeError:
            known = [n for n, _ in self._module.named_modules() if n]
            raise TargetError(
                f"island {name!r} is not a module of {type(self._module).__name__}{near_names(name, known)}."
            ) from None


def _eager_methods(island: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    yield island, "forward"
    if not is_metric(island):
        return
    for metric in filter(is_metric, island.modules()):  # a collection's metrics can be called one by one
        for method in ("forward", *_METRIC_METHODS):
            if callable(getattr(metric, method, None)):
                yield metric, method


def _bound(module: nn.Module, method: str) -> types.MethodType:
    # Bound to the module, it is copied with the module. Dynamo guards on the code of such a function,
    # which all share, and not on its identity: repeated blocks go on sharing their compiled code.
    return types.MethodType(_eager(getattr(type(module), method), method), module)


def _eager(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    eager: Callable[..., Any] = torch.compiler.disable(function, reason=_REASON)  # type: ignore[no-untyped-call]
    # Pickle stores a bound method by its function's name, which a careless decorator may have changed.
    eager.__name__ = name
    return eager


class _EagerCall:
    """Calls what an instance had as its method before, outside of Dynamo.

    Copies and pickles hold that earlier object itself, so they are what they would be without this.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        vars(self)["_function"] = function
        vars(self)["_eager"] = _eager(function, getattr(function, "__name__", "forward"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._eager(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_function"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_function"], name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((self._function,),)
