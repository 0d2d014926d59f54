"""The callback's steady step and another way to run the same model, in turns, in this process.

    python -m lightning_hotcompile.bench.one_steady CASE ARM [--threads N] [--blocks N] [--options JSON]

It prints one line of JSON. Two processes with the same code can differ by more than the difference that is
looked for; here both ways have the same process, weights, data and Trainer, and take turns in blocks of
steps.
Where the compiler keeps its files is up to the environment.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch._functorch.config as functorch_config
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hotcompile.bench.arms import IN_PLACE
from lightning_hotcompile.bench.cases import CASES, Case
from lightning_hotcompile.bench.measuring_process import given
from lightning_hotcompile.bench.quiet import train
from lightning_hotcompile.callback import HotCompile
from lightning_hotcompile.watch.stats import paired_ratio

STEPS = 20
"""Of a block."""

LEFT_OUT = 4
"""First steps of a block: caches are another's, and what was switched has its price."""

UNTIMED = 4
"""First blocks: the other way is compiled in one of them."""

MOST_STEPS = 4000
"""Until the callback has decided."""

TRAINING = 100_000_000
"""Steps of the training that is ended early: one so long that all pays that helps."""

_PUT_ON_MODULES = ("training_step", "_compiled_call_impl")
_PUT_ON_OPTIMIZERS = ("step",)
_OF_GROUPS = ("lr", "fused", "foreach")


class Muted(HotCompile):
    """The callback, which sees only its own steps."""

    muted = False

    @property
    def is_undecided(self) -> bool:
        """Whether its step is not yet the one that it ends with."""
        run = self._runs.get("train")
        tries = run is not None and run.session.side.is_busy
        return tries or self.phase not in ("steady", "declined", "reverted")

    def on_train_batch_start(self, *args: Any) -> None:
        """Not of the other way's steps."""
        if not self.muted:
            super().on_train_batch_start(*args)

    def on_before_optimizer_step(self, *args: Any) -> None:
        """Not of the other way's steps."""
        if not self.muted:
            super().on_before_optimizer_step(*args)

    def on_train_batch_end(self, *args: Any) -> None:
        """Not of the other way's steps."""
        if not self.muted:
            super().on_train_batch_end(*args)


@dataclass(frozen=True)
class Way:
    """What a way to run has put on the model and on its optimizers."""

    attributes: tuple[tuple[Any, dict[str, Any]], ...]
    settings: tuple[dict[str, Any], ...]
    """Of the optimizers' groups."""

    donated_buffer: bool

    @classmethod
    def now(cls, trainer: Trainer) -> Way:
        """The present one."""
        return cls(
            attributes=tuple(
                (owner, {name: vars(owner)[name] for name in names if name in vars(owner)})
                for owner, names in _owners(trainer)
            ),
            settings=tuple(
                {key: group[key] for key in _OF_GROUPS if key in group} for group in _groups(trainer)
            ),
            donated_buffer=functorch_config.donated_buffer,
        )

    def put(self, trainer: Trainer) -> None:
        """Run in this way from now on."""
        take_out(trainer)
        for owner, attributes in self.attributes:
            vars(owner).update(attributes)
        for group, settings in zip(_groups(trainer), self.settings, strict=True):
            group.update(settings)
        functorch_config.donated_buffer = self.donated_buffer


def take_out(trainer: Trainer) -> None:
    """Eager, as the user wrote it."""
    for owner, names in _owners(trainer):
        for name in names:
            vars(owner).pop(name, None)
    for group in _groups(trainer):
        group["lr"] = float(group["lr"])
        group.update({key: None for key in ("fused", "foreach") if key in group})
    functorch_config.donated_buffer = True


def _owners(trainer: Trainer) -> Iterator[tuple[Any, Sequence[str]]]:
    yield from ((module, _PUT_ON_MODULES) for module in trainer.lightning_module.modules())
    yield from ((optimizer, _PUT_ON_OPTIMIZERS) for optimizer in trainer.optimizers)


def _groups(trainer: Trainer) -> Iterable[dict[str, Any]]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]


class InTurns(Callback):
    """Once the callback has decided, its steps and another arm's take turns: ours, theirs, theirs, ours.

    Args:
        hot: the callback.
        arm: the other way, by its name among the arms.
        blocks: how many are timed.
    """

    def __init__(self, hot: Muted, arm: str, blocks: int) -> None:
        self._hot = hot
        self._put_arm = IN_PLACE[arm]
        self._most = UNTIMED + blocks
        self._ours: Way | None = None
        self._theirs: Way | None = None
        self._starts: list[float] = []
        self._steps = 0
        self.blocks: list[tuple[bool, float]] = []
        """Of each block whether it was the callback's, and its median step in seconds."""

    @property
    def _is_ours(self) -> bool:
        return self._steps // STEPS % 4 in (0, 3)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Before the callback's own hook: this one comes first."""
        if not self._steps and self._hot.is_undecided:
            trainer.should_stop = trainer.global_step > MOST_STEPS
            return
        if self._steps % STEPS == 0:
            self._end_block()
            if len(self.blocks) >= self._most:
                trainer.should_stop = True
            self._switch(trainer)
        self._starts.append(time.perf_counter())
        self._steps += 1

    def _end_block(self) -> None:
        if self._starts:
            times = [end - start for start, end in pairwise([*self._starts, time.perf_counter()])]
            ours = (self._steps // STEPS - 1) % 4 in (0, 3)
            self.blocks.append((ours, median(times[LEFT_OUT:])))
        self._starts = []

    def _switch(self, trainer: Trainer) -> None:
        if self._is_ours is not self._hot.muted:
            return
        if self._hot.muted:
            self._theirs = Way.now(trainer)
            assert self._ours is not None
            self._ours.put(trainer)
        else:
            self._ours = Way.now(trainer)
            if self._theirs is None:
                take_out(trainer)
                self._put_arm(trainer)
            else:
                self._theirs.put(trainer)
        self._hot.muted = not self._hot.muted

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The callback takes out what it has put in."""
        if self._hot.muted and self._ours is not None:
            self._ours.put(trainer)
            self._hot.muted = False

    def pairs(self) -> tuple[list[float], list[float]]:
        """Their times and ours, block by block: neighbours are a pair."""
        timed = self.blocks[UNTIMED:]
        both = [dict(pair) for pair in zip(timed[::2], timed[1::2], strict=False)]
        return [pair[False] for pair in both], [pair[True] for pair in both]


def run(case: Case, arm: str, blocks: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train until ``blocks`` blocks of both ways are timed.

    Raises:
        NotImplementedError: the arm cannot run this case.
    """
    hot = Muted(**options)
    turns = InTurns(hot, arm, blocks)
    train(case.model(), case.batches(), [turns, hot], max_steps=TRAINING)
    theirs, ours = turns.pairs()
    ratio = paired_ratio(theirs, ours)
    return {
        "phase": hot.report.phase,
        "reason": hot.report.reason,
        "scope": hot.report.scope,
        "ours_ms": 1e3 * median(ours) if ours else None,
        "theirs_ms": 1e3 * median(theirs) if theirs else None,
        "ratio": ratio and ratio.value,
        "low": ratio and ratio.low,
        "high": ratio and ratio.high,
        "pairs": len(ours),
    }


def main() -> None:
    """One case and one arm in this process."""
    found = given(
        __doc__,
        lambda p: p.add_argument("arm", choices=sorted(IN_PLACE)),
        lambda p: p.add_argument("--blocks", type=int, default=60),
    )
    print(json.dumps(run(CASES[found.case], found.arm, found.blocks, found.options)))


if __name__ == "__main__":
    main()
