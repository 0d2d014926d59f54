"""Which optimizers' steps are compiled: each class of torch.optim has its answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_hotcompile.plan.optimizers import COMPILABLE, why_not_compiled

CLASSES = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}
EAGER = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(2, 3))]


def test_every_class_of_torch_is_decided() -> None:
    # A class that a newer torch adds is eager until somebody has looked at it.
    assert set(CLASSES) >= COMPILABLE
    assert not COMPILABLE & EAGER


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_each_class(name: str) -> None:
    reason = why_not_compiled(CLASSES[name](parameters()))
    if name in COMPILABLE:
        assert reason is None
    else:
        assert reason == f"{name} is not one of torch.optim's multi-tensor optimizers"


@pytest.mark.parametrize("name", sorted(COMPILABLE))
def test_each_compilable_one_has_a_multi_tensor_step(name: str) -> None:
    assert "foreach" in CLASSES[name](parameters()).defaults


@pytest.mark.parametrize("name", sorted(COMPILABLE))
def test_with_64_bit_weights_those_stay_eager_that_keep_more_than_counts_in_32_bit(name: str) -> None:
    weights = [nn.Parameter(torch.ones(2, dtype=torch.float64))]
    reason = why_not_compiled(CLASSES[name](weights))
    assert (reason is not None) == (name in ("ASGD", "NAdam"))
    assert why_not_compiled(CLASSES[name](parameters())) is None
    if reason is not None:
        assert "in 32 bit" in reason
        weights[0].grad = torch.ones_like(weights[0])
        optimizer = CLASSES[name](weights)
        optimizer.step()
        kept = {k for k, v in optimizer.state[weights[0]].items() if v.dtype is torch.float32}
        assert kept > {"step"}, "else it may be compiled"


def test_a_fused_one_stays_eager() -> None:
    assert why_not_compiled(torch.optim.AdamW(parameters(), fused=True)) == "it is fused already"


def test_one_fused_group_is_enough() -> None:
    first, second = parameters()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "fused": True}]
    assert why_not_compiled(torch.optim.AdamW(groups)) == "it is fused already"


def test_a_differentiable_one_stays_eager() -> None:
    assert why_not_compiled(torch.optim.SGD(parameters(), differentiable=True)) == "it is differentiable"


def test_sparse_parameters_stay_eager() -> None:
    sparse = nn.Parameter(torch.eye(3).to_sparse())
    assert why_not_compiled(torch.optim.SGD([sparse])) == "it has sparse parameters"


def test_a_class_of_the_user_stays_eager_whatever_its_name() -> None:
    own = type("AdamW", (torch.optim.AdamW,), {"__module__": "elsewhere.ema"})
    reason = "elsewhere.ema.AdamW is not one of torch.optim's multi-tensor optimizers"
    assert why_not_compiled(own(parameters())) == reason


def test_what_is_no_optimizer_of_torch_is_not_looked_into() -> None:
    assert why_not_compiled(object()) == "object is not one of torch.optim's multi-tensor optimizers"


@pytest.mark.parametrize(("device", "capturable"), [("cpu", False), ("cpu", True), ("meta", True)])
def test_nadam_is_compiled_where_its_state_is_on_one_device(device: str, capturable: bool) -> None:
    parameter = nn.Parameter(torch.ones(1, device=device))
    assert why_not_compiled(torch.optim.NAdam([parameter], capturable=capturable)) is None


def test_nadam_with_a_number_in_host_memory_is_not() -> None:
    parameter = nn.Parameter(torch.ones(1, device="meta"))
    assert "capturable=True" in str(why_not_compiled(torch.optim.NAdam([parameter])))
