"""Options of the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.matrix.compare import Cell, Expect, check, in_scopes
from tests.matrix.nets import SgdNet
from tests.models import loader


class ReadsGradients(SgdNet):
    """Looks at gradients and weights in every hook that Lightning has around the update."""

    def see(self, name: str) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm() if grads else torch.tensor(-1.0)
        self.log(name, norm)

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.see("before_backward")
        self.log("sees_loss", loss.detach())

    def on_after_backward(self) -> None:
        self.see("after_backward")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.see("before_zero_grad")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.see("before_step")


class Clips(SgdNet):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        self.log("clipped", torch.stack([p.grad.norm() for p in self.parameters()]).norm())


EAGER_ONLY = Expect(phase="observing")

# What only the Trainer sees is tried in one scope: auto=None.
CELLS = [
    Cell(name="plain", model=SgdNet, val=lambda: loader(16)),
    Cell(name="accumulation", model=SgdNet, trainer={"accumulate_grad_batches": 2, "max_epochs": 6}),
    Cell(
        name="accumulation that does not divide an epoch",
        model=SgdNet,
        trainer={"accumulate_grad_batches": 5, "max_epochs": 12},
    ),
    Cell(name="clip norm", model=ReadsGradients, trainer={"gradient_clip_val": 0.05}),
    Cell(
        name="clip value",
        model=ReadsGradients,
        trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    Cell(name="own clipping", model=Clips),
    Cell(
        name="accumulation and clipping",
        model=ReadsGradients,
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_epochs": 6},
    ),
    Cell(name="bf16-mixed", model=SgdNet, trainer={"precision": "bf16-mixed"}),
    Cell(
        name="bf16-true",
        model=SgdNet,
        trainer={"precision": "bf16-true"},
        options={"compile_optimizer": False},  # compiled, it rounds lr * gradient to 16 bits
    ),
    Cell(name="64-true", model=SgdNet, trainer={"precision": "64-true"}),
    Cell(name="16-mixed", model=SgdNet, trainer={"precision": "16-mixed"}),
    Cell(
        name="fast_dev_run", model=SgdNet, trainer={"fast_dev_run": True}, auto=EAGER_ONLY, regions=EAGER_ONLY
    ),
    Cell(
        name="fast_dev_run of many",
        model=SgdNet,
        train=lambda: loader(256),
        val=lambda: loader(16),
        trainer={"fast_dev_run": 32},
    ),
    Cell(name="overfit", model=SgdNet, trainer={"overfit_batches": 2, "max_epochs": 16}),
    Cell(
        name="limits",
        model=SgdNet,
        val=lambda: loader(32),
        trainer={"limit_train_batches": 5, "limit_val_batches": 0.5, "max_epochs": 7},
    ),
    Cell(
        name="no training batch",
        model=SgdNet,
        trainer={"limit_train_batches": 0},
        auto=EAGER_ONLY,
        regions=EAGER_ONLY,
    ),
    Cell(name="max_steps in mid-epoch", model=SgdNet, trainer={"max_steps": 29, "max_epochs": -1}),
    Cell(name="max_time", model=SgdNet, auto=None, trainer={"max_time": "00:01:00:00"}),
    Cell(name="val in mid-epoch", model=SgdNet, val=lambda: loader(16), trainer={"val_check_interval": 5}),
    Cell(
        name="val by steps",
        model=SgdNet,
        val=lambda: loader(16),
        trainer={"val_check_interval": 7, "check_val_every_n_epoch": None},
    ),
    Cell(name="no inference_mode", model=SgdNet, val=lambda: loader(16), trainer={"inference_mode": False}),
    Cell(name="reload", model=SgdNet, auto=None, trainer={"reload_dataloaders_every_n_epochs": 1}),
    Cell(name="no sampler", model=SgdNet, auto=None, trainer={"use_distributed_sampler": False}),
    Cell(name="detect_anomaly", model=SgdNet, trainer={"detect_anomaly": True}),
    Cell(name="simple profiler", model=SgdNet, auto=None, trainer={"profiler": "simple"}),
    Cell(name="advanced profiler", model=SgdNet, auto=None, trainer={"profiler": "advanced"}),
    Cell(
        name="no sanity check",
        model=SgdNet,
        auto=None,
        val=lambda: loader(16),
        trainer={"num_sanity_val_steps": 0},
    ),
    Cell(
        name="all sanity checks",
        model=SgdNet,
        auto=None,
        val=lambda: loader(16),
        trainer={"num_sanity_val_steps": -1},
    ),
]


@pytest.mark.parametrize(("cell", "scope"), in_scopes(CELLS))
def test_trains_as_without(cell: Cell, scope: str) -> None:
    check(cell, scope)


@pytest.fixture
def _deterministic_again() -> Any:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic_again")
@pytest.mark.parametrize("scope", ["auto", "regions"])
def test_deterministic(scope: str) -> None:
    check(Cell(name="deterministic", model=SgdNet, trainer={"deterministic": True}), scope)


HOOKED = Expect(phase="declined", reason="nothing to compile")  # the profiler hooks every module


@pytest.mark.parametrize("scope", ["auto", "regions"])
@pytest.mark.parametrize(("names", "expect"), [(True, HOOKED), (False, Expect())], ids=["names", "no names"])
def test_pytorch_profiler(names: bool, expect: Expect, scope: str, tmp_path: Path) -> None:
    from lightning.pytorch.profilers import PyTorchProfiler

    def profiled() -> dict[str, Any]:
        profiler = PyTorchProfiler(
            dirpath=tmp_path, filename="p", record_module_names=names, export_to_chrome=False
        )
        return {"profiler": profiler}

    check(Cell(name="profiler", model=SgdNet, trainer=profiled, auto=expect, regions=expect), scope)
