"""A machine on which it is known what a step takes, eager and compiled: for tests of what is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_hotcompile import HotCompile
from lightning_hotcompile.run import stage_run
from lightning_hotcompile.run.session import Session
from tests.models import Net, loader, make_trainer, seeded

STEP_S = 20.0


class Ticks(Callback):
    """A clock by which each step takes a second."""

    now = 0.0

    def on_before_zero_grad(self, *_: Any) -> None:
        """Once in each step, compiled or not."""
        self.now += 1.0

    @contextmanager
    def in_sessions(self) -> Iterator[None]:
        """Trainings are timed by it."""
        original = Session.__init__

        def timed(session: Session, *args: Any, **kwargs: Any) -> None:
            original(session, *args, **{**kwargs, "now": lambda: self.now})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Session, "__init__", timed)
            yield


class Machine(Callback):
    """A step takes 20 s, and each run of a compiled part so many seconds more or less.

    Args:
        extra_s: by part: ``optimizer``, ``step`` (the graph that has the loss), ``module`` (all others); and
            ``tuned`` for the step or a module that is compiled with a mode.
        broken: parts that cannot be compiled.
        wait_s: seconds that go by between two steps.
    """

    accumulates = 1
    """Batches before an update."""

    net: type[Net] = Net

    def __init__(self, *broken: str, wait_s: float = 0.0, **extra_s: float) -> None:
        self.now = 0.0
        self.broken = broken
        self.wait_s = wait_s
        self.extra_s = extra_s
        self.runs = Counter[str]()
        self.graphs = Counter[str]()
        self.modes = Counter[tuple[str, str]]()
        self.model = Net()

    def on_before_zero_grad(self, *_: Any) -> None:
        """Once in each step, compiled or not."""
        self.now += STEP_S

    def on_train_batch_end(self, *_: Any) -> None:
        """After the step, as loading the next batch would be."""
        self.now += self.wait_s

    def backend(self, graph: Any, inputs: Any, mode: str | None = None) -> Callable[..., Any]:
        """Runs graphs as they are."""
        part = _part_of(graph)
        extra_s = self.extra_s.get(part, 0.0)
        if mode is not None and part != "optimizer":
            self.modes[part, mode] += 1
            extra_s += self.extra_s.get("tuned", 0.0)
        if part in self.broken:
            raise RuntimeError(f"{part} is broken")
        self.graphs[part] += 1

        def run(*args: Any) -> Any:
            self.runs[part] += 1
            self.now += extra_s
            return graph.forward(*args)

        return run

    def train(self, monkeypatch: pytest.MonkeyPatch, steps: int, **options: Any) -> HotCompile:
        """Train for so many steps on this machine."""
        machine = self

        class Timed(Session):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs, now=lambda: machine.now)

        monkeypatch.setattr(stage_run, "Session", Timed)
        settings: dict[str, Any] = {"threshold": 3, "prewarm": False, "parity": "off", "on_error": "raise"}
        settings["fused_optimizer"] = False  # its optimizer is one to compile
        callback = HotCompile(backend=self.backend, **{**settings, **options})
        limits = {"max_steps": steps, "max_epochs": -1, "accumulate_grad_batches": self.accumulates}
        trainer = make_trainer([callback, self], **limits)
        torch.manual_seed(1)
        self.model = seeded(self.net)
        trainer.fit(self.model, loader())
        return callback


def _part_of(graph: Any) -> str:
    calls = " ".join(str(node.target) for node in graph.graph.nodes)
    if "cross_entropy" in calls:
        return "step"
    return "module" if "linear" in calls else "optimizer"
