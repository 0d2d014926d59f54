"""One builder for each scope: which modules or functions become which regions."""

from __future__ import annotations

import fnmatch
import importlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    modules_inside,
    structure_of,
    why_not_compiled,
)


@dataclass(frozen=True, kw_only=True)
class Region:
    """One unit of compilation: what becomes one compiled function.

    ``kind`` is ``step``, ``group``, ``module``, ``function`` or ``optimizer``; ``members`` are
    module names (for ``function``: ``package.module:name``; for ``optimizer``: its index).
    ``structure`` tells modules of the same class and size apart that are built differently.
    """

    name: str
    kind: str
    members: tuple[str, ...]
    class_name: str
    parameters: int = 0
    structure: str = ""
    tensors: int = 0
    """How many tensors an optimizer steps."""

    def __str__(self) -> str:
        if self.kind == "step":
            return f"{self.class_name}.{self.name} as a whole, loss included"
        if self.kind == "group":
            size = f"{self.parameters:,} parameters each"
            return f"{self.name}: {self.class_name} x{len(self.members)} as one group, {size}"
        if self.kind == "module":
            return f"{self.name}: {self.class_name}, {self.parameters:,} parameters"
        if self.kind == "optimizer":
            return f"{self.name}: {self.class_name}.step"
        return f"{self.name}: {self.kind}"


_Built = tuple[tuple[Region, ...], tuple[LeftEager, ...]]


def plan_step(module: nn.Module, method: str) -> _Built:
    """The whole step as one region; ``method`` is its name, for example ``training_step``."""
    region = Region(
        name=method,
        kind="step",
        members=(method,),
        class_name=type(module).__name__,
        parameters=count_parameters(module),
        structure=structure_of(module),
    )
    return (region,), ()


def _plan_regions(module: nn.Module, islands: Sequence[Island], targets: Sequence[str]) -> _Built:
    blocks, left = find_regions(module, {i.name for i in islands})
    return _group(blocks), left


def _plan_module(module: nn.Module, islands: Sequence[Island], targets: Sequence[str]) -> _Built:
    if targets:
        return _plan_pattern(module, islands, targets)
    return _as_regions(dict(_callable_children(module)), modules_inside(module, [i.name for i in islands]))


def _as_regions(chosen: Mapping[str, nn.Module], eager: Collection[int]) -> _Built:
    """Regions of the chosen modules; one that hangs in two places is one region."""
    blocks, left = [], []
    seen = set(eager)
    for name, module in chosen.items():
        if id(module) in seen:
            continue
        seen.add(id(module))
        reason = why_not_compiled(module)
        if reason is None:
            blocks.append(_as_block(name, module))
        else:
            left.append(LeftEager(name=name, class_name=type(module).__name__, reason=reason))
    return _group(blocks), tuple(left)


def _callable_children(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children whole; in place of a container that cannot be called, what it holds."""
    for name, child in module.named_children():
        if has_forward(child):
            yield prefix + name, child
        else:
            yield from _callable_children(child, f"{prefix}{name}.")


def _plan_pattern(module: nn.Module, islands: Sequence[Island], targets: Sequence[str]) -> _Built:
    functions = [_function_region(target) for target in targets if ":" in target]
    named = {name: m for name, m in module.named_modules(remove_duplicate=False) if name}
    chosen: dict[str, nn.Module] = {}
    for target in targets:
        if ":" not in target:
            chosen.update(_matching(type(module).__name__, named, target))
    topmost = {n: named[n] for n in named if n in chosen and not any(n.startswith(o + ".") for o in chosen)}
    groups, left = _as_regions(topmost, modules_inside(module, [i.name for i in islands]))
    return (*groups, *functions), left


def _matching(owner: str, named: Mapping[str, nn.Module], target: str) -> dict[str, nn.Module]:
    """The modules that a glob names; in place of a container that cannot be called, what it holds."""
    matches = [n for n in named if fnmatch.fnmatchcase(n, target)]
    if not matches:
        raise TargetError(
            f"targets={target!r} matches no module of {owner}"
            f"{near_names(target, named)}. Known names begin with: {', '.join(list(named)[:5])}."
        )
    found: dict[str, nn.Module] = {}
    for name in matches:
        match = named[name]
        found.update([(name, match)] if has_forward(match) else _callable_children(match, f"{name}."))
    if not found:
        raise TargetError(
            f"targets={target!r} matches only {', '.join(matches[:3])}: nothing that can be called."
        )
    return found


def _as_block(name: str, module: nn.Module) -> Block:
    return Block(
        name=name,
        class_name=type(module).__name__,
        structure=structure_of(module),
        parameters=count_parameters(module),
        repeated=False,
    )


def _group(blocks: Sequence[Block]) -> tuple[Region, ...]:
    """One region per structure; blocks of one structure share one compiled function."""
    groups: dict[str, list[Block]] = {}
    for block in blocks:
        groups.setdefault(block.structure, []).append(block)
    regions: list[Region] = []
    for members in groups.values():
        region = _region_of(members)
        times = sum(r.name == region.name or r.name.startswith(f"{region.name} #") for r in regions)
        regions.append(replace(region, name=f"{region.name} #{times + 1}") if times else region)
    return tuple(regions)


def _region_of(blocks: Sequence[Block]) -> Region:
    names, first = tuple(block.name for block in blocks), blocks[0]
    return Region(
        name=_common_name(names),
        kind="module" if len(names) == 1 else "group",
        members=names,
        class_name=first.class_name,
        parameters=first.parameters,
        structure=first.structure,
    )


def _common_name(names: Sequence[str]) -> str:
    """``net.blocks.*`` for ``net.blocks.0`` and ``net.blocks.1``; else the first name and a count."""
    if len(names) == 1:
        return names[0]
    parents = {n.rpartition(".")[0] for n in names}
    parent = parents.pop()
    return f"{parent}.*" if parent and not parents else f"{names[0]} +{len(names) - 1}"


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
    except (ImportError, ValueError, TypeError) as error:  # an empty or a relative name is no ImportError
        raise TargetError(f"targets={target!r}: cannot import {module_name!r} ({error}).") from error
    *parents, name = path.split(".")
    for part in parents:
        owner = _attribute(owner, part, target)
    function = inspect.getattr_static(owner, name, _attribute(owner, name, target))
    if not inspect.isfunction(function):
        raise TargetError(f"targets={target!r} is a {type(function).__name__}, not a plain function.")
    return owner, name, function


def _attribute(owner: Any, name: str, target: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise TargetError(f"targets={target!r}: no {name!r} there{near_names(name, dir(owner))}.") from None


BUILDERS = {
    "regions": _plan_regions,
    "module": _plan_module,
    "pattern": _plan_pattern,
}
