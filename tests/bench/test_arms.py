"""What the arms of the benchmarks do to a model, before anything is compiled."""

from __future__ import annotations

import itertools

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hotcompile.bench import one_run
from lightning_hotcompile.bench.arms import ARMS, block_names
from lightning_hotcompile.bench.cases import CASES, DIFFERENT_BATCHES
from lightning_hotcompile.bench.quiet import train


@pytest.mark.parametrize(
    ("case", "first", "number"),
    [
        ("gpt-32", "blocks.0", 4),
        ("norm-stack", "net.0", 8),
        ("24-alike", "net.0", 24),
        ("24-different", "net.0", 24),  # of one class, though no two have the same shapes
        ("gan", "generator", 2),
        ("text", "net.blocks.0", 2),
        ("elementwise", "net", 1),
    ],
)
def test_blocks_are_what_a_user_would_compile(case: str, first: str, number: int) -> None:
    names = block_names(CASES[case].model())
    assert (names[0], len(names)) == (first, number)


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_case_is_the_same_each_time(case: str) -> None:
    first, second = CASES[case].model().state_dict(), CASES[case].model().state_dict()
    assert all(first[name].equal(second[name]) for name in first)
    once, again = (list(itertools.islice(CASES[case].batches(), DIFFERENT_BATCHES + 1)) for _ in range(2))
    for (x, y), (same_x, same_y) in zip(once, again, strict=True):
        assert x.equal(same_x)
        assert y.equal(same_y)
    assert once[0] is once[DIFFERENT_BATCHES]
    assert len({id(batch) for batch in once}) == DIFFERENT_BATCHES


def test_training_step_of_manual_optimization_cannot_be_compiled_as_a_whole() -> None:
    with pytest.raises(NotImplementedError, match="manual optimization"):
        ARMS["step"](CASES["gan"], {})


def three_steps(model: LightningModule, case: str, callbacks: list[Callback]) -> Trainer:
    limits = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 3}
    return train(model, CASES[case].batches(), callbacks, **limits)


@pytest.mark.parametrize("case", ["mlp", "gan"])
@pytest.mark.parametrize("arm", ["eager+fused", "step+fused"])
def test_arms_that_use_torchs_fused_optimizer(arm: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda body: compiled.append(body) or body)
    if (arm, case) == ("step+fused", "gan"):
        with pytest.raises(NotImplementedError, match="manual optimization"):
            ARMS[arm](CASES[case], {})
        return
    model, callbacks = ARMS[arm](CASES[case], {})
    trainer = three_steps(model, case, callbacks)
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    assert {(group["fused"], group["foreach"]) for group in groups} == {(True, False)}
    assert len(compiled) == (arm == "step+fused")
    eager = CASES[case].model()
    three_steps(eager, case, [])
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("arm", ["eager+fused", "step+fused"])
def test_one_short_training_of_these(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda body: original(body, backend="eager"))
    found = one_run.run(CASES["mlp"], arm, 4, (2,))
    assert set(found["marks"]) == {2, 4}
    assert found["marks"][4]["moved"] > found["marks"][2]["moved"] > 0
    assert found["phase"] == ""
