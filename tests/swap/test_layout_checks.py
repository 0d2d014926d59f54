"""Which compiled code looks at the layout of its tensors, and that it is right where it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from lightning_hotcompile.swap import layout_checks
from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded


@torch.library.custom_op("hotcompile_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """An operation of somebody's own."""
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def reasons(function: Callable[..., Any], *inputs: Any, **settings: Any) -> list[str | None]:
    """What is said about each graph that Dynamo captures."""
    found: list[str | None] = []

    def backend(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        found.append(layout_checks.why_needed(graph_module, example_inputs))
        return graph_module.forward

    torch.compile(function, backend=backend, **settings)(*inputs)
    return found


@pytest.fixture(autouse=True)
def _not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_SIZE_ASSERTS", raising=False)


class Scaled(nn.Module):
    """One parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class TestWhyNeeded:
    def test_not_where_all_operations_are_torchs_own(self) -> None:
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3), nn.GELU())
        assert reasons(lambda x: model(x).softmax(-1)[0] + 1, torch.ones(2, 1, 4, 4)) == [None]

    def test_where_sizes_vary(self) -> None:
        (reason,) = reasons(torch.sin, torch.ones(3, 4), dynamic=True)
        assert reason is not None
        assert "sizes vary" in reason

    def test_where_an_operation_is_somebodys_own(self) -> None:
        (reason,) = reasons(lambda x: twice(x).sin(), torch.ones(3))
        assert reason is not None
        assert "hotcompile_tests" in reason

    def test_where_it_is_in_an_inner_graph(self) -> None:
        def step(x: Tensor) -> Any:
            return checkpoint(lambda y: twice(y).sin(), x, use_reentrant=False)

        (reason,) = reasons(step, torch.ones(3, requires_grad=True))
        assert reason is not None
        assert "hotcompile_tests" in reason

    def test_where_a_function_is_not_looked_into(self) -> None:
        def own(x: Tensor) -> Tensor:
            return x.t()

        torch.compiler.allow_in_graph(own)
        (reason,) = reasons(lambda x: own(x).sin(), torch.ones(3, 4))
        assert reason is not None
        assert "own" in reason

    def test_where_parameters_are_not_inputs(self) -> None:
        graph = torch.fx.symbolic_trace(Scaled())
        reason = layout_checks.why_needed(graph, [torch.ones(3)])
        assert reason == "the graph holds tensors that no guard looks at"

    @pytest.mark.parametrize("value", ["0", "1"])
    def test_where_the_user_has_a_say(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_SIZE_ASSERTS", value)
        (reason,) = reasons(torch.sin, torch.ones(3))
        assert reason == "TORCHINDUCTOR_SIZE_ASSERTS is set"


SCRIPT = """
from tests.hot import hot
from tests.models import Net, fit, seeded

callback = hot(backend="inductor", scope="step", store=None, {options})
fit(seeded(Net, width=8, n_block=1), [callback], max_steps=8, max_epochs=-1)
assert all(region.proven for region in callback.report.regions), callback.report.to_text()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("options", "checked"),
    [("", [False, False, True]), ("options=dict(size_asserts=True)", [True, True, True])],
)
def test_only_the_optimizers_code_checks(tmp_path: Path, options: str, checked: list[bool]) -> None:
    code = tmp_path / "code.log"
    environment = {
        **os.environ,
        "TORCH_LOGS": "output_code",
        "TORCH_LOGS_OUT": str(code),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    script = SCRIPT.format(options=options)
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, check=True, timeout=500)
    calls = code.read_text(encoding="utf-8").split("def call(")[1:]
    assert [" assert_size_stride(" in call for call in calls] == checked, "forward, backward, optimizer"


class Changed(Net):
    """Its tensors get another layout in mid-run, with the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.mix = nn.Parameter(torch.randn(4, 8))
        self.register_buffer("scale", torch.rand(8, 8))
        self.change = "nothing"

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        seen = self.conv(x.view(-1, 1, 2, 4)).flatten(2)  # N, 4, 8
        out: Tensor = super().loss((seen.transpose(1, 2) @ self.mix @ self.scale[:, 0] + x, y))
        return out

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 12:
            if self.change == "parameters":
                self.mix.data = transposed(self.mix.data)
                self.conv.to(memory_format=torch.channels_last)
            elif self.change == "buffer":
                self.scale = transposed(self.scale)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        late = self.trainer.training and self.global_step >= 12
        return [transposed(batch[0]), batch[1]] if self.change == "batch" and late else batch


def transposed(x: Tensor) -> Tensor:
    """The same values, one column after the other in memory."""
    return x.t().contiguous().t()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scope", ["step", "regions"])
@pytest.mark.parametrize("change", ["nothing", "parameters", "buffer", "batch"])
def test_training_is_right_when_a_layout_changes(change: str, scope: str) -> None:
    models: list[pl.LightningModule] = []
    for callbacks in ([], [hot(backend="inductor", scope=scope, store=None, compile_optimizer=False)]):
        model = seeded(Changed)
        model.change = change
        fit(model, callbacks, max_steps=24, max_epochs=-1)
        models.append(model)
    report = callbacks[0].report
    assert report.phase in ("settling", "refining", "steady", "reverted"), report.to_text()
    assert any(region.proven for region in report.regions)
    assert_same(*models)
