"""A handler of signals that is called amid a compile does what it does without one."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from lightning_hotcompile.run import preflight
from lightning_hotcompile.run.session import Session
from lightning_hotcompile.swap.process.time_limit import Alarm, time_limit
from lightning_hotcompile.swap.tracing.signal_handlers import SignalHandlers, comes_from_a_handler
from tests.hot import STEP, assert_proven, assert_same, hot
from tests.models import Small, fit, loader, make_trainer, seeded

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="a signal of POSIX systems")


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@torch.library.custom_op("hotcompile_tests::signalled", mutates_args=())
def signalled(x: Tensor) -> Tensor:
    """An operation of which the signal comes while it is traced, and not while it runs."""
    return x.clone()


@signalled.register_fake
def _(x: Tensor) -> Tensor:
    signal.raise_signal(signal.SIGUSR1)
    return torch.empty_like(x)


signalled.register_autograd(lambda ctx, gradient: gradient)


class Head(nn.Linear):
    """The last layer, with the operation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(signalled(x))


class Signalled(Small):
    """A model with it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head(16, 3)


def fit_with_handler(handler: Callable[[Any], None], callbacks: list[Any]) -> Signalled:
    """A training in which the handler is called at each signal, with the Trainer."""
    model, trainer = seeded(Signalled), make_trainer(callbacks)
    signal.signal(signal.SIGUSR1, lambda *_: handler(trainer))
    trainer.fit(model, loader())
    return model


@pytest.mark.parametrize("scope", ["step", "module"])
def test_a_checkpoint_that_is_saved_amid_a_trace_is_that_of_eager(scope: str, tmp_path: Path) -> None:
    """Lightning's handler saves at once, where SLURM ends a job and asks for it anew."""
    expected: list[dict[str, Any]] = []
    saved: list[Any] = []

    def save(trainer: Any) -> None:
        trainer.save_checkpoint(tmp_path / "job.ckpt")
        saved.append(torch.load(tmp_path / "job.ckpt", weights_only=False))
        expected.append({name: value.tolist() for name, value in trainer.model.state_dict().items()})

    callback = hot(**{**STEP, "scope": scope})
    model = fit_with_handler(save, [callback])
    assert len(saved) > 1
    for checkpoint, values in zip(saved, expected, strict=True):
        assert {type(value) for value in checkpoint["state_dict"].values()} == {Tensor}
        assert {name: value.tolist() for name, value in checkpoint["state_dict"].items()} == values
    assert_proven(callback.report)
    assert_same(fit_with_handler(lambda trainer: None, []), model)


class Preempted(Exception):
    """What a handler raises."""


@pytest.mark.parametrize("on_error", ["eager", "raise"])
def test_what_a_handler_raises_ends_the_training(on_error: str) -> None:
    """It was taken for an error of the compile, and training went on."""
    callback, cause = hot(**STEP, on_error=on_error), ValueError("the cause")

    def end(trainer: Any) -> None:
        steps.append(trainer.global_step)
        raise Preempted("the job ends") from cause

    steps: list[int] = []
    with pytest.raises(Preempted, match="the job ends") as raised:
        fit_with_handler(end, [callback])
    assert raised.value.__cause__ is cause
    assert steps == [3]
    assert callback.report.reason.startswith("cost_gate=False")


class Handlers:
    """Of every kind that there is: each of them raises the error of the one below."""

    def end(self, *_: object) -> None:
        raise Preempted("the job ends")

    def __call__(self, *_: object) -> None:
        self.end()

    @classmethod
    def of_all_kinds(cls) -> dict[str, Any]:
        def function(number: int, frame: FrameType | None) -> None:
            cls().end()

        partial = functools.partial(functools.partial(function))
        return {"function": function, "method": cls().end, "object": cls(), "partial": partial}


def rings(graph: Any, inputs: Any, **_: Any) -> Any:
    """A backend of which a signal comes while its code runs for the fifth time."""
    runs = itertools.count(1)

    def run(*args: Any) -> Any:
        if next(runs) == 5:
            signal.raise_signal(signal.SIGUSR1)
        return graph.forward(*args)

    return run


@pytest.mark.parametrize("kind", ["function", "method", "object", "partial"])
def test_what_a_handler_raises_in_compiled_code_ends_the_training(kind: str) -> None:
    """It was taken for an error of the compiled code, and eager went on."""
    callback = hot(**{**STEP, "backend": rings, "on_error": "eager"})
    signal.signal(signal.SIGUSR1, Handlers.of_all_kinds()[kind])
    model = seeded(Small)
    with pytest.raises(Preempted, match="the job ends"):
        fit(model, [callback])
    assert "training_step" not in vars(model)


def test_what_a_handler_raises_in_code_of_ours_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for an error of the callback's, and training went on."""
    monkeypatch.setattr(Session, "consider_step", lambda *_: signal.raise_signal(signal.SIGUSR1))
    signal.signal(signal.SIGUSR1, Handlers())
    with pytest.raises(Preempted, match="the job ends"):
        fit(seeded(Small), [hot(**STEP, on_error="eager")])


def test_what_a_handler_raises_while_the_run_is_planned_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a reason to decline, and training went on."""
    monkeypatch.setattr(preflight, "plan_compile", lambda *_, **__: signal.raise_signal(signal.SIGUSR1))
    signal.signal(signal.SIGUSR1, Handlers())
    with pytest.raises(Preempted, match="the job ends"):
        fit(seeded(Small), [hot(**STEP, on_error="eager")])


def amid_a_compile(action: Callable[[], object]) -> None:
    """Do something where Dynamo is at work."""

    def backend(graph: Any, inputs: Any) -> Any:
        action()
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))


def ring() -> None:
    signal.raise_signal(signal.SIGUSR1)


def test_handlers_are_there_again_afterwards() -> None:
    def first(*_: object) -> None:
        signal.signal(signal.SIGUSR2, second)

    def second(*_: object) -> None:
        """Put in place by the other one."""

    signal.signal(signal.SIGUSR1, first)
    signal.signal(signal.SIGUSR2, first)
    of_python = signal.getsignal(signal.SIGINT)
    with SignalHandlers():
        amid_a_compile(ring)
        within = signal.getsignal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGINT) is of_python
    assert signal.getsignal(signal.SIGUSR1) is first
    assert signal.getsignal(signal.SIGUSR2) is second
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    assert callable(within)
    within(signal.SIGUSR1, None)  # somebody has kept it
    assert signal.getsignal(signal.SIGUSR2) is second


class SeesAll(TorchDispatchMode):
    """A mode of the user's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"it sees {func}")


class SeesCalls(TorchFunctionMode):
    """One that sees calls and not operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"it sees {func}")


@pytest.mark.parametrize("key", [None, torch._C.DispatchKey.Functionalize, torch._C.DispatchKey.Meta])
def test_a_handler_sees_real_tensors_whatever_is_open(key: Any) -> None:
    found: list[Any] = []

    def look(*_: object) -> None:
        found.append((type(made := torch.ones(2) + 1), made.device.type, made.tolist()))
        found.append(_get_current_dispatch_mode_stack())

    def ring_amid_modes() -> None:
        include = torch._C.DispatchKeySet(key) if key else torch._C._dispatch_tls_local_include_set()
        guard = torch._C._ForceDispatchKeyGuard(include, torch._C._dispatch_tls_local_exclude_set())
        with FakeTensorMode() as fake, SeesAll() as user, guard, SeesCalls() as calls:
            ring()
            still.append(_get_current_dispatch_mode_stack() == [fake, user])
            still.append(_get_current_function_mode_stack()[-1] is calls)

    still: list[bool] = []
    signal.signal(signal.SIGUSR1, look)
    with SignalHandlers():
        amid_a_compile(ring_amid_modes)
    assert found == [(Tensor, "cpu", [2.0, 2.0]), []]
    assert still == [True, True]


def test_the_default_device_is_that_of_the_handler_too() -> None:
    devices: list[str] = []
    signal.signal(signal.SIGUSR1, lambda *_: devices.append(torch.empty(1).device.type))
    with torch.device("meta"), SignalHandlers():
        amid_a_compile(ring)
    assert devices == ["meta"]


def interrupted_amid_modes() -> None:
    with SignalHandlers():
        FakeTensorMode().__enter__()
        SeesCalls().__enter__()
        raise KeyboardInterrupt


def test_no_mode_is_left_by_an_error() -> None:
    """Ctrl-C may come when a mode is in force, and before it is known that it is to be taken back."""
    with pytest.raises(KeyboardInterrupt):
        interrupted_amid_modes()
    assert _get_current_dispatch_mode_stack() == []
    assert _get_current_function_mode_stack() == []


def test_a_mode_of_the_users_stays_after_an_error() -> None:
    with SeesAll() as mode:
        with pytest.raises(KeyboardInterrupt):
            interrupted_amid_modes()
        assert _get_current_dispatch_mode_stack() == [mode]
    assert _get_current_dispatch_mode_stack() == []


def end(*_: object) -> None:
    """A handler that raises."""
    raise Preempted


@pytest.mark.parametrize(
    ("handler", "error"), [(end, Preempted), (signal.default_int_handler, KeyboardInterrupt)]
)
def test_what_has_caught_the_error_of_a_handler_does_not_keep_it(handler: Any, error: Any) -> None:
    """Python does, at the end of a weak reference: a part of the Ctrl-Cs that came in a compile was lost."""

    def swallow() -> None:
        with contextlib.suppress(BaseException):
            ring()

    def call() -> None:
        with SignalHandlers(), SignalHandlers():
            amid_a_compile(swallow)

    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(error):
        call()


def test_what_code_of_the_users_has_caught_is_caught() -> None:
    """Such as a step with a time limit of its own, between two graphs."""
    signal.signal(signal.SIGUSR1, end)
    caught = False
    with SignalHandlers():
        try:
            ring()
        except Preempted:
            caught = True
    assert caught


def test_ctrl_c_stays_what_it_is() -> None:
    def call() -> None:
        with SignalHandlers():
            amid_a_compile(ring)

    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        call()


def test_a_time_limit_is_left_alone() -> None:
    with time_limit(60.0, "compile_timeout"):
        alarm = signal.getsignal(signal.SIGALRM)
        with SignalHandlers():
            assert signal.getsignal(signal.SIGALRM) is alarm


def test_in_another_thread_nothing_is_done() -> None:
    handler: Callable[[int, FrameType | None], None] = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGUSR1, handler)
    found: list[Any] = []

    def look() -> None:
        with SignalHandlers():
            found.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [handler]


def test_the_error_of_a_time_limit_is_not_one_of_a_handler() -> None:
    alarm = Alarm(60.0, TimeoutError, may_throw=lambda _: True)
    alarm.start()
    try:
        with pytest.raises(TimeoutError) as raised:
            signal.raise_signal(signal.SIGALRM)
        assert not comes_from_a_handler(raised.value)
    finally:
        alarm.stop()
