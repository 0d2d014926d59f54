"""Decide what is compiled: scope + targets + islands -> CompilePlan."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.errors import PlanError
from lightning_hotcompile.plan.islands import Island, find_islands
from lightning_hotcompile.plan.obstacles import holds_bounded_deque, reads_metrics
from lightning_hotcompile.plan.optimizers import optimizer_regions
from lightning_hotcompile.plan.regions import LeftEager, find_regions, has_foreign_hooks
from lightning_hotcompile.plan.scopes import BUILDERS, Region, plan_step
from lightning_hotcompile.plan.sharding import holds_sharded, is_sharded
from lightning_hotcompile.plan.tree import render_tree

MANY_BLOCKS = 32
"""From this many repeated blocks on, ``auto`` compiles one block instead of the whole step.

At 24 blocks the whole step still compiles in a minute on 2 CPU cores, and gains more (suite ``scopes``).
"""


@dataclass(frozen=True, kw_only=True)
class CompilePlan:
    """What is compiled, what stays eager and why. Equal plans have equal digests on all ranks.

    ``print(plan)`` shows it as a tree.
    """

    scope: str
    reason: str
    regions: tuple[Region, ...]
    islands: tuple[Island, ...] = ()
    left_eager: tuple[LeftEager, ...] = ()
    notes: tuple[str, ...] = ()
    spares_optimizers: bool = False
    """Whether optimizers that could be compiled stay eager, for a shorter compile."""

    adds_optimizers: bool = False
    """Whether optimizers are compiled that have a fused kernel of torch's."""

    mode: str | None = None
    """Inductor's mode for this plan alone; ``None`` leaves the callback's own."""

    @property
    def name(self) -> str:
        """What tells it from other plans of the same step: the scope, and how it is carried out."""
        spared = " without optimizer" if self.spares_optimizers else ""
        added = " with optimizer" if self.adds_optimizers else ""
        return f"{self.scope}{spared}{added}" + ("" if self.mode is None else f", {self.mode}")

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits, the same in every process for the same plan."""
        parts = (self.name, self.regions, self.islands)
        return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compile."""
        return not self.regions

    def of_kind(self, *kinds: str) -> tuple[Region, ...]:
        """The regions of the given kinds, in order."""
        return tuple(r for r in self.regions if r.kind in kinds)

    def without_optimizers(self) -> CompilePlan | None:
        """The same plan with a shorter compile; ``None`` if it has no optimizers, or nothing else."""
        spared, others = self.of_kind("optimizer"), [r for r in self.regions if r.kind != "optimizer"]
        if not spared or not others:
            return None
        why = "is left out, for a shorter compile"
        notes = (*self.notes, *(f"{region.name} ({region.class_name}) {why}" for region in spared))
        return replace(self, regions=tuple(others), notes=notes, spares_optimizers=True)

    def is_more_than(self, other: CompilePlan) -> bool:
        """Whether it is the other plan, with optimizers compiled that stay as they are there."""
        more = [region for region in self.regions if region not in other.regions]
        return (
            self.mode == other.mode
            and len(self.regions) == len(other.regions) + len(more)
            and {region.kind for region in more} == {"optimizer"}
        )

    def __str__(self) -> str:
        branches: dict[str, Iterable[str]] = {
            "compiled": [str(region) for region in self.regions] or ["nothing"],
            "kept eager": (f"{i.name} ({i.class_name}): {i.reason}" for i in self.islands),
            "left eager": (f"{m.name} ({m.class_name}): {m.reason}" for m in self.left_eager),
            "notes": self.notes,
        }
        return render_tree(f"plan {self.digest}: scope {self.name} ({self.reason})", branches)


def plan_compile(
    module: nn.Module,
    *,
    scope: str = "auto",
    targets: Sequence[str] = (),
    keep_eager: Sequence[str] = (),
    compile_anyway: Sequence[str] = (),
    compile_optimizer: bool | str = "auto",
    optimizers: Sequence[Any] = (),
    fused_optimizer: bool = False,
    fullgraph: bool = False,
    step: str = "training_step",
) -> CompilePlan:
    """Plan the compilation of a model; nothing is compiled here.

    Args:
        module: a LightningModule, or any module (which has no ``training_step``, so no step scope).
        scope: ``auto``, ``step``, ``regions``, ``module`` or ``pattern``.
        targets: globs over module names, or functions as ``package.module:function``.
        keep_eager: globs over module or class names that stay eager.
        compile_anyway: globs over module or class names that are no islands though they look it.
        compile_optimizer: ``True``, ``False`` or ``"auto"``.
        optimizers: the optimizers whose step may be compiled.
        fused_optimizer: leave those out for which torch has a fused kernel, as the callback does on a CPU.
        fullgraph: refuse islands, since each one is a graph break.
        step: the method that is one step, for example ``validation_step``.

    Raises:
        ConfigError: a value is not allowed, as for the options of the same name.
        TargetError: a target or an exception matches nothing; the message lists near names.
        PlanError: the scope is not possible for this module, or ``fullgraph`` meets islands.

    Example:
        >>> print(plan_compile(nn.Sequential(nn.Linear(2, 2)), scope="regions"))  # doctest: +SKIP
    """
    HotCompileConfig(
        scope=scope,
        targets=targets,
        keep_eager=keep_eager,
        compile_anyway=compile_anyway,
        compile_optimizer=compile_optimizer,
    )
    islands = find_islands(module, keep_eager=keep_eager, compile_anyway=compile_anyway)
    if scope == "auto":
        scope, reason = choose_scope(module, islands, targets, step)
    else:
        reason = f"scope={scope!r} was asked for"
    _refuse_impossible(module, scope, islands, fullgraph, step)
    built = plan_step(module, step) if scope == "step" else BUILDERS[scope](module, islands, targets)
    if holds_sharded(module):
        built, optimizers = _only_sharded(module, *built), ()  # whose parameters are DTensors
    regions, left = built
    of_optimizers, notes = optimizer_regions(optimizers, compile_optimizer, scope, fused=fused_optimizer)
    return CompilePlan(
        scope=scope,
        reason=reason,
        regions=regions + (of_optimizers if regions else ()),
        islands=islands,
        left_eager=left,
        notes=(*_fragment_note(scope, islands, step), *notes),
    )


def choose_scope(
    module: nn.Module,
    islands: Sequence[Island],
    targets: Sequence[str] = (),
    step: str = "training_step",
) -> tuple[str, str]:
    """The first rule of ``auto``, with its reason.

    The whole step gains most on most models (suite ``scopes``), unless it cannot be one graph or is so
    deep that one graph takes too long to compile.
    """
    if targets:
        return "pattern", "targets were given"
    obstacle = _why_not_whole(module, islands, step)
    if obstacle is not None:
        return "regions", obstacle
    # a model with fewer modules has no need to be searched for those that are alike
    has_many = sum(1 for _ in module.modules()) > MANY_BLOCKS
    repeated = [b for b in find_regions(module)[0] if b.repeated] if has_many else []
    if len(repeated) >= MANY_BLOCKS:
        return "regions", f"{len(repeated)} repeated blocks: one block compiles faster than the whole step"
    return "step", "the whole step as one graph gains most on models that capture"


def other_scopes(module: nn.Module, plan: CompilePlan) -> tuple[str, ...]:
    """Scopes that can be tried after the one that ``auto`` has chosen by rule, the most promising first.

    None where the rule had no choice: where modules have to stay eager, or the step cannot be one graph.
    """
    if _why_not_whole(module, plan.islands, "training_step") is not None:
        return ()
    return tuple(scope for scope in ("step", "module") if scope != plan.scope)


def _only_sharded(
    root: nn.Module, regions: Sequence[Region], left: Sequence[LeftEager]
) -> tuple[tuple[Region, ...], tuple[LeftEager, ...]]:
    """Blocks that are sharded as such: the parameters of the others come and go with a module above."""
    kept = [
        r
        for r in regions
        if r.kind == "function" or all(_is_sharded_alone(root.get_submodule(n)) for n in r.members)
    ]
    reason = "is not sharded as a block of its own: its parameters come and go with another module"
    others = [
        LeftEager(name=name, class_name=region.class_name, reason=reason)
        for region in regions
        if region not in kept
        for name in region.members
    ]
    return tuple(kept), (*left, *others)


def _is_sharded_alone(module: nn.Module) -> bool:
    return is_sharded(module) and not any(map(holds_sharded, module.children()))


def _why_not_whole(module: nn.Module, islands: Sequence[Island], step: str) -> str | None:
    """Why the whole step is not to be compiled as one graph, or ``None``."""
    obstacle = _why_not_step(module, step)
    if obstacle is not None:
        return obstacle
    if reads_metrics(module, step):
        return f"{step} reads metrics of the Trainer, and logs of a compiled step come after it"
    outer = [i for i in islands if not i.is_metric]
    if outer:
        return f"{len(outer)} modules stay eager, which would break the step into fragments"
    if any(has_foreign_hooks(child) for child in module.children()):
        return "modules have hooks, which have to run as they are"
    return None


def _fragment_note(scope: str, islands: Sequence[Island], step: str) -> tuple[str, ...]:
    inside = sum(not i.is_metric for i in islands)
    if scope != "step" or not inside:
        return ()
    return (f"{inside} modules stay eager inside of {step}: one graph per fragment between them",)


def _why_not_step(module: nn.Module, method: str) -> str | None:
    step = getattr(module, method, None)
    if step is None:
        return f"a plain module has no {method}"
    if holds_sharded(module):
        return "FSDP2 gathers parameters in hooks, which stay outside of compiled blocks"
    if holds_bounded_deque(module):
        return f"{type(module).__name__} holds a deque with maxlen, which Dynamo takes for one without"
    if method == "training_step" and not getattr(module, "automatic_optimization", True):
        return "manual optimization: training_step holds backward and optimizer steps"
    try:
        parameters = inspect.signature(step).parameters
    except (TypeError, ValueError):
        return None
    if "dataloader_iter" in parameters:
        return f"{method} fetches its own batches (dataloader_iter)"
    return None


def _refuse_impossible(
    module: nn.Module, scope: str, islands: Sequence[Island], fullgraph: bool, step: str
) -> None:
    islands = [i for i in islands if not i.is_metric]  # most metrics are used outside of training_step
    if fullgraph and islands:
        names = ", ".join(f"{i.name} ({i.class_name})" for i in islands[:3])
        raise PlanError(
            f"fullgraph=True cannot hold: {len(islands)} modules stay eager and each one is a graph "
            f"break: {names}. Set fullgraph=False, or exempt them with compile_anyway."
        )
    obstacle = _why_not_step(module, step) if scope == "step" else None
    if obstacle is not None:
        raise PlanError(f"scope='step' is not possible: {obstacle}. Use scope='regions' or 'auto'.")
