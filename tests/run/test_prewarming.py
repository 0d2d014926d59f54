"""A child process compiles ahead: the phase before the flip, and what happens if the child fails."""

from __future__ import annotations

import gc
import itertools
import pickle
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hotcompile import HotCompile
from lightning_hotcompile.errors import HotCompileWarning
from lightning_hotcompile.machine import Action, Facts, Phase, State, advance
from lightning_hotcompile.plan import compile_cost
from lightning_hotcompile.plan.forecast import Decision
from lightning_hotcompile.receipt.wording import headline
from lightning_hotcompile.run import ahead, flip, weighing
from lightning_hotcompile.run.judge import Judge
from lightning_hotcompile.run.session import Session
from lightning_hotcompile.swap.prewarm import run
from lightning_hotcompile.swap.prewarm.parent import Job, Result, Status
from lightning_hotcompile.tracks import Track
from lightning_hotcompile.watch.signature import StepSignature
from lightning_hotcompile.watch.unit import UnitSignature
from tests.hot import STEP, assert_proven, assert_same, hot
from tests.models import Batches, Net, Small, fit, loader, make_trainer, seeded

GO = Decision(go=True, reason="it pays")


class TestMachine:
    def test_it_comes_before_the_flip(self) -> None:
        found = advance(State(), Facts(hot=True, decision=GO, prewarm="wanted"))
        assert (found.state.phase, found.action) == (Phase.PREWARMING, Action.PREWARM)
        assert found.state.flips == 0, "nothing was compiled for use yet"

    def test_training_goes_on_while_it_runs(self) -> None:
        state = State(phase=Phase.PREWARMING)
        found = advance(state, Facts(prewarm="running"))
        assert found.state is state
        assert found.action is Action.NONE

    def test_then_it_flips(self) -> None:
        state = State(phase=Phase.PREWARMING, reason="it pays")
        found = advance(state, Facts(prewarm="over"))
        assert (found.state.phase, found.state.flips, found.action) == (Phase.FLIPPING, 1, Action.INSTALL)
        assert found.state.reason == "it pays"

    def test_no_prewarm_flips_at_once(self) -> None:
        assert advance(State(), Facts(hot=True, decision=GO)).state.phase is Phase.FLIPPING


class Scripted:
    """Stands in for the run of a child process that is over after some looks at it."""

    looks = 5
    made: list[Scripted]

    def __init__(self, trace: Any, **options: Any) -> None:
        self.trace, self.options = trace, options
        self.graphs: list[str] = []
        self.calls: list[str] = []
        type(self).made.append(self)

    @property
    def is_tracing(self) -> bool:
        return self.trace is not None

    is_slowing = False
    took_s = 12.5
    has_compiled = True
    crash: str | None = None

    def begin(self) -> None:
        self.calls.append("begin")
        self.trace.witness.collect = lambda region, *_: self.graphs.append(region)
        self.trace.put()
        self.trace.gate.open(flip.Lane.COMPILE)

    def end_step(self) -> None:
        trace, self.trace = self.trace, None
        if trace is not None:
            self.calls.append("end")
            trace.take_out()

    def is_over(self) -> bool:
        self.looks -= 1
        return self.looks <= 0

    def in_words(self) -> str:
        return f"prewarm: scripted, {len(self.graphs)} graphs"

    def cancel(self) -> None:
        self.end_step()
        self.calls.append("cancel")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    Scripted.made = []
    monkeypatch.setattr(ahead, "PrewarmRun", Scripted)
    monkeypatch.setattr(ahead, "why_not", lambda *_: None)
    return Scripted


def test_after_an_error_of_ours_beside_the_child_nothing_is_waited_for(
    scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Scripted) -> bool:
        raise LookupError("not foreseen")

    monkeypatch.setattr(scripted, "is_over", fails)
    plain, model, callback = seeded(Small), seeded(Small), hot(**STEP, on_error="eager")
    fit(plain)
    with pytest.warns(HotCompileWarning, match="not foreseen"):
        fit(model, [callback])
    assert_same(plain, model)
    assert callback.report.phase == "reverted"
    assert "not foreseen" in callback.report.reason
    assert "verdict" not in headline(callback.report)
    assert scripted.made[0].calls[-1] == "cancel"


@pytest.mark.parametrize("scope", ["step", "regions"])
def test_one_step_is_traced_and_training_goes_on_eagerly(scripted: type[Scripted], scope: str) -> None:
    plain, model, callback = seeded(Small), seeded(Small), hot(scope=scope)
    fit(plain, max_epochs=6)
    fit(model, [callback], max_epochs=6)
    assert_same(plain, model)
    report = callback.report
    phases = [e["phase"] for e in report.events if e["kind"] == "phase_changed"]
    assert phases[:3] == ["prewarming", "flipping", "settling"]
    assert report.phase == "steady"
    assert_proven(report)
    (made,) = scripted.made
    assert made.calls[:2] == ["begin", "end"]
    assert made.calls[-1] == "cancel"
    planned = {r.name for r in report.regions}
    assert set(made.graphs) == planned, "each region was traced"
    assert sum(r.graphs for r in report.regions) == len(planned), "and compiled once, for use"
    assert any(note == f"prewarm: scripted, {len(made.graphs)} graphs" for note in report.notes)
    assert {"prewarming"} <= {p.name for p in report.phases}


def test_a_step_that_never_comes_back_gives_its_threads_back(
    scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next kind of step waits for the child; its own steps would be no measure meanwhile."""
    monkeypatch.setattr(scripted, "is_slowing", property(lambda self: self.looks > 0))
    monkeypatch.setattr(scripted, "looks", 20)

    class Freezes(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.inp.requires_grad_(self.global_step < 6)

    callback = hot(**STEP)
    fit(seeded(Freezes), [callback], max_epochs=6)
    (made,) = scripted.made
    assert made.looks <= 0
    installed = [e["step"] for e in callback.report.events if e.get("phase") == "flipping"]
    assert len(installed) == 1
    assert 6 < installed[0] < 40
    assert callback.report.phase == "steady"
    assert callback.report.speedup is not None


def test_the_batch_that_was_traced_is_let_go(scripted: type[Scripted]) -> None:
    """Of a family it is known which dimensions of its tensors vary; Dynamo keeps what knows that."""
    traced: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, *_: Any) -> None:
            if scripted.made and scripted.made[0].is_tracing:
                traced.append(weakref.ref(batch[0]))

        def on_train_batch_end(self, *_: Any) -> None:
            if callback.phase == "prewarming":
                gc.collect()
                alive.append(traced[0]() is not None)

    callback = hot(**STEP)
    data = DataLoader(Batches([5, 6, 7, 9, 10, 11, 13] * 4), batch_size=None)
    fit(seeded(Small), [callback, Looks()], train=data, max_epochs=1)
    assert len(alive) > 2
    assert not alive[-1]


def test_a_run_that_ends_first_ends_the_child(scripted: type[Scripted]) -> None:
    scripted.looks = 10_000
    told = []

    class Asks(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            told.append(callback.report)

    try:
        model, callback = seeded(Small), hot(**STEP)
        fit(model, [callback, Asks()], max_epochs=1)
    finally:
        scripted.looks = 5
    assert callback.report.phase == told[-1].phase == "prewarming"
    assert callback.report.ended
    assert "; the run ended before there was a verdict" in headline(callback.report)
    assert not any(report.ended for report in told)
    assert scripted.made[0].calls[-1] == "cancel"
    assert "training_step" not in vars(model)


def test_an_exception_in_the_traced_step_gives_the_model_back(scripted: type[Scripted]) -> None:
    class Fails(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.global_step == 3:
                raise ValueError("mine")
            return loss

    model = seeded(Fails)
    with pytest.raises(ValueError, match="mine"):
        fit(model, [hot(scope="step")])
    assert "training_step" not in vars(model)
    assert "log" not in vars(model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"prewarm": False}, "prewarm=False"),
        ({"backend": "aot_eager"}, "no cache on disk"),
        ({"threshold": 0}, "threshold=0"),
        ({"mode": "max-autotune"}, "max-autotune times kernels"),
    ],
    ids=str,
)
def test_why_there_is_none(options: dict[str, Any], reason: str) -> None:
    seen: list[str | None] = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(callback._runs["train"].session.flip.ahead.why_none())

    least = {"scope": "pattern", "targets": ["head"]}  # for the one that compiles
    callback = hot(**{"backend": "inductor", "prewarm": True, "threshold": 1000, **least, **options})
    make_trainer([callback, Looks()], max_steps=1, max_epochs=-1).fit(seeded(Small), loader())
    assert reason in str(seen[0])


class Kept:
    """Stands in for the child process: keeps what it is given."""

    jobs: list[Job]
    options: dict[str, Any]

    def __init__(self, **options: Any) -> None:
        type(self).jobs, type(self).options = [], options

    def start(self) -> None:
        """There is no process."""

    def add(self, job: Job) -> None:
        self.jobs.append(job)

    def close(self) -> None:
        """There is no process."""

    def poll(self) -> Status:
        results = tuple(Result(name=j.name, seconds=1.0, error=None, cached=True) for j in self.jobs)
        return Status(state="done", reason=None, seconds=2.0, results=results)

    def cancel(self) -> None:
        """There is no process."""


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> type[Kept]:
    monkeypatch.setattr(run, "Prewarm", Kept)
    monkeypatch.setattr(ahead, "why_not", lambda *_: None)
    return Kept


class Whole(Kept):
    """It has compiled anew all that it was given."""

    work_s = 2.0

    def poll(self) -> Status:
        status = super().poll()
        return replace(status, results=tuple(replace(result, new=True) for result in status.results))


class KeepsPrewarm(pl.Callback):
    """What a flip knows of its child process, and the batches that were traced for it."""

    def __init__(self, hot: HotCompile) -> None:
        self.hot = hot
        self.found: Any = None
        self.traced: list[int] = []

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self.found = self.hot._runs["train"].session.flip.ahead.prewarm
        if self.found is not None and self.found.is_tracing:
            self.traced.append(trainer.fit_loop.epoch_loop.batch_idx)


class Hooks(pl.Callback):
    """How many hooks there are after each optimizer's step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.seen.append(sum(len(o._optimizer_step_post_hooks) for o in trainer.optimizers))


def test_the_optimizer_goes_to_the_child_in_words(kept: type[Kept]) -> None:
    plain, model, callback, hooks = seeded(Small), seeded(Small), hot(scope="step"), Hooks()
    fit(plain, max_epochs=6)
    fit(model, [hooks, callback], max_epochs=6)
    assert_same(plain, model)
    assert [(j.name, j.kind) for j in kept.jobs] == [("training_step", "graph"), ("optimizer 0", "optimizer")]
    assert '"class": "AdamW"' in pickle.loads(kept.jobs[1].graph)["optimizer"]
    assert any("2 of 2 graphs compiled by a child process" in note for note in callback.report.notes)
    assert set(hooks.seen) == {0}, "a hook is there in the traced step only"
    compiled = [e["region"] for e in callback.report.events if e["kind"] == "compiled"]
    assert compiled[:2] == ["training_step", "optimizer 0"], "at the flip, not before"


def signature(digest: str) -> StepSignature:
    return StepSignature("train", digest, (), b"", b"", "grad", (), "32", None)


ENDS_CYCLES = UnitSignature(steps=((signature("b"), 1), (signature("a"), 1)))
BEGINS_CYCLES = UnitSignature(steps=((signature("a"), 1), (signature("b"), 1)))


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({}, True),
        ({"is_last": True}, False),
        ({"unit": BEGINS_CYCLES}, False),
        ({"unit": signature("a")}, False),
        ({"unit": None}, False),
        ({"optimizers": []}, False),
        ({"ranks": 2}, False),
        ({"ranks": 2, "phase": Phase.PREWARMING}, True),
    ],
)
def test_when_a_child_waits_for_another_batch(changes: dict[str, Any], waits: bool) -> None:
    """Never for one that does not come: such a step has to have ended the last cycle that it was in."""
    facts = {"is_last": False, "unit": ENDS_CYCLES, "optimizers": ["one"], "ranks": 1, **changes}
    loop = SimpleNamespace(_should_accumulate=lambda: not facts["is_last"])
    judge = Judge.__new__(Judge)
    trainer = SimpleNamespace(world_size=facts["ranks"], accumulate_grad_batches=2, fit_loop=loop)
    installation = SimpleNamespace(optimizers=facts["optimizers"])
    judge._trainer, judge._stage = trainer, "train"  # type: ignore[assignment]
    judge._flip = SimpleNamespace(installation=installation)  # type: ignore[assignment]
    state = State(phase=facts.get("phase", Phase.OBSERVING))
    track = Track(signature=signature("a"), state=state, unit=facts["unit"])
    assert judge._waits_for_update(track) is waits


@pytest.mark.parametrize("batches", [2, 3])
def test_with_accumulated_gradients_a_step_that_ends_in_an_update_is_shown(
    kept: type[Kept], batches: int
) -> None:
    plain, model, callback = seeded(Small), seeded(Small), hot(scope="step")
    keeps = KeepsPrewarm(callback)
    fit(plain, max_epochs=6, accumulate_grad_batches=batches)
    fit(model, [callback, keeps], max_epochs=6, accumulate_grad_batches=batches)
    assert_same(plain, model)
    assert [batch_idx % batches for batch_idx in keeps.traced] == [batches - 1]
    assert [job.kind for job in kept.jobs] == ["graph", "optimizer"]
    assert keeps.found.has_compiled


class Slow(Kept):
    """It takes a while."""

    looks = 3

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        type(self).looks = 3

    def poll(self) -> Status:
        status = super().poll()
        type(self).looks -= 1
        return status if self.looks <= 0 else replace(status, state="running")


@pytest.fixture
def one_of_two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of two cores on which training uses both."""
    monkeypatch.setattr(run, "Prewarm", Slow)
    monkeypatch.setattr(run, "_POLL_AFTER_S", 600.0)  # the child is asked by the number of steps alone
    monkeypatch.setattr(ahead, "why_not", lambda *_: None)
    monkeypatch.setattr(ahead, "threads_meanwhile", lambda _: 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Threads(pl.Callback):
    """How many threads each step has, by the phase that it is in."""

    def __init__(self, hot: HotCompile) -> None:
        self.hot = hot
        self.seen: list[tuple[str, int]] = []

    def on_before_zero_grad(self, *_: Any) -> None:
        self.seen.append((self.hot.phase, torch.get_num_threads()))


@pytest.mark.usefixtures("one_of_two_threads")
def test_a_child_that_is_done_is_known_to_be_whoever_asks() -> None:
    class AsksToo(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            prewarm = callback._runs["train"].session.flip.ahead.prewarm
            if callback.phase == "prewarming" and prewarm is not None:
                prewarm.is_over()

    callback = hot(**STEP)
    fit(seeded(Small), [callback, AsksToo()], max_epochs=8)
    assert callback.report.phase == "steady"


@pytest.mark.usefixtures("one_of_two_threads")
class TestFewerThreads:
    def test_training_gives_one_up_while_the_child_compiles_and_gets_it_back(self) -> None:
        callback = hot(**STEP)
        fit(seeded(Small), [callback, threads := Threads(callback)], max_epochs=8)
        while_prewarming = [n for phase, n in threads.seen if phase == "prewarming"]
        assert while_prewarming[0] == 2, "the traced step: the number is part of the compiled code"
        assert set(while_prewarming[1:]) == {1}
        assert {n for phase, n in threads.seen if phase != "prewarming"} == {2}
        assert torch.get_num_threads() == 2
        assert callback.report.phase == "steady"
        assert any("while training used 1 of its threads" in note for note in callback.report.notes)

    def test_slower_steps_are_no_measure_of_eager_ones_and_count_as_a_cost(self) -> None:
        sessions: list[Session] = []

        class Keeps(pl.Callback):
            def on_train_batch_end(self, *_: Any) -> None:
                sessions[:] = [callback._runs["train"].session]

        callback = hot(**STEP)
        fit(seeded(Small), [callback, Keeps()], max_epochs=8)
        prewarming = next(p for p in callback.report.phases if p.name == "prewarming")
        assert prewarming.steps > 10
        assert prewarming.median_ms is None, "no usual step among them"
        assert len(sessions[0].ledger._slowed) == prewarming.steps

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_it_gets_it_back_whatever_happens(self, error: type[BaseException]) -> None:
        class Fails(Small):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if self.global_step == 9:
                    seen.append(torch.get_num_threads())
                    raise error("mine")
                return super().training_step(batch, batch_idx)

        seen: list[int] = []
        with pytest.raises((error, SystemExit)):
            fit(seeded(Fails), [hot(**STEP)])
        assert seen == [1]
        assert torch.get_num_threads() == 2

    def test_validation_gets_it_back_too_once_the_child_is_done(self) -> None:
        class Threads(Small):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                super().validation_step(batch, batch_idx)
                seen.append(torch.get_num_threads())

        seen: list[int] = []
        callback = hot(threshold=11, **STEP)
        fit(seeded(Threads), [callback], val=loader(8 * 40), max_epochs=1)
        assert callback.report.phase == "prewarming"
        assert seen[2] == 1, "after the sanity check"
        assert seen[-1] == 2

    def test_training_meanwhile_is_slower_and_compiles_nothing(self) -> None:
        """Code is made for a number of threads: what is compiled now would not fit later."""

        class Sees(pl.Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                slowed = len(callback._runs["train"].session.ledger._slowed)
                seen[trainer.current_epoch].append((callback.phase, torch.get_num_threads(), slowed))

        seen: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
        callback = hot(stages=("train", "validate"), threshold=31, **STEP)
        data = {"train": loader(8 * 30), "val": loader(8 * 32)}
        fit(seeded(Small), [callback, Sees()], **data, max_epochs=5)
        waits = list(itertools.takewhile(lambda each: each[0] == "observing", seen[1]))
        assert len(waits) >= 10, "it is hot at the first of them, but the validation before has begun a child"
        assert {threads for _, threads, _ in waits} == {1}
        assert waits[-1][2] >= len(waits) - 2, "each of them is slow; the last ones are not booked yet"
        assert torch.get_num_threads() == 2
        assert callback.report.phase == "steady", callback.report.reason
        assert callback.reports["validate"].phase == "steady"

    def test_another_kind_of_step_is_not_compiled_meanwhile_even_by_itself(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen, kinds = list[int](), list[Track]()

        def forecast(_: weighing.Weighing, track: Track) -> Decision:
            kinds.extend([] if track in kinds else [track])
            return replace(GO, inline=track is not kinds[0])

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            seen.append(torch.get_num_threads())
            return graph

        monkeypatch.setattr(weighing.Weighing, "forecast", forecast)
        callback = hot(backend=backend, dynamic=False, **STEP)
        data = DataLoader(Batches([8] * 6 + [4] * 60), batch_size=None)
        fit(seeded(Small), [callback], train=data, max_epochs=1)
        assert len(kinds) == 2
        assert seen == [2]

    def test_a_run_that_ends_first_gets_it_back(self) -> None:
        callback = hot(**STEP)
        make_trainer([callback], max_steps=6, max_epochs=-1).fit(seeded(Small), loader())
        assert callback.report.phase == "prewarming"
        assert torch.get_num_threads() == 2


class TwoOptimizers(Small):
    """Steps two optimizers by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        assert isinstance(optimizers, list)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.blocks.parameters(), lr=1e-2, momentum=0.9),
            torch.optim.Adam([*self.inp.parameters(), *self.head.parameters()], lr=1e-2),
        ]


def test_each_optimizer_goes_to_the_child(kept: type[Kept]) -> None:
    plain, model = seeded(TwoOptimizers), seeded(TwoOptimizers)
    fit(plain, max_epochs=6)
    fit(model, [hot(scope="regions", compile_optimizer=True)], max_epochs=6)
    assert_same(plain, model)
    described = [j.name for j in kept.jobs if j.kind == "optimizer"]
    assert described == ["optimizer 0", "optimizer 1"]


@pytest.mark.usefixtures("kept")
def test_an_optimizer_without_an_update_in_the_traced_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneIsSeldom(TwoOptimizers):
        def optimizers(self, *_: Any) -> Any:
            both = super().optimizers()
            assert isinstance(both, list)
            return both if self.trainer.fit_loop.epoch_loop.batch_idx % 6 == 5 else both[:1]

    monkeypatch.setattr(run, "Prewarm", Whole)
    plain, model = seeded(OneIsSeldom), seeded(OneIsSeldom)
    callback = hot(scope="regions", compile_optimizer=True)
    keeps = KeepsPrewarm(callback)
    fit(plain, max_epochs=6)
    fit(model, [callback, keeps], max_epochs=6)
    assert_same(plain, model)
    assert [job.name for job in Whole.jobs if job.kind == "optimizer"] == ["optimizer 0"]
    assert not keeps.found.has_compiled
    assert keeps.found.took_s is None, "no time of the whole plan"
    (note,) = (note for note in callback.report.notes if note.startswith("prewarm: "))
    assert note.endswith("(optimizer 1: made no update in the traced step)")


@pytest.mark.usefixtures("kept")
def test_an_optimizer_whose_settings_have_moved_is_not_for_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flip would not take it either."""

    class Cycles(Small):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters())
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=100)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    monkeypatch.setattr(run, "Prewarm", Whole)
    callback = hot(scope="step")
    keeps = KeepsPrewarm(callback)
    fit(seeded(Cycles), [callback, keeps], max_epochs=6)
    assert [job.name for job in Whole.jobs] == ["training_step"]
    assert keeps.found.has_compiled
    assert keeps.found.took_s is None, "no time of the whole plan"
    (optimizer,) = (region for region in callback.report.regions if region.kind == "optimizer")
    assert optimizer.note == "its betas changed since training began (a schedule?)"


@pytest.mark.parametrize("limit_s", [None, 30.0])
def test_the_child_has_the_time_that_was_asked_for(kept: type[Kept], limit_s: float | None) -> None:
    fit(seeded(Small), [hot(compile_timeout=limit_s, **STEP)], max_epochs=2)
    assert kept.options["limit_s"] == limit_s


def test_an_optimizer_that_cannot_be_described_is_told_and_left_to_the_flip(kept: type[Kept]) -> None:
    class Unusual(Small):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters())
            optimizer.param_groups[0]["decay_rule"] = torch.sqrt
            return optimizer

    callback = hot(scope="step")
    fit(seeded(Unusual), [callback], max_epochs=6)
    assert [j.name for j in kept.jobs] == ["training_step"]
    assert any("optimizer 0: its decay_rule is a builtin" in note for note in callback.report.notes)
    assert_proven(callback.report)


class WithMomentum(Small):
    """SGD with momentum."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class WithGroups(Small):
    """AdamW with two groups and a schedule."""

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": decayed},
            {"params": others, "weight_decay": 0.0, "lr": 1e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        # up and down: the steps until the child is done are many, and a rate near 0 makes an eager update
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step % 10))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class WithSmallConvolutions(WithMomentum):
    """Depthwise and 1x1: compiled code gives their gradients other strides, where there is one element."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.pointwise = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        images = (x[:, :, None] * x[:, None, :])[:, None]
        return super().forward(self.pointwise(self.depthwise(self.stem(images)).relu()).mean((1, 2)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("net", "rows"),
    [
        (WithGroups, (8,)),
        (WithSmallConvolutions, (8,)),
        (WithMomentum, (5, 9, 6, 8, 7)),
    ],
)
def test_the_flip_finds_what_the_child_has_compiled(
    net: type[Net], rows: tuple[int, ...], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    callback = hot(backend="inductor", scope="step", prewarm=True, compile_timeout=400)

    class StopsWhenSettling(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            late = time.monotonic() - start > 600  # an upper bound: the test fails then
            trainer.should_stop = late or callback.phase in ("settling", "steady", "reverted")

    start = time.monotonic()
    data = [next(iter(loader(n, n, seed=n))) for n in rows * 20]
    train = torch.utils.data.DataLoader(data, batch_size=None)  # type: ignore[arg-type, var-annotated]
    fit(seeded(net, width=8), [callback, StopsWhenSettling()], train=train, max_epochs=-1, max_steps=-1)
    report = callback.report
    assert report.phase in ("settling", "steady"), report.reason
    compiled = [e for e in report.events if e["kind"] == "compiled"]
    assert len(compiled) == 2, "step and optimizer"
    hits = {e["region"]: e["cache_hit"] for e in compiled}
    assert hits == {"training_step": True, "optimizer 0": True}, report.notes
    assert any("2 of 2 graphs compiled by a child process" in note for note in report.notes)


def test_a_child_that_slows_training_more_than_it_saves_is_stopped(
    scripted: type[Scripted], cheap_compiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted, "looks", 10_000)
    monkeypatch.setattr(scripted, "is_slowing", True)
    monkeypatch.setattr(scripted, "elapsed_s", 3.0, raising=False)
    plain, model, callback = seeded(Small), seeded(Small), hot(cost_gate=True, prewarm=True)

    class Slow(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            if callback.phase == "prewarming":
                monkeypatch.setattr(compile_cost, "BASE_COMPILE_S", 100.0)
                time.sleep(0.02)

    fit(plain, max_epochs=6)
    fit(model, [callback, Slow()], max_epochs=6)
    assert callback.report.phase == "declined"
    assert "stopped a child process that compiled for 3 s, since steps took" in callback.report.reason
    assert scripted.made[-1].calls[-1] == "cancel"
    assert_same(plain, model)


@pytest.mark.parametrize(("has_compiled", "words"), [(True, "its code is there"), (False, "no code yet")])
def test_a_child_that_took_too_long_is_weighed_again(
    scripted: type[Scripted],
    cheap_compiles: None,
    monkeypatch: pytest.MonkeyPatch,
    has_compiled: bool,
    words: str,
) -> None:
    """What was cheap when it began is dear when it is over, with few steps left."""

    def is_over(self: Scripted) -> bool:
        monkeypatch.setattr(compile_cost, "BASE_COMPILE_S", 100.0)
        return True

    monkeypatch.setattr(scripted, "is_over", is_over)
    monkeypatch.setattr(scripted, "has_compiled", has_compiled)
    callback = hot(cost_gate=True, prewarm=True)
    fit(seeded(Small), [callback])
    assert callback.report.phase == "declined"
    assert f"too late after a child process, {words}: not worth it" in callback.report.reason
    assert [e["phase"] for e in callback.report.events if "phase" in e][:2] == ["prewarming", "declined"]


@pytest.mark.parametrize("options", [{}, {"cost_gate": True}, {"min_speedup": 0.0}])
def test_what_crashed_in_the_child_does_not_run_here(
    scripted: type[Scripted], cheap_compiles: None, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    crash = "the child process was ended by SIGABRT: double free or corruption (out)"
    monkeypatch.setattr(scripted, "crash", crash)
    plain, model, callback = seeded(Small), seeded(Small), hot(prewarm=True, **options)
    fit(plain, max_epochs=6)
    fit(model, [callback], max_epochs=6)
    report = callback.report
    assert report.phase == "declined"
    assert report.reason == f"{crash}; it compiles the step and runs it once"
    assert not any(e["kind"] == "compiled" for e in report.events)
    assert not any(region.proven for region in report.regions)
    assert_same(plain, model)


def test_what_crashed_in_the_child_does_not_run_here_for_batches_of_another_size_either(
    scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    crash = "the child process was ended by SIGSEGV"
    monkeypatch.setattr(scripted, "crash", crash)
    callback = hot(prewarm=True, dynamic=False)
    data = DataLoader(Batches([8] * 10 + [4] * 15), batch_size=None)
    fit(seeded(Small), [callback], train=data, max_epochs=1)
    events = callback.report.events
    assert [e["phase"] for e in events if e["kind"] == "phase_changed"] == ["prewarming", *["declined"] * 2]
    assert not any(e["kind"] == "compiled" for e in events)
    assert len(scripted.made) == 1
