"""Calls that no compiled code fits."""

from __future__ import annotations

from typing import Any

from lightning_hotcompile.swap.fit import MANY_GRAPHS, MISSES_IN_A_ROW, Fit
from lightning_hotcompile.swap.gate import Lane


class Counts:
    """What a Fit asks a Witness for."""

    def __init__(self, graphs: int) -> None:
        self.total_runs = 0
        self.graphs: list[Any] = ["a"] * graphs

    def graphs_of(self, region: str) -> list[Any]:
        return [g for g in self.graphs if g == region]

    def runs_of(self, region: str) -> int:
        return len(self.graphs_of(region))


def with_graphs(n: int) -> tuple[Counts, Fit]:
    witness = Counts(n)
    return witness, Fit("a", witness)  # type: ignore[arg-type]


def call(witness: Counts, fit: Fit, lane: Lane, *, runs: int = 0, compiles: int = 0) -> str | None:
    fit.begin()
    witness.total_runs += runs
    witness.graphs.extend(["a"] * compiles)
    return fit.end(lane)


def test_misses_in_a_row_lose_a_region() -> None:
    witness, fit = with_graphs(1)
    for _ in range(MISSES_IN_A_ROW - 1):
        call(witness, fit, Lane.REUSE)
    assert not fit.is_lost
    call(witness, fit, Lane.REUSE)
    assert fit.is_lost
    call(witness, fit, Lane.REUSE, runs=1)
    assert not fit.is_lost


def test_what_never_had_compiled_code_cannot_lose_it() -> None:
    witness, fit = with_graphs(0)
    for _ in range(9):
        call(witness, fit, Lane.REUSE)
    assert not fit.is_lost


def test_dynamo_that_compiles_no_more_is_told() -> None:
    witness, fit = with_graphs(MANY_GRAPHS)
    reason = call(witness, fit, Lane.COMPILE)
    assert reason is not None
    assert f"none of its {MANY_GRAPHS} graphs fits" in reason
    assert "recompile limit" in reason


def test_a_call_that_ran_or_compiled_is_no_refusal() -> None:
    witness, fit = with_graphs(MANY_GRAPHS)
    assert call(witness, fit, Lane.COMPILE, runs=1) is None
    assert call(witness, fit, Lane.COMPILE, compiles=1) is None
    assert call(witness, fit, Lane.REUSE) is None


def test_few_graphs_are_no_limit() -> None:
    witness, fit = with_graphs(MANY_GRAPHS - 1)
    assert call(witness, fit, Lane.COMPILE) is None
