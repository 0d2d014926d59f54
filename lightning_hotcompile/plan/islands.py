"""What stays eager: TransformerEngine, MS-AMP, metrics and the user's list."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from lightning_hotcompile.errors import TargetError, near_names
from lightning_hotcompile.plan.regions import has_forward

_TE_REASON = "TransformerEngine keeps its FP8 state outside of the graph"
_METRIC_REASON = "a metric keeps its own state"
_PACKAGES = {
    "transformer_engine": _TE_REASON,
    "msamp": "MS-AMP keeps its FP8 state outside of the graph",
    "torchmetrics": _METRIC_REASON,
}
# Plain tensor code in a TransformerEngine class: compiling it is most of what there is to gain.
_COMPILE_WELL = frozenset({"RotaryPositionEmbedding", "DropPath"})
# The field of the autocast state that tells the first module of a step: it flips within the step.
_FIRST_MODULE_FLAG = 4


@dataclass(frozen=True, kw_only=True)
class Island:
    """A module that stays eager inside of whatever is compiled around it."""

    name: str
    """Dotted name in the module that was searched; empty for that module itself."""

    class_name: str
    """Name of its class, for people."""

    reason: str
    """Why it stays eager."""

    @property
    def is_metric(self) -> bool:
        """Whether it is a torchmetrics metric: its ``update`` and ``compute`` stay eager too."""
        return self.reason == _METRIC_REASON


def find_islands(
    module: nn.Module, keep_eager: Sequence[str] = (), compile_anyway: Sequence[str] = ()
) -> tuple[Island, ...]:
    """The topmost modules that must not be compiled, in the order of ``named_modules``.

    A module is an island by its package (any class it derives from, so that a class made on the fly
    such as FSDP2's is recognised) or by a ``keep_eager`` glob over module names or class names. A
    container without a ``forward`` is never called, so its children become islands in its place.
    The searched module itself is matched by package only. What hangs inside of an island is eager
    with it, ``compile_anyway`` or not.

    ``compile_anyway`` exempts a module, not what hangs below it: its children are judged on their
    own, except that a ``keep_eager`` glob that it overruled does not apply to them again. So the
    layers inside of an exempted ``te.TransformerLayer`` stay islands; ``'layer*'`` exempts all,
    since ``*`` also matches dots.

    Raises:
        TargetError: a glob matches no module; the message lists near names.

    Example:
        >>> find_islands(nn.Sequential(nn.Linear(2, 2)), keep_eager=["0"])
        (Island(name='0', class_name='Linear', reason="keep_eager='0'"),)
    """
    names = _Names(module)
    names.refuse_unmatched("keep_eager", keep_eager)
    names.refuse_unmatched("compile_anyway", compile_anyway)
    return tuple(_search(names, tuple(keep_eager), tuple(compile_anyway)))


def is_metric(module: nn.Module) -> bool:
    """Whether a module comes from torchmetrics."""
    return _package_reason(module) == _METRIC_REASON


def fp8_state() -> tuple[Hashable, ...] | None:
    """TransformerEngine's FP8 autocast state as a value that is equal as long as FP8 works the same.

    Returns:
        Whether FP8 and calibration are on, the recipe by type and fields, the process group by name
        and whether a CUDA graph is being captured. ``None`` where TransformerEngine was not
        imported, or does not tell. Its ``repr`` is the same in every process.
    """
    for name in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):
        manager = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
        if manager is not None:
            try:
                return _autocast_state(manager)
            except Exception:  # noqa: BLE001 - a private interface of another package may change
                return None
    return None


@dataclass(frozen=True, kw_only=True)
class _Inherited:
    """What a module hands down to its children."""

    keep_eager: tuple[str, ...]
    reason: str = ""


class _Names:
    """A module tree by names; a module that hangs in two places answers to both."""

    def __init__(self, root: nn.Module) -> None:
        self.named = list(root.named_modules(remove_duplicate=False))
        self._aliases: dict[int, list[str]] = {}
        for name, module in self.named:
            self._aliases.setdefault(id(module), []).append(name)

    def matches(self, pattern: str, module: nn.Module) -> bool:
        aliases = self._aliases[id(module)]
        if "" in aliases:  # the root: a glob such as '*' is meant for what it holds
            return False
        return any(fnmatchcase(name, pattern) for name in (*aliases, *_class_names(module)))

    def refuse_unmatched(self, option: str, patterns: Sequence[str]) -> None:
        for pattern in patterns:
            if not any(self.matches(pattern, module) for _, module in self.named):
                known = [n for name, module in self.named[1:] for n in (name, *_class_names(module))]
                raise TargetError(
                    f"{option}={pattern!r} matches no module: give a glob over the names or class names "
                    f"of the modules inside of {type(self.named[0][1]).__name__}{near_names(pattern, known)}."
                )


def _search(names: _Names, keep_eager: tuple[str, ...], compile_anyway: tuple[str, ...]) -> Iterator[Island]:
    inherited = {"": _Inherited(keep_eager=keep_eager)}
    seen: set[int] = set()
    for name, module in names.named:
        above = inherited.get(name.rpartition(".")[0])
        if above is None:  # inside of an island, which handed nothing down
            continue
        matching = [p for p in above.keep_eager if names.matches(p, module)]
        reason = above.reason or _package_reason(module) or "".join(f"keep_eager={p!r}" for p in matching[:1])
        if any(names.matches(p, module) for p in compile_anyway):
            left = tuple(p for p in above.keep_eager if p not in matching)
            inherited[name] = _Inherited(keep_eager=left)
        elif not reason or not has_forward(module):
            inherited[name] = _Inherited(keep_eager=above.keep_eager, reason=reason)
        else:
            inherited.pop(name, None)  # the root's own entry
            if id(module) not in seen:
                seen.add(id(module))
                yield Island(name=name, class_name=type(module).__name__, reason=reason)


def _package_reason(module: nn.Module) -> str:
    for cls in type(module).__mro__:
        package = cls.__module__.partition(".")[0]
        if package in _PACKAGES:
            return "" if cls.__name__ in _COMPILE_WELL else _PACKAGES[package]
    return ""


def _class_names(module: nn.Module) -> list[str]:
    return [c.__name__ for c in type(module).__mro__ if issubclass(c, nn.Module) and c is not nn.Module]


def _autocast_state(manager: Any) -> tuple[Hashable, ...]:
    read = getattr(manager, "get_autocast_state", None) or manager.get_fp8_autocast_state  # the older name
    state = list(read())
    del state[_FIRST_MODULE_FLAG]
    enabled, calibrating, recipe, group, *rest = state
    if not (enabled or calibrating):
        recipe = group = None  # whatever was left behind has no effect
    return (bool(enabled), bool(calibrating), _frozen(recipe), _group_name(group), *map(_frozen, rest))


def _group_name(group: Any) -> str | None:
    return None if group is None else str(getattr(group, "group_name", type(group).__name__))


def _frozen(value: Any) -> Hashable:
    """A recipe's field as a hashable value, the same in every process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return (type(value).__name__, value)
    if isinstance(value, enum.Enum):
        return (type(value).__name__, value.name)
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(_frozen, value))
    if isinstance(value, Mapping):
        return (type(value).__name__, *sorted((str(k), repr(_frozen(v))) for k, v in value.items()))
    if isinstance(value, (type, torch.dtype)):
        return str(value)
    code = getattr(value, "__code__", None)
    if code is not None:
        return ("function", value.__module__, value.__qualname__, code.co_firstlineno)
    if dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        return (type(value).__qualname__, *((name, _frozen(v)) for name, v in sorted(_fields(value))))
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _fields(value: Any) -> list[tuple[str, Any]]:
    """Fields and attributes; private ones, such as a cached ``repr``, come and go."""
    declared = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    names = {f.name for f in declared} | set(getattr(value, "__dict__", ()))
    return [(name, getattr(value, name)) for name in names if not name.startswith("_")]
