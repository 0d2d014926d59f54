"""What a compiled optimizer step finds in place of the user's values, and what is there afterwards."""

from __future__ import annotations

import copy
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hotcompile.swap.optimizers import optimizer_values
from lightning_hotcompile.swap.optimizers.optimizer_values import (
    Capturable,
    LearningRates,
    OptimizerValues,
    StepCounts,
)
from tests.swap.writes import Writes


class TestLearningRates:
    def optimizer(self, *rates: Any) -> Optimizer:
        groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
        return torch.optim.SGD(groups, lr=1.0)

    def test_there_and_back(self) -> None:
        optimizer = self.optimizer(0.1, 0.2)
        rates = LearningRates(optimizer)
        rates.as_tensors()
        tensors = [g["lr"] for g in optimizer.param_groups]
        assert [(t.dtype, t.item()) for t in tensors] == [(torch.float64, 0.1), (torch.float64, 0.2)]
        rates.as_given()
        rates.as_given()
        assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.2]

    def test_the_same_tensors_are_used_again(self) -> None:
        optimizer = self.optimizer(0.1)
        rates = LearningRates(optimizer)
        found = []
        for value in (0.1, 0.05):
            optimizer.param_groups[0]["lr"] = value
            rates.as_tensors()
            found.append(optimizer.param_groups[0]["lr"])
            assert found[-1].item() == value
            rates.as_given()
        assert found[0] is found[1]

    def test_a_tensor_of_the_users_is_left_alone(self) -> None:
        mine = torch.tensor(0.1)
        optimizer = self.optimizer(mine, 0.2)
        rates = LearningRates(optimizer)
        rates.as_tensors()
        assert optimizer.param_groups[0]["lr"] is mine
        rates.as_given()
        assert optimizer.param_groups[0]["lr"] is mine
        assert optimizer.param_groups[1]["lr"] == 0.2


def test_capturable_there_and_back() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))]}]
    groups[1]["capturable"] = True
    optimizer = torch.optim.AdamW(groups)
    capturable = Capturable(optimizer)
    capturable.put()
    assert [group["capturable"] for group in optimizer.param_groups] == [True, True]
    for _ in range(2):
        capturable.as_given()
        assert [group["capturable"] for group in optimizer.param_groups] == [False, True]


def test_an_optimizer_that_knows_no_capturable_is_left_alone() -> None:
    optimizer = torch.optim.Adagrad([nn.Parameter(torch.ones(1))])
    Capturable(optimizer).put()
    assert "capturable" not in optimizer.param_groups[0]


class TestStepCounts:
    def optimizer(self, device: str = "meta", dtype: torch.dtype = torch.float32) -> torch.optim.AdamW:
        parameters = [nn.Parameter(torch.ones(2, device=device, dtype=dtype)) for _ in range(2)]
        optimizer = torch.optim.AdamW(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return optimizer

    def steps(self, optimizer: Optimizer) -> list[Tensor]:
        return [entries["step"] for entries in optimizer.state.values()]

    def written(self, counts: StepCounts, *, counted: bool = True) -> list[float]:
        with Writes() as writes:
            counts.on_device()
        counts.in_host_memory(counted=counted)
        return writes.numbers

    def test_on_the_cpu_nothing_is_put(self) -> None:
        optimizer = self.optimizer("cpu")
        then, counts = self.steps(optimizer), StepCounts(optimizer)
        counts.on_device()
        assert all(a is b for a, b in zip(self.steps(optimizer), then, strict=True))
        assert not counts.are_missing

    def test_64_bit_parameters_are_counted_in_64_bit_meanwhile(self) -> None:
        optimizer = self.optimizer("cpu", torch.float64)
        eager, counts = self.steps(optimizer), StepCounts(optimizer)
        counts.on_device()
        assert [(step.dtype, step.item()) for step in self.steps(optimizer)] == [(torch.float64, 1.0)] * 2
        counts.in_host_memory(counted=True)
        assert all(a is b for a, b in zip(self.steps(optimizer), eager, strict=True))
        assert [(step.dtype, step.item()) for step in eager] == [(torch.float32, 2.0)] * 2

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_where_eager_counts_in_64_bit_so_does_compiled_code(self, device: str) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            optimizer = self.optimizer(device, torch.float64)
        finally:
            torch.set_default_dtype(torch.float32)
        eager, counts = self.steps(optimizer), StepCounts(optimizer)
        counts.on_device()
        assert [step.dtype for step in (*eager, *self.steps(optimizer))] == [torch.float64] * 4
        assert all(step.device.type == device for step in self.steps(optimizer))
        counts.in_host_memory(counted=False)

    def test_there_and_back(self) -> None:
        optimizer = self.optimizer()
        counts = StepCounts(optimizer)
        counts.on_device()
        assert all(step.is_meta for step in self.steps(optimizer))
        counts.in_host_memory(counted=False)
        counts.in_host_memory(counted=True)
        assert [step.item() for step in self.steps(optimizer)] == [1.0, 1.0]

    def test_what_has_no_gradient_is_not_counted(self) -> None:
        optimizer = self.optimizer()
        optimizer.param_groups[0]["params"][0].grad = None
        self.written(StepCounts(optimizer))
        assert [step.item() for step in self.steps(optimizer)] == [1.0, 2.0]

    def test_they_are_written_only_if_something_else_counted(self) -> None:
        optimizer = self.optimizer()
        counts = StepCounts(optimizer)
        assert self.written(counts) == [1.0, 1.0]
        assert self.written(counts) == []
        optimizer.step()
        assert self.written(counts) == [4.0, 4.0]
        assert self.written(counts, counted=False) == []
        assert self.written(counts) == [5.0, 5.0], "nobody knows what a step that failed has counted"
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert self.written(counts) == [6.0, 6.0]
        assert [step.item() for step in self.steps(optimizer)] == [7.0, 7.0]

    def test_the_same_tensors_are_used_again(self) -> None:
        optimizer = self.optimizer()
        counts, found = StepCounts(optimizer), []
        for _ in range(2):
            counts.on_device()
            found.append(self.steps(optimizer))
            counts.in_host_memory(counted=True)
        assert all(a is b for a, b in zip(*found, strict=True))

    def test_a_step_that_would_make_them_is_known(self) -> None:
        optimizer = self.optimizer()
        counts = StepCounts(optimizer)
        assert not counts.are_missing
        late = nn.Parameter(torch.ones(2, device="meta"))
        optimizer.add_param_group({"params": [late]})
        assert not counts.are_missing
        late.grad = torch.ones(2, device="meta")
        assert counts.are_missing
        optimizer.param_groups[1]["capturable"] = True
        assert not counts.are_missing


def test_a_state_dict_is_the_users_wherever_it_is_taken() -> None:
    """A handler of signals, which may save, comes between any two lines."""
    optimizer = TestStepCounts().optimizer()
    values = OptimizerValues(optimizer)
    optimizer.register_state_dict_post_hook(values.in_state_dict)
    found: list[Any] = []

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != optimizer_values.__file__:
            return None
        saved = optimizer.state_dict()
        groups = [(group["lr"], group["capturable"]) for group in saved["param_groups"]]
        found.append((groups, [entries["step"].device.type for entries in saved["state"].values()]))
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        for _ in range(3):
            with values.for_compiled():
                assert all(step.is_meta for step in TestStepCounts().steps(optimizer))
    finally:
        sys.settrace(before)
    assert len(found) > 100
    assert [each for each in found if each != ([(1e-3, False)], ["cpu", "cpu"])] == []


def test_a_state_dict_that_is_taken_changes_nothing_of_the_optimizers() -> None:
    optimizer = TestStepCounts().optimizer()
    values = OptimizerValues(optimizer)
    optimizer.register_state_dict_post_hook(values.in_state_dict)
    optimizer.state["of the user"] = 3  # type: ignore[index, assignment]
    with values.for_compiled():
        saved = optimizer.state_dict()
        assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
        assert optimizer.param_groups[0]["capturable"] is True
        assert all(s["step"].is_meta for s in optimizer.state.values() if isinstance(s, dict))
    assert saved["state"]["of the user"] == 3
    assert [s["step"].device.type for s in saved["state"].values() if isinstance(s, dict)] == ["cpu", "cpu"]
