"""The way from eager to compiled and back: install, watch for failures, take out."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import torch

from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.run.ahead import Ahead
from lightning_hotcompile.run.stage_context import StageContext
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.swap.inductor import paths as inductor_paths
from lightning_hotcompile.swap.installation import Installation
from lightning_hotcompile.swap.past_compiles import reason_for
from lightning_hotcompile.swap.tracing.dynamic_dims import BatchInStep
from lightning_hotcompile.swap.tracing.stance import is_forced_eager, stance_against_compiling

NO_REGION: frozenset[str] = frozenset()


class Flip:
    """Carries out one plan on one model, and takes it back.

    Args:
        context: of the stage.
        plan: what to compile.
    """

    def __init__(self, context: StageContext, plan: CompilePlan) -> None:
        self._trainer = context.trainer
        self._config = context.config
        self._ledger = context.ledger
        self._story = context.story
        self._now = context.now
        self._peak_at_flip: float | None = None
        self._told = (0, 0)
        self.is_lost = False
        """Whether nothing was left that could be used when :meth:`failure` was asked last."""
        self._compile_s = 0.0
        self.recompile_reason: str | None = None
        self._paused = False
        self._seen = (0, 0)
        self._runs_before = 0
        self.batch = BatchInStep(context.module)
        self._new_installation = functools.partial(
            Installation, plan, context.module, context.config, context.trainer.optimizers, context.shared
        )
        self.installation = self._new_installation()
        self.ahead = Ahead(context)
        self.had_toolchain: bool | None = None
        """Whether the compiler's toolchain was there before the step compiled; None if it never did."""

    @property
    def in_place(self) -> bool:
        """Whether the model is changed now."""
        return self.installation.in_place

    def begin_prewarm(self) -> None:
        """Start a child process that compiles what the step that is about to run will show."""
        start = self._now()
        self.ahead.had_toolchain = self._has_toolchain()
        trace = self._new_installation()
        trace.gate.dynamic_dims = self.batch.dims
        self.ahead.begin_prewarm(trace)
        self._ledger.install_s += self._now() - start

    def _has_toolchain(self) -> bool:
        """Asked before a compile; the compiler uses its lasting folder by then."""
        inductor = self._config.backend == "inductor"
        return inductor and inductor_paths.holds_headers(inductor_paths.headers_in_use())

    def install(self, eager_parts: Sequence[str] = ()) -> None:
        """Put the plan in place; parts of it may be known to be no gain."""
        if self.in_place:
            return
        for part in eager_parts:
            self.take_back(part, "an earlier run was faster without it")
        start = self._now()
        if self.had_toolchain is None:
            self.had_toolchain = self._has_toolchain()
        self._peak_at_flip = allocated_peak_mb()
        self._story.compiling(len(self.installation.plan.regions))
        if self._ledger.flip_step is None:
            self._ledger.flip_step = self._ledger.steps
        self.installation.put()
        self._ledger.install_s += self._now() - start

    def take_back(self, part: str, reason: str) -> None:
        """Let one part of the plan be eager from now on."""
        for region in self.installation.take_back(part, reason):
            self._story.fell_back(region, reason)

    def take_out(self) -> None:
        """Change the model back."""
        self._paused = False
        self.ahead.cancel()
        if self.in_place:
            self.installation.take_out()

    def end(self) -> None:
        """Change the model back for good; nothing of this works on beside it any longer."""
        self.take_out()
        self.installation.end()

    def pause(self) -> None:
        """Change the model back for a while; what was compiled is kept."""
        self._paused = self.in_place
        if self._paused:
            self.installation.take_out()

    def go_on(self) -> None:
        """Change the model again, if it was changed when paused."""
        paused, self._paused = self._paused, False
        if paused:
            self.installation.put()

    def lane(self, wanted: Lane) -> Lane:
        """The lane of the step that is about to run: eager if nothing is in place, to wait, or if told to."""
        if wanted is Lane.EAGER or not self.in_place:
            return Lane.EAGER
        if wanted is Lane.COMPILE:
            waits = self.batch.is_one_to_wait_after() or stance_against_compiling() is not None
            ends = self._trainer.received_sigterm  # after this step: it may have come since the last one
            return Lane.EAGER if waits or ends else wanted
        return Lane.EAGER if is_forced_eager() else wanted

    def open(self, lane: Lane, *, armed: bool = True, without: str | None = None) -> None:
        """A step begins on this lane, perhaps without one part of the plan.

        ``armed``: outputs are looked at for NaN while they are new.
        """
        installation = self.installation
        watch, gate = installation.witness.watch, installation.gate
        watch.armed = armed
        self._runs_before = watch.total_runs
        self._compile_s = installation.timer.seconds
        gate.open(lane, installation.parts.get(without, NO_REGION) if without else NO_REGION)
        if lane is Lane.COMPILE:
            installation.timer.start()
            gate.dynamic_dims = self.batch.dims

    def close(self) -> tuple[bool, bool]:
        """A step ended: whether compiled code ran, wherever there is any; whether it compiled or failed."""
        installation = self.installation
        self.batch.end()
        installation.gate.close()
        self.ahead.end_step()
        ran = installation.witness.watch.total_runs > self._runs_before and not installation.is_lost_anywhere
        before, self._told = self._told, installation.happened
        if self._told[1] > before[1]:
            self._tell_new_graphs(before[1])
        return ran, self._told != before or installation.timer.seconds > self._compile_s

    def _tell_new_graphs(self, told: int) -> None:
        graphs = self.installation.witness.graphs
        known = {g.region for g in graphs[:told]}
        again = dict.fromkeys(g.compile_id for g in graphs[told:] if g.region in known)
        reasons = {each: reason for each in again if (reason := reason_for(each)) is not None}
        self.recompile_reason = next(reversed(reasons.values()), self.recompile_reason)
        self._story.compiled(graphs[told:], known, reasons)

    @property
    def has_news(self) -> bool:
        """Whether something was compiled or failed since :meth:`failure` was asked last."""
        return self._seen != self.installation.happened

    def failure(self) -> str | None:
        """Why nothing of this installation can be used any longer; single regions are taken out."""
        self._seen = self.installation.happened
        if not self.in_place:
            return None
        for name, reason in self.installation.drop_failed():
            self._story.fell_back(name, reason)
        self.is_lost = not self.installation.anything_left
        return _nothing_left(self.installation.first_error) if self.is_lost else None

    def why_useless(self) -> str | None:
        """Why another signature need not be compiled: all regions have failed; ``None`` if one has not."""
        return _nothing_left(self.installation.first_error) if self.installation.has_failed else None

    def why_nothing_ran(self) -> str:
        """An explanation for compiled code that did not run."""
        return f"compiled code did not run: {self.installation.why_nothing_ran()}"

    def peak_memory_mb(self) -> dict[str, float]:
        """Peak of allocated accelerator memory up to the flip and of the whole run, in MB."""
        peaks = {"until_flip": self._peak_at_flip, "whole_run": allocated_peak_mb()}
        return {name: peak for name, peak in peaks.items() if peak is not None}

    def abandon_step(self) -> None:
        """Leave a step that did not end."""
        self.batch.end()
        with contextlib.suppress(Exception):
            self.installation.gate.close()
            self.ahead.end_step()


def _nothing_left(error: str | None) -> str:
    return f"nothing is left that can be used: {error or 'no region is left'}"


def allocated_peak_mb() -> float | None:
    """Most memory that tensors held on the GPU so far, ``None`` without one or where none was used.

    The allocator's own high-water mark, which is never reset here: others may be reading it. An allocator
    that is not torch's (RAPIDS' RMM) has none.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    with contextlib.suppress(RuntimeError):
        return float(torch.cuda.max_memory_allocated()) / 2**20 or None
    return None
