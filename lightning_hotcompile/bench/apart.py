"""A training with the callback against one that never had it: processes of their own, in turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from lightning_hotcompile.bench.runs import run_in_process

Side = Callable[[bool], Mapping[str, Any]]
"""Trains in a process of its own, with the callback or without it; what :mod:`.one_side` prints."""

WITHOUT = "without"
"""The arm's name."""


def side(case: str, steps: int, options: Mapping[str, Any], folder: Path, threads: int) -> Side:
    """Processes that share the compiler's files in ``folder``: only the first one compiles."""

    def run(callback: bool) -> Mapping[str, Any]:
        given = [case, "--steps", str(steps), "--threads", str(threads), "--options", json.dumps(options)]
        given += ["--callback"] if callback else []
        return run_in_process("lightning_hotcompile.bench.one_side", given, folder, threads)

    return run


def in_pairs(run: Side, pairs: int) -> dict[str, Any]:
    """A row: without the callback / with it, the median over pairs of processes, the least and the most.

    The first of a pair is the one that was the second of the pair before.
    """
    both = [
        {callback: run(callback) for callback in ((False, True) if number % 2 else (True, False))}
        for number in range(pairs)
    ]
    ours, theirs = ([pair[callback]["step_ms"] for pair in both] for callback in (True, False))
    ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
    middle = sorted(range(pairs), key=ratios.__getitem__)[pairs // 2]
    return {
        **{name: both[middle][True][name] for name in ("phase", "reason", "scope")},
        "ours_ms": median(ours),
        "theirs_ms": median(theirs),
        "ratio": median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "pairs": pairs,
    }
