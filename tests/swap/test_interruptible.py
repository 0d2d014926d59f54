"""An alarm is thrown only where torch is not in the middle of something."""

from __future__ import annotations

import ast
import contextlib
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import lightning_hotcompile
from lightning_hotcompile.swap.dynamo import compiling_allowed
from lightning_hotcompile.swap.process import interruptible
from lightning_hotcompile.swap.process.interruptible import can_be_interrupted
from lightning_hotcompile.swap.process.time_limit import time_limit
from lightning_hotcompile.swap.tracing.tracing_limit import TracingLimit
from tests.functions import turned

TORCH = Path(torch.__file__).parent
STANDARD = Path(sysconfig.get_path("stdlib"))
OWN = Path(interruptible.__file__).parents[1]

needs_alarm = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs an alarm signal")


def function_at(path: Path | str, name: str) -> Callable[..., Any]:
    """A function as if it stood in that file; it calls its argument, or returns its own frame."""
    names: dict[str, Any] = {"sys": sys}
    source = f"def {name}(inner=None):\n    return sys._getframe() if inner is None else inner()"
    exec(compile(source, str(path), "exec"), names)
    function: Callable[..., Any] = names[name]
    return function


def frame_at(path: Path | str, name: str, *callers: str, of: Path | str = "/elsewhere/code.py") -> FrameType:
    call = function_at(path, name)
    for caller in callers:
        call = (lambda outer, inner: lambda: outer(inner))(function_at(of, caller), call)
    frame = call()
    assert isinstance(frame, FrameType)
    return frame


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (STANDARD / "threading.py", "wait"),
        (STANDARD / "subprocess.py", "_wait"),
        (TORCH / "_dynamo" / "symbolic_convert.py", "step"),
        (TORCH / "fx" / "interpreter.py", "run_node"),
        (TORCH / "_inductor" / "scheduler.py", "can_fuse"),
        (TORCH.parent / "sympy" / "core" / "add.py", "flatten"),
        (Path.home() / "project" / "backend.py", "compiled"),
        ("train.py", "compiled"),
        ("<stdin>", "compiled"),
        ("<ipython-input-3-0a1b>", "compiled"),
        (STANDARD / "multiprocessing" / "popen_fork.py", "poll"),
    ],
)
def test_waits_steps_of_the_compiler_and_code_of_others_can_be(path: Path | str, name: str) -> None:
    assert can_be_interrupted(frame_at(path, name))
    assert can_be_interrupted(frame_at(path, name, "trace", "compile"))
    assert not can_be_interrupted(frame_at(path, name, "trace", "__exit__", "compile"))
    assert not can_be_interrupted(frame_at(path, name, "__enter__"))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (STANDARD / "contextlib.py", "__exit__"),
        (STANDARD / "contextlib.py", "wait"),
        (STANDARD / "threading.py", "release"),
        (STANDARD / "weakref.py", "remove"),
        (TORCH / "_subclasses" / "fake_tensor.py", "__torch_dispatch__"),
        (TORCH / "_dynamo" / "symbolic_convert.py", "CALL"),
        (TORCH / "utils" / "_python_dispatch.py", "step"),
        (OWN / "swap" / "witness.py", "wait"),
        ("<eval_with_key>.1", "forward"),
        ("<string>", "__init__"),
    ],
)
def test_all_else_can_not(path: Path | str, name: str) -> None:
    assert not can_be_interrupted(frame_at(path, name))


@pytest.mark.parametrize(
    "path",
    [
        TORCH / "utils" / "_filelock.py",
        TORCH.parent / "filelock" / "_lock.py",
        STANDARD / "concurrent" / "futures" / "_base.py",
        STANDARD / "subprocess.py",
    ],
)
@pytest.mark.parametrize("name", ["__enter__", "__exit__"])
def test_locks_and_pools_wait_where_a_with_begins_or_ends(path: Path, name: str) -> None:
    assert can_be_interrupted(frame_at(STANDARD / "threading.py", "wait", name, "compile", of=path))
    assert not can_be_interrupted(frame_at(STANDARD / "threading.py", "wait", "__del__", of=path))


def test_an_import_is_not_interrupted() -> None:
    """What it has imported so far would not be run again."""
    importing = "<frozen importlib._bootstrap>"
    code = frame_at("/elsewhere/package/__init__.py", "module", "_load", of=importing)
    assert not can_be_interrupted(code)


def test_what_pauses_inside_of_a_generator_may_be_a_context_manager() -> None:
    def frames() -> Iterator[FrameType]:
        yield sys._getframe()

    assert not can_be_interrupted(next(frames()))
    assert not can_be_interrupted(None)


def test_torch_has_the_functions() -> None:
    """Where one is gone a compile is interrupted later, or not at all: look for what took its place."""
    for name, functions in interruptible._STEPS.items():
        tree = ast.parse((TORCH / name).read_text(encoding="utf-8"))
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert set(functions) <= defined, name


def test_the_standard_library_has_the_functions() -> None:
    assert callable(subprocess.Popen._wait)  # type: ignore[attr-defined]
    assert callable(subprocess.Popen._communicate)  # type: ignore[attr-defined]
    for name, functions in interruptible._WAITING.items():
        tree = ast.parse((STANDARD / name).read_text(encoding="utf-8"))
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        missing = set(functions) - defined
        assert missing <= {"_wait_for_tstate_lock"}, f"{name}: {missing}"  # until Python 3.12


@needs_alarm
@pytest.mark.usefixtures("own_alarm")
def test_the_end_of_a_with_is_not_interrupted() -> None:
    put_back: list[str] = []

    @contextlib.contextmanager
    def changed() -> Iterator[None]:
        yield
        threading.Event().wait(0.1)
        put_back.append("here")

    def hang() -> None:
        with changed():
            pass
        threading.Event().wait(20.0)
        pytest.fail("was not interrupted")

    with pytest.raises(TimeoutError), time_limit(0.02, "limit"):
        hang()
    assert put_back == ["here"]


@needs_alarm
@pytest.mark.usefixtures("own_alarm")
def test_an_alarm_where_a_mode_ends_leaves_no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors of the process would be fake from then on."""
    end, alarms = FakeTensorMode.__exit__, []

    def __exit__(self: FakeTensorMode, *error: Any) -> Any:
        alarms.append(signal.getsignal(signal.SIGALRM))
        signal.raise_signal(signal.SIGALRM)
        return end(self, *error)

    monkeypatch.setattr(FakeTensorMode, "__exit__", __exit__)
    limit = TracingLimit(60.0)
    with compiling_allowed(suppress_errors=True), limit:
        result = torch.compile(turned, backend="aot_eager")(torch.ones(2))
    modes = _get_current_dispatch_mode_stack()
    torch._dynamo.reset()
    assert not modes
    assert limit._alarm._ring in alarms
    assert limit.reached is None
    torch.testing.assert_close(result, turned(torch.ones(2)))


def test_its_own_code_is_the_whole_package() -> None:
    assert Path(lightning_hotcompile.__file__).parent == interruptible._OWN
