"""Several processes at once lose nothing of each other."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.store.examples import key, profile, sample, store_in

WRITERS, WRITES = 4, 25

pytestmark = pytest.mark.slow


def processes() -> Any:
    """Fresh processes that do not each import torch anew."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.store.examples"])
    return context


def write(folder: Path, number: int) -> None:
    store = store_in(folder, lock_timeout=120.0)
    for index in range(WRITES):
        assert store.remember(profile("shared"))
        if index % 5 == 0:
            assert store.remember(profile(f"own-{number}-{index}"))
            assert store.add_compile_sample(sample(float(number * WRITES + index)))


def write_until_killed(folder: Path, ready: Any) -> None:
    store = store_in(folder, lock_timeout=120.0)
    ready.set()
    while True:
        store.remember(profile("shared"))


def test_four_writers(tmp_path: Path) -> None:
    context = processes()
    writers = [context.Process(target=write, args=(tmp_path, n)) for n in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [w.exitcode for w in writers] == [0] * WRITERS
    store = store_in(tmp_path)
    for number in range(WRITERS):
        for index in range(0, WRITES, 5):
            assert store.find(key(f"own-{number}-{index}")) is not None
    shared = store.find(key("shared"))
    assert shared is not None
    assert shared.runs == WRITERS * WRITES
    assert {s.seconds for s in store.compile_samples()} == set(map(float, range(0, WRITERS * WRITES, 5)))
    assert list((store.folder / "tmp").iterdir()) == []


def test_a_writer_killed_at_any_point_leaves_a_whole_profile_and_no_lock(tmp_path: Path) -> None:
    context = processes()
    store = store_in(tmp_path)
    store.remember(profile("shared"))
    ready = context.Event()
    writer = context.Process(target=write_until_killed, args=(tmp_path, ready))
    writer.start()
    assert ready.wait(120)
    before = store.find(key("shared"))
    assert before is not None
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    found = store.find(key("shared"))
    assert found is not None
    assert found.runs >= before.runs
    assert store.remember(profile("shared")) is True
