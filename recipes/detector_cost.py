"""What watching costs: microseconds a step at rest, and how much slower an observed step is.

python recipes/detector_cost.py [rounds=30]

The first figure is a tight loop over signature and detector for a batch of two tensors of the
default model. The second one pairs short fits of the default model with and without the callback,
while it observes (its one recorded step included), and gives the median ratio with its interval.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from typing import Any

import lightning as L
import torch
from hydra import compose, initialize
from hydra.utils import instantiate

from lightning_hotcompile import HotCompile, StepDetector
from lightning_hotcompile.watch.signature import SignatureReader
from lightning_hotcompile.watch.stats import paired_ratio, summarize

OBSERVED = 10
LOOPS = 5_000


class StepTimer(L.Callback):
    """Adds up the time of the first steps, other callbacks' hooks included."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begin = 0.0

    def begin(self) -> L.Callback:
        """The callback that goes first: its hook starts the clock."""
        timer = self

        class Begin(L.Callback):
            def on_train_batch_start(self, *_: Any) -> None:
                timer._begin = time.perf_counter()

        return Begin()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """The callback that goes last: its hook stops the clock."""
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready <= OBSERVED:
            self.seconds += time.perf_counter() - self._begin


def detector_us(model: L.LightningModule, batch: Any) -> float:
    """Microseconds that signature and detector take for one step."""
    reader, detector = SignatureReader(model), StepDetector(threshold=10)
    samples = []
    for _ in range(LOOPS):
        start = time.perf_counter()
        signature = reader.read(batch)
        detector.begin_step(signature)
        detector.end_step()
        samples.append(1e6 * (time.perf_counter() - start))
    return summarize(samples).median


def observed_seconds(model: L.LightningModule, data: Any, callbacks: list[L.Callback]) -> float:
    """Seconds of the first steps of a short fit."""
    timer = StepTimer()
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=OBSERVED + 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[timer.begin(), *callbacks, timer],
    )
    trainer.fit(model, datamodule=data)
    return timer.seconds


def main(rounds: int = 30) -> None:
    """Measure and print both figures."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with initialize(version_base="1.3", config_path="../conf"):
        config = compose("train", overrides=["output_dir=."])
    data, model = instantiate(config.data), instantiate(config.model, total_steps=1_000_000)
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    watched, plain = [], []
    for _ in range(rounds + 1):
        plain.append(observed_seconds(model, data, []))
        watched.append(observed_seconds(model, data, [HotCompile(threshold=OBSERVED + 1)]))
    ratio = paired_ratio(watched[1:], plain[1:])  # the first pair warms up the machine
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} pairs of {OBSERVED} steps")
    print(f"signature and detector: {detector_us(model, batch):.1f} us a step (median, tight loop)")
    step_ms = summarize([1e3 * s / OBSERVED for s in plain[1:]]).median
    print(f"an observed step takes {ratio} of an eager one ({step_ms:.1f} ms)")


if __name__ == "__main__":
    main(*(int(argument.removeprefix("rounds=")) for argument in sys.argv[1:]))
