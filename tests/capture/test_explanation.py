"""What was found out travels through a file; what the forecast can say without a step."""

from __future__ import annotations

import pytest

from lightning_hotcompile.capture.explanation import Explanation, RegionSeen, explanation_from, outlook
from lightning_hotcompile.plan.compile_cost import expected_compile_s
from lightning_hotcompile.plan.forecast import Expectation, expected_speedup, forecast
from lightning_hotcompile.plan.scopes import Region
from lightning_hotcompile.swap.tracing.breaks import GraphBreak

STEP = (
    Region(name="training_step", kind="step", members=("training_step",), class_name="Net"),
    Region(name="optimizer 0", kind="optimizer", members=("0",), class_name="AdamW", tensors=8),
)


def test_it_comes_back_from_its_json() -> None:
    given = Explanation(
        model="Net",
        scope="step",
        plan="plan\n└── x",
        looked=True,
        regions=(RegionSeen(name="a", kind="group", members=("a", "b"), calls=2, graphs=(3, 4), error="e"),),
        breaks=(GraphBreak(reason="r", file="f.py", line=3, hints=("h",)),),
        errors=("x",),
        versions={"torch": "2"},
    )
    assert explanation_from(given.to_json()) == given


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_something_else_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        explanation_from(text)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_least_step_time_is_where_the_forecast_turns(on_cpu: bool) -> None:
    words = outlook(STEP, 2000, on_cpu=on_cpu)
    number, unit = words.partition("more than about ")[2].partition(",")[0].split()
    least_s = float(number) * (1e-3 if unit == "ms" else 1)

    def goes(step_s: float) -> bool:
        gain = expected_speedup(STEP, step_s if on_cpu else None)
        expected = Expectation(compile_s=expected_compile_s(STEP), speedup=gain, measured=True)
        return forecast(remaining_steps=2000, step_s=step_s, expected=expected).go

    assert goes(1.03 * least_s)
    assert not goes(0.95 * least_s)


def test_a_run_of_no_or_unknown_length_is_told() -> None:
    assert "with 0 steps it does not pay" in outlook(STEP, 0, on_cpu=True)
    assert "length of the run is not known" in outlook(STEP, None, on_cpu=True)
