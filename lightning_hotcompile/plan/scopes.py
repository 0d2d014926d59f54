"""One builder for each scope: which modules or functions become which regions."""

from __future__ import annotations

import fnmatch
import importlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_hotcompile.errors import TargetError, near_names
from lightning_hotcompile.plan.islands import Island
from lightning_hotcompile.plan.regions import (
    Block,
    LeftEager,
    count_parameters,
    find_regions,
    has_forward,
    structure_of,
    why_not_compiled,
)


@dataclass(frozen=True, kw_only=True)
class Region:
    """One unit of compilation: what becomes one compiled function.

    ``kind`` is ``step``, ``group``, ``module``, ``function`` or ``optimizer``; ``members`` are
    module names (for ``function``: ``package.module:name``; for ``optimizer``: its index).
    """

    name: str
    kind: str
    members: tuple[str, ...]
    class_name: str
    parameters: int = 0


_Built = tuple[tuple[Region, ...], tuple[LeftEager, ...]]


def _plan_step(module: nn.Module, islands: Sequence[Island], targets: Sequence[str]) -> _Built:
    name = type(module).__name__
    region = Region(
        name="training_step",
        kind="step",
        members=("training_step",),
        class_name=name,
        parameters=count_parameters(module),
    )
    return (region,), ()


def _plan_regions(module: nn.Module, islands: Sequence[Island], targets: Sequence[str]) -> _Built:
    blocks, left = find_regions(module, {i.name for i in islands})
    return _group(blocks), left


def _plan_module(module: nn.Module, islands: Sequence[Island], targets: Sequence[str]) -> _Built:
    if targets:
        return _plan_pattern(module, islands, targets)
    island_names = {i.name for i in islands}
    blocks, left = [], []
    for name, child in _callable_children(module):
        if name in island_names:
            continue
        reason = why_not_compiled(child)
        if reason is None:
            blocks.append(_as_block(name, child))
        else:
            left.append(LeftEager(name=name, class_name=type(child).__name__, reason=reason))
    return _group(blocks), tuple(left)


def _callable_children(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children whole; in place of a container that cannot be called, what it holds."""
    for name, child in module.named_children():
        if has_forward(child):
            yield prefix + name, child
        else:
            yield from _callable_children(child, f"{prefix}{name}.")


def _plan_pattern(module: nn.Module, islands: Sequence[Island], targets: Sequence[str]) -> _Built:
    modules = {name: m for name, m in module.named_modules() if name}
    island_names = [i.name for i in islands]
    chosen: dict[str, nn.Module] = {}
    functions = []
    for target in targets:
        if ":" in target:
            functions.append(_function_region(target))
            continue
        matches = [n for n in modules if fnmatch.fnmatchcase(n, target)]
        if not matches:
            raise TargetError(
                f"targets={target!r} matches no module of {type(module).__name__}"
                f"{near_names(target, modules)}. Known names begin with: {', '.join(list(modules)[:5])}."
            )
        chosen.update((n, modules[n]) for n in matches if has_forward(modules[n]))
    eager = {n for n in chosen for i in island_names if n == i or n.startswith(i + ".")}
    topmost = [
        n
        for n in modules
        if n in chosen and n not in eager and not any(n.startswith(o + ".") for o in chosen)
    ]
    refused = [
        LeftEager(name=n, class_name=type(modules[n]).__name__, reason=r)
        for n in topmost
        if (r := why_not_compiled(modules[n])) is not None
    ]
    gone = {r.name for r in refused}
    blocks = [_as_block(n, modules[n]) for n in topmost if n not in gone]
    return (*_group(blocks), *functions), tuple(refused)


def _as_block(name: str, module: nn.Module) -> Block:
    return Block(
        name=name,
        class_name=type(module).__name__,
        structure=structure_of(module),
        parameters=count_parameters(module),
        repeated=False,
    )


def _single(block: Block) -> Region:
    return Region(
        name=block.name,
        kind="module",
        members=(block.name,),
        class_name=block.class_name,
        parameters=block.parameters,
    )


def _group(blocks: Sequence[Block]) -> tuple[Region, ...]:
    """One region per structure; blocks of one structure share one compiled function."""
    groups: dict[str, list[Block]] = {}
    for block in blocks:
        groups.setdefault(block.structure, []).append(block)
    return tuple(
        _single(members[0])
        if len(members) == 1
        else Region(
            name=_common_name([b.name for b in members]),
            kind="group",
            members=tuple(b.name for b in members),
            class_name=members[0].class_name,
            parameters=members[0].parameters,
        )
        for members in groups.values()
    )


def _common_name(names: Sequence[str]) -> str:
    """``net.blocks.*`` for ``net.blocks.0`` and ``net.blocks.1``; else the first name and a count."""
    parents = {n.rpartition(".")[0] for n in names}
    if len(parents) == 1:
        parent = parents.pop()
        return f"{parent}.* [{names[0].rpartition('.')[2]}..]" if parent else f"{names[0]} +{len(names) - 1}"
    return f"{names[0]} +{len(names) - 1}"


def _function_region(target: str) -> Region:
    resolve_function(target)
    return Region(name=target, kind="function", members=(target,), class_name="function")


def resolve_function(target: str) -> tuple[Any, str, Any]:
    """The owner (module or class), the attribute's name and the function of ``package.module:name``.

    Raises:
        TargetError: the module cannot be imported, or has no such function.
    """
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise TargetError(f"targets={target!r}: cannot import {module_name!r} ({error}).") from error
    *parents, name = path.split(".")
    for part in parents:
        owner = _attribute(owner, part, target)
    _attribute(owner, name, target)
    function = inspect.getattr_static(owner, name)
    if not inspect.isfunction(function):
        raise TargetError(f"targets={target!r} is a {type(function).__name__}, not a plain function.")
    return owner, name, function


def _attribute(owner: Any, name: str, target: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise TargetError(f"targets={target!r}: no {name!r} there{near_names(name, dir(owner))}.") from None


BUILDERS = {
    "step": _plan_step,
    "regions": _plan_regions,
    "module": _plan_module,
    "pattern": _plan_pattern,
}
