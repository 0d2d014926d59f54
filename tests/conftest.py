"""Fixtures for all tests."""

import atexit
import builtins
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import BaseTorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode

from lightning_hotcompile.plan import compile_cost

pytest_plugins = ("tests.te_fixture",)

# One busy process beside a training with two OpenMP threads slows its steps many times over.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

# Never the store of whoever runs the tests. Each worker has a folder in that of the first process.
if "STORE_OF_TESTS" not in os.environ:
    os.environ["STORE_OF_TESTS"] = tempfile.mkdtemp(prefix="hotcompile-tests-")
    atexit.register(shutil.rmtree, os.environ["STORE_OF_TESTS"], ignore_errors=True)
STORE = Path(os.environ["STORE_OF_TESTS"], os.environ.get("PYTEST_XDIST_WORKER", "alone"))
os.environ["HOTCOMPILE_STORE"] = str(STORE)


@pytest.fixture(autouse=True)
def no_verdicts_of_other_tests() -> Iterator[None]:
    """Compiled code stays, as tests would take long without; what a test has found about a model does not."""
    yield
    for path in (STORE / "profiles").glob("*.json"):
        path.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """What Dynamo has learned in one test neither helps nor hinders the next one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


TOLD_OF_MODES = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
"""Where torch keeps that a mode is in use, in all threads: what is left there fails tests much later."""


@pytest.fixture(autouse=True)
def no_mode_left() -> Iterator[None]:
    """A mode that a test leaves on, or torch's word of one, would fail tests after it, and not itself."""
    yield
    left = _get_current_dispatch_mode_stack()
    for _ in left:
        _pop_mode()
    told = [name for name in TOLD_OF_MODES if getattr(_python_dispatch, name, False)]
    for name in told:
        setattr(_python_dispatch, name, False)
    with BaseTorchDispatchMode():
        pass  # from there it is told to Dynamo's guards
    assert not left, "left on"
    assert not told, "told of for good"


@pytest.fixture(autouse=True)
def no_setting_left() -> Iterator[None]:
    """Nor one of Dynamo's, which decides what its guards look at."""
    before = torch._dynamo.config.get_config_copy()
    yield
    after = torch._dynamo.config.get_config_copy()
    left = {name: value for name, value in after.items() if before.get(name) != value}
    left.pop("error_on_nested_jit_trace", None)  # TransformerEngine sets it when it is imported
    for name in left:
        setattr(torch._dynamo.config, name, before[name])
    assert not left, "left on"


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed."""
    usual = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")
        return usual(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "lightning_hotcompile.view.picture", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)


@pytest.fixture
def cheap_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each plan is worth a trial."""
    monkeypatch.setattr(compile_cost, "BASE_COMPILE_S", 1e-6)
    monkeypatch.setattr(compile_cost, "TOOLCHAIN_S", 0.0)
    monkeypatch.setattr(
        compile_cost, "SECONDS_PER_REGION", dict.fromkeys(compile_cost.SECONDS_PER_REGION, 1e-6)
    )
    for name in ("SECONDS_PER_TENSOR", "SECONDS_PER_OP"):
        monkeypatch.setattr(compile_cost, name, 0.0)
    monkeypatch.setattr(compile_cost, "KNOWN_STEP_S", 1e-6)


@pytest.fixture
def own_alarm() -> Iterator[None]:
    """The test runner may use the alarm for its own time limit: it gets it back."""
    handler = signal.getsignal(signal.SIGALRM)
    rest, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, rest, interval)
