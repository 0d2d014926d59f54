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
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader

from lightning_hotcompile import HotCompile
from lightning_hotcompile.swap.ranks import Proposal, Ranks
from lightning_hotcompile.tracks import Track
from lightning_hotcompile.watch.signature import SignatureReader
from tests.hot import hot
from tests.models import Net, make_trainer, seeded

BATCHES = 60
ROWS = 8
TIMEOUT_S = 60
"""A collective that one rank does not come to fails after this."""


def _broken(graph: Any, inputs: Any, **_: Any) -> Any:
    raise RuntimeError("no compiler on this machine")


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "step": ({"scope": "step"}, {}),
    "regions": ({"scope": "regions"}, {}),
    "large": ({"scope": "step"}, {}),
    "optimizer": ({"scope": "step", "compile_optimizer": True}, {}),
    "hot later": ({"scope": "step"}, {}),
    "cannot compile": ({"scope": "step"}, {"backend": _broken}),
    "cannot warm up": ({"scope": "regions"}, {"backend": _broken}),
    "refuses": ({"scope": "pattern", "targets": ("blocks.*",)}, {"targets": ("nothing.*",)}),
    "other plan": ({"scope": "regions"}, {"keep_eager": ("blocks.1",)}),
    "nothing to compile": ({"scope": "regions"}, {"keep_eager": ("*",)}),
    "other threshold": ({"scope": "regions"}, {"threshold": 4}),
    "switched off": ({"scope": "regions"}, {}),
    "own error": ({"scope": "regions"}, {}),
    "late": ({"scope": "step"}, {}),
    "too late": ({"scope": "step"}, {}),
    "too late at the start": ({"scope": "regions"}, {}),
    "fails later": ({"scope": "step"}, {}),
    "unused parameters": ({"scope": "step"}, {}),
    "unused parameters by regions": ({"scope": "regions"}, {}),
    "static graph": ({"scope": "step"}, {}),
    "static graph, with a teacher": ({"scope": "step"}, {}),
    "bucket view": ({"scope": "step"}, {}),
    "halved gradients": ({"scope": "step"}, {}),
    "accumulation": ({"scope": "step"}, {}),
    **{
        f"{scope} ahead": ({"scope": scope, "backend": "inductor", "prewarm": True}, {})
        for scope in ("step", "regions")
    },
}
"""Each case: the options of both ranks, and what rank 1 has otherwise."""

DDP: dict[str, dict[str, Any]] = {
    "unused parameters": {"find_unused_parameters": True},
    "unused parameters by regions": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "static graph, with a teacher": {"static_graph": True},
    "bucket view": {"gradient_as_bucket_view": True},
    "halved gradients": {"ddp_comm_hook": fp16_compress_hook},
    "accumulation": {},
}
"""Each of these is trained without the callback too: what the strategy is given."""

TRAINER: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 3, "max_epochs": 3},
    "step ahead": {"max_epochs": 400},
    "regions ahead": {"max_epochs": 400},
}


class UntilSteady(Callback):
    """Ends the training a few steps after compiled code is kept, which all ranks do at the same batch."""

    def __init__(self, callback: HotCompile) -> None:
        self._callback = callback
        self._steps = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Slow enough for a child process to be done."""
        time.sleep(0.02)
        self._steps += self._callback.phase in ("steady", "declined", "reverted")
        trainer.should_stop = self._steps >= 5


LATE = {"late": 3, "too late": 3, "too late at the start": 0}
"""The number of the meeting that rank 1 comes late to; at the third the model is compiled already."""


class WithSpare(Net):
    """Has parameters that get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)


class WithTeacher(Net):
    """Has parameters that are used, and get no gradient; DDP raises once one has been given one."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(x)
        return super().forward(x) + taught


WIDTH = {"large": 256}
"""Of a model with more than a mebibyte of parameters: DDP cuts its graph into pieces."""


def model_of(case: str) -> Net:
    """A new model of this case, always with the same weights."""
    if case.endswith("with a teacher"):
        return seeded(WithTeacher)
    model: Net = seeded(WithSpare) if case.startswith("unused") else seeded(Net, WIDTH.get(case, 16))
    return model


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
    elif case == "fails later":
        ran, steady = Track.ran, itertools.count()

        def fails_late(track: Track, **how: Any) -> None:
            ran(track, **how)
            if str(track.phase) == "steady" and next(steady) == 4:
                track.failure = "compiled code did not fit"

        with mock.patch.object(Track, "ran", fails_late):
            yield
    else:
        yield


@contextlib.contextmanager
def late(case: str, rank: int) -> Iterator[None]:
    """Rank 1 comes to one meeting when rank 0 waits already, or when it has given up. No clock decides."""
    exchange, meetings, number = Ranks.exchange, itertools.count(), LATE.get(case)

    def come(ranks: Ranks, proposal: Proposal, limit_s: float | None = None) -> list[Proposal]:
        if next(meetings) == number:
            if rank == 1:
                wait_for_rank_0(ranks._meeting, given_up=case != "late")
            elif case != "late":
                limit_s = 0.2
        return exchange(ranks, proposal, limit_s)

    with mock.patch.object(Ranks, "exchange", come) if number is not None else contextlib.nullcontext():
        yield


def wait_for_rank_0(meeting: Any, *, given_up: bool) -> None:
    """Until it has come to the meeting that is next for this rank, or until it has left it."""
    store = meeting._store
    number = store.add("lightning_hotcompile/meetings of rank 1", 0) + 1
    key = meeting._verdict(number) if given_up else meeting._text(number, 0)
    store.wait([key], timedelta(seconds=TIMEOUT_S))


def train(case: str, rank: int, folder: Path) -> None:
    """Train one case and write ``CASE-RANK.pt`` and ``CASE-RANK.json``."""
    torch._dynamo.reset()
    both, second = OPTIONS[case]
    callback = hot(on_error="eager", **{**both, **(second if rank else {})})
    if case in DDP:
        _, plain = fit(case, rank, [])
        torch.save(plain.state_dict(), folder / f"{case}-{rank}-plain.pt")
    callbacks = [callback, UntilSteady(callback)] if case.endswith(" ahead") else [callback]
    with late(case, rank), trouble(case) if rank == 1 else contextlib.nullcontext():
        trainer, model = fit(case, rank, callbacks)
    assert trainer.global_rank == rank
    seen = {
        "report": callback.report.to_dict(),
        "global_step": trainer.global_step,
        "attributes": sorted(vars(model)),
    }
    torch.save(model.state_dict(), folder / f"{case}-{rank}.pt")
    (folder / f"{case}-{rank}.json").write_text(json.dumps(seen), encoding="utf-8")


def fit(case: str, rank: int, callbacks: list[Any]) -> tuple[Any, Net]:
    """Train a new model of this case."""
    model = model_of(case)
    short = rank == 1 and case == "hot later"
    loader = DataLoader(batches(rank, _short_at_first if short else lambda i: ROWS), batch_size=None)
    timeout = timedelta(seconds=TIMEOUT_S)
    trainer = make_trainer(
        callbacks,
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timeout, **DDP.get(case, {})),
        use_distributed_sampler=False,
        **{"max_epochs": 1, **TRAINER.get(case, {})},
    )
    trainer.fit(model, loader)
    return trainer, model


def main(folder: Path, cases: list[str]) -> None:
    """One case after the other; Lightning starts this script once more as rank 1."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    for case in cases:
        train(case, rank, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
