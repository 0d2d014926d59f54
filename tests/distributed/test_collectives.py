"""Two real processes whose steps have collectives of their own: each rank comes to all of them in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import train_with_collectives as script
from tests.distributed.train_two_ranks import BATCHES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="this build of torch has no gloo",
    ),
]


@pytest.fixture(params=script.CASES)
def ranks(request: pytest.FixtureRequest, in_turn: tuple[Path, str]) -> list[dict[str, Any]]:
    """What both ranks saw in one case."""
    folder, output = in_turn
    files = [folder / f"{request.param}-{rank}.pt" for rank in (0, 1)]
    if not all(file.exists() for file in files):
        pytest.fail(f"a rank did not end {request.param!r}:\n{output[-4000:]}")
    return [torch.load(file) for file in files]


def test_all_values_and_weights_are_those_of_a_run_without_the_callback(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["plain"]["logged"]) == BATCHES
        for plain, found in zip(rank["plain"]["logged"], rank["found"]["logged"], strict=True):
            assert found == pytest.approx(plain, rel=1e-4)
        for name, weight in rank["plain"]["weights"].items():
            torch.testing.assert_close(rank["found"]["weights"][name], weight, rtol=1e-4, atol=1e-4)


def test_the_rest_of_the_step_is_compiled(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["report"]["phase"] == "steady", rank["report"]["reason"]
        assert rank["report"]["regions"]
        assert all(region["proven"] for region in rank["report"]["regions"])
        assert rank["report"]["graph_breaks"] > 0
        flips = [e["step"] for e in rank["report"]["events"] if e.get("phase") == "flipping"]
        assert flips == [script.FLIP], "the batch in which a rank has other shapes"
