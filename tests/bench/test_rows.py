"""Rows of a suite: lists of sizes, and names that are refused."""

from __future__ import annotations

import pytest

from lightning_hotcompile.bench.rows import chosen, rows_of
from lightning_hotcompile.errors import ConfigError


def test_lists_stand_for_rows_and_are_in_their_names() -> None:
    entry = {"case": "attention", "batch_size": 8, "seq_len": [256, 512], "d_model": [16, 64]}
    rows = rows_of([entry])
    assert [row.key for row in rows] == [
        "attention seq_len=256 d_model=16",
        "attention seq_len=256 d_model=64",
        "attention seq_len=512 d_model=16",
        "attention seq_len=512 d_model=64",
    ]
    assert rows[1].sizes == {"batch_size": 8, "seq_len": 256, "d_model": 64}
    assert {row.workload for row in rows} == {"attention"}


def test_a_case_may_be_called_otherwise_than_its_workload() -> None:
    (row,) = rows_of([{"case": "wide", "workload": "mlp", "batch_size": 4, "hidden": 8}])
    assert (row.key, row.workload) == ("wide", "mlp")


def test_rows_are_chosen_by_case_or_by_name() -> None:
    rows = rows_of([{"case": "simple", "batch_size": 8, "width": [16, 32]}, {"case": "mlp", "batch_size": 4}])
    assert [r.key for r in chosen(rows, ["simple"])] == ["simple width=16", "simple width=32"]
    assert [r.key for r in chosen(rows, ["simple width=32", "mlp"])] == ["simple width=32", "mlp"]
    with pytest.raises(ConfigError, match=r"case='simpel' is unknown.*did you mean 'simple'"):
        chosen(rows, ["simpel"])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"batch_size": 8}, "has no case"),
        ({"case": "simpel", "batch_size": 8}, "did you mean 'simple'"),
        ({"case": "simple", "widht": 8}, "did you mean 'width'"),
        ({"case": "detector", "model": "gpt"}, "detector has one size, model"),
        ({"case": "detector"}, "detector has one size, model"),
    ],
)
def test_a_wrong_entry_is_refused_by_name(entry: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rows_of([entry])


def test_two_rows_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two rows are called 'mlp'"):
        rows_of([{"case": "mlp", "batch_size": 4}, {"case": "mlp", "batch_size": 8}])
