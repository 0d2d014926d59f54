"""A compiled optimizer step does what the eager one does, and leaves no trace."""

from __future__ import annotations

import contextlib
import copy
import inspect
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, adam
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_hotcompile.plan.optimizers import COMPILABLE
from lightning_hotcompile.plan.scopes import Region
from lightning_hotcompile.swap.dynamo import TORCH
from lightning_hotcompile.swap.gate import Gate, Lane
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.optimizers.optimizer import SwappedOptimizer
from lightning_hotcompile.swap.optimizers.optimizer_step import ReplacedStep, is_watched
from lightning_hotcompile.swap.optimizers.static_marks import MARK
from tests.elsewhere import compiling_elsewhere
from tests.swap.writes import Writes

STEPS = 8
SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adam": {"amsgrad": True},
}


class Arm:
    """A small model with an optimizer of one kind and a schedule, whose step may be compiled.

    With ``state`` one eager step was made before, as in a run that flips once it is hot.
    """

    def __init__(
        self,
        kind: str,
        *,
        compiled: bool,
        backend: Any = "aot_eager",
        state: bool = True,
        suppress_errors: bool = False,
        dtype: torch.dtype = torch.float32,
        **witness: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
        groups = [{"params": self.model[0].parameters(), "lr": 0.02}, {"params": self.model[2].parameters()}]
        self.optimizer: Optimizer = getattr(torch.optim, kind)(groups, lr=0.01, **SETTINGS.get(kind, {}))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.gate = Gate(suppress_errors=suppress_errors)
        self.witness = Witness(backend, **witness)
        self.swapped = self.fresh()
        self.lane = Lane.COMPILE if compiled else Lane.EAGER
        self.data = torch.Generator().manual_seed(1)
        if state:
            self.step(Lane.EAGER)
        if compiled:
            self.swapped.put(self.model)

    def fresh(self) -> SwappedOptimizer:
        """As at the beginning of a training."""
        kind = type(self.optimizer).__name__
        region = Region(name="optimizer 0", kind="optimizer", members=("0",), class_name=kind)
        return SwappedOptimizer(region, self.gate, self.witness, optimizer=self.optimizer, dynamic=None)

    def loss(self) -> Tensor:
        x = torch.randn(16, 4, generator=self.data).to(self.model[0].weight.dtype)
        return (self.model(x) - x.sum(dim=1, keepdim=True)).square().mean()

    def step(self, lane: Lane | None = None) -> Any:
        """As Lightning does it: a closure with forward and backward."""

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        self.gate.open(lane or self.lane)
        try:
            loss = self.optimizer.step(closure)
        finally:
            self.gate.close()
        self.scheduler.step()
        return loss

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def assert_equal_states(a: Any, b: Any, path: str = "") -> None:
    """Equal, types included: a tensor is no float."""
    assert type(a) is type(b), f"{path}: {type(a)} and {type(b)}"
    if isinstance(a, Tensor):
        assert (a.dtype, a.device, a.requires_grad) == (b.dtype, b.device, b.requires_grad), path
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m: f"{path}: {m}")
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_equal_states(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal_states(x, y, f"{path}.{i}")
    else:
        assert a == pytest.approx(b) if isinstance(a, float) else a == b, path


@pytest.mark.parametrize("kind", sorted(COMPILABLE))
def test_eight_steps_are_those_of_eager(kind: str) -> None:
    plain, swapped = Arm(kind, compiled=False), Arm(kind, compiled=True)
    for _ in range(STEPS):
        torch.testing.assert_close(plain.step(), swapped.step(), rtol=1e-4, atol=1e-5)
        rates = [[g["lr"] for g in arm.optimizer.param_groups] for arm in (plain, swapped)]
        assert rates[0] == rates[1]
        assert all(type(rate) is float for rate in rates[1])
    assert_equal_states(plain.state(), swapped.state())
    assert swapped.witness.watch.total_runs == STEPS
    assert swapped.witness.error_of("optimizer 0") is None
    assert len(swapped.witness.graphs) == 1, "the schedule alone recompiles nothing"


@pytest.mark.parametrize("kind", sorted(COMPILABLE))
def test_also_the_very_first_step_may_be_compiled(kind: str) -> None:
    options = {"state": False, "suppress_errors": True}
    plain, swapped = (Arm(kind, compiled=c, **options) for c in (False, True))
    for _ in range(3):
        plain.step()
        swapped.step()
    assert_equal_states(plain.state(), swapped.state())
    assert swapped.swapped.error is None
    assert swapped.witness.watch.total_runs > 0


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("kind", sorted(COMPILABLE - {"ASGD", "NAdam"}))  # these stay eager
def test_updates_of_64_bit_have_all_digits_of_eager(kind: str, state: bool) -> None:
    plain, swapped = (Arm(kind, compiled=c, state=state, dtype=torch.float64) for c in (False, True))
    for _ in range(STEPS):
        plain.step()
        swapped.step()
    for a, b in zip(plain.model.parameters(), swapped.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)
    assert_equal_states(plain.state(), swapped.state())
    assert swapped.witness.watch.total_runs >= STEPS - 1, "eager makes the state of some"


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RAdam"])
def test_lanes_can_change_at_each_step(kind: str) -> None:
    plain, swapped = Arm(kind, compiled=False), Arm(kind, compiled=True)
    for i in range(STEPS):
        plain.step()
        swapped.step((Lane.COMPILE, Lane.EAGER, Lane.REUSE)[i % 3])
    assert_equal_states(plain.state(), swapped.state())
    assert swapped.witness.watch.total_runs == 5


@pytest.mark.parametrize("kind", sorted(COMPILABLE))
@pytest.mark.parametrize("groups", [1, 2])
def test_a_rate_of_zero_moves_nothing(kind: str, groups: int) -> None:
    """At the end of a schedule, or in a group that is frozen: also weights that never had a gradient."""
    plain, swapped = Arm(kind, compiled=False), Arm(kind, compiled=True)
    for arm in (plain, swapped):
        for weight in arm.model.parameters():
            weight.register_hook(lambda grad: torch.zeros_like(grad).copy_(grad * (grad.cumsum(0) != grad)))
            if kind != "Adagrad" or TORCH >= (2, 13):  # before, its state is made with it, and not again
                arm.optimizer.state[weight].clear()
    for rate in (0.01, 0.0, 0.01, 1e-50):
        for arm in (plain, swapped):
            for group in arm.optimizer.param_groups[:groups]:
                group["lr"] = rate
            arm.step()
    assert all(weight.isfinite().all() for weight in plain.model.parameters())
    assert_equal_states(plain.state(), swapped.state())
    assert swapped.witness.watch.total_runs == 2, "with a rate of 0 the step is eager"


def test_a_rate_may_be_an_array_of_numpys() -> None:
    plain, swapped = Arm("AdamW", compiled=False), Arm("AdamW", compiled=True)
    for step in range(4):
        for arm in (plain, swapped):
            arm.optimizer.param_groups[0]["lr"] = np.where(step < 2, 0.01, 0.02)
            arm.step()
    torch.testing.assert_close(plain.model.state_dict(), swapped.model.state_dict())
    assert swapped.witness.watch.total_runs == 4


def test_no_tensor_is_marked_as_one_that_never_moves() -> None:
    arm = Arm("AdamW", compiled=True)
    weight = arm.model[0].weight
    vars(weight)[MARK] = "unguarded"  # by somebody else
    for _ in range(3):
        arm.step()
    assert arm.witness.watch.total_runs == 3
    state = [v for s in arm.optimizer.state.values() for v in s.values()]
    marked = [t for t in (*arm.model.parameters(), *state) if MARK in vars(t)]
    assert [t is weight for t in marked] == [True]
    assert vars(weight)[MARK] == "unguarded"


def test_its_signature_is_that_of_eager() -> None:
    bare = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    before = inspect.signature(bare.step)
    undo = ReplacedStep(bare, lambda: None, lambda: False, may_lie_under=True).put()
    second = ReplacedStep(bare, lambda: None, lambda: False).put()
    assert inspect.signature(bare.step) == before
    assert second()
    assert undo()


def test_reuse_compiles_nothing() -> None:
    plain, swapped = Arm("AdamW", compiled=False), Arm("AdamW", compiled=True)
    for _ in range(3):
        plain.step()
        swapped.step(Lane.REUSE)
    assert swapped.witness.graphs == []
    assert_equal_states(plain.state(), swapped.state())


def test_eager_has_the_settings_of_the_user_though_another_thread_begins_to_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, swapped = Arm("AdamW", compiled=False), Arm("AdamW", compiled=True)
    plain.step()
    swapped.step()
    capturable: list[bool] = []
    original = adam.adam

    def told(*args: Any, **kwargs: Any) -> None:
        capturable.append(kwargs["capturable"])
        original(*args, **kwargs)

    monkeypatch.setattr(adam, "adam", told)  # which the compiled code does not fit
    with contextlib.ExitStack() as elsewhere:
        swapped.model.register_forward_hook(lambda *_: elsewhere.enter_context(compiling_elsewhere()))
        swapped.step(Lane.REUSE)
    assert capturable == [False, False]
    plain.step()
    assert_equal_states(plain.state(), swapped.state())


def test_state_can_be_saved_and_loaded_in_mid_run() -> None:
    plain, first, second = (Arm("AdamW", compiled=c) for c in (False, True, True))
    for _ in range(4):
        plain.step()
        first.step()
    saved = copy.deepcopy(first.state())
    assert all(type(g["lr"]) is float for g in saved["optimizer"]["param_groups"])
    second.model.load_state_dict(saved["model"])
    second.optimizer.load_state_dict(saved["optimizer"])
    second.data, second.scheduler = first.data, copy.deepcopy(first.scheduler)
    second.scheduler.optimizer = second.optimizer
    for _ in range(4):
        plain.step()
        second.step()
    assert_equal_states(plain.state(), second.state())
    assert [arm.witness.watch.total_runs for arm in (first, second)] == [4, 4]


def test_hooks_run_once_a_step_and_may_change_the_gradients() -> None:
    calls: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def call(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            calls.append(name)
            if name == "pre":
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            p.grad.mul_(0.5)

        return call

    arms = Arm("SGD", compiled=False), Arm("SGD", compiled=True)
    for arm in arms:
        arm.optimizer.register_step_pre_hook(hook("pre"))
        arm.optimizer.register_step_post_hook(hook("post"))
    for _ in range(3):
        for arm in arms:
            calls.clear()
            arm.step()
            assert calls == ["pre", "post"]
    assert_equal_states(arms[0].state(), arms[1].state())
    assert arms[1].witness.watch.total_runs == 3


@pytest.mark.parametrize("common", [False, True])
def test_a_hook_that_the_closure_registers_is_called_as_in_eager(common: bool) -> None:
    def calls(arm: Arm) -> list[int]:
        arm.step()
        seen: list[int] = []
        handles: list[Any] = []
        steps = 0

        def closure() -> Tensor:
            nonlocal steps
            steps += 1
            if steps == 2:
                register = (
                    register_optimizer_step_post_hook if common else arm.optimizer.register_step_post_hook
                )
                handles.append(register(lambda optimizer, args, kwargs: seen.append(len(args))))
            arm.optimizer.zero_grad()
            loss = arm.loss()
            loss.backward()
            return loss

        for _ in range(4):
            arm.gate.open(arm.lane)
            arm.optimizer.step(closure)
            arm.gate.close()
        handles[0].remove()
        return seen

    eager, ours = calls(Arm("SGD", compiled=False)), Arm("SGD", compiled=True)
    assert calls(ours) == eager
    assert len(eager) == 3
    assert ours.witness.watch.total_runs > 0


@pytest.mark.parametrize("how", ["keyword", "position", "none"])
def test_a_hook_is_given_what_the_step_was_called_with(how: str) -> None:
    def seen(arm: Arm) -> list[tuple[int, list[str]]]:
        arm.step()
        found: list[tuple[int, list[str]]] = []

        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            found.append((len(args), list(kwargs)))

        arm.optimizer.register_step_pre_hook(hook)
        arm.optimizer.register_step_post_hook(hook)

        def closure() -> Tensor:
            arm.optimizer.zero_grad()
            loss = arm.loss()
            loss.backward()
            return loss

        arm.gate.open(arm.lane)
        if how == "keyword":
            arm.optimizer.step(closure=closure)
        elif how == "position":
            arm.optimizer.step(closure)
        else:
            closure()
            arm.optimizer.step()
        arm.gate.close()
        return found

    compiled = Arm("SGD", compiled=True)
    assert seen(compiled) == seen(Arm("SGD", compiled=False))
    assert compiled.witness.watch.total_runs == 2


def test_a_profiler_sees_the_step_under_its_usual_name() -> None:
    arm = Arm("SGD", compiled=True)
    arm.step()
    assert not is_watched(arm.optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert is_watched(arm.optimizer)
        arm.step()
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.events() or ()}
    assert arm.witness.watch.total_runs == 2


def test_a_step_without_a_closure_returns_nothing() -> None:
    arm = Arm("AdamW", compiled=True)
    arm.loss().backward()
    arm.gate.open(Lane.COMPILE)
    assert arm.optimizer.step() is None
    arm.gate.close()
    assert arm.witness.watch.total_runs == 1


def test_the_closure_runs_once_with_gradients_and_floats() -> None:
    arm = Arm("AdamW", compiled=True)
    seen: list[tuple[bool, type]] = []

    def closure() -> Tensor:
        seen.append((torch.is_grad_enabled(), type(arm.optimizer.param_groups[0]["lr"])))
        arm.optimizer.zero_grad()
        loss = arm.loss()
        loss.backward()
        return loss

    arm.gate.open(Lane.COMPILE)
    with torch.no_grad():
        loss = arm.optimizer.step(closure)
    arm.gate.close()
    assert seen == [(True, float)]
    assert isinstance(loss, Tensor)
    assert arm.witness.watch.total_runs == 1


def test_an_error_in_the_closure_is_the_users_and_changes_nothing() -> None:
    arm = Arm("AdamW", compiled=True)
    arm.step()
    before = copy.deepcopy(arm.state())

    def closure() -> Tensor:
        raise ValueError("mine")

    arm.gate.open(Lane.COMPILE)
    with pytest.raises(ValueError, match="mine"):
        arm.optimizer.step(closure)
    arm.gate.close()
    assert_equal_states(before, arm.state())
    assert arm.swapped.is_in_place
    assert arm.witness.watch.total_runs == 1


def test_rates_are_floats_again_after_an_error_in_the_compiled_step() -> None:
    def explodes(graph: Any, inputs: Any, **_: Any) -> Any:
        def run(*args: Any) -> Any:
            raise ArithmeticError("boom")

        return run

    arm = Arm("AdamW", compiled=True, backend=explodes, parity="off", raise_errors=True)
    arm.loss().backward()
    arm.gate.open(Lane.COMPILE)
    with pytest.raises(ArithmeticError, match="boom"):
        arm.optimizer.step()
    arm.gate.close()
    assert [type(g["lr"]) for g in arm.optimizer.param_groups] == [float, float]


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_schedule_that_moves_momentum_too_is_right(kind: str) -> None:
    arms = Arm(kind, compiled=False), Arm(kind, compiled=True, suppress_errors=True)
    for arm in arms:
        arm.scheduler = torch.optim.lr_scheduler.OneCycleLR(arm.optimizer, max_lr=0.1, total_steps=STEPS + 1)
        for _ in range(STEPS):
            arm.step()
    assert_equal_states(arms[0].state(), arms[1].state())
    assert arms[1].swapped.error is None
    assert arms[1].swapped.is_in_place
    assert len(arms[1].witness.graphs) <= (4 if TORCH >= (2, 13) else 5)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_schedule_that_moves_momentum_too_does_not_recompile(kind: str) -> None:
    arm = Arm(kind, compiled=True)
    arm.scheduler = torch.optim.lr_scheduler.OneCycleLR(arm.optimizer, max_lr=0.1, total_steps=STEPS + 1)
    for _ in range(STEPS):
        arm.step()
    assert len(arm.witness.graphs) <= 2


@pytest.mark.parametrize(("kind", "setting"), [("SGD", "momentum"), ("AdamW", "betas")])
def test_what_a_schedule_moves_while_training_is_watched_is_not_compiled(kind: str, setting: str) -> None:
    arms = Arm(kind, compiled=False), Arm(kind, compiled=False)
    for arm in arms:
        arm.scheduler = torch.optim.lr_scheduler.OneCycleLR(arm.optimizer, max_lr=0.1, total_steps=STEPS + 3)
        arm.swapped = arm.fresh()
        arm.step()
        arm.step()
    arms[1].swapped.put(arms[1].model)
    assert not arms[1].swapped.is_in_place
    assert f"its {setting} changed since training began" in str(arms[1].swapped.error)
    for _ in range(STEPS - 1):
        arms[0].step()
        arms[1].step(Lane.COMPILE)
    assert arms[1].witness.watch.total_runs == 0
    assert_equal_states(arms[0].state(), arms[1].state())


def test_a_learning_rate_that_moves_is_no_reason() -> None:
    arm = Arm("AdamW", compiled=False)
    for _ in range(4):
        arm.step()
    arm.swapped.put(arm.model)
    assert arm.swapped.error is None
    arm.step(Lane.COMPILE)
    assert arm.witness.watch.total_runs == 1


def test_a_setting_that_changes_after_the_compile_is_compiled_once_more() -> None:
    arms = Arm("AdamW", compiled=False), Arm("AdamW", compiled=True)
    for arm in arms:
        arm.step()
        for group in arm.optimizer.param_groups:
            group["weight_decay"] = 0.3
    arms[1].swapped.take_out()
    arms[1].swapped.put(arms[1].model)
    for arm in arms:
        arm.step()
    assert arms[1].swapped.error is None
    assert arms[1].witness.watch.total_runs == 2
    assert_equal_states(arms[0].state(), arms[1].state())


def test_a_group_that_is_added_later_is_stepped_too() -> None:
    arms = Arm("SGD", compiled=False), Arm("SGD", compiled=True)
    extras = []
    for arm in arms:
        arm.step()
        extra = nn.Parameter(torch.ones(2))
        arm.optimizer.add_param_group({"params": [extra], "lr": 0.3})
        arm.scheduler = torch.optim.lr_scheduler.StepLR(arm.optimizer, 2, 0.5)
        for _ in range(2):
            extra.grad = torch.ones(2)
            arm.step(Lane.COMPILE if arm is arms[1] else Lane.EAGER)
        extras.append(extra)
    assert arms[1].witness.watch.total_runs == 3
    assert all(type(g["lr"]) is float for g in arms[1].optimizer.param_groups)
    torch.testing.assert_close(extras[0], extras[1])


def test_taking_it_out_leaves_the_optimizer_as_it_was() -> None:
    arm = Arm("AdamW", compiled=False)
    before = dict(vars(arm.optimizer))
    arm.swapped.put(arm.model)
    assert arm.swapped.is_in_place
    assert vars(arm.optimizer)["step"] is not before.get("step")
    arm.step(Lane.COMPILE)
    arm.swapped.take_out()
    arm.swapped.take_out()
    after = vars(arm.optimizer)
    assert {k: v for k, v in after.items() if k != "_opt_called"} == {
        k: v for k, v in before.items() if k != "_opt_called"
    }
    assert not arm.swapped.is_in_place


def test_a_copy_of_the_optimizer_steps_its_own_parameters_eagerly() -> None:
    arm = Arm("SGD", compiled=True)
    arm.step()
    model, optimizer = copy.deepcopy((arm.model, arm.optimizer))
    before = copy.deepcopy(arm.model.state_dict())
    assert arm.witness.watch.total_runs == 1
    model(torch.ones(1, 4)).sum().backward()
    arm.gate.open(Lane.COMPILE)
    optimizer.step()
    arm.gate.close()
    assert arm.witness.watch.total_runs == 1
    assert_equal_states(before, arm.model.state_dict())
    assert not torch.equal(model[0].weight, arm.model[0].weight)


def test_a_scheduler_finds_that_the_optimizer_stepped(recwarn: pytest.WarningsRecorder) -> None:
    arm = Arm("SGD", compiled=True)
    arm.step()
    assert arm.witness.watch.total_runs == 1
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_an_optimizer_without_a_scheduler_gets_no_mark_of_one() -> None:
    arm = Arm("SGD", compiled=False)
    arm.optimizer = torch.optim.SGD(arm.model.parameters(), lr=0.1)
    swapped = arm.fresh()
    swapped.put(arm.model)
    arm.step(Lane.COMPILE)
    assert arm.witness.watch.total_runs == 1
    assert not hasattr(arm.optimizer, "_opt_called")


@pytest.mark.parametrize("kind", ["AdamW", "RAdam", "Adamax"])
def test_an_optimizer_that_asks_for_foreach_is_compiled(kind: str) -> None:
    """It refuses learning rates that are tensors, unless it is capturable."""
    plain, swapped = Arm(kind, compiled=False), Arm(kind, compiled=True)
    for arm in (plain, swapped):
        for group in arm.optimizer.param_groups:
            group["foreach"] = True
    for _ in range(3):
        plain.step()
        swapped.step()
    assert swapped.swapped.error is None
    assert swapped.witness.watch.total_runs == 3
    assert_equal_states(plain.state(), swapped.state())


class Signalled:
    """A backend whose code gets a signal while it runs, before or after its work.

    Args:
        when: ``before`` or ``after``.
        handler: what is done about the signal, wherever Python is then.
    """

    def __init__(self, when: str, handler: Callable[[], None]) -> None:
        self._when = when
        self._handler = handler

    def __call__(self, graph: Any, inputs: Any, **_: Any) -> Any:
        def run(*args: Any) -> Any:
            if self._when == "before":
                self._signal()
            result = graph.forward(*args)
            if self._when == "after":
                self._signal()
            return result

        return run

    def _signal(self) -> None:
        before = signal.signal(signal.SIGUSR1, lambda *_: self._handler())
        try:
            signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)


def layout(state: Any) -> Any:
    """A state dict without what a step changes: what is saved as what, and the settings."""
    if isinstance(state, dict):
        return {key: layout(value) for key, value in state.items()}
    if isinstance(state, list):
        return [layout(value) for value in state]
    return (state.dtype, state.device, tuple(state.shape)) if isinstance(state, Tensor) else state


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="a signal of POSIX systems")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["AdamW", "RAdam", "SGD", "Adagrad"])
def test_a_checkpoint_that_a_signal_makes_in_mid_step_is_that_of_eager(kind: str, when: str) -> None:
    """Lightning's handler saves at once, where SLURM ends a job and asks for it anew."""
    saved: list[Any] = []

    def save() -> None:
        saved.append(copy.deepcopy(arm.optimizer.state_dict()))

    plain, arm = Arm(kind, compiled=False), Arm(kind, compiled=True, backend=Signalled(when, save))
    expected = layout(plain.optimizer.state_dict())
    plain.step()
    arm.step()
    assert saved
    assert [layout(state) for state in saved] == [expected] * len(saved)
    assert_equal_states(plain.state(), arm.state())
    resumed = Arm(kind, compiled=False)
    resumed.optimizer.load_state_dict(saved[-1])
    resumed.step()
    assert all(type(group["lr"]) is float for group in resumed.optimizer.param_groups)


def test_what_saves_in_mid_step_leaves_no_trace() -> None:
    arm = Arm("AdamW", compiled=True)
    arm.swapped.take_out()
    assert not arm.optimizer._optimizer_state_dict_post_hooks


class Elsewhere:
    """An AdamW whose parameters are not in host memory, as on an accelerator; they have no values at all.

    Of three parameters the last has no gradient, and so no state.
    """

    def __init__(self, backend: Any = "eager", **options: Any) -> None:
        self.parameters = [nn.Parameter(torch.ones(2, device="meta")) for _ in range(3)]
        for parameter in self.parameters[:2]:
            parameter.grad = torch.ones(2, device="meta")
        groups = [{"params": self.parameters[:2]}, {"params": self.parameters[2:]}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1, **options)
        self.gate = Gate(suppress_errors=False)
        self.witness = Witness(backend, parity="off", raise_errors=True)
        region = Region(name="optimizer 0", kind="optimizer", members=("0",), class_name="AdamW")
        self.swapped = SwappedOptimizer(
            region, self.gate, self.witness, optimizer=self.optimizer, dynamic=None
        )
        self.swapped.put(nn.Module())

    def step(self, lane: Lane = Lane.COMPILE) -> None:
        self.gate.open(lane)
        try:
            self.optimizer.step()
        finally:
            self.gate.close()

    @property
    def counts(self) -> list[Tensor]:
        return [entries["step"] for entries in self.optimizer.state.values()]


@pytest.mark.parametrize("foreach", [None, True])
def test_counts_stay_in_host_memory_and_count_on(foreach: bool | None) -> None:
    there = Elsewhere(foreach=foreach)
    there.step(Lane.EAGER)
    counts = there.counts
    for number, lane in enumerate([Lane.COMPILE, Lane.REUSE, Lane.EAGER, Lane.REUSE], start=2):
        there.step(lane)
        assert [(c.device.type, c.item()) for c in there.counts] == [("cpu", number)] * 2
        assert all(now is then for now, then in zip(there.counts, counts, strict=True))
        assert [group["capturable"] for group in there.optimizer.param_groups] == [False, False]
    assert there.witness.watch.total_runs == 3
    assert len(there.witness.graphs) == 1


def test_a_step_without_any_gradient_counts_nothing() -> None:
    there = Elsewhere()
    there.step(Lane.EAGER)
    for parameter in there.parameters:
        parameter.grad = None
    for lane in (Lane.COMPILE, Lane.REUSE):
        there.step(lane)
        assert [(c.device.type, c.item()) for c in there.counts] == [("cpu", 1)] * 2


def test_counts_are_made_by_eager() -> None:
    there = Elsewhere()
    there.step()
    assert [(c.device.type, c.item()) for c in there.counts] == [("cpu", 1)] * 2
    assert there.witness.watch.total_runs == 0
    there.step()
    assert there.witness.watch.total_runs == 1


def test_an_error_leaves_counts_and_settings_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Elsewhere()
    there.step(Lane.EAGER)

    def fails(*_: Any) -> None:
        assert all(count.is_meta for count in there.counts)
        raise RuntimeError("out of something")

    monkeypatch.setattr(there.swapped, "choose", fails)
    with pytest.raises(RuntimeError, match="out of something"):
        there.step()
    assert [(c.device.type, c.item()) for c in there.counts] == [("cpu", 1)] * 2
    assert [(group["lr"], group["capturable"]) for group in there.optimizer.param_groups] == [
        (0.1, False)
    ] * 2
    assert [type(group["lr"]) for group in there.optimizer.param_groups] == [float, float]


def test_where_nothing_is_compiled_any_longer_eager_makes_the_update_at_once() -> None:
    """With nothing around it, which on an accelerator is a kernel for each parameter."""
    there = Elsewhere()
    there.step(Lane.EAGER)
    with Writes() as writes:
        for _ in range(3):
            there.step(Lane.REUSE)
    assert writes.numbers == []
    assert [count.item() for count in there.counts] == [4, 4]
    assert (there.swapped.calls, there.swapped.could_compile) == (3, False)
    there.step(Lane.COMPILE)
    there.step(Lane.REUSE)
    assert there.witness.watch.total_runs == 2
    assert [count.item() for count in there.counts] == [6, 6]
    assert there.swapped.could_compile


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="a signal of POSIX systems")
@pytest.mark.parametrize("when", ["before", "after"])
def test_counts_that_are_saved_in_mid_step_are_those_in_host_memory(when: str) -> None:
    saved: list[Any] = []

    def save() -> None:
        state = there.optimizer.state_dict()
        saved.append([(e["step"].device.type, e["step"].item()) for e in state["state"].values()])
        saved.append([(group["lr"], group["capturable"]) for group in state["param_groups"]])
        assert all(count.is_meta for count in there.counts), "the step that is under way has its own"

    there = Elsewhere(backend=Signalled(when, save))
    there.step(Lane.EAGER)
    there.step()
    assert saved == [[("cpu", 1)] * 2, [(0.1, False)] * 2]
    assert [(c.device.type, c.item()) for c in there.counts] == [("cpu", 2)] * 2
