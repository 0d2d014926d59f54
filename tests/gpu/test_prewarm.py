"""A child process compiles on the GPU beside the training, and the flip finds its code."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

from lightning_hotcompile.swap.prewarm.choice import Surroundings
from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, loader, seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


class UntilCompared(pl.Callback):
    """Trains until compiled steps are compared, not longer than is usual for a child."""

    def __init__(self, callback: Any) -> None:
        self._callback, self._start = callback, time.monotonic()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        late = time.monotonic() - self._start > 300
        trainer.should_stop = late or self._callback.phase in ("settling", "steady", "reverted", "declined")


class Lasting(Net):
    """It makes tens of thousands of small steps while a child compiles: by a schedule its rate would be 0."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-6)


class Drops(Lasting):
    def __init__(self) -> None:
        super().__init__(dropout=0.2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("model_class", [Lasting, Drops], ids=lambda c: c.__name__)
def test_the_flip_finds_what_the_child_has_compiled(
    precision: Any, model_class: type[Net], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With random numbers, too, where the comparison may compile the graph without them."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    callback = hot(backend="inductor", scope="step", prewarm=True)
    missed = counters["aot_autograd"]["autograd_cache_miss"]
    fit(
        seeded(model_class),
        [callback, UntilCompared(callback)],
        accelerator="gpu",
        precision=precision,
        max_epochs=-1,
        max_steps=-1,
    )
    report = callback.report
    assert report.phase in ("settling", "steady"), report.reason
    hits = {e["region"]: e["cache_hit"] for e in report.events if e["kind"] == "compiled"}
    assert hits == {"training_step": True, "optimizer 0": True}, report.notes
    assert counters["aot_autograd"]["autograd_cache_miss"] == missed, "nothing was lowered once more"
    assert any("2 of 2 graphs compiled by a child process" in note for note in report.notes), report.notes


def test_what_there_is_beside_a_training_on_this_gpu() -> None:
    around = Surroundings.here(accelerator=True, device=torch.device("cuda", 0))
    assert around.device_memory is not None
    assert 0 < around.device_memory <= torch.cuda.get_device_properties(0).total_memory


class Attention(nn.Module):
    """That the user has compiled: on a GPU it never holds the scores of all pairs."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        from torch.nn.attention.flex_attention import flex_attention

        self.heads, self.attend = heads, [torch.compile(flex_attention, dynamic=False)]
        self.qkv, self.proj = nn.Linear(16, 3 * heads * 64), nn.Linear(heads * 64, 16)

    def forward(self, h: Tensor) -> Any:
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, 64)).permute(2, 0, 3, 1, 4)
        return self.proj(self.attend[0](q, k, v).transpose(1, 2).flatten(2))


class Fused(Net):
    length, heads = 4096, 8

    def __init__(self) -> None:
        super().__init__(n_block=0)
        self.attention = Attention(self.heads)

    def forward(self, x: Tensor) -> Any:
        h = self.inp(x)[:, None].expand(-1, self.length, -1)
        h = h * torch.linspace(0, 1, self.length, device=x.device)[:, None]
        return self.head(self.attention(h).mean(1))


def attended() -> DataLoader[Any]:
    return loader(48, 4)


@pytest.mark.parametrize("prewarm", [False, True])
@pytest.mark.parametrize("scope", ["step", "regions"])
def test_attention_that_the_user_has_fused(prewarm: bool, scope: str) -> None:
    plain, model = seeded(Fused), seeded(Fused)
    callback = hot(backend="inductor", scope=scope, prewarm=prewarm, compile_optimizer=False)
    options: dict[str, Any] = {"accelerator": "gpu", "precision": "bf16-mixed", "max_epochs": 3}
    fit(plain, train=attended(), **options)
    fit(model, [callback], train=attended(), **options)
    assert "NOT right" not in callback.report.parity, callback.report.parity
    assert callback.report.phase == "steady" or prewarm, callback.report.reason  # else a child may be at work
    assert_same(plain, model, tolerance=5e-2)


def test_a_traced_step_does_not_take_the_memory_of_all_scores() -> None:
    """They are 2.1 GB here, and more than one copy of them would be made."""
    pairs = 4 * Fused.heads * Fused.length**2 * 4
    callback = hot(backend="inductor", scope="step", prewarm=True, compile_optimizer=False)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(int(free - 1.7 * pairs), dtype=torch.uint8, device="cuda")
    try:
        fit(seeded(Fused), [callback], train=attended(), accelerator="gpu", precision="bf16-mixed")
    finally:
        del ballast
        torch.cuda.empty_cache()
    assert any("its attention is fused" in note for note in callback.report.notes), callback.report.notes


class Swiglu(Net):
    """Blocks of a language model, small."""

    def __init__(self) -> None:
        super().__init__(n_block=0)
        self.up = nn.Linear(16, 128)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Any:
        h = self.inp(x)
        gate, value = self.up(F.rms_norm(h, (16,))).chunk(2, -1)
        return self.head(h + self.down(F.silu(gate) * value))


def test_a_cold_compile_on_this_gpu_is_right_without_a_child() -> None:
    plain, model = seeded(Swiglu), seeded(Swiglu)
    callback = hot(backend="inductor", scope="step", compile_optimizer=True)
    fit(plain, accelerator="gpu")
    fit(model, [callback], accelerator="gpu")
    assert_proven(callback.report)
    assert_same(plain, model, tolerance=1e-3)
