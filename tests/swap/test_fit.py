"""Calls that no compiled code fits."""

from __future__ import annotations

from typing import Any

from lightning_hotcompile.swap.graphs.fit import MANY_GRAPHS, MISSES_IN_A_ROW, Fit


class Counts:
    """What a Fit asks a Witness for."""

    def __init__(self, graphs: int) -> None:
        self.graphs: list[Any] = ["a"] * graphs

    def graphs_of(self, region: str) -> list[Any]:
        return [g for g in self.graphs if g == region]

    def runs_of(self, region: str) -> int:
        return len(self.graphs_of(region))


def with_graphs(n: int) -> tuple[Counts, Fit]:
    witness = Counts(n)
    return witness, Fit("a", witness)  # type: ignore[arg-type]


def test_misses_in_a_row_lose_a_region() -> None:
    _, fit = with_graphs(1)
    for _ in range(MISSES_IN_A_ROW - 1):
        fit.missed()
    assert not fit.is_lost
    fit.missed()
    assert fit.is_lost
    fit.ran()
    assert not fit.is_lost


def test_a_run_in_between_begins_the_count_anew() -> None:
    _, fit = with_graphs(1)
    for _ in range(MISSES_IN_A_ROW - 1):
        fit.missed()
    fit.ran()
    for _ in range(MISSES_IN_A_ROW - 1):
        fit.missed()
    assert not fit.is_lost


def test_what_never_had_compiled_code_cannot_lose_it() -> None:
    _, fit = with_graphs(0)
    for _ in range(9):
        fit.missed()
    assert not fit.is_lost


def test_dynamo_that_compiles_no_more_is_told() -> None:
    _, fit = with_graphs(MANY_GRAPHS)
    reason = fit.refused()
    assert reason is not None
    assert f"none of its {MANY_GRAPHS} graphs fits" in reason
    assert "recompile limit" in reason


def test_few_graphs_are_no_limit() -> None:
    _, fit = with_graphs(MANY_GRAPHS - 1)
    assert fit.refused() is None
