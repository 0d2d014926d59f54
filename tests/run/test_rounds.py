"""Further plans are tried where they may pay, and the best one is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_hotcompile import HotCompile, HotCompileConfig, plan_compile
from lightning_hotcompile.plan import compile_cost
from lightning_hotcompile.receipt.ledger import Ledger
from lightning_hotcompile.run import ahead, memory, preflight
from lightning_hotcompile.run.ahead import Ahead
from lightning_hotcompile.run.flip import Flip
from lightning_hotcompile.run.moves import Moves
from lightning_hotcompile.run.rounds import Rounds
from lightning_hotcompile.run.stage_context import StageContext
from lightning_hotcompile.store.profiles import Profile
from lightning_hotcompile.store.store import Store
from lightning_hotcompile.swap.inductor import paths as inductor_paths
from lightning_hotcompile.swap.installation import Installation
from lightning_hotcompile.tracks import Track
from lightning_hotcompile.watch.clock import StepTime
from lightning_hotcompile.watch.step_record import PairedUnits, StepRecord
from tests.hot import assert_same
from tests.made_up_machine import STEP_S, Machine
from tests.models import Net, fit, seeded

LONG = 250
MODULES = 5
"""Runs of compiled modules in a step of the model with scope ``module``."""


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., HotCompile]:
    def run(machine: Machine, steps: int = LONG, **options: Any) -> HotCompile:
        return machine.train(monkeypatch, steps, **{"store": str(tmp_path / "store"), **options})

    return run


def test_a_plan_that_is_faster_is_kept(train: Callable[..., HotCompile]) -> None:
    machine = Machine(step=-2.0, module=-2.0, optimizer=-1.0)
    report = train(machine).report
    assert (report.phase, report.scope) == ("steady", "module")
    assert report.tried == pytest.approx({"step": STEP_S / 17, "module": STEP_S / (STEP_S - 2 * MODULES - 1)})
    assert report.speedup is not None
    assert report.speedup.value == pytest.approx(STEP_S / 9)
    assert any("step 1.18x, module 2.22x; module is in use" in note for note in report.notes)


def test_a_plan_that_is_slower_is_left_and_the_one_before_goes_on_without_a_compile(
    train: Callable[..., HotCompile],
) -> None:
    machine = Machine(step=-6.0, module=1.0, optimizer=-1.0)
    report = train(machine).report
    assert (report.phase, report.scope) == ("steady", "step")
    assert list(report.tried) == ["step", "module"]
    assert "scope module was tried" in report.reason
    assert machine.graphs["step"] == 1
    assert machine.runs["step"] > LONG / 2
    assert report.speedup is not None
    assert report.speedup.value == pytest.approx(STEP_S / 13)


def test_a_plan_that_helps_where_the_first_did_not(train: Callable[..., HotCompile]) -> None:
    report = train(Machine(step=4.0, module=-2.0, optimizer=2.0)).report
    assert report.tried == pytest.approx({"step": 1.0, "module": STEP_S / 10})
    assert (report.phase, report.scope) == ("steady", "module")
    assert report.eager_parts == ("optimizer",)


def test_none_that_helps(train: Callable[..., HotCompile]) -> None:
    machine = Machine(step=4.0, module=1.0, optimizer=2.0)
    report = train(machine).report
    assert (report.phase, report.scope) == ("reverted", "step")
    assert report.tried == {"step": 1.0, "module": 1.0}


def test_a_plan_that_cannot_be_compiled_is_left(train: Callable[..., HotCompile]) -> None:
    machine = Machine("module", step=-6.0, optimizer=-1.0)
    report = train(machine, on_error="eager").report
    assert (report.phase, report.scope) == ("steady", "step")
    assert report.tried == pytest.approx({"step": STEP_S / 13, "module": STEP_S / 19})  # by the optimizer
    assert machine.runs["step"] > LONG / 2


@pytest.mark.parametrize(
    ("steps", "options"),
    [(65, {}), (LONG, {"scope": "step"}), (LONG, {"cost_gate": False}), (LONG, {"min_speedup": 0.0})],
    ids=["too few steps are left", "the scope was asked for", "no cost gate", "whatever it gains"],
)
def test_no_other_plan_is_tried(
    train: Callable[..., HotCompile], steps: int, options: dict[str, Any]
) -> None:
    machine = Machine(step=-2.0, module=-2.0, optimizer=-1.0)
    assert list(train(machine, steps, **options).report.tried) == ["step"]
    assert machine.graphs["module"] == 0


def test_the_next_run_begins_with_the_best_one_and_tries_no_other(train: Callable[..., HotCompile]) -> None:
    train(Machine(step=-2.0, module=-2.0, optimizer=-1.0))
    machine = Machine(step=-2.0, module=-2.0, optimizer=-1.0)
    report = train(machine).report
    assert (report.phase, report.scope) == ("steady", "module")
    assert machine.graphs["step"] == 0
    assert list(report.tried) == ["module"]


def test_a_run_that_ends_in_a_trial_reports_and_remembers_what_it_had_before(
    train: Callable[..., HotCompile],
) -> None:
    machine = Machine(step=-6.0)  # a part that makes no difference takes long to be tried
    callback = train(machine, 170)
    report = callback.report
    phases = [e["phase"] for e in report.events if e["kind"] == "phase_changed"]
    assert phases[-2:] == ["refining", "steady"], "who has the event log alone knows how it ended, too"
    assert (report.phase, report.scope, list(report.tried)) == ("steady", "step", ["step"])
    assert report.speedup is not None
    assert report.speedup.value == pytest.approx(STEP_S / 14)
    again = train(machine, 170).report
    assert "the measured speed-up of 1.43x" in again.decision


class MadeUpChild:
    """Stands in for the run of a child process, which is over at once."""

    made = 0
    is_tracing = is_slowing = False
    has_compiled = True
    took_s = None

    def __init__(self, *_: Any, **__: Any) -> None:
        type(self).made += 1
        self.crash = "the child process was ended by SIGSEGV" if self.made == 2 else None

    def is_over(self) -> bool:
        return True

    def in_words(self) -> str:
        return "prewarm: made up"

    def begin(self) -> None:
        """There is no process."""

    end_step = cancel = begin


def test_a_trial_whose_child_process_crashes_leaves_the_plan_before_in_use(
    train: Callable[..., HotCompile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MadeUpChild, "made", 0)
    monkeypatch.setattr(ahead, "PrewarmRun", MadeUpChild)
    monkeypatch.setattr(ahead, "why_not", lambda *_: None)
    machine = Machine(step=-6.0, module=-7.0, optimizer=-1.0)
    report = train(machine).report
    assert MadeUpChild.made == 2
    assert machine.graphs["module"] == 0
    assert (report.phase, report.scope, list(report.tried)) == ("steady", "step", ["step"])
    assert machine.runs["step"] > LONG / 2, "it is taken up again at once, not in the report alone"


def test_a_trial_whose_code_does_not_fit_leaves_the_plan_before_alone(
    train: Callable[..., HotCompile], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_up = Rounds._take_up

    def after_misses(rounds: Rounds, best: Any, track: Any, reason: str) -> None:
        track.failure, track.recompile_episodes = "compiled code did not fit", 4
        take_up(rounds, best, track, reason)

    monkeypatch.setattr(Rounds, "_take_up", after_misses)
    report = train(Machine(step=-6.0, module=1.0, optimizer=-1.0)).report
    assert (report.phase, report.scope) == ("steady", "step")


def test_steps_of_a_slower_plan_are_not_booked_at_the_gain_of_the_one_that_is_kept() -> None:
    ledger = Ledger()
    for eager_s, compiled_s in ((3.0, 1.0), (1.0, 2.0)):
        ledger.pairs = PairedUnits()
        for i in range(20):
            compiled = i % 2 == 1
            record = StepRecord(phase="settling", compiled=compiled, pairs=ledger.pairs)
            seconds = compiled_s if compiled else eager_s
            ledger.add(StepTime(tag=record, seconds=seconds, wait_seconds=0.0), record)
        ledger.end_round()
    assert ledger.saved_s == pytest.approx(10 * (3.0 - 1.0) + 10 * (1.0 - 2.0))


def test_where_one_plan_cannot_be_taken_out_the_others_are(
    train: Callable[..., HotCompile], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    end = Flip.end

    def fails(flip: Flip) -> None:
        end(flip)
        ended.append(flip.installation.plan.name)
        raise RuntimeError(f"{ended[-1]} stays")

    monkeypatch.setattr(Flip, "end", fails)
    with pytest.raises(RuntimeError, match="stays"):
        train(Machine(step=-2.0, module=-2.0, optimizer=-1.0))
    assert sorted(set(ended)) == ["module", "step"]


def test_max_flips_bounds_the_plans_too(train: Callable[..., HotCompile]) -> None:
    machine = Machine(step=-2.0, module=-2.0, optimizer=-1.0)
    assert list(train(machine, max_flips=1).report.tried) == ["step"]


@pytest.mark.parametrize("options", [{"scope": "step"}, {"compile_optimizer": True}], ids=str)
def test_a_run_that_asks_for_something_else_knows_nothing_of_what_auto_has_found(
    train: Callable[..., HotCompile], options: dict[str, Any]
) -> None:
    train(Machine(step=-2.0, module=-2.0, optimizer=3.0))
    report = train(Machine(step=-2.0, module=-2.0, optimizer=3.0), 60, **options).report
    flips = [e["reason"] for e in report.events if e["kind"] == "phase_changed" and e["phase"] == "flipping"]
    assert "an assumed speed-up" in flips[0]


@pytest.mark.slow
def test_two_plans_for_real(cheap_compiles: None, tmp_path: Path) -> None:
    """Inductor and the real clock: whichever plan wins, both were measured, and nothing is lost."""
    plain, model = seeded(Net), seeded(Net)
    settings: dict[str, Any] = {
        "threshold": 3,
        "prewarm": False,
        "on_error": "raise",
        "fused_optimizer": False,
    }
    callback = HotCompile(store=str(tmp_path / "store"), **settings)
    fit(plain, max_steps=1200, max_epochs=-1)
    fit(model, [callback], max_steps=1200, max_epochs=-1)
    report = callback.report
    assert list(report.tried) == ["step", "module"]
    assert report.phase in ("steady", "reverted")
    left = [event["left"] for event in report.events if event["kind"] == "scopes_raced"]
    assert report.tried[report.scope] == max(
        report.tried[scope] for scope in report.tried if scope not in left
    )
    assert "NOT right" not in report.parity
    assert_same(plain, model, tolerance=1e-2)


LEAN = "step without optimizer"


class TestOptimizersThatStayEager:
    """Where compiling them would take longer than it is expected to save."""

    SHORT = 80

    @pytest.fixture(autouse=True)
    def dear_optimizers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compile_cost, "SECONDS_PER_TENSOR", 3.0)

    def test_in_a_run_that_is_too_short_for_them(self, train: Callable[..., HotCompile]) -> None:
        machine = Machine(step=-4.0, optimizer=-4.0)
        report = train(machine, self.SHORT).report
        assert (report.phase, report.scope, list(report.tried)) == ("steady", LEAN, [LEAN])
        assert machine.graphs["step"] == 1
        assert machine.graphs["optimizer"] == 0
        assert LEAN in report.plan.splitlines()[0]
        assert "optimizer 0 (AdamW) is left out, for a shorter compile" in report.notes
        assert report.eager_parts == ()

    def test_not_in_a_long_one(self, train: Callable[..., HotCompile]) -> None:
        report = train(Machine(step=-4.0, optimizer=-4.0)).report
        assert (report.scope, next(iter(report.tried))) == ("step", "step")

    @pytest.mark.parametrize(
        "options",
        [{"compile_optimizer": True}, {"cost_gate": False}, {"max_flips": 1}, {"min_speedup": 0.0}],
        ids=str,
    )
    def test_not_where_all_was_asked_for(
        self, train: Callable[..., HotCompile], options: dict[str, Any]
    ) -> None:
        assert train(Machine(step=-4.0, optimizer=-4.0), self.SHORT, **options).report.scope == "step"

    @pytest.mark.parametrize("scope", ["auto", "step"])
    def test_a_longer_run_begins_so_and_then_tries_all(
        self, train: Callable[..., HotCompile], scope: str
    ) -> None:
        train(Machine(step=-4.0, optimizer=-4.0), self.SHORT, scope=scope)
        machine = Machine(step=-4.0, module=1.0, optimizer=-4.0)
        report = train(machine, scope=scope).report
        assert list(report.tried)[:2] == [LEAN, "step"]
        assert (report.phase, report.scope) == ("steady", "step")
        assert report.speedup is not None
        assert report.speedup.value == pytest.approx(STEP_S / 12)

    def test_that_it_did_not_help_says_nothing_about_the_whole(
        self, train: Callable[..., HotCompile]
    ) -> None:
        first = train(Machine(step=2.0, optimizer=-6.0), self.SHORT).report
        assert (first.phase, list(first.tried)) == ("reverted", [LEAN])
        again = train(Machine(step=2.0, optimizer=-6.0), self.SHORT).report
        assert (again.phase, list(again.tried)) == ("steady", ["step"])

    def test_nor_does_it_keep_short_runs_of_the_whole_from_adding_up(
        self, train: Callable[..., HotCompile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory, "_keeps_code", lambda backend: True)
        monkeypatch.setattr(inductor_paths, "holds_graphs", lambda folder: True)
        monkeypatch.setattr(Store, "compile_samples", lambda self: ())
        assert train(Machine(step=2.0, optimizer=-6.0), self.SHORT).report.phase == "reverted"
        (file,) = Store(tmp_path / "store")._records.profiles()
        sums = []
        for _ in range(2):
            report = train(Machine(step=2.0, optimizer=-6.0), 12).report
            assert (report.phase, report.scope) == ("declined", "step"), report.decision
            profile = Profile.from_bytes(file.read_bytes())
            assert (profile.verdict, profile.scope) == ("bad", LEAN)
            sums.append(profile.forgone_s or 0.0)
        assert sums[1] > sums[0] > 0

    def test_what_was_not_measured_in_the_run_before_is_begun_alike(
        self, train: Callable[..., HotCompile], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gains = {("step",): 1.23, ("step", "optimizer"): 1.25}
        with monkeypatch.context() as patch:
            patch.setattr(memory, "expected_speedup", lambda r, *_: gains[tuple(x.kind for x in r)])
            assert train(Machine(step=-4.0), 15).report.phase == "settling"
        machine = Machine(step=-4.0, optimizer=-4.0)
        assert next(iter(train(machine).report.tried)) == LEAN

    def test_not_where_the_step_alone_would_save_nothing(
        self, train: Callable[..., HotCompile], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gains = {("step",): 0.9, ("step", "optimizer"): 1.05}
        monkeypatch.setattr(memory, "expected_speedup", lambda r, *_: gains[tuple(x.kind for x in r)])
        report = train(Machine(), 30).report
        assert (report.phase, report.scope) == ("declined", "step")

    def test_each_decision_is_about_the_batch_of_its_step(
        self, train: Callable[..., HotCompile], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun: list[tuple[str, bool]] = []
        usual = Moves.move

        def move(moves: Moves, track: Track, steps: int) -> None:
            begun.append((moves._plan.name, moves._flip.batch._batch is not None))
            usual(moves, track, steps)

        monkeypatch.setattr(Moves, "move", move)
        train(Machine(step=-4.0), self.SHORT)
        assert {name for name, _ in begun} == {"step", LEAN}
        assert all(known for _, known in begun)

    def test_a_compile_that_found_a_part_in_the_cache_says_nothing_about_others(
        self, train: Callable[..., HotCompile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Installation, "was_warm", None)
        report = train(Machine(step=-4.0, optimizer=-4.0)).report
        store = Store(tmp_path / "store")
        (file,) = store._records.profiles()
        assert report.phase == "steady"
        assert Profile.from_bytes(file.read_bytes()).compile_s is None
        assert store.compile_samples() == ()

    def test_weights_are_the_same(self, train: Callable[..., HotCompile]) -> None:
        plain = seeded(Net)
        fit(plain, max_steps=self.SHORT, max_epochs=-1)
        machine = Machine(step=-4.0, optimizer=-4.0)
        assert train(machine, self.SHORT).report.scope == LEAN
        assert_same(plain, machine.model)


TUNED = "max-autotune-no-cudagraphs"


@pytest.fixture
def tunable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: there is a mode to try."""
    monkeypatch.setattr(preflight, "other_modes", lambda *_: (TUNED,))


@pytest.mark.usefixtures("tunable")
class TestModes:
    STEPS = 900

    def test_a_mode_is_tried_on_the_scope_that_is_kept(self, train: Callable[..., HotCompile]) -> None:
        machine = Machine(step=-2.0, module=-2.0, tuned=-0.5)
        report = train(machine, self.STEPS).report
        assert report.tried == pytest.approx(
            {
                "step": STEP_S / 18,
                "module": STEP_S / (STEP_S - 2 * MODULES),
                f"module, {TUNED}": STEP_S / (STEP_S - 2.5 * MODULES),
            }
        )
        assert (report.phase, report.scope) == ("steady", f"module, {TUNED}")
        assert set(machine.modes) == {("module", TUNED)}
        assert report.plan.splitlines()[0].count(TUNED) == 1

    def test_one_that_is_slower_is_left(self, train: Callable[..., HotCompile]) -> None:
        machine = Machine(step=-6.0, module=1.0, tuned=1.0)
        report = train(machine, self.STEPS).report
        assert list(report.tried) == ["step", "module", f"step, {TUNED}"]
        assert (report.phase, report.scope) == ("steady", "step")
        assert f"scope step, {TUNED} was tried: 1.33x" in report.reason
        assert machine.runs["step"] > self.STEPS / 2

    def test_the_next_run_begins_with_it_and_tries_no_other(self, train: Callable[..., HotCompile]) -> None:
        train(Machine(step=-6.0, module=1.0, tuned=-1.0), self.STEPS)
        machine = Machine(step=-6.0, module=1.0, tuned=-1.0)
        report = train(machine, self.STEPS).report
        assert (report.phase, list(report.tried)) == ("steady", [f"step, {TUNED}"])
        assert machine.graphs["module"] == 0

    def test_its_compile_says_nothing_about_others(
        self, train: Callable[..., HotCompile], tmp_path: Path
    ) -> None:
        report = train(Machine(step=-2.0, module=-2.0, tuned=-0.5), self.STEPS).report
        assert report.scope.endswith(TUNED)
        assert Store(tmp_path / "store").compile_samples() == ()

    @pytest.mark.parametrize(
        ("tried", "asked_for"),
        [
            (TUNED, {}),
            (None, {"mode": TUNED}),
            (None, {"mode": "max-autotune"}),
            (None, {"options": {"max_autotune_gemm": True}}),
        ],
        ids=str,
    )
    def test_no_child_process_compiles_it(self, tried: str | None, asked_for: dict[str, Any]) -> None:
        unused: Any = None
        plan = replace(plan_compile(seeded(Net), scope="step"), mode=tried)
        context = StageContext(
            trainer=unused,
            module=unused,
            config=HotCompileConfig(**asked_for),
            stage="train",
            watch=unused,
            ledger=unused,
            story=unused,
            memory=unused,
            side=unused,
            together=unused,
            shared=unused,
            child_limit_s=None,
            now=unused,
        )
        assert "times kernels" in str(Ahead(context.for_plan(plan)).why_none())

    def test_none_is_tried_where_nothing_helps(self, train: Callable[..., HotCompile]) -> None:
        machine = Machine(step=4.0, module=1.0, optimizer=2.0)
        assert list(train(machine, self.STEPS).report.tried) == ["step", "module"]

    def test_none_is_tried_in_a_run_that_is_too_short_for_it(self, train: Callable[..., HotCompile]) -> None:
        machine = Machine(step=-6.0, module=1.0, tuned=-1.0)
        assert list(train(machine, LONG).report.tried) == ["step", "module"]
        assert not machine.modes

    @pytest.mark.slow
    def test_inductor_gets_the_mode(self, cheap_compiles: None, tmp_path: Path) -> None:
        settings: dict[str, Any] = {"threshold": 3, "prewarm": False, "on_error": "raise"}
        settings["fused_optimizer"] = False
        plain, model = seeded(Net), seeded(Net)
        callback = HotCompile(store=str(tmp_path / "store"), **settings)
        fit(plain, max_steps=600, max_epochs=-1)
        fit(model, [callback], max_steps=600, max_epochs=-1)
        report = callback.report
        steady = max(report.tried["step"], report.tried["module"]) > 1
        assert [TUNED in name for name in report.tried] == [False, False, *[True] * steady]
        assert "NOT right" not in report.parity
        assert_same(plain, model, tolerance=1e-2)


@pytest.mark.parametrize(
    ("options", "device", "modes"),
    [
        ({}, "cuda", (TUNED,)),
        ({}, "cpu", ()),
        ({"mode": "default"}, "cuda", ()),
        ({"mode": "reduce-overhead"}, "cuda", ()),
        ({"options": {"max_autotune": True}}, "cuda", ()),
        ({"options": {}}, "cuda", ()),
        ({"backend": "aot_eager"}, "cuda", ()),
    ],
    ids=str,
)
def test_modes_that_can_be_tried(options: dict[str, Any], device: str, modes: tuple[str, ...]) -> None:
    assert preflight.other_modes(HotCompileConfig(**options), device) == modes


def test_weights_are_those_of_a_run_without_the_callback(train: Callable[..., HotCompile]) -> None:
    plain = seeded(Net)
    fit(plain, max_steps=LONG, max_epochs=-1)
    machine = Machine(step=-6.0, module=1.0, optimizer=-1.0)
    assert list(train(machine).report.tried) == ["step", "module"]
    assert_same(plain, machine.model)
