"""The sentences and the rule of thumb that come out of a table."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hotcompile.bench.answers import answers, rule_of_thumb
from lightning_hotcompile.bench.measurement import ArmResult, Measurement
from lightning_hotcompile.bench.records import Record, failure_of, records_of
from lightning_hotcompile.bench.rows import rows_of
from lightning_hotcompile.bench.sheets import thumb
from tests.bench.suite_examples import measured, times


def table(found: Sequence[Measurement]) -> list[Record]:
    sizes = [16 * 2**i for i in range(len(found))]
    rows = rows_of([{"case": "simple", "batch_size": 8, "width": sizes}])
    return [r for row, one in zip(rows, found, strict=True) for r in records_of("s", row, one)]


def lines(records: Sequence[Record], question: str) -> str:
    return "\n".join(answers(records).get(question, []))


def test_faster_and_slower_rows_are_named_with_their_intervals() -> None:
    records = table([measured(), measured((1.0, 1.0), (2.0, 2.0)), measured((1.0,), (1.0,))])
    words = lines(records, "Where compiling helps and where it hurts")
    assert "Over 3 compiled measurements the geometric mean is 1.00x." in words
    assert "Faster in 1: simple width=16 2.00x [2.00, 2.00]." in words
    assert "Slower in 1: simple width=32 0.50x [0.50, 0.50]." in words
    assert "No difference in 1" in words


def test_a_ratio_of_which_little_is_known_is_named() -> None:
    noisy = measured((2.0,), (1.0,))
    noisy.arms["eager"].laps["forward"] = [0.001, 0.004] * 10
    words = lines(table([measured(), noisy]), "Where compiling helps and where it hurts")
    assert "Too noisy to say much" in words
    assert "more than 1.5 times apart: simple width=32." in words


def test_how_it_scales_names_the_size_and_the_trend() -> None:
    growing = [measured((2.0,), (2.0,)), measured((3.0,), (2.0,)), measured((4.0,), (2.0,))]
    words = lines(table(growing), "How it scales with size")
    assert words == "simple, width 16: 1.00x, 32: 1.50x, 64: 2.00x (the gain grows with it)."
    assert "shrinks" in lines(table(growing[::-1]), "How it scales with size")
    mixed = [growing[1], growing[0], growing[2]]
    assert "no clear trend" in lines(table(mixed), "How it scales with size")


def test_a_trend_inside_of_the_intervals_is_none() -> None:
    found = [measured((2.0,), (2.0,)), measured((3.0,), (2.0,))]
    found[1].arms["eager"].laps["forward"] = [0.001, 0.005] * 10
    words = lines(table(found), "How it scales with size")
    assert words.endswith("(no clear trend).")


def test_the_optimizer_dilutes_the_gain() -> None:
    found = measured((2.0, 4.0, 6.0), (1.0, 2.0, 6.0))
    found.arms["compiled+optimizer"] = ArmResult(compiled=True, laps=times(1.0, 2.0, 1.0), compile_s=15.0)
    records = table([found])
    words = lines(records, "What the optimizer does to it")
    assert "gain is 2.00x" in words
    assert "makes it 1.33x, a compiled one 3.00x" in words
    assert "takes 67% of the step" in words
    passes = lines(records, "Forward, forward and backward, full step")
    assert "forward and backward: 2.00x (geometric mean of 1)." in passes
    assert "full step with the optimizer: 1.33x (geometric mean of 1)." in passes


def test_the_fused_operator_stands_beside_the_compiled_code() -> None:
    found = measured()
    found.arms["sdpa"] = ArmResult(compiled=False, laps=times(0.5, 1.0))
    words = lines(table([found]), "Beside fused and other eager code")
    assert words == "simple width=16: sdpa 4.00x [4.00, 4.00] of eager, compiled 2.00x [2.00, 2.00]."


def test_the_rule_of_thumb_is_made_of_measured_break_even() -> None:
    short = [measured((0.5,), (0.25,)), measured((0.5,), (1.0,))]
    longer = [measured((20.0,), (10.0,)), measured((20.0,), (15.0,))]
    first, second = rule_of_thumb(table([*short, *longer]))
    assert (first["eager_step"], first["measured"], first["paid"]) == ("under 1 ms", 2, 1)
    assert first["median_steps"] == 48_000  # 12 s, a quarter of a millisecond a step
    assert (second["eager_step"], second["paid"]) == ("10 to 100 ms", 2)
    assert second["range"] == "1,200 to 2,400"
    assert second["median_steps"] == 1800


def test_one_break_even_has_no_range() -> None:
    words = lines(table([measured((0.5,), (0.25,))]), "When it pays")
    assert words == "A step that takes under 1 ms eagerly: 1 of 1 paid, after 48,000 steps."


def test_the_table_says_where_most_were_not_faster() -> None:
    slow, fast = measured((0.5,), (1.0,)), measured((0.5,), (0.25,))
    column = "compile if you run more than"
    assert thumb(table([fast, slow]))[0][column] == "48,000 steps"
    assert thumb(table([fast, slow, slow]))[0][column] == "48,000 steps; most were not faster"
    assert thumb(table([slow]))[0][column] == "never"


def test_a_class_without_gain_says_never() -> None:
    words = lines(table([measured((0.5,), (1.0,))]), "When it pays")
    assert words == "A step that takes under 1 ms eagerly: 0 of 1 paid."


def test_rows_without_a_number_are_told_with_their_reason() -> None:
    records = table([measured(status="INVALID", reason="the recompile limit was hit")])
    (row,) = rows_of([{"case": "mlp", "batch_size": 4}])
    records.append(failure_of("s", row, "SKIPPED", "no time was left"))
    words = lines(records, "Rows without a number")
    assert "simple width=16 (compiled): INVALID: the recompile limit was hit" in words
    assert "mlp (all): SKIPPED: no time was left" in words
    assert "Where compiling helps and where it hurts" not in answers(records)


def test_what_watching_costs_is_the_ratio_the_other_way_round() -> None:
    extra = {"detector_us": 8.4, "at_rest_us": 21.5, "recorded_ms": 12.34}
    watched = ArmResult(compiled=False, laps={"step": [0.0105] * 10}, extra=extra)
    found = Measurement(
        arms={"eager": ArmResult(compiled=False, laps={"step": [0.010] * 10}), "watched": watched}
    )
    words = lines(table([found]), "What watching costs")
    assert "take 8.4 us a step, all hooks of a steady step 21.5 us" in words
    assert "a step takes 1.05x of a plain one" in words
    assert "the one that is recorded takes 12.3 ms more, once in a run" in words
    assert "Beside fused and other eager code" not in answers(table([found]))
