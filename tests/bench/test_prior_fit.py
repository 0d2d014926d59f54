"""The fit behind the forecast's prior, on rows that are made up."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_hotcompile.bench.prior_fit import LEAST_CASES, fitted, not_negative
from lightning_hotcompile.plan.prior import AROUND_S, Gain, OpStatistics

TRUE = Gain(
    share=0.1, call_ms=0.6, density=0.08, batch_norm_ms=0.5, usual_fusible=1.0, usual_batch_norm=0.0,
    typical=1.0, least=0.01, most=100.0, rms=0.0, cases=0,
)  # fmt: skip


def row(
    ms: float, fusible: int, batch_norm: int, speedup: float | None, plan: str = "step"
) -> dict[str, Any]:
    ops = {"aten.mul.Tensor": fusible - (batch_norm > 0), "aten.mm.default": 7}
    elements = {"aten.native_batch_norm.default": batch_norm, "aten.mul.Tensor": 10**9}
    ops.update({"aten.native_batch_norm.default": 1} if batch_norm else {})
    return {"plan": plan, "eager_ms": ms, "speedup": speedup, "ops": ops, "elements": elements}


def rows(number: int = 12) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    found = []
    for i in range(number):
        ms, fusible = float(random.uniform(2, 30)), int(random.integers(20, 900))
        batch_norm = int(random.integers(10**5, 3 * 10**6)) if i % 3 == 0 else 0
        known = OpStatistics(fusible=fusible, batch_norm=batch_norm)
        found.append(row(ms, fusible, batch_norm, TRUE.speedup(1e-3 * ms, known)))
    return found


def test_what_made_the_rows_is_found_again() -> None:
    found = Gain(**fitted(rows())["step"])  # type: ignore[arg-type]
    for name in ("share", "call_ms", "density", "batch_norm_ms"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), abs=1e-5)
    assert found.cases == 12
    assert found.rms < 0.05
    speedups = [r["speedup"] for r in rows()]
    assert (found.least, found.most) == pytest.approx((min(speedups), max(speedups)), abs=1e-5)
    assert found.typical == pytest.approx(math.exp(np.mean(np.log(speedups))), abs=1e-5)
    assert found.usual_fusible == pytest.approx(
        np.mean(
            [sum(list(r["ops"].values())) - 7 for r in rows()] / np.array([r["eager_ms"] for r in rows()])
        )
    )


def test_batch_norm_counts_only_where_it_predicts_better() -> None:
    assert fitted(rows())["step"]["batch_norm_ms"] > 0
    without = [row(r["eager_ms"], sum(r["ops"].values()) - 7, 0, r["speedup"]) for r in rows()]
    for i, factor in enumerate([1.4, 0.9]):  # one gains much and one, with ten times as much of it, nothing
        without[i]["elements"] = {"aten.native_batch_norm.default": 10 ** (5 + i)}
        without[i]["speedup"] *= factor
    assert fitted(without)["step"]["batch_norm_ms"] == 0


def timed(number: int = 12) -> list[dict[str, Any]]:
    """Steps of which the time of light operations is saved; how many there are says nothing."""
    true, random = replace(TRUE, density=0.0, light=1.1), np.random.default_rng(1)
    found = []
    for each in rows(number):
        light_s = 1e-3 * each["eager_ms"] * float(random.uniform(0.02, 0.5))
        seconds = {"aten.mul.Tensor": light_s, "aten.mm.default": 1e-4, "aten.gelu.default": 1e-4}
        known = OpStatistics.of(each["ops"], each["elements"], seconds)
        speedup = true.speedup(1e-3 * each["eager_ms"], known)
        found.append({**each, "speedup": speedup, "seconds": seconds})
    return found


def test_times_of_operations_count_where_they_predict_better() -> None:
    found = Gain(**fitted(timed())["step"])  # type: ignore[arg-type]
    assert (found.light, found.batch_norm_ms) == pytest.approx((1.1, 0.5), abs=1e-5)
    assert (found.density, found.share) == pytest.approx((0, 0.1), abs=1e-5)
    shares = [
        (each["seconds"]["aten.mul.Tensor"] + AROUND_S * each["ops"]["aten.mul.Tensor"]) / each["eager_ms"]
        for each in timed()
    ]
    assert found.usual_light == pytest.approx(1e3 * float(np.mean(shares)), abs=1e-5)


def test_times_that_say_nothing_are_left_out() -> None:
    random = np.random.default_rng(2)
    found = [{**each, "seconds": {"aten.mul.Tensor": float(random.uniform(0, 0.002))}} for each in rows()]
    gain = fitted(found)["step"]
    assert (gain["light"], gain["usual_light"]) == (0, 0)
    assert gain["density"] == pytest.approx(TRUE.density, abs=1e-5)


def test_where_one_case_was_not_timed_times_are_not_used() -> None:
    found = timed()
    del found[3]["seconds"]
    assert fitted(found)["step"]["light"] == 0


def test_each_scope_has_its_own_and_few_cases_have_none() -> None:
    few = [{**r, "plan": "few"} for r in rows(LEAST_CASES - 1)]
    without = [{**r, "speedup": None} for r in rows()]
    assert list(fitted([*rows(), *few, *without])) == ["step"]


def test_the_error_is_that_of_a_case_it_has_not_seen() -> None:
    alike = [row(ms, int(10 * ms), 0, 1.0) for ms in (2.0, 4.0, 8.0, 16.0, 32.0)]
    odd = row(10.0, 100, 0, math.e)
    assert fitted([*alike, odd])["step"]["rms"] == pytest.approx(1 / math.sqrt(6), rel=0.2)


def test_no_coefficient_is_negative() -> None:
    known = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert not_negative(known, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert not_negative(known, np.array([1.0, 3.0, 5.0])) == pytest.approx([0.0, 11 / 7])
    assert not_negative(known, np.array([3.0, 4.0, 5.0])) == pytest.approx([2.0, 1.0])
    assert not_negative(known, -np.ones(3)) == pytest.approx([0.0, 0.0])
