"""Trains on two processes (gloo, CPU) and writes what each of them saw; run by ``test_two_ranks.py``.

    python tests/distributed/train_two_ranks.py FOLDER CASE [CASE ...]

All cases share the two processes, since starting them takes longer than training.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_hotcompile.watch.signature import SignatureReader
from tests.hot import hot
from tests.models import Net, make_trainer, seeded

BATCHES = 60
ROWS = 8
TIMEOUT_S = 20
"""A collective that one rank does not come to fails after this."""


def _broken(graph: Any, inputs: Any, **_: Any) -> Any:
    raise RuntimeError("no compiler on this machine")


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "step": ({"scope": "step"}, {}),
    "regions": ({"scope": "regions"}, {}),
    "hot later": ({"scope": "step"}, {}),
    "cannot compile": ({"scope": "step"}, {"backend": _broken}),
    "cannot warm up": ({"scope": "regions"}, {"backend": _broken}),
    "other plan": ({"scope": "regions"}, {"keep_eager": ("blocks.1",)}),
    "nothing to compile": ({"scope": "regions"}, {"keep_eager": ("*",)}),
    "other threshold": ({"scope": "regions"}, {"threshold": 4}),
    "switched off": ({"scope": "regions"}, {}),
    "own error": ({"scope": "regions"}, {}),
}
"""Each case: the options of both ranks, and what rank 1 has otherwise."""


def batches(rank: int, rows: Callable[[int], int] = lambda i: ROWS) -> list[Any]:
    """Batches of one rank; ``rows`` says how many rows the i-th has."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(BATCHES, ROWS, 8, generator=generator)
    y = torch.randint(0, 3, (BATCHES, ROWS), generator=generator)
    return [(x[i][: rows(i)], y[i][: rows(i)]) for i in range(BATCHES)]


def _short_at_first(i: int) -> int:
    return ROWS - 1 if i < 7 else ROWS


@contextlib.contextmanager
def trouble(case: str) -> Iterator[None]:
    """What goes wrong on rank 1 only, besides its options."""
    if case == "switched off":
        with mock.patch.dict(os.environ, HOTCOMPILE="off"):
            yield
    elif case == "own error":
        read, calls = SignatureReader.read, itertools.count()

        def fails(reader: SignatureReader, *args: Any, **kwargs: Any) -> Any:
            if next(calls) == 4:
                raise RuntimeError("our own bug")
            return read(reader, *args, **kwargs)

        with mock.patch.object(SignatureReader, "read", fails):
            yield
    else:
        yield


def train(case: str, rank: int, folder: Path) -> None:
    """Train one case and write ``CASE-RANK.pt`` and ``CASE-RANK.json``."""
    torch._dynamo.reset()
    both, second = OPTIONS[case]
    model, callback = seeded(Net), hot(on_error="eager", **{**both, **(second if rank else {})})
    short = rank == 1 and case == "hot later"
    loader = DataLoader(batches(rank, _short_at_first if short else lambda i: ROWS), batch_size=None)
    trainer = make_trainer(
        [callback],
        devices=2,
        max_epochs=1,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=TIMEOUT_S)),
        use_distributed_sampler=False,
    )
    with trouble(case) if rank == 1 else contextlib.nullcontext():
        trainer.fit(model, loader)
    assert trainer.global_rank == rank
    seen = {
        "report": callback.report.to_dict(),
        "global_step": trainer.global_step,
        "attributes": sorted(vars(model)),
    }
    torch.save(model.state_dict(), folder / f"{case}-{rank}.pt")
    (folder / f"{case}-{rank}.json").write_text(json.dumps(seen), encoding="utf-8")


def main(folder: Path, cases: list[str]) -> None:
    """One case after the other; Lightning starts this script once more as rank 1."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    for case in cases:
        train(case, rank, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
