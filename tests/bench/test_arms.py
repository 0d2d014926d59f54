"""What the arms of the benchmarks do to a model, before anything is compiled."""

from __future__ import annotations

import itertools

import pytest

from lightning_hotcompile.bench.arms import ARMS, block_names
from lightning_hotcompile.bench.cases import CASES, DIFFERENT_BATCHES


@pytest.mark.parametrize(
    ("case", "first", "number"),
    [
        ("gpt-32", "blocks.0", 4),
        ("norm-stack", "net.0", 8),
        ("24-alike", "net.0", 24),
        ("24-different", "net.0", 24),  # of one class, though no two have the same shapes
        ("gan", "generator", 2),
        ("text", "net.blocks.0", 2),
        ("elementwise", "net", 1),
    ],
)
def test_blocks_are_what_a_user_would_compile(case: str, first: str, number: int) -> None:
    names = block_names(CASES[case].model())
    assert (names[0], len(names)) == (first, number)


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_case_is_the_same_each_time(case: str) -> None:
    first, second = CASES[case].model().state_dict(), CASES[case].model().state_dict()
    assert all(first[name].equal(second[name]) for name in first)
    once, again = (list(itertools.islice(CASES[case].batches(), DIFFERENT_BATCHES + 1)) for _ in range(2))
    for (x, y), (same_x, same_y) in zip(once, again, strict=True):
        assert x.equal(same_x)
        assert y.equal(same_y)
    assert once[0] is once[DIFFERENT_BATCHES]
    assert len({id(batch) for batch in once}) == DIFFERENT_BATCHES


def test_training_step_of_manual_optimization_cannot_be_compiled_as_a_whole() -> None:
    with pytest.raises(NotImplementedError, match="manual optimization"):
        ARMS["step"](CASES["gan"], {})
