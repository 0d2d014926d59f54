"""One case compiled in one scope, in this process; prints one line of JSON.

    python -m lightning_hotcompile.bench.one_scope CASE [--threads N] [--pairs N] [--fused] [--options JSON]

Where the compiler keeps its files is up to the environment.
"""

from __future__ import annotations

import json
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hotcompile.bench.arms import AtStart, fuse_optimizers
from lightning_hotcompile.bench.cases import CASES, Case
from lightning_hotcompile.bench.measuring_process import given
from lightning_hotcompile.bench.quiet import train
from lightning_hotcompile.callback import HotCompile
from lightning_hotcompile.run import judge
from lightning_hotcompile.watch.canonical import OpGraph
from lightning_hotcompile.watch.opgraph import OpRecorder

_STEPS_PER_PAIR = 2
_STEPS_BEFORE_PAIRS = 40  # until a step is hot, is compiled and has been compiled again where it has to be


class OpsOfOneStep(Callback):
    """Records the operations of one training step, its forward and backward.

    Args:
        steps: that are recorded; kept is the one whose operations took least, since others use the machine.
    """

    def __init__(self, steps: range = range(3, 7)) -> None:
        self.graph: OpGraph | None = None
        self.seconds: dict[str, float] = {}
        self._steps = steps
        self._recorder = OpRecorder()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Begin with the chosen steps."""
        if trainer.fit_loop.epoch_loop.batch_idx in self._steps:
            self._recorder.start()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """End with its backward."""
        if trainer.fit_loop.epoch_loop.batch_idx not in self._steps:
            return
        self._recorder.stop()
        graph, seconds = self._recorder.graph(), dict(self._recorder.seconds_by_op)
        is_better = self.graph is None or sum(seconds.values()) < sum(self.seconds.values())
        if graph is not None and is_better:
            self.graph, self.seconds = graph, seconds


def run(case: Case, pairs: int, options: dict[str, Any], *, fused: bool = False) -> dict[str, Any]:
    """Train until ``pairs`` pairs of eager and compiled steps are measured; eager time / compiled time."""
    hot, ops = HotCompile(**options), OpsOfOneStep()
    before: list[Callback] = [AtStart(fuse_optimizers)] if fused else []
    steps = _STEPS_BEFORE_PAIRS + _STEPS_PER_PAIR * pairs
    callbacks = [*before, ops, hot]
    trainer = train(case.model(), case.batches(), callbacks, max_epochs=1, limit_train_batches=steps)
    report = hot.report
    return {
        "phase": report.phase,
        "reason": report.reason,
        "scope": report.scope,
        "regions": [region.kind for region in report.regions if region.proven],
        "eager_ms": report.eager_ms and report.eager_ms.median,
        "speedup": report.speedup and report.speedup.value,
        "low": report.speedup and report.speedup.low,
        "high": report.speedup and report.speedup.high,
        "pairs": report.speedup and report.speedup.n,
        "compile_s": report.compile_s,
        "ops": dict(ops.graph.counts) if ops.graph else {},
        "elements": dict(ops.graph.elements_by_op) if ops.graph else {},
        "seconds": {op: round(seconds, 7) for op, seconds in ops.seconds.items()},
        "parameters": sum(p.numel() for p in trainer.lightning_module.parameters()),
    }


def main() -> None:
    """One scope of one case in this process."""
    found = given(
        __doc__,
        lambda p: p.add_argument("--pairs", type=int, default=40),
        lambda p: p.add_argument("--fused", action="store_true"),
    )
    judge.SETTLING_LOOKS = (found.pairs,)  # one look, after all pairs
    print(json.dumps(run(CASES[found.case], found.pairs, found.options, fused=found.fused)))


if __name__ == "__main__":
    main()
