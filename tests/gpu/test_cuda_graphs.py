"""Modes that record CUDA graphs: what a replay overwrites is looked at by nobody, and numbers are eager's."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hotcompile import HotCompile
from tests.hot import assert_proven, assert_same, hot
from tests.models import Block, Net, fit, loader, seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]

GPU: dict[str, Any] = {"accelerator": "gpu", "max_epochs": 8}


class Losses(pl.Callback):
    """What was logged in each step, asked for once the step is over."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["loss"]))


class Dropped(Net):
    """Each replay draws numbers of its own."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)


class Counted(Net):
    """Running statistics, which each replay has to move on."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16))  # type: ignore[assignment]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The CUDA graphs that torch records."""
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    found: list[Any] = []
    record = CUDAGraphTreeManager.record_function

    def told(self: Any, inputs: Any, function: Any) -> Any:
        found.append(function)
        return record(self, inputs, function)

    monkeypatch.setattr(CUDAGraphTreeManager, "record_function", told)
    return found


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("model_class", [Net, Dropped, Counted], ids=lambda c: c.__name__)
@pytest.mark.parametrize("scope", ["step", "regions"])
def test_a_training_is_the_one_without(
    mode: str, model_class: type[Net], scope: str, recorded: list[Any]
) -> None:
    if mode == "max-autotune" and scope == "regions":
        pytest.skip("it times kernels for minutes; once is enough")
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(backend="inductor", mode=mode, scope=scope, compile_optimizer=False)
    without, with_it = Losses(), Losses()
    fit(plain, [without], val=loader(16, seed=3), **GPU)
    fit(model, [callback, with_it], val=loader(16, seed=3), **GPU)
    assert_proven(callback.report)
    assert callback.report.phase == "steady", callback.report.reason
    assert recorded
    assert len(with_it.seen) == len(without.seen)
    torch.testing.assert_close(torch.tensor(with_it.seen), torch.tensor(without.seen), rtol=1e-3, atol=1e-3)
    assert_same(plain, model, tolerance=1e-2)


def test_a_compiled_optimizer_beside_them_is_right() -> None:
    plain, model = seeded(Net), seeded(Net)
    callback = hot(backend="inductor", mode="reduce-overhead", scope="step", compile_optimizer=True)
    fit(plain, **GPU)
    fit(model, [callback], **GPU)
    assert_proven(callback.report)
    assert_same(plain, model, tolerance=1e-2)


def test_without_such_a_mode_none_are_recorded(recorded: list[Any]) -> None:
    from torch._inductor import config

    callback = hot(backend="inductor", scope="step", compile_optimizer=False)
    with config.patch({"triton.cudagraphs": True}):
        fit(seeded(Net), [callback], **GPU)
    assert_proven(callback.report)
    assert not recorded


@pytest.mark.parametrize("changes", [{"accumulate_grad_batches": 2}, {}])
def test_they_are_refused_where_gradients_would_be_lost(changes: dict[str, Any]) -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = bool(changes)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if changes:
                return super().training_step(batch, batch_idx)
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            return optimizer.step()

    with pytest.raises(ValueError, match="records CUDA graphs"):
        fit(seeded(Manual), [HotCompile(mode="reduce-overhead")], **{**GPU, **changes})


class Captures(Net):
    """A part of it is in a CUDA graph of the user's own from one step on."""

    at: int

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Block(16)
        self.graph: Any = None

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.inp(x)
        return F.cross_entropy(self(x), y) + (h - self.target(h.detach())).square().mean()

    @torch.no_grad()
    def target(self, h: Tensor) -> Any:
        if self.graph is None and self.global_step + 1 < self.at:
            return self.teacher(h)
        if self.graph is None:
            self.given, self.graph = h.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.found = self.teacher(self.given)
        self.given.copy_(h)
        self.graph.replay()
        return self.found.clone()


@pytest.mark.parametrize("at", [4, 6, 7])
@pytest.mark.parametrize("scope", ["step", "regions"])
def test_a_graph_that_the_step_captures_by_itself_is_left_alone(at: int, scope: str) -> None:
    """In the step that compiles, or in one of those after it, whose runs are looked at."""
    trained = type("Captures", (Captures,), {"at": at})
    plain, model = seeded(trained), seeded(trained)
    callback = hot(backend="aot_eager", scope=scope, compile_optimizer=False, on_error="eager")
    fit(plain, **GPU)
    fit(model, [callback], **GPU)
    assert scope == "step" or callback.report.phase == "steady", callback.report.reason
    assert_same(plain, model, tolerance=1e-3)
