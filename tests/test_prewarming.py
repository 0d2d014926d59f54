"""A child process compiles ahead: the phase before the flip, and what happens if the child fails."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_hotcompile import flip, judge
from lightning_hotcompile.machine import Action, Facts, Phase, State, advance
from lightning_hotcompile.plan.forecast import Decision
from tests.hot import assert_same, hot
from tests.models import Net, fit, loader, make_trainer, seeded

GO = Decision(go=True, reason="it pays")


class TestMachine:
    def test_it_comes_before_the_flip(self) -> None:
        found = advance(State(), Facts(hot=True, decision=GO, prewarm="wanted"))
        assert (found.state.phase, found.action) == (Phase.PREWARMING, Action.PREWARM)
        assert found.state.flips == 0, "nothing was compiled for use yet"

    def test_calls_are_captured_first_where_a_warm_up_needs_them(self) -> None:
        found = advance(State(), Facts(hot=True, decision=GO, prewarm="wanted", needs_capture=True))
        assert (found.state.phase, found.action) == (Phase.PREWARMING, Action.CAPTURE)
        then = advance(found.state, Facts(prewarm="wanted", needs_capture=True))
        assert (then.state.phase, then.action) == (Phase.PREWARMING, Action.PREWARM)

    def test_training_goes_on_while_it_runs(self) -> None:
        state = State(phase=Phase.PREWARMING)
        assert advance(state, Facts(prewarm="running")) == advance(state, Facts(prewarm="running"))
        assert advance(state, Facts(prewarm="running")).action is Action.NONE

    @pytest.mark.parametrize(("needs_capture", "action"), [(True, Action.CAPTURE), (False, Action.INSTALL)])
    def test_then_it_flips(self, needs_capture: bool, action: Action) -> None:
        state = State(phase=Phase.PREWARMING, reason="it pays")
        found = advance(state, Facts(prewarm="over", needs_capture=needs_capture))
        assert (found.state.phase, found.state.flips, found.action) == (Phase.FLIPPING, 1, action)
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

    def begin(self, captures: Mapping[str, Any]) -> None:
        self.calls.append("begin")
        self.trace.witness.collect = lambda region, *_: self.graphs.append(region)
        self.trace.put(captures)
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
    monkeypatch.setattr(flip, "PrewarmRun", Scripted)
    monkeypatch.setattr(judge, "why_not", lambda *_: None)
    return Scripted


@pytest.mark.parametrize("scope", ["step", "regions"])
def test_one_step_is_traced_and_training_goes_on_eagerly(scripted: type[Scripted], scope: str) -> None:
    plain, model, callback = seeded(Net), seeded(Net), hot(scope=scope)
    fit(plain, max_epochs=6)
    fit(model, [callback], max_epochs=6)
    assert_same(plain, model)
    report = callback.report
    phases = [e["phase"] for e in report.events if e["kind"] == "phase_changed"]
    assert phases[:3] == ["prewarming", "flipping", "settling"]
    assert report.phase == "steady"
    assert all(r.proven for r in report.regions)
    (run,) = scripted.made
    assert run.calls[:2] == ["begin", "end"]
    assert run.calls[-1] == "cancel"
    planned = {r.name for r in report.regions}
    assert set(run.graphs) == planned, "each region was traced"
    assert sum(r.compiles for r in report.regions) == len(planned), "and compiled once, for use"
    assert any(note == f"prewarm: scripted, {len(run.graphs)} graphs" for note in report.notes)
    assert {"prewarming"} <= {p.name for p in report.phases}


def test_a_run_that_ends_first_ends_the_child(scripted: type[Scripted]) -> None:
    scripted.looks = 10_000
    try:
        model, callback = seeded(Net), hot(scope="step")
        fit(model, [callback], max_epochs=1)
    finally:
        scripted.looks = 5
    assert callback.report.phase == "prewarming"
    assert scripted.made[0].calls[-1] == "cancel"
    assert "training_step" not in vars(model)


def test_an_exception_in_the_traced_step_gives_the_model_back(scripted: type[Scripted]) -> None:
    class Fails(Net):
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
    ],
    ids=str,
)
def test_why_there_is_none(options: dict[str, Any], reason: str) -> None:
    seen: list[str | None] = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(callback._runs["train"].session.judge.why_no_prewarm())

    callback = hot(**{"backend": "inductor", "prewarm": True, "threshold": 1000, **options})
    make_trainer([callback, Looks()], max_steps=1, max_epochs=-1).fit(seeded(Net), loader())
    assert reason in str(seen[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_flip_finds_what_the_child_has_compiled(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    callback = hot(backend="inductor", scope="step", prewarm=True, compile_timeout=400)

    class StopsWhenSettling(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            late = time.monotonic() - start > 600  # an upper bound: the test fails then
            trainer.should_stop = late or callback.phase in ("settling", "steady", "reverted")

    start = time.monotonic()
    fit(seeded(Net, width=8), [callback, StopsWhenSettling()], max_epochs=-1, max_steps=-1)
    report = callback.report
    assert report.phase in ("settling", "steady"), report.reason
    compiled = [e for e in report.events if e["kind"] == "compiled"]
    assert len(compiled) == 2, "step and optimizer"
    hits = {e["region"]: e["cache_hit"] for e in compiled}
    assert hits["training_step"] is True, report.notes
    # A compiled optimizer has operations (prims) that cannot go to another process yet: told, not hidden.
    assert hits["optimizer 0"] is False
    assert any("1 of 1 graphs compiled by a child process" in note for note in report.notes)
    assert any("optimizer 0: the graph cannot be serialised" in note for note in report.notes)
