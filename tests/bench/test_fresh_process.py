"""A row in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_hotcompile.bench import fresh_process
from lightning_hotcompile.bench.cases import CASES
from lightning_hotcompile.bench.detector_cost import at_rest_us, detector_us, observed_seconds
from lightning_hotcompile.bench.fresh_process import FreshProcess
from lightning_hotcompile.bench.measurement import Request
from lightning_hotcompile.bench.runs import RunFailed, RunKilled, RunTimedOut
from lightning_hotcompile.callback import HotCompile
from tests.bench.suite_examples import measured

SMALL = Request(
    workload="simple", sizes={"batch_size": 4, "width": 8}, warmup=2, rounds=8, backend="aot_eager"
)


def test_one_row_is_measured_in_a_fresh_process(tmp_path: Path) -> None:
    request = replace(SMALL, workload="mlp", sizes={"batch_size": 4, "hidden": 8})
    found = FreshProcess(toolchain=tmp_path, threads=1)(request, 300.0)
    assert {name: (arm.status, arm.reason) for name, arm in found.arms.items()} == dict.fromkeys(
        ("eager", "compiled", "compiled+optimizer"), ("ok", "")
    )
    both = found.arms["compiled+optimizer"]
    assert both.compile_s > found.arms["compiled"].compile_s > 0
    assert both.parity == found.arms["compiled"].parity == "agrees"
    assert len(found.arms["eager"].laps["forward"]) == 8


@pytest.mark.slow
def test_one_row_is_measured_with_inductor(tmp_path: Path) -> None:
    found = FreshProcess(toolchain=tmp_path, threads=1)(replace(SMALL, backend="inductor"), 500.0)
    assert {name: (arm.status, arm.reason) for name, arm in found.arms.items()} == dict.fromkeys(
        ("eager", "compiled"), ("ok", "")
    )
    assert found.arms["compiled"].parity == "agrees"
    assert found.arms["compiled"].compile_s > 0


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    request = Request(workload="simple", sizes={"batch_size": -4, "width": 8}, backend="aot_eager")
    with pytest.raises(RunFailed, match="negative dimension"):
        FreshProcess(toolchain=tmp_path, threads=1)(request, 300.0)


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(RunTimedOut, match="it took more than 0 s"):
        FreshProcess(toolchain=tmp_path, threads=1)(SMALL, 0.05)


class Killer:
    """Stands for the processes: the system ends those with an arm that is too large."""

    def __init__(self, too_large: Sequence[str]) -> None:
        self.asked: list[str] = []
        self._too_large = too_large

    def __call__(self, module: str, arguments: Sequence[str], *_: Any, **__: Any) -> dict[str, Any]:
        only = json.loads(arguments[0])["only"]
        self.asked.append(only)
        if only in self._too_large:
            raise RunKilled("it was ended by signal 9")
        found = measured()
        found.arms = {name: arm for name, arm in found.arms.items() if only in ("", name)}
        return found.to_dict()


def test_rows_share_what_the_toolchain_has_made_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []

    def run(*_: Any, compiler_files: Path, **__: Any) -> dict[str, Any]:
        compiler_files.mkdir(exist_ok=True)
        seen.append({path.name for path in compiler_files.iterdir()})
        (compiler_files / f"file {len(seen)}").touch()
        return measured().to_dict()

    monkeypatch.setattr(fresh_process, "run_in_process", run)
    process = FreshProcess(toolchain=tmp_path)
    process.start_toolchain("cpu", "inductor")
    process(SMALL, 100.0)
    process(SMALL, 100.0)
    assert seen == [set(), {"file 1"}, {"file 1"}]


def test_where_all_arms_are_too_much_each_half_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = Killer(["", "eager"])
    monkeypatch.setattr(fresh_process, "run_in_process", killer)
    found = FreshProcess(toolchain=tmp_path)(SMALL, 100.0)
    assert killer.asked == ["", "eager", "compiled"]
    assert {name: arm.status for name, arm in found.arms.items()} == {"eager": "OOM", "compiled": "ok"}
    assert not found.paired
    assert "processes of their own" in found.note


def test_where_no_arm_fits_the_row_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_process, "run_in_process", Killer(["", "eager", "compiled"]))
    with pytest.raises(RunKilled, match="signal 9"):
        FreshProcess(toolchain=tmp_path)(SMALL, 100.0)


def test_the_detector_is_timed() -> None:
    assert detector_us(CASES["mlp"], loops=20) > 0
    assert at_rest_us(CASES["mlp"], steps=20) > 0


def test_what_watching_costs_is_measured_in_a_process(tmp_path: Path) -> None:
    request = Request(workload="detector", sizes={"model": "mlp"}, rounds=6)
    found = FreshProcess(toolchain=tmp_path, threads=1)(request, 300.0)
    assert {name: len(arm.laps["step"]) for name, arm in found.arms.items()} == {"eager": 6, "watched": 6}
    assert found.arms["watched"].extra["detector_us"] > 0
    assert found.arms["watched"].extra["at_rest_us"] > 0
    assert found.arms["watched"].extra["recorded_ms"] > 0


def test_what_watching_costs_is_not_told_without_a_recorded_step() -> None:
    with pytest.raises(RuntimeError, match="no step of mlp was recorded"):
        observed_seconds(CASES["mlp"], [HotCompile(threshold=0, backend="eager", store=None)])
