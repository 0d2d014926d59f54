"""From samples to the columns of the table."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_hotcompile.bench.records import Record, failure_of, records_of
from lightning_hotcompile.bench.rows import Row, rows_of
from tests.bench.suite_examples import measured, times

ATTENTION = {
    *("batch_size", "seq_len", "d_model", "compiled", "status", "peak_memory_mb"),
    *("forward_mean_ms", "forward_std_ms", "backward_mean_ms", "backward_std_ms", "total_mean_ms"),
    *("forward_median_ms", "backward_median_ms", "total_median_ms"),
    *("compile_s", "graph_breaks", "parity"),
}
TRANSFORMER = {
    *("model_size", "context_length", "batch_size", "vocab_size", "compiled", "peak_memory_mb", "compile_s"),
    *("d_model", "d_ff", "num_layers", "num_heads"),
    *("forward_mean_ms", "forward_std_ms", "forward_backward_mean_ms", "forward_backward_std_ms"),
    *("full_step_mean_ms", "full_step_std_ms"),
    *("forward_speedup", "forward_backward_speedup", "full_step_speedup"),
}


def a_row(**entry: object) -> Row:
    (row,) = rows_of([entry or {"case": "attention", "batch_size": 8, "seq_len": 256, "d_model": 16}])
    return row


def both(*arguments: object, **changes: object) -> tuple[Record, Record]:
    eager, compiled = records_of("s", a_row(), measured(*arguments, **changes))  # type: ignore[arg-type]
    return eager, compiled


def test_attention_has_the_columns_that_were_asked_for() -> None:
    eager, compiled = both()
    assert set(compiled) >= ATTENTION
    assert (eager["compiled"], compiled["compiled"]) == (False, True)
    assert (compiled["batch_size"], compiled["seq_len"], compiled["d_model"]) == (8, 256, 16)


def test_transformer_has_the_columns_that_were_asked_for() -> None:
    found = dataclasses.replace(
        measured((2.0, 4.0, 6.0), (1.0, 2.0, 6.0)),
        facts={"d_model": 128, "d_ff": 512, "num_layers": 2, "num_heads": 4},
    )
    row = a_row(
        case="tiny",
        workload="transformer",
        model_size="tiny",
        context_length=32,
        batch_size=4,
        vocab_size=100,
    )
    compiled = records_of("s", row, found)[1]
    assert set(compiled) >= TRANSFORMER
    assert compiled["forward_backward_speedup"] == pytest.approx(2.0)
    assert compiled["full_step_speedup"] == pytest.approx(12 / 9)
    assert compiled["speedup"] == compiled["full_step_speedup"]


def test_times_are_in_milliseconds_with_their_spread() -> None:
    found = measured()
    found.arms["eager"].laps = {"forward": [0.001, 0.002, 0.003, 0.010] * 3, "backward": [0.001] * 12}
    eager = records_of("s", a_row(), found)[0]
    assert eager["forward_mean_ms"] == pytest.approx(4.0)
    assert eager["forward_median_ms"] == pytest.approx(2.5)
    assert eager["forward_iqr_ms"] == pytest.approx(3.0)
    assert eager["forward_std_ms"] == pytest.approx(3.6927, rel=1e-3)
    assert eager["total_mean_ms"] == pytest.approx(5.0)
    assert "optimizer_mean_ms" not in eager
    assert "full_step_mean_ms" not in eager


def test_break_even_is_compile_time_over_what_a_step_saves() -> None:
    _, compiled = both()
    assert compiled["verdict"] == "faster"
    assert compiled["break_even_steps"] == 4000  # 12 s, and 3 ms a step


@pytest.mark.parametrize(("compiled_ms", "verdict"), [((2.0, 4.0), "no difference"), ((3.0, 6.0), "slower")])
def test_what_is_not_faster_never_breaks_even(compiled_ms: tuple[float, ...], verdict: str) -> None:
    _, compiled = both((2.0, 4.0), compiled_ms)
    assert compiled["verdict"] == verdict
    assert compiled["break_even_steps"] is None


def test_a_run_of_a_hundred_steps_includes_the_warm_up() -> None:
    eager, compiled = both()
    assert eager["total_100_steps_s"] == pytest.approx(0.1 + 0.6)
    assert compiled["total_100_steps_s"] == pytest.approx(12.5 + 0.3)
    assert compiled["per_iteration_ms"] == pytest.approx(128.0)


def test_an_invalid_arm_has_no_times_and_no_ratio() -> None:
    _, compiled = both(status="INVALID", reason="it did not run")
    assert compiled["status"] == "INVALID"
    assert [name for name in compiled if name.endswith(("_ms", "speedup", "verdict"))] == []


def test_one_arm_out_of_memory_does_not_hide_the_other() -> None:
    found = measured()
    found.arms["eager"].status, found.arms["eager"].laps = "OOM", times(1.0, 1.0, rounds=2)
    eager, compiled = records_of("s", a_row(), found)
    assert "total_median_ms" not in eager
    assert compiled["total_median_ms"] == pytest.approx(3.0)
    assert "speedup" not in compiled


def test_arms_of_different_processes_have_no_ratio() -> None:
    compiled = records_of("s", a_row(), dataclasses.replace(measured(), paired=False))[1]
    assert compiled["total_median_ms"] == pytest.approx(3.0)
    assert "speedup" not in compiled


def test_too_few_pairs_have_no_verdict() -> None:
    found = measured()
    for arm in found.arms.values():
        arm.laps = {name: seconds[:5] for name, seconds in arm.laps.items()}
    compiled = records_of("s", a_row(), found)[1]
    assert compiled["verdict"] == "too few pairs"
    assert "speedup" not in compiled


def test_a_row_that_failed_is_a_record_with_its_reason() -> None:
    record = failure_of("s", a_row(), "TIMEOUT", "it took more than 9 s")
    assert (record["row"], record["arm"], record["status"]) == ("attention", "all", "TIMEOUT")
    assert record["seq_len"] == 256
