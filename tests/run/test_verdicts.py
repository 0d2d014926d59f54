"""What a checkpoint keeps of a training that has ended."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lightning_hotcompile.machine import TOO_SLOW
from lightning_hotcompile.run.verdicts import to_keep, why_not_again
from lightning_hotcompile.watch.stats import Ratio
from tests.view.examples import report

SLOW = Ratio(value=0.8, low=0.7, high=0.9, n=10, confidence=0.98)
DEPENDS_ON: dict[str, Any] = {"plan": "0123", "min_speedup": 1.02}


@pytest.mark.parametrize(
    ("reason", "is_final"),
    [
        (f"slower: {SLOW}{TOO_SLOW}1.02", True),
        (f"slower: {SLOW}{TOO_SLOW}1.02; scope module was tried: 1.00x", True),
        ("nothing is left that can be used: compiled code raised in run 9", False),
        ("compiled code did not fit its own step signature 4 times over", False),
    ],
)
def test_what_failed_is_tried_again_though_it_was_slow_until_then(reason: str, is_final: bool) -> None:
    ended = dataclasses.replace(report(), phase="reverted", reason=reason, speedup=SLOW)
    kept = to_keep(None, ended, DEPENDS_ON)
    assert kept is not None
    assert (why_not_again(kept, DEPENDS_ON) is not None) is is_final
