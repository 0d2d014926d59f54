"""Two real processes: all ranks change at the same batch, or none does, and nobody waits forever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.distributed import train_two_ranks as script
from tests.hot import assert_same
from tests.models import Net, make_trainer, seeded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="this build of torch has no gloo",
    ),
]

ROOT = Path(__file__).parents[2]
TIME_LIMIT_S = 120
HEALTHY = ("step", "regions", "hot later", "cannot compile", "cannot warm up", "other plan")
ONE_STANDS_ASIDE = ("nothing to compile", "other threshold", "switched off", "own error")


@dataclass(frozen=True)
class Rank:
    """What one process saw."""

    report: dict[str, Any]
    global_step: int
    attributes: list[str]
    weights: dict[str, Tensor]

    @property
    def phases(self) -> list[tuple[int, str]]:
        """Each change of phase with its batch."""
        return [(e["step"], e["phase"]) for e in self.report["events"] if e["kind"] == "phase_changed"]


def run(folder: Path, cases: tuple[str, ...]) -> str:
    """Train the cases on two processes; the end of what they printed. Never waits longer than the limit."""
    variables = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")}
    process = subprocess.Popen(
        [sys.executable, str(Path(script.__file__)), str(folder), *cases],
        env={**variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOTCOMPILE": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that rank 1, its child, ends with it
    )
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = f"{process.communicate()[0]}\nended after {TIME_LIMIT_S} s"
    return output[-4000:]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("healthy")
    return folder, run(folder, HEALTHY)


def ranks_of(ran: tuple[Path, str], case: str) -> list[Rank]:
    folder, output = ran
    found = []
    for number in (0, 1):
        path = folder / f"{case}-{number}.json"
        if not path.exists():
            pytest.fail(f"rank {number} did not end {case!r}:\n{output}")
        weights = torch.load(path.with_suffix(".pt"))
        found.append(Rank(**json.loads(path.read_text(encoding="utf-8")), weights=weights))
    return found


def trained_alone(case: str) -> Net:
    """The same training in one process without the callback: each batch holds that of both ranks."""
    model = seeded(Net)
    later = script._short_at_first if case == "hot later" else (lambda i: script.ROWS)
    pairs = list(zip(script.batches(0), script.batches(1, later), strict=True))
    if case == "hot later":
        # Two means of different numbers of rows: DDP weighs the ranks alike, not the rows.
        model.loss = lambda batch: (Net.loss(model, batch[0]) + Net.loss(model, batch[1])) / 2  # type: ignore
        joined: list[Any] = pairs
    else:
        joined = [tuple(torch.cat(both) for both in zip(*pair, strict=True)) for pair in pairs]
    make_trainer(max_epochs=1).fit(model, DataLoader(joined, batch_size=None))
    return model


def assert_trained_like_eager(case: str, ranks: list[Rank]) -> None:
    plain = trained_alone(case)
    for rank in ranks:
        assert rank.global_step == script.BATCHES
        assert not {"training_step", "log"} & set(rank.attributes)
        model = seeded(Net)
        model.load_state_dict(rank.weights)
        assert_same(plain, model, tolerance=1e-3)


@pytest.mark.parametrize("case", HEALTHY)
def test_every_case_trains_like_one_process_without_the_callback(
    healthy: tuple[Path, str], case: str
) -> None:
    assert_trained_like_eager(case, ranks_of(healthy, case))


@pytest.mark.parametrize("case", HEALTHY)
def test_the_replicas_stay_equal_to_the_last_bit(healthy: tuple[Path, str], case: str) -> None:
    # DDP averages gradients only: an update that is rounded otherwise on one rank is never made good.
    first, second = ranks_of(healthy, case)
    differences = {n: (v - second.weights[n]).abs().max().item() for n, v in first.weights.items()}
    assert {n: d for n, d in differences.items() if d} == {}


@pytest.mark.parametrize("case", HEALTHY)
def test_the_ranks_change_their_phase_at_the_same_batch(healthy: tuple[Path, str], case: str) -> None:
    first, second = ranks_of(healthy, case)
    assert first.phases == second.phases
    assert first.phases or case == "other plan", "only that one is settled before the first batch"


@pytest.mark.parametrize("case", ["step", "regions"])
def test_both_flip_by_the_same_plan_and_prove_every_region(healthy: tuple[Path, str], case: str) -> None:
    ranks = ranks_of(healthy, case)
    assert [phase for _, phase in ranks[0].phases] == ["flipping", "settling", "steady"]
    assert len({r.report["plan_digest"] for r in ranks}) == 1
    for rank in ranks:
        assert rank.report["phase"] == "steady", rank.report["reason"]
        assert rank.report["regions"]
        assert all(r["proven"] for r in rank.report["regions"])
        assert rank.report["speedup"] is not None
        assert rank.report["recompiles"] == 0


@pytest.mark.parametrize("case", ["cannot compile", "cannot warm up"])
def test_one_that_cannot_compile_takes_both_back(healthy: tuple[Path, str], case: str) -> None:
    first, second = ranks_of(healthy, case)
    for rank in (first, second):
        assert rank.report["phase"] == "reverted"
        assert "no compiler on this machine" in rank.report["reason"]
    assert first.report["reason"].startswith("rank 1: ")


def test_different_plans_are_declined_by_both(healthy: tuple[Path, str]) -> None:
    ranks = ranks_of(healthy, "other plan")
    digests = [r.report["plan_digest"] for r in ranks]
    assert digests[0] != digests[1]
    for rank in ranks:
        assert rank.report["phase"] == "declined"
        assert "different plans" in rank.report["reason"]
        assert all(d in rank.report["reason"] for d in digests)
        assert rank.report["regions"] == []


@pytest.mark.parametrize("case", ONE_STANDS_ASIDE)
def test_one_that_stands_aside_keeps_nobody_waiting(tmp_path: Path, case: str) -> None:
    ran = tmp_path, run(tmp_path, (case,))
    ranks = ranks_of(ran, case)
    assert_trained_like_eager(case, ranks)
    for rank in ranks:
        assert rank.report["phase"] in ("declined", "reverted", "observing")
    # The error of its own comes when both have agreed to flip: that is taken back.
    assert ranks[0].report["phase"] == ("reverted" if case == "own error" else "declined")
    assert "rank 1" in ranks[0].report["reason"]
