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
TIME_LIMIT_S = 540
"""Far above what it takes: about a minute and a half on a core of its own."""

KEPT = ("step", "regions", "large", "optimizer", "late", *script.DDP)
ENDED = ("cannot compile", "cannot warm up", "other plan", "too late", "too late at the start")
STANDS_ASIDE = ("nothing to compile", "other threshold", "switched off", "own error")
CASES = (*KEPT, "hot later", "fails later", *ENDED, *STANDS_ASIDE)
AHEAD = ("step ahead", "regions ahead")
LAST = "refuses"
"""Ends the processes."""


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


def run_script(file: str, *arguments: str, **more: str) -> str:
    """Run a script and the ranks that Lightning starts from it. Never waits longer than the limit."""
    variables = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")}
    process = subprocess.Popen(
        [sys.executable, file, *arguments],
        env={**variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOTCOMPILE": "", **more},
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
    return output


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """All cases, in two processes: starting them takes longer than training."""
    folder = tmp_path_factory.mktemp("ranks")
    empty = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    return folder, run_script(script.__file__, str(folder), *CASES, *AHEAD, LAST, **empty)


def ranks_of(ran: tuple[Path, str], case: str) -> list[Rank]:
    folder, output = ran
    found = []
    for number in (0, 1):
        path = folder / f"{case}-{number}.json"
        if not path.exists():
            pytest.fail(f"rank {number} did not end {case!r}:\n{output[-4000:]}")
        weights = torch.load(path.with_suffix(".pt"))
        found.append(Rank(**json.loads(path.read_text(encoding="utf-8")), weights=weights))
    return found


def trained_alone(case: str) -> Net:
    """The same training in one process without the callback: in each step the mean of what both ranks have.

    Of two means, as DDP has it: it weighs ranks alike, and not rows. The mean over all rows at once is
    rounded otherwise, which alone moves weights of ``large`` by more than the tolerance on some processors.
    """
    model = script.model_of(case)
    later = script._short_at_first if case == "hot later" else (lambda i: script.ROWS)
    pairs = list(zip(script.batches(0), script.batches(1, later), strict=True))
    model.loss = lambda batch: (Net.loss(model, batch[0]) + Net.loss(model, batch[1])) / 2  # type: ignore
    make_trainer(max_epochs=1).fit(model, DataLoader(pairs, batch_size=None))
    return model


@pytest.mark.parametrize("case", [c for c in CASES if c not in script.DDP])
def test_every_case_trains_like_one_process_without_the_callback(ran: tuple[Path, str], case: str) -> None:
    plain = trained_alone(case)
    for rank in ranks_of(ran, case):
        assert rank.global_step == script.BATCHES
        model = script.model_of(case)
        model.load_state_dict(rank.weights)
        assert_same(plain, model, tolerance=1e-3)


@pytest.mark.parametrize("case", script.DDP)
def test_each_kind_of_ddp_trains_as_without_the_callback(ran: tuple[Path, str], case: str) -> None:
    for number, rank in enumerate(ranks_of(ran, case)):
        plain = torch.load(ran[0] / f"{case}-{number}-plain.pt")
        assert plain.keys() == rank.weights.keys()
        for name, weight in plain.items():
            torch.testing.assert_close(rank.weights[name], weight, rtol=1e-4, atol=1e-4)
        spare = [name for name in plain if name.startswith("spare")]
        assert len(spare) == (2 if case.startswith("unused") else 0)


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_left_in_the_module(ran: tuple[Path, str], case: str) -> None:
    for rank in ranks_of(ran, case):
        assert not {"training_step", "log"} & set(rank.attributes)


@pytest.mark.parametrize("case", CASES)
def test_the_replicas_stay_equal_to_the_last_bit(ran: tuple[Path, str], case: str) -> None:
    # DDP averages gradients only: an update that is rounded otherwise on one rank is never made good.
    first, second = ranks_of(ran, case)
    differences = {n: (v - second.weights[n]).abs().max().item() for n, v in first.weights.items()}
    assert {n: d for n, d in differences.items() if d} == {}


@pytest.mark.parametrize("case", [*KEPT, "hot later", "cannot compile", "cannot warm up", "too late"])
def test_the_ranks_change_their_phase_at_the_same_batch(ran: tuple[Path, str], case: str) -> None:
    first, second = ranks_of(ran, case)
    assert first.phases == second.phases
    assert first.phases


@pytest.mark.parametrize("case", KEPT)
def test_both_flip_by_the_same_plan_and_prove_every_region(ran: tuple[Path, str], case: str) -> None:
    ranks = ranks_of(ran, case)
    assert [phase for _, phase in ranks[0].phases] == ["flipping", "settling", "steady"]
    assert len({r.report["plan_digest"] for r in ranks}) == 1
    for rank in ranks:
        assert rank.report["phase"] == "steady", rank.report["reason"]
        assert rank.report["regions"]
        assert all(r["proven"] for r in rank.report["regions"])
        assert rank.report["speedup"] is not None
        assert rank.report["recompiles"] == 0


def test_each_piece_that_ddp_makes_of_a_graph_is_compared_with_eager(ran: tuple[Path, str]) -> None:
    """It calls them once while they are traced, with tensors that hold nothing."""
    for rank in ranks_of(ran, "large"):
        (region,) = rank.report["regions"]
        assert region["graphs"] > 1
        agree = f"{region['graphs']} of {region['graphs']} graphs agree with eager, largest difference"
        assert rank.report["parity"].startswith(agree)
        assert region["runs"] % region["graphs"] == 0
        assert rank.report["parity_error"] is not None


def test_no_rank_compiles_its_optimizer(ran: tuple[Path, str]) -> None:
    for rank in ranks_of(ran, "optimizer"):
        assert [region["kind"] for region in rank.report["regions"]] == ["step"]
        assert any("compile_optimizer=True is for one process" in note for note in rank.report["notes"])


@pytest.mark.parametrize("case", ["cannot compile", "cannot warm up"])
def test_one_that_cannot_compile_takes_both_back(ran: tuple[Path, str], case: str) -> None:
    first, second = ranks_of(ran, case)
    for rank in (first, second):
        assert rank.report["phase"] == "reverted"
        assert "no compiler on this machine" in rank.report["reason"]
    assert first.report["reason"].startswith("rank 1: ")


def test_different_plans_are_declined_by_both(ran: tuple[Path, str]) -> None:
    ranks = ranks_of(ran, "other plan")
    digests = [r.report["plan_digest"] for r in ranks]
    assert digests[0] != digests[1]
    for rank in ranks:
        assert rank.report["phase"] == "declined"
        assert "different plans" in rank.report["reason"]
        assert all(d in rank.report["reason"] for d in digests)
        assert rank.report["regions"] == []


@pytest.mark.parametrize(("case", "phase"), [("too late", "reverted"), ("too late at the start", "declined")])
def test_one_that_comes_too_late_ends_it_for_both(ran: tuple[Path, str], case: str, phase: str) -> None:
    for rank in ranks_of(ran, case):
        assert rank.report["phase"] == phase
        assert rank.report["reason"] == "rank 1: did not answer within 0.2 s"


def test_one_that_fails_after_all_have_agreed_goes_back_alone(ran: tuple[Path, str]) -> None:
    # Gradients are averaged, so nobody has to be told, and no exchange is needed in the steady state.
    first, second = ranks_of(ran, "fails later")
    assert first.report["phase"] == "steady"
    assert second.phases[: len(first.phases)] == first.phases
    assert second.phases[len(first.phases)][1] == "reverted"
    assert "compiled code did not fit" in json.dumps(second.report["events"])


@pytest.mark.parametrize("case", STANDS_ASIDE)
def test_one_that_stands_aside_keeps_nobody_waiting(ran: tuple[Path, str], case: str) -> None:
    ranks = ranks_of(ran, case)
    for rank in ranks:
        assert rank.report["phase"] in ("declined", "reverted", "observing")
    # The error of its own comes when both have agreed to flip: that is taken back.
    assert ranks[0].report["phase"] == ("reverted" if case == "own error" else "declined")
    assert "rank 1" in ranks[0].report["reason"]


def test_a_refusal_on_one_rank_is_told_to_the_others_before_it_ends_the_run(
    ran: tuple[Path, str],
) -> None:
    _, output = ran
    assert "HotCompile: declined: rank 1: TargetError: targets='nothing.*'" in output
    assert "ended after" not in output


@pytest.mark.parametrize("case", AHEAD)
def test_one_child_process_compiles_for_both_ranks(ran: tuple[Path, str], case: str) -> None:
    """Rank 0 has it; rank 1 waits with its flip, and finds the same code in the cache."""
    first, second = ranks_of(ran, case)
    assert first.phases == second.phases
    assert [phase for _, phase in first.phases] == ["prewarming", "flipping", "settling", "steady"]
    child, none = ([n for n in rank.report["notes"] if n.startswith("prewarm")] for rank in (first, second))
    assert "1 of 1 graphs compiled by a child process" in child[0]
    assert none == []
    for rank in (first, second):
        graphs = [e for e in rank.report["events"] if e["kind"] == "compiled"]
        assert graphs
        assert all(e["cache_hit"] for e in graphs)
    assert_same(*(_loaded(rank) for rank in (first, second)))


def _loaded(rank: Rank) -> Net:
    model = seeded(Net)
    model.load_state_dict(rank.weights)
    return model
