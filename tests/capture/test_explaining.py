"""The callback that explains, in Trainers of this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from lightning_hotcompile import HotCompile, HotCompileConfig
from lightning_hotcompile.asked_for import _plan
from lightning_hotcompile.capture.ending import TrainingEnded
from lightning_hotcompile.capture.explaining import Explain
from lightning_hotcompile.capture.explanation import Explanation, explanation_from
from lightning_hotcompile.capture.order import EXPLANATION_FILE, ExplainOrder
from tests.models import Net, fit, loader, make_trainer, seeded, weights


def explain(tmp_path: Path, scope: str | None = None, **others: Any) -> Explain:
    order = ExplainOrder(folder=str(tmp_path), scope=scope)
    options: dict[str, Any] = {
        "config": HotCompileConfig(),
        "plan_for": _plan,
        "remaining": lambda trainer: 100,
        **others,
    }
    return Explain(order, HotCompile, **options)


def explained(
    tmp_path: Path, model: Any, *callbacks: Any, scope: str | None = None, **options: Any
) -> Explanation:
    with pytest.raises(TrainingEnded) as ended:
        fit(model, [*callbacks, explain(tmp_path, scope)], **options)
    assert ended.value.code == 0
    return explanation_from((tmp_path / EXPLANATION_FILE).read_text(encoding="utf-8"))


class Noisy(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        print("a graph break")
        return loss * 1


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.backwards = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.backwards += 1
            optimizer.step()


class Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ValueError("no such label")


def test_nothing_is_trained_or_left_behind(tmp_path: Path) -> None:
    model = seeded(Net)
    before = weights(model)
    validated: list[int] = []
    model.validation_step = lambda batch, batch_idx: validated.append(batch_idx)
    saving = [
        ModelCheckpoint(tmp_path / "a", save_on_exception=True),
        OnExceptionCheckpoint(tmp_path / "b"),
    ]
    found = explained(tmp_path, model, *saving, val=loader(16), enable_checkpointing=True)
    assert found.looked
    assert validated == []
    assert {p.name for p in tmp_path.iterdir()} == {EXPLANATION_FILE}
    for name, value in weights(model).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert "training_step" not in vars(model)
    assert all(p.grad is None for p in model.parameters())


class WithRMSprop(Net):
    """Its optimizer has no fused kernel, so it would be compiled."""

    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.parameters(), lr=0.01)


def test_the_whole_step_is_one_graph_with_its_logs(tmp_path: Path) -> None:
    found = explained(tmp_path, seeded(WithRMSprop))
    step, optimizer = found.regions
    assert (found.model, found.scope, found.declined, found.breaks) == ("WithRMSprop", "step", None, ())
    assert (step.name, step.calls, len(step.graphs), step.error) == ("training_step", 1, 1, None)
    assert step.graphs[0] > 10
    assert optimizer.error is not None
    assert "not looked at" in optimizer.error
    assert "WithRMSprop.training_step as a whole" in found.plan
    assert found.forecast is not None
    assert "with 100 steps" in found.forecast


def test_an_optimizer_with_a_fused_kernel_is_not_compiled(tmp_path: Path) -> None:
    found = explained(tmp_path, seeded(Net))
    assert [region.name for region in found.regions] == ["training_step"]
    assert "optimizer 0 (AdamW) is not compiled: torch has a fused kernel for it" in found.plan


def test_a_graph_break_is_told_with_its_line(tmp_path: Path) -> None:
    found = explained(tmp_path, seeded(Noisy))
    (graph_break,) = found.breaks
    assert (graph_break.file, graph_break.function) == (__file__, "training_step")
    assert graph_break.code == 'print("a graph break")'
    assert len(found.regions[0].graphs) == 2


def test_another_scope_is_looked_at(tmp_path: Path) -> None:
    found = explained(tmp_path, seeded(Net), scope="regions")
    assert found.scope == "regions"
    (blocks,) = [r for r in found.regions if r.kind == "group"]
    assert (len(blocks.members), blocks.calls, len(blocks.graphs)) == (3, 3, 1)


def test_the_scripts_own_callback_gives_its_options_and_does_nothing(tmp_path: Path) -> None:
    own = HotCompile(scope="regions", keep_eager=["head"], event_log=str(tmp_path / "log.jsonl"))
    found = explained(tmp_path, seeded(Net), own)
    assert found.scope == "regions"
    assert "head (Linear)" in found.plan
    assert own.report.steps == 0
    assert not (tmp_path / "log.jsonl").exists()


def test_what_dynamo_cannot_compile_is_an_error_of_its_region(tmp_path: Path) -> None:
    found = explained(tmp_path, seeded(Noisy), HotCompile(fullgraph=True))
    step = found.regions[0]
    assert step.graphs == ()
    assert step.error is not None
    assert "print" in step.error or "builtin" in step.error
    assert "Noisy.training_step as a whole" in found.plan


def test_manual_optimization_runs_its_step_and_changes_nothing(tmp_path: Path) -> None:
    model = seeded(Manual)
    before = weights(model)
    found = explained(tmp_path, model)
    assert model.backwards == 2
    assert found.scope == "regions"
    assert any(region.graphs for region in found.regions)
    for name, value in weights(model).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_a_step_that_fails_still_has_its_plan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such label"):
        fit(seeded(Fails), [explain(tmp_path)])
    found = explanation_from((tmp_path / EXPLANATION_FILE).read_text(encoding="utf-8"))
    assert found.failed == "ValueError: no such label"
    assert "Fails.training_step" in found.plan


def test_why_nothing_would_be_compiled_is_told_without_a_batch(tmp_path: Path) -> None:
    model = seeded(Net)
    model.compile(backend="eager")
    found = explained(tmp_path, model)
    assert found.declined is not None
    assert "compiled by the user already" in found.declined
    assert not found.looked


@pytest.mark.parametrize("options", [{"keep_eager": ["hea"]}, {"backend": "inducter"}])
def test_a_wrong_option_is_told(tmp_path: Path, options: dict[str, Any]) -> None:
    found = explained(tmp_path, seeded(Net), HotCompile(**options))
    assert found.declined is not None
    assert str(*options.values()).strip("[]'") in found.declined
    assert found.plan == ""


def test_gradients_that_accumulate_end_the_first_batch_too(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counts(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(batch_idx)
            loss: Tensor = super().training_step(batch, batch_idx)
            return loss

    explained(tmp_path, seeded(Counts), scope="regions", accumulate_grad_batches=4)
    assert seen == [0]


def test_other_stages_are_left_alone(tmp_path: Path) -> None:
    check: Callable[..., Any] = make_trainer([explain(tmp_path)]).validate
    assert check(seeded(Net), loader(16), verbose=False)
    assert list(tmp_path.iterdir()) == []
