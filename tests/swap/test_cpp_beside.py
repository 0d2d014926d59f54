"""The C++ compiler is started beside the tracing, once, and makes what the compile then needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch._inductor.codecache as codecache
import torch._inductor.config as inductor_config
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch._inductor.cpp_builder import CppBuilder

from lightning_hotcompile.swap.dynamo import TORCH
from lightning_hotcompile.swap.inductor import cpp_beside
from lightning_hotcompile.swap.inductor.cpp_beside import (
    EarlyToolchain,
    beside,
    builds_beside,
    start_toolchain,
    why_not_early,
)
from lightning_hotcompile.swap.inductor.probes import AsNeeded
from lightning_hotcompile.swap.inductor.whole_files import WholeFiles
from lightning_hotcompile.swap.process.time_limit import Alarm, time_limit
from tests.hot import hot
from tests.models import Net, fit, seeded

NEVER = 5.0
"""What takes for ever in these tests has an end of its own, should the limit not work."""

needs_alarm = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs an alarm signal")


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)


class TestWhyNotEarly:
    def test_early_on_a_cpu_with_two_cores(self) -> None:
        assert why_not_early(nn.Linear(2, 2), {}) is None

    def test_not_with_one_core(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
        assert why_not_early(nn.Linear(2, 2), {}) == "there is no second core"

    def test_not_for_another_device(self) -> None:
        assert why_not_early(nn.Linear(2, 2, device="meta"), {}) == "the model is on meta"

    @pytest.mark.parametrize(("version", "early"), [((2, 11), False), ((2, 13), True)])
    def test_not_where_options_would_be_those_of_the_whole_process(
        self, version: tuple[int, int], early: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cpp_beside, "TORCH", version)
        reason = why_not_early(nn.Linear(2, 2), {"cpp.simdlen": 128})
        assert (reason is None) is early
        assert why_not_early(nn.Linear(2, 2), {}) is None


def entered(options: Any = None) -> EarlyToolchain:
    """One whose thread has ended."""
    early = EarlyToolchain(nn.Linear(2, 2), options)
    with early:
        assert early.thread is not None
    early.wait()
    assert not early.thread.is_alive()
    return early


class TestThread:
    def test_nobody_waits_for_it_before_the_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        goes_on, found = threading.Event(), list[tuple[str, Any]]()

        def start(options: Any) -> None:
            goes_on.wait(60)
            found.append((threading.current_thread().name, options))

        monkeypatch.setattr(cpp_beside, "start_toolchain", start)
        given = {"max_autotune": True} if TORCH >= (2, 13) else {}
        early = EarlyToolchain(nn.Linear(2, 2), given)
        with early:
            thread = early.thread
        with early:
            assert early.thread is thread, "once: what comes later finds what was made"
        assert thread is not None
        assert thread.is_alive()
        goes_on.set()
        early.wait()
        assert found == [("hotcompile-toolchain", given)]

    def test_its_files_are_whole_though_the_rest_has_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begun, goes_on = threading.Event(), threading.Event()
        before, seen = CppBuilder.build, list[object]()

        def start(_: Any) -> None:
            begun.set()
            goes_on.wait(60)
            seen.append(CppBuilder.build)

        monkeypatch.setattr(cpp_beside, "start_toolchain", start)
        early = EarlyToolchain(nn.Linear(2, 2), None)
        with WholeFiles(), early:
            ours = CppBuilder.build
            begun.wait(60)
        goes_on.set()
        early.wait()
        assert ours is not before
        assert seen == [ours]
        assert CppBuilder.build is before

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SIGTERMException, ValueError])
    def test_nobody_waits_after_an_interruption(
        self, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Lightning ignores further ones once it ends the training, so the user could do nothing."""
        goes_on, waited = threading.Event(), threading.Event()
        monkeypatch.setattr(cpp_beside, "start_toolchain", lambda _: goes_on.wait(60))
        early = EarlyToolchain(nn.Linear(2, 2), None)
        with early:
            thread = early.thread
        assert thread is not None
        monkeypatch.setattr(thread, "join", lambda *_: waited.set())
        try:
            raise error
        except error:
            early.wait()
        assert waited.is_set() == issubclass(error, Exception)
        goes_on.set()

    def test_a_compiler_that_hangs_does_not_hold_the_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
        goes_on = threading.Event()
        monkeypatch.setattr(cpp_beside, "start_toolchain", lambda _: goes_on.wait(60))
        monkeypatch.setattr(cpp_beside, "LONGEST_WAIT_S", 0.01)
        early = EarlyToolchain(nn.Linear(2, 2), None)
        with early:
            thread = early.thread
        early.wait()
        assert thread is not None
        assert thread.is_alive()
        assert thread.daemon, "else the end of the process would wait for it"
        goes_on.set()

    @pytest.mark.skipif(TORCH < (2, 13), reason="settings are those of the process")
    def test_it_has_the_settings_of_this_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found: list[object] = []
        monkeypatch.setattr(
            cpp_beside, "start_toolchain", lambda _: found.append(inductor_config.cpp.simdlen)
        )
        with inductor_config.patch({"cpp.simdlen": 128}):
            entered()
        assert found == [128]

    def test_without_a_thread_the_compile_does_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_thread(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", no_thread)
        early = EarlyToolchain(nn.Linear(2, 2), None)
        with early:
            assert early.thread is None
        early.wait()

    def test_an_error_is_left_to_the_compile(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(codecache.CppWrapperCodeCache, "load_async", lambda *_: 1 / 0)
        monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "load_async", lambda *_: 1 / 0)
        caplog.set_level("DEBUG", logger=cpp_beside.__name__)
        entered()
        assert "could not be started early" in caplog.text
        assert "ZeroDivisionError" in caplog.text

    @pytest.mark.skipif(TORCH < (2, 13), reason="with options nothing is begun early there")
    def test_options_that_inductor_does_not_know_are_left_to_the_compile(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("DEBUG", logger=cpp_beside.__name__)
        entered({"no_such_option": 1})
        assert "no_such_option" in caplog.text


@pytest.mark.parametrize(
    ("options", "variable", "asked"),
    [
        ({"cpp_wrapper": True}, None, "wrapper"),
        ({"cpp_wrapper": False}, None, "bindings"),
        ({"cpp_wrapper": False}, "1", "bindings"),
    ],
)
def test_the_header_is_that_of_the_code_to_come(
    options: dict[str, Any], variable: str | None, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("TORCHINDUCTOR_CPP_WRAPPER", variable)
    found: list[str] = []
    for name, cache in (
        ("wrapper", codecache.CppWrapperCodeCache),
        ("bindings", codecache.CppPythonBindingsCodeCache),
    ):
        monkeypatch.setattr(cache, "load_async", lambda *_, name=name: found.append(name))
    start_toolchain(options)
    assert found == [asked]


class TestBuildsBeside:
    @pytest.fixture(autouse=True)
    def builds(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
        """What is built by which thread; a function that adds the number it was built of."""
        found: list[tuple[str, object]] = []

        def load(n: int) -> Any:
            found.append((threading.current_thread().name, inductor_config.cpp.simdlen))
            if n < 0:
                raise RuntimeError("C++ compile error")
            return lambda x: x + n

        monkeypatch.setattr(codecache.CppWrapperCodeCache, "load_pybinding", load)
        return found

    def test_each_in_a_thread_under_the_settings_of_this_one(self, builds: Any) -> None:
        with inductor_config.patch({"cpp.simdlen": 128}), builds_beside():
            first = codecache.CppWrapperCodeCache.load_pybinding(1)
            second = codecache.CppWrapperCodeCache.load_pybinding(2)
            assert first(10) == 11, "whoever calls it early waits"
        assert second(10) == 12
        assert builds == 2 * [("hotcompile-build", 128)]

    def test_afterwards_and_in_another_thread_as_usual(self, builds: Any) -> None:
        load = codecache.CppWrapperCodeCache.load_pybinding
        with builds_beside():
            ours = codecache.CppWrapperCodeCache.load_pybinding
            other = threading.Thread(
                target=lambda: codecache.CppWrapperCodeCache.load_pybinding(1), name="another"
            )
            other.start()
            other.join()
        assert codecache.CppWrapperCodeCache.load_pybinding is load
        ours(2)
        assert [name for name, _ in builds] == ["another", threading.current_thread().name]

    def test_an_error_is_raised_at_the_end(self) -> None:
        with pytest.raises(RuntimeError, match=r"C\+\+ compile error"):
            beside(lambda *_: codecache.CppWrapperCodeCache.load_pybinding(-1))(nn.Identity(), ())

    def test_an_error_inside_comes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ended = threading.Event()

        def slow(_: int) -> Any:
            time.sleep(0.2)
            ended.set()
            raise RuntimeError("C++ compile error")

        def lowering(*_: Any) -> Any:
            codecache.CppWrapperCodeCache.load_pybinding(-1)
            raise ValueError("lowering")

        monkeypatch.setattr(codecache.CppWrapperCodeCache, "load_pybinding", slow)
        with pytest.raises(ValueError, match="lowering"):
            beside(lowering)(nn.Identity(), ())
        assert ended.is_set(), "it would take the core of what is compiled instead"

    @pytest.fixture
    def never_built(self, own_alarm: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
        """Code that takes for ever to be built; those builds that have ended all the same."""
        goes_on, ended = threading.Event(), list[bool]()

        def load(n: int) -> Any:
            ended.append(goes_on.wait(NEVER))
            return lambda x: x + n

        monkeypatch.setattr(codecache.CppWrapperCodeCache, "load_pybinding", load)
        yield ended
        goes_on.set()
        while any(thread.name == "hotcompile-build" for thread in threading.enumerate()):
            time.sleep(0.01)

    @needs_alarm
    @pytest.mark.parametrize("fails", [False, True])
    def test_a_time_limit_holds_for_what_is_built(self, fails: bool, never_built: list[bool]) -> None:
        def lowering(*_: Any) -> Any:
            build = codecache.CppWrapperCodeCache.load_pybinding(1)
            if fails:
                raise ValueError("lowering")
            return build

        with pytest.raises(TimeoutError), time_limit(0.05, "compile_timeout"):
            beside(lowering)(nn.Identity(), ())
        assert never_built == []

    @needs_alarm
    def test_after_the_limit_of_a_call_nobody_waits(self, never_built: list[bool]) -> None:
        """It throws an error that code which catches errors takes for its own."""
        alarm = Alarm(0.05, TimeoutError)
        alarm.start()
        try:
            with pytest.raises(TimeoutError):
                beside(lambda *_: codecache.CppWrapperCodeCache.load_pybinding(1))(nn.Identity(), ())
        finally:
            alarm.stop()
        assert never_built == []

    @pytest.mark.parametrize(("cores", "thread"), [({0}, "MainThread"), ({0, 1}, "hotcompile-build")])
    def test_only_with_a_second_core(
        self, cores: set[int], thread: str, builds: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores, raising=False)
        backend = beside(lambda *_: codecache.CppWrapperCodeCache.load_pybinding(1))
        assert backend(nn.Identity(), ())(10) == 11
        assert [name for name, _ in builds] == [thread]


def test_two_threads_do_not_probe_at_the_same_time() -> None:
    at_once, most = [0], [0]

    class Probe:
        def __bool__(self) -> bool:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
            time.sleep(0.05)
            at_once[0] -= 1
            return True

    probes = AsNeeded([Probe(), Probe()])
    threads = [threading.Thread(target=lambda: len(probes)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


@pytest.mark.parametrize(("backend", "prewarm"), [("aot_eager", False), ("inductor", True)])
def test_not_where_nothing_is_compiled_by_inductor_in_this_process(
    backend: str, prewarm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[str] = []
    callback = hot(backend=backend, prewarm=prewarm, store=None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_beside, "start_toolchain", lambda _: phases.append(callback.phase))
    fit(seeded(Net), [callback], max_steps=6, max_epochs=-1)
    assert "prewarming" not in phases, "a step is only traced there"
    assert backend == "inductor" or not phases


def test_it_has_ended_when_the_fit_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    threads, is_waited_for = list[threading.Thread](), threading.Event()
    wait = EarlyToolchain.wait

    def start(_: Any) -> None:
        threads.append(threading.current_thread())
        is_waited_for.wait(60)

    def noted(early: EarlyToolchain) -> None:
        is_waited_for.set()
        wait(early)

    monkeypatch.setattr(EarlyToolchain, "wait", noted)

    def fails(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpp_beside, "start_toolchain", start)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fails)
    callback = hot(backend="inductor", store=None, on_error="eager")
    fit(seeded(Net), [callback], max_steps=5, max_epochs=-1)
    assert callback.report.phase == "reverted"
    assert [thread.is_alive() for thread in threads] == [False]


SCRIPT = """
import json
import threading
from torch._inductor.cpp_builder import CppBuilder
from tests.hot import assert_proven, hot
from tests.models import Net, fit, seeded

def main():
    by, found, build = {{}}, [], CppBuilder.build

    def noted(self):
        build(self)
        for part, kind in ((".h.gch", "header"), (".h.pch", "header"), (".main.so", "code")):
            if part in self.get_target_file_path():
                by.setdefault(kind, []).append(threading.current_thread().name)

    CppBuilder.build = noted
    for i, options in enumerate([{{}}, dict(options=dict(cpp_wrapper=False)), dict(random="backend")]):
        callback = hot(backend="inductor", scope="step", store={store!r}, **options)
        fit(seeded(Net, width=8 + i, n_block=1), [callback], max_steps=8, max_epochs=-1)
        assert_proven(callback.report)
        found.append(dict(by))
        by.clear()
    print(json.dumps(found))

main()
"""


@pytest.mark.slow
def test_the_compile_needs_no_other_header_and_builds_in_threads(tmp_path: Path) -> None:
    script = SCRIPT.format(store=str(tmp_path / "store"))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # else the headers are torch's own, and there already
    found = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            cwd=tmp_path,
            check=True,
            timeout=500,
            capture_output=True,
            text=True,
        )
        found.append(json.loads(run.stdout.splitlines()[-1]))
    first, second = found
    headers = [each.pop("header", []) for each in first]
    ours = ["hotcompile-toolchain"]
    assert headers == [ours, ours, []], "the last one needs that of the first"
    if TORCH >= (2, 13):
        for each in (first[0], first[2]):
            assert each["code"] == 3 * ["hotcompile-build"], "forward, backward and optimizer"
    assert second == 3 * [{}], "it finds all of it in the store"
