"""torch's own fused kernel in place of the loop over tensors that an optimizer runs on the CPU by default."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lightning_hotcompile.errors import first_line
from lightning_hotcompile.swap.optimizers.fused_check import FusedCheck
from lightning_hotcompile.swap.optimizers.fused_kernels import GroupTensors
from lightning_hotcompile.swap.optimizers.fused_layout import FusedLayout
from lightning_hotcompile.swap.optimizers.optimizer_step import ReplacedStep, bare_step
from lightning_hotcompile.swap.own_thread import is_traced_here
from lightning_hotcompile.swap.tracing.signal_handlers import comes_from_a_handler
from lightning_hotcompile.watch.stats import has_first_arm

_CHECKS = 3
"""Updates that may be no measure (infinite, NaN, or none at all) before it is given up."""

_MISFITS = 16
"""Updates in a row that are not for the kernel before a trial is given up, and one that was kept rests."""

_REST = 256
"""Updates of such a rest."""

Result = TypeVar("Result")


class Stage(enum.Enum):
    """Where a fused kernel stands."""

    CHECKING = "checking"
    """The loop runs; the kernel is compared with it on copies."""

    TIMING = "timing"
    """Both run in turns."""

    KEPT = "kept"
    LEFT = "left"
    """The loop runs, for good."""


class FusedStep:
    """One optimizer: first a comparison on copies, then both in turns, then what was decided.

    Settings and state stay those of the loop, so that nobody sees it, checkpoints included. An update that
    the kernel is not made for is done by the loop.

    Args:
        optimizer: one for which :func:`~lightning_hotcompile.plan.optimizers.why_not_fused` has no reason.
        timed: told of each update on trial: whether the kernel did it, its seconds, and whether it is no
            measure.
        is_timed: whether both run in turns first; else a kernel that agrees is kept.
        now: a clock in seconds.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        timed: Callable[[bool, float, bool], None],
        *,
        is_timed: bool = True,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.optimizer = optimizer
        self.stage = Stage.CHECKING
        self.reason = ""
        """Why the loop runs for good."""

        self.runs = 0
        """Updates by the fused kernel."""

        self.updates = 0
        self.check_s = 0.0
        """Seconds that the comparison took."""

        self._timed = timed
        self._is_timed = is_timed
        self._now = now
        self._bare = bare_step(type(optimizer))
        self._layout = FusedLayout(optimizer)
        self._checks = 0
        self._misfits = 0
        self._rests = 0
        self._turns = 0
        self._is_out = True
        self._undo: Callable[[], bool] | None = None

    def put(self) -> None:
        """Give the optimizer a ``step`` of its own; a second call does nothing."""
        if self._undo is None:
            step = ReplacedStep(self.optimizer, self._update, self._is_off, may_lie_under=True)
            self._undo, self._is_out = step.put(), False

    def take_out(self) -> None:
        """Give it back the one it had. What lies under another one goes when it is asked again."""
        self._is_out = True
        if self._undo is not None and self._undo():
            self._undo = None

    def keep(self) -> None:
        """From now on the fused kernel, wherever it fits."""
        self.stage = Stage.KEPT

    def leave(self, reason: str) -> None:
        """From now on the loop."""
        self.stage, self.reason = Stage.LEFT, reason
        self.take_out()

    def _is_off(self) -> bool:
        return self._is_out or self.stage is Stage.LEFT or is_traced_here()

    def _update(self) -> None:
        self.updates += 1
        if self._rests:
            self._rests -= 1
            self._loop()
            return
        start = self._now()
        groups = self._tried(self._layout.groups)
        if not groups:
            self._loop()
            if self.stage is Stage.TIMING:
                self._timed(False, self._now() - start, True)
            self._misfits += groups is None
            if self._misfits >= _MISFITS:
                self._give_way()
            return
        self._misfits = 0
        if self.stage is Stage.KEPT:
            self._fused(groups)
        elif self.stage is Stage.CHECKING:
            self._check(groups)
        else:
            self._take_turns(groups, start)

    def _give_way(self) -> None:
        """So many updates in a row were not for the kernel: looking closely at each is not worth its time."""
        self._misfits = 0
        if self.stage is Stage.KEPT:
            self._rests = _REST
        elif self.stage is not Stage.LEFT:
            self.leave("its tensors or settings are not those that it is made for")

    def _take_turns(self, groups: Sequence[GroupTensors], start: float) -> None:
        """Loop, kernel, kernel, loop and so on: neither is always the first of a pair."""
        by_kernel = not has_first_arm(self._turns)
        self._turns += 1
        if by_kernel:
            self._fused(groups)
        else:
            start = self._now()  # the loop need not look at any layout
            self._loop()
        self._timed(by_kernel, self._now() - start, False)

    def _loop(self) -> None:
        with torch.no_grad():
            self._bare(self.optimizer)

    def _fused(self, groups: Sequence[GroupTensors]) -> None:
        with torch.no_grad():
            for group in groups:
                group.update()
                increment_version(group.changed)  # which these kernels, unlike the loop, leave as it is
        self.runs += 1

    def _check(self, groups: Sequence[GroupTensors]) -> None:
        """The loop in the training, the kernel on copies."""
        if not any(group["lr"] for group in self.optimizer.param_groups):
            self._loop()  # of which no weight is moved
            return
        start = self._now()
        check = self._tried(lambda: FusedCheck(groups))
        self.check_s += self._now() - start
        self._loop()
        if check is None:
            return
        start = self._now()
        agrees = self._tried(check.agrees)
        self.check_s += self._now() - start
        self._checks += 1
        if self.stage is Stage.LEFT:
            return
        if agrees:
            self.stage = Stage.TIMING if self._is_timed else Stage.KEPT
        elif agrees is False:
            self.leave("its update differs from that of the loop")
        elif self._checks == _CHECKS:
            self.leave("its updates cannot be compared: they are not finite, or move no weight")

    def _tried(self, action: Callable[[], Result]) -> Result | None:
        """What this returns; after an error of it the loop runs for good."""
        try:
            return action()
        except Exception as error:  # whatever it is, the loop does the update
            if comes_from_a_handler(error):
                raise
            self.leave(f"it could not be tried: {first_line(error)}")
            return None
