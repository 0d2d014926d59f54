"""A warm-up on captured inputs leaves nothing behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hotcompile.swap.warmup import Capture, InputRecorder, nothing_changed, warm_up


class Busy(nn.Module):
    """Does everything that a forward should not do twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("total", torch.zeros(()))
        self.calls = 0
        self.seen: list[int] = []
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        self.calls += 1
        self.seen.append(self.calls)
        self.cache["x"] = x
        self.newest = x
        self.total += 1
        return {"y": torch.dropout(self.norm(self.linear(x)), 0.5, True) * scale}


def snapshot(module: nn.Module) -> dict[str, Any]:
    return {
        "random": torch.get_rng_state().clone(),
        "state": {n: t.clone() for n, t in module.state_dict().items()},
        "grads": [None if p.grad is None else p.grad.clone() for p in module.parameters()],
        "training": [m.training for m in module.modules()],
        "attributes": [sorted(vars(m)) for m in module.modules()],
    }


def assert_unchanged(before: dict[str, Any], module: nn.Module) -> None:
    after = snapshot(module)
    assert torch.equal(before["random"], after["random"])
    for name, value in before["state"].items():
        assert torch.equal(value, after["state"][name]), name
    for a, b in zip(before["grads"], after["grads"], strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    assert (before["training"], before["attributes"]) == (after["training"], after["attributes"])


@pytest.mark.parametrize("with_gradients", [False, True])
def test_everything_is_as_before(with_gradients: bool) -> None:
    module, x = Busy(), torch.randn(3, 4)
    if with_gradients:
        module(x)["y"].sum().backward()
        module.zero_grad(set_to_none=False)
        module.linear.weight.grad = torch.ones(4, 4)
    versions = [p._version for p in module.parameters()]
    calls, cache, seen = module.calls, dict(module.cache), list(module.seen)
    identities = id(module.seen), id(module.cache)
    before = snapshot(module)
    warm_up(module, Capture.of((x,), {"scale": 2.0}))
    assert_unchanged(before, module)
    assert (module.calls, module.seen, list(module.cache)) == (calls, seen, list(cache))
    assert (id(module.seen), id(module.cache)) == identities
    assert [p._version for p in module.parameters()] == versions


def test_also_after_an_error() -> None:
    class Fails(Busy):
        def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            super().forward(x, scale)
            raise ValueError("mine")

    module, capture = Fails(), Capture.of((torch.randn(3, 4),), {})
    before = snapshot(module)
    with pytest.raises(ValueError, match="mine"):
        warm_up(module, capture)
    assert_unchanged(before, module)
    assert (module.calls, module.seen, module.cache) == (0, [], {})


def test_the_backward_runs_too() -> None:
    ran: list[str] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ran.append("forward")
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            ran.append("backward")
            return grad * 2

    class Uses(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Watched.apply(super().forward(x))

    warm_up(Uses(4, 4), Capture.of((torch.randn(2, 4),), {}))
    assert ran == ["forward", "backward"]


def test_without_gradients_no_backward() -> None:
    with torch.no_grad():
        capture = Capture.of((torch.randn(3, 4),), {})
    assert capture.grad_enabled is False
    modes: list[bool] = []
    module = nn.Linear(4, 4)
    module.register_forward_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    warm_up(module, capture)
    assert modes == [False]


def test_autocast_and_dtype_are_those_of_the_captured_call() -> None:
    seen: list[tuple[bool, torch.dtype, torch.dtype]] = []
    module = nn.Linear(4, 4)

    def watch(*_: Any) -> None:
        seen.append(
            (
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.get_default_dtype(),
            )
        )

    module.register_forward_hook(watch)
    x = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        inside = Capture.of((x,), {})
    outside = Capture.of((x,), {})
    warm_up(module, inside)
    with torch.autocast("cpu", torch.bfloat16):
        warm_up(module, outside)
    assert seen[0][:2] == (True, torch.bfloat16)
    assert seen[1][0] is False
    assert torch.get_default_dtype() is torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_a_capture_shares_memory_but_no_history() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    middle = x * 2
    capture = Capture.of(({"deep": [middle]},), {"flag": True})
    held = capture.args[0]["deep"][0]
    assert held.data_ptr() == middle.data_ptr()
    assert (held.requires_grad, held.grad_fn) == (True, None)
    assert capture.kwargs == {"flag": True}


class TestInputRecorder:
    def test_the_first_call_of_each_module_is_recorded(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        recorder = InputRecorder([("first", model[0]), ("second", model[1])])
        first, second = torch.ones(1, 4), torch.zeros(1, 4)
        model(first)
        model(second)
        assert set(recorder.captures) == {"first", "second"}
        assert torch.equal(recorder.captures["first"].args[0], first)
        assert recorder.captures["second"].args[0].requires_grad

    def test_hooks_are_gone_afterwards(self) -> None:
        model = nn.Linear(4, 4)
        recorder = InputRecorder([("only", model)])
        recorder.remove()
        recorder.remove()
        assert not model._forward_pre_hooks
        assert not model._forward_pre_hooks_with_kwargs
        model(torch.ones(1, 4))
        assert recorder.captures == {}


def test_containers_that_did_not_change_are_not_touched() -> None:
    class Touchy(list):  # type: ignore[type-arg]
        def clear(self) -> None:
            raise AssertionError("touched")

    module = nn.Linear(2, 2)
    module.mine = Touchy([1])
    module.tensors = [torch.ones(2), torch.ones(2)]  # have no truth value when compared
    before = copy.copy(module.tensors)
    with nothing_changed(module):
        pass
    assert all(a is b for a, b in zip(module.tensors, before, strict=True))
