"""What a fused optimizer would take is timed on copies: the optimizer itself stays as it is."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hotcompile.swap import fused
from lightning_hotcompile.swap.fused import FusedTrial, try_fused


def model(width: int = 8) -> nn.Module:
    net = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    net(torch.ones(2, width)).sum().backward()
    return net


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("Adam", {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
        ("AdamW", {"lr": 0.1, "betas": (0.5, 0.6), "maximize": True}),
        ("Adagrad", {"lr": 0.1}),
    ],
)
def test_the_optimizer_and_its_parameters_are_read_only(kind: str, options: dict[str, Any]) -> None:
    net = model()
    optimizer = getattr(torch.optim, kind)(net.parameters(), **options)
    optimizer.step()
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
    gradients = [p.grad.clone() for p in net.parameters()]
    random = torch.get_rng_state()
    trial = try_fused(optimizer)
    assert trial is not None
    assert trial.name == kind
    assert torch.equal(torch.get_rng_state(), random)
    assert repr(optimizer.state_dict()) == repr(state)
    assert all(torch.equal(w, weights[name]) for name, w in net.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), gradients, strict=True))


def test_both_kinds_are_timed_in_turn_and_the_first_steps_are_left_out() -> None:
    ticks = itertools.chain.from_iterable((0.0, 9.0) if i < 4 else (0.0, 2.0 - i % 2) for i in range(99))
    optimizer = torch.optim.AdamW(model().parameters(), lr=0.1)
    optimizer.step()
    trial = try_fused(optimizer, now=ticks.__next__)
    assert trial == FusedTrial(name="AdamW", eager_s=2.0, fused_s=1.0)


def test_groups_with_rates_of_their_own_and_parameters_without_a_gradient() -> None:
    net = model()
    first, second = net
    second.bias.grad = None
    first.bias.requires_grad_(False)
    groups = [{"params": first.parameters(), "lr": 0.5}, {"params": second.parameters()}]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    optimizer.step()
    assert try_fused(optimizer) is not None


def test_tensors_that_the_kernel_would_misread() -> None:
    net = nn.Linear(8, 4)
    net(torch.ones(2, 8)).sum().backward()
    net.weight.grad = torch.ones(()).expand(4, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    assert try_fused(optimizer) is None


class Own(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Own(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
        lambda p: torch.optim.Adam(p, lr=0.1, differentiable=True),
    ],
    ids=["a class of the user's", "none has been made", "it is fused", "differentiable"],
)
def test_there_is_nothing_to_try(make: Any) -> None:
    assert try_fused(make(model().parameters())) is None


def test_large_models_and_other_dtypes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    assert try_fused(torch.optim.SGD(model().bfloat16().parameters(), lr=0.1, momentum=0.9)) is None
    assert try_fused(optimizer) is not None
    monkeypatch.setattr(fused, "MOST_ELEMENTS", 2)
    assert try_fused(optimizer) is None


class TestAdvice:
    trial = FusedTrial(name="AdamW", eager_s=0.004, fused_s=0.001)

    def test_names_what_each_way_saves(self) -> None:
        advice = self.trial.advice(compiled_saves_s=0.001, step_s=0.02)
        assert advice is not None
        assert "AdamW(..., fused=True) would save 3 ms of each step (4 ms eager, 1 ms fused" in advice
        assert "compiling the optimizer saves 1 ms" in advice

    @pytest.mark.parametrize("saves", [0.0, -0.002])
    def test_if_the_compiled_one_saves_nothing(self, saves: float) -> None:
        assert "saves nothing" in str(self.trial.advice(compiled_saves_s=saves, step_s=0.02))

    def test_none_if_compiled_saves_as_much_or_the_step_is_long(self) -> None:
        assert self.trial.advice(compiled_saves_s=0.0028, step_s=0.02) is None
        assert self.trial.advice(compiled_saves_s=0.0, step_s=1.0) is None
