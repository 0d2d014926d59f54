"""What a training with the callback has to share with the same training without it."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn

from lightning_hotcompile import HotCompile
from tests.hot import hot
from tests.models import loader, make_trainer, seeded

TOLERANCE = 1e-4

# Entries of callbacks' states that hold wall times or paths of the one run.
_OF_ONE_RUN = ("time_elapsed", "path", "dirpath", "best_k_models")


class Journal(Logger):
    """Remembers what is logged, but for the callback's own scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[int | None, dict[str, float]]] = []

    name = "journal"
    version = 0

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing to remember."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        users = {k: float(v) for k, v in metrics.items() if not k.startswith("hotcompile/")}
        if users:
            self.entries.append((step, users))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One finished training: the model, its Trainer, what was logged and what a checkpoint would hold."""

    model: pl.LightningModule
    trainer: pl.Trainer
    logged: list[tuple[int | None, dict[str, float]]]
    checkpoint: dict[str, Any]
    random_state: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Expect:
    """What the callback has to have done: its last phase, why, and which regions never ran."""

    phase: str = "steady"
    reason: str = ""
    unproven: tuple[str, ...] = ()
    scope: str = ""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One kind of run. ``auto`` and ``regions`` are what is expected in these scopes."""

    name: str
    model: Callable[[], pl.LightningModule]
    train: Callable[[], Any] = loader
    val: Callable[[], Any] | None = None
    callbacks: Callable[[], list[pl.Callback]] = list
    trainer: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)
    auto: Expect | None = Expect(scope="step")
    regions: Expect | None = Expect()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the callback."""

    ignored: tuple[str, ...] = ()
    """Logged names that hold wall times."""

    tolerance: float = TOLERANCE
    """Larger only where 16-bit numbers are rounded elsewhere, as fused code does."""


def in_scopes(cells: Sequence[Cell]) -> list[Any]:
    """The cells as parameters ``(cell, scope)`` for pytest."""
    import pytest

    return [
        pytest.param(
            cell,
            scope,
            id=f"{cell.name}-{scope}",
        )
        for cell in cells
        for scope in ("auto", "regions")
        if getattr(cell, scope) is not None
    ]


def seed() -> None:
    """All random states from the start."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def random_state() -> tuple[Any, ...]:
    """The state of all random generators that a training on the CPU may draw from."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def train(cell: Cell, callback: HotCompile | None = None) -> Outcome:
    """Train the cell's model from its seed."""
    model, journal = seeded(cell.model), Journal()
    own = cell.trainer() if callable(cell.trainer) else cell.trainer
    options = {"logger": journal, "log_every_n_steps": 1, "max_epochs": 3, **own}
    seed()
    trainer = make_trainer([*cell.callbacks(), *([callback] if callback else [])], **options)
    trainer.fit(model, cell.train(), cell.val() if cell.val else None)
    return outcome(model, trainer, journal)


def outcome(model: pl.LightningModule, trainer: pl.Trainer, journal: Journal | None = None) -> Outcome:
    """What is left after a training."""
    state = random_state()
    return Outcome(
        model=model,
        trainer=trainer,
        logged=journal.entries if journal is not None else [],
        checkpoint=saved(trainer),
        random_state=state,
    )


def saved(trainer: pl.Trainer) -> dict[str, Any]:
    """A checkpoint of this moment, written and read again."""
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_checkpoint(Path(folder) / "x.ckpt")
        checkpoint: dict[str, Any] = torch.load(Path(folder) / "x.ckpt", weights_only=False)
    checkpoint.pop("hotcompile", None)  # the callback's own verdict
    checkpoint["callbacks"] = {
        k: v for k, v in checkpoint.get("callbacks", {}).items() if not k.startswith("HotCompile")
    }
    return checkpoint


def check(cell: Cell, scope: str) -> HotCompile:
    """Train without and with the callback: same results, and the callback did what is expected."""
    expect: Expect = getattr(cell, scope)
    callback = hot(scope=scope, **{"threshold": 2, **cell.options})
    plain, under = train(cell), train(cell, callback)
    assert_same_run(plain, under, ignored=cell.ignored, tolerance=cell.tolerance)
    assert_did(callback, expect)
    return callback


def assert_did(callback: HotCompile, expect: Expect) -> None:
    """The receipt is the expected one: the phase, the reason, and the proof of each region."""
    report = callback.report
    story = report.to_text()
    assert report.phase == expect.phase, story
    assert expect.reason in report.reason, story
    assert expect.scope in ("", report.scope), story
    if expect.phase in ("steady", "settling"):
        assert report.regions, story
        assert {r.name for r in report.regions if not r.proven} == set(expect.unproven), story
        assert any(r.runs for r in report.regions), story
    elif expect.phase in ("observing", "declined"):
        assert not any(r.runs for r in report.regions), story


def assert_same_run(
    plain: Outcome, under: Outcome, *, ignored: Sequence[str] = (), tolerance: float = TOLERANCE
) -> None:
    """Weights, buffers, optimizers, loops, metrics, logs, random states and attributes are the same."""
    assert list(plain.checkpoint["state_dict"]) == list(under.checkpoint["state_dict"])
    assert_close(plain.checkpoint, under.checkpoint, "checkpoint", tolerance)
    first, second = plain.model.state_dict(), under.model.state_dict()
    assert list(first) == list(second)
    assert_close(first, second, "model", tolerance)
    for which in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        metrics = [_without(getattr(o.trainer, which), ignored) for o in (plain, under)]
        assert_close(*metrics, which, tolerance)
    logs = [[(step, _without(m, ignored)) for step, m in o.logged] for o in (plain, under)]
    assert_close(*logs, "logged", tolerance)
    assert_close(plain.random_state, under.random_state, "random state", tolerance=0.0)
    assert attributes_of(plain.model) == attributes_of(under.model)
    assert hooks_of(plain.model) == hooks_of(under.model)


def _without(metrics: Mapping[str, Any], ignored: Sequence[str]) -> dict[str, Any]:
    return {k: v for k, v in metrics.items() if not any(part in k for part in ("hotcompile", *ignored))}


def attributes_of(model: nn.Module) -> dict[str, set[str]]:
    """The names of the attributes of each module."""
    return {name: set(vars(module)) for name, module in model.named_modules()}


def hooks_of(model: nn.Module) -> dict[str, list[int]]:
    """How many hooks of each kind each module has."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {name: [len(getattr(m, kind)) for kind in kinds] for name, m in model.named_modules()}


def assert_close(a: Any, b: Any, where: str, tolerance: float = TOLERANCE) -> None:
    """Two nested values are of the same types and structure; numbers agree within the tolerance."""
    if isinstance(a, Tensor):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m: f"{where}: {m}")
    elif isinstance(a, np.ndarray):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=where)
    elif isinstance(a, Mapping):
        assert list(a) == list(b), where
        for key in a:
            if not str(key).endswith(_OF_ONE_RUN):
                assert_close(a[key], b[key], f"{where}[{key!r}]", tolerance)
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b), where
        assert len(a) == len(b), f"{where}: {len(a)} and {len(b)} entries"
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_close(x, y, f"{where}[{index}]", tolerance)
    elif dataclasses.is_dataclass(a) and not isinstance(a, type):
        assert_close(vars(a), vars(b), where, tolerance)
    elif isinstance(a, float):
        assert type(b) is float, where
        assert abs(a - b) <= tolerance * (1 + abs(a)) or (a != a and b != b) or a == b, f"{where}: {a}, {b}"
    else:
        assert type(a) is type(b), f"{where}: {type(a)} and {type(b)}"
        assert a == b or not isinstance(a, (int, str, bool, bytes)), f"{where}: {a!r} and {b!r}"
