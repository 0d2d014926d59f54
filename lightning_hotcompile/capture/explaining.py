"""The callback that explains: plans, traces the first batch through the planned regions, ends the script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import lightning
import lightning.pytorch as pl
import torch
from torch.fx import GraphModule
from torch.optim import Optimizer

from lightning_hotcompile.capture.ending import end_training, write_whole
from lightning_hotcompile.capture.explanation import Explanation, RegionSeen, outlook
from lightning_hotcompile.capture.order import EXPLANATION_FILE, ExplainOrder
from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.either_lightning import CHECKPOINTS, Callback
from lightning_hotcompile.errors import HotCompileError, first_line
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.plan.scopes import Region
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.swap.installation import Installation, Proof
from lightning_hotcompile.swap.parity.captured import count_ops

PlanFor = Callable[[pl.Trainer, pl.LightningModule, HotCompileConfig], tuple[CompilePlan | None, str | None]]
"""The plan, and why nothing would be compiled."""


class Explain(Callback):
    """Writes what would be compiled, and which graphs and graph breaks the first batch has.

    The regions of the plan are put in place as for a training, but no graph goes to a backend. Automatic
    optimization ends after the forward; optimizers take no step in either kind.

    Args:
        order: where to write, and the scope.
        companion: the class of the callback whose options count, should the script have one.
        config: the options that count otherwise.
        plan_for: plans as that callback does.
        remaining: batches that the training has in all, ``None`` if unknown.
    """

    def __init__(
        self,
        order: ExplainOrder,
        companion: type[Callback],
        config: HotCompileConfig,
        plan_for: PlanFor,
        remaining: Callable[[pl.Trainer], int | None],
    ) -> None:
        self._order = order
        self._companion = companion
        self._plan_for = plan_for
        self._remaining = remaining
        self._config = config
        self._found: Explanation | None = None
        self._look: _Look | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the script's own HotCompile out, with its options, and leave the sanity check away."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        own: list[Any] = [c for c in callbacks if isinstance(c, self._companion)]
        trainer.callbacks = [c for c in callbacks if c not in own]  # type: ignore[attr-defined]
        self._config = own[0].config if own else self._config
        if self._order.scope is not None:
            self._config = with_scope(self._config, self._order.scope)
        trainer.num_sanity_val_steps = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Plan; without a plan there is nothing to wait for."""
        try:
            plan, declined = self._plan_for(trainer, pl_module, self._config)
        except HotCompileError as error:
            plan, declined = None, str(error)
        outcome = None
        if plan is not None and not plan.is_empty:
            on_cpu = pl_module.device.type == "cpu"
            outcome = outlook(plan.regions, self._remaining(trainer), on_cpu=on_cpu)
        self._found = Explanation(
            model=type(pl_module).__name__,
            scope=plan.scope if plan else "",
            plan=str(plan) if plan else "",
            declined=declined,
            forecast=outcome,
            versions={"torch": torch.__version__, "lightning": lightning.__version__},
        )
        if plan is None or plan.is_empty or declined is not None:
            self._end(trainer)
        self._look = _Look(plan, pl_module, self._config)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Everything in place for the first batch."""
        for optimizer in trainer.optimizers:
            vars(optimizer)["step"] = _no_step
        if self._look is not None:
            self._look.begin()

    def on_before_zero_grad(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """The forward is over; of automatic optimization this is all that is looked at."""
        if pl_module.automatic_optimization:
            self._end(trainer)

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor
    ) -> None:
        """The same, where gradients are kept from a batch before."""
        if pl_module.automatic_optimization:
            self._end(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Manual optimization: the whole step was looked at."""
        self._end(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """The script failed: what is known so far is told."""
        if self._found is not None:
            self._found = replace(self._found, failed=first_line(exception))
            self._write(trainer)

    def _end(self, trainer: pl.Trainer) -> NoReturn:
        self._write(trainer)
        end_training(trainer, but_for=CHECKPOINTS)

    def _write(self, trainer: pl.Trainer) -> None:
        assert self._found is not None
        found, self._found = self._found, None  # once: ending a training is an exception too
        if self._look is not None:
            found = self._look.end(found)
        if trainer.is_global_zero:
            write_whole(Path(self._order.folder, EXPLANATION_FILE), found.to_json())


class _Look:
    """The plan in place for one batch, with no backend behind Dynamo."""

    def __init__(self, plan: CompilePlan, module: pl.LightningModule, config: HotCompileConfig) -> None:
        self._optimizers = plan.of_kind("optimizer")
        others = tuple(region for region in plan.regions if region not in self._optimizers)
        self._plan = replace(plan, regions=others)
        self._module = module
        self._config = replace(config, on_error="eager")
        self._graphs: dict[str, list[int]] = {}
        self._installation: Installation | None = None

    def begin(self) -> None:
        """Change the model; the batch that follows is traced."""
        self._installation = Installation(self._plan, self._module, self._config, ())
        self._installation.witness.collect = self._collect
        self._installation.put()
        self._installation.gate.open(Lane.COMPILE)

    def end(self, found: Explanation) -> Explanation:
        """Change the model back, and add what was seen."""
        installation = self._installation
        if installation is None:
            return found
        installation.take_out()
        failures = dict.fromkeys(installation.gate.failures)
        seen = tuple(self._seen(proof) for proof in installation.proofs())
        told = {region.error for region in seen}
        return replace(
            found,
            looked=True,
            regions=(*seen, *map(_not_looked_at, self._optimizers)),
            breaks=installation.graph_breaks,
            errors=tuple(failure for failure in failures if failure not in told),
        )

    def _collect(self, region: str, graph: GraphModule, example_inputs: Sequence[Any]) -> None:
        self._graphs.setdefault(region, []).append(count_ops(graph))

    def _seen(self, proof: Proof) -> RegionSeen:
        region, graphs = proof.region, tuple(self._graphs.get(proof.region.name, ()))
        return RegionSeen(
            name=region.name,
            kind=region.kind,
            members=region.members,
            calls=proof.calls,
            graphs=graphs,
            error=proof.error or _why_no_graph(proof.calls, graphs),
        )


def _not_looked_at(region: Region) -> RegionSeen:
    return RegionSeen(
        name=region.name,
        kind=region.kind,
        members=region.members,
        calls=0,
        graphs=(),
        error="not looked at: no optimizer takes a step here",
    )


def with_scope(config: HotCompileConfig, scope: str) -> HotCompileConfig:
    """The options with another scope; targets stay where they have a meaning.

    Raises:
        ConfigError: the scope needs targets, and there are none.
    """
    targets = () if scope in ("step", "regions") else config.targets
    return replace(config, scope=scope, targets=targets)


def _why_no_graph(calls: int, graphs: Sequence[int]) -> str | None:
    if graphs:
        return None
    return "no graph was captured" if calls else "it was not called in the first batch"


def _no_step(closure: Callable[[], Any] | None = None, *_: Any, **__: Any) -> Any:
    """In place of an optimizer's step: the closure runs, no parameter changes."""
    return closure() if closure is not None else None
