"""A second run uses what the first one has learned."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest

from lightning_hotcompile import HotCompile, HotCompileConfig, plan_compile
from lightning_hotcompile.machine import Phase
from lightning_hotcompile.plan import compile_cost, forecast
from lightning_hotcompile.receipt.ledger import Ledger
from lightning_hotcompile.run import ahead, memory, weighing
from lightning_hotcompile.run.memory import Memory
from lightning_hotcompile.run.store_in_use import StoreInUse
from lightning_hotcompile.run.weighing import Weighing
from lightning_hotcompile.store import compiler_cache, samples
from lightning_hotcompile.store.folder import StoreError
from lightning_hotcompile.store.profiles import Profile
from lightning_hotcompile.store.store import Store
from lightning_hotcompile.swap.inductor import paths as inductor_paths
from lightning_hotcompile.swap.prewarm import choice
from lightning_hotcompile.watch.signature import SignatureReader, StepSignature
from lightning_hotcompile.watch.stats import Ratio
from tests.hot import assert_same
from tests.models import Small, fit, seeded
from tests.store import examples
from tests.view.examples import report

READ_SAMPLES = Store.compile_samples
KEEPS_CODE = memory._keeps_code


@pytest.fixture(autouse=True)
def _no_samples(cheap_compiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "compile_samples", lambda self: ())


def learning(folder: Path, **options: Any) -> HotCompile:
    settings: dict[str, Any] = {"threshold": 5, "backend": "aot_eager", "min_speedup": 0.0}
    settings["fused_optimizer"] = False  # so that there is an optimizer to compile, for who asks for that
    settings["compile_optimizer"] = False  # it takes most of the time, and is remembered like the rest
    return HotCompile(store=str(folder), on_error="raise", **{**settings, **options})


def flipped_at(callback: HotCompile) -> int | None:
    return next((e["step"] for e in callback.report.events if e["kind"] == "compiling"), None)


@pytest.mark.parametrize("scope", ["step", "regions"])
def test_a_plan_that_was_good_flips_at_once_in_the_next_run(tmp_path: Path, scope: str) -> None:
    options: dict[str, Any] = {"scope": scope, "compile_optimizer": "auto"}
    one, two = learning(tmp_path / "s", **options), learning(tmp_path / "s", **options)
    plain, model = seeded(Small), seeded(Small)
    fit(seeded(Small), [one], max_epochs=6)
    assert one.report.phase == "steady"
    fit(plain, max_epochs=6)
    # What the first run measured stays: its compiling took longer than these small steps can save.
    profile = next(iter(Store(tmp_path / "s")._records.profiles()))
    assert profile.is_file()
    _forget_costs(tmp_path / "s")
    fit(model, [two], max_epochs=6)
    assert (flipped_at(one), flipped_at(two)) == (5, 1)
    assert_same(plain, model)


@pytest.mark.parametrize(("is_measured", "verdict"), [(True, "good"), (False, "unknown")])
def test_what_was_kept_unmeasured_is_no_verdict(is_measured: bool, verdict: str) -> None:
    """It would stand for the measured one of an earlier run."""
    ratio = Ratio(value=1.2, low=1.1, high=1.3, n=9, confidence=0.95) if is_measured else None
    ended = cast(Any, SimpleNamespace(phase="steady", speedup=ratio, reason=""))
    assert Memory._verdict(cast(Any, None), ended) == verdict


def _forget_costs(folder: Path) -> None:
    """So that the forecast of the second run is about the verdict and not about these seconds."""
    for path in Store(folder)._records.profiles():
        known = Profile.from_bytes(path.read_bytes())
        cheap = replace(
            known, compile_s=1e-6, warm_compile_s=1e-6, speedup=2.0, speedup_low=1.9, speedup_high=2.1
        )
        path.write_bytes(cheap.to_bytes())


class NoChild:
    """Stands in for a child process that nobody should start."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a child process was started")


@pytest.mark.parametrize("is_there", [True, False])
def test_code_that_an_earlier_run_has_compiled_needs_no_child_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    fit(seeded(Small), [learning(tmp_path / "s", scope="step")], max_epochs=6)
    _forget_costs(tmp_path / "s")
    asked: list[str] = []
    monkeypatch.setattr(ahead, "why_not", lambda *_: None)
    monkeypatch.setattr(ahead, "PrewarmRun", NoChild)
    monkeypatch.setattr(memory, "_keeps_code", lambda backend: True)
    monkeypatch.setattr(inductor_paths, "holds_graphs", lambda folder: asked.append("graphs") or is_there)
    again = learning(tmp_path / "s", scope="step")
    with nullcontext() if is_there else pytest.raises(AssertionError, match="a child process was started"):
        fit(seeded(Small), [again], max_epochs=6)
    assert asked == ["graphs"] or not is_there, "what is there is remembered"
    assert flipped_at(again) == (1 if is_there else None)


def test_a_child_process_that_is_to_compile_is_in_the_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = choice.Surroundings(posix=True, cores=2, training_threads=1, accelerator=False, free_memory=None)
    monkeypatch.setattr(compile_cost, "BASE_COMPILE_S", 40.0)
    monkeypatch.setattr(compile_cost, "TOOLCHAIN_S", 0.0)
    monkeypatch.setattr(choice.Surroundings, "here", lambda **_: around)
    monkeypatch.setattr(memory, "expected_speedup", lambda *_: 2.0)
    monkeypatch.setattr(Ledger, "eager_step_s", 1.0)  # as if: loading the code takes 7 s
    callback = learning(tmp_path / "s", backend="inductor", scope="step", prewarm="auto", cost_gate=True)
    fit(seeded(Small), [callback], max_epochs=1, limit_train_batches=8)
    assert callback.report.phase == "declined"
    assert "a child process would compile for about 40 s" in callback.report.reason


@pytest.fixture
def a_long_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """240 steps take 0.24 s, of which compiled code saves 0.048 s; to compile takes 0.09 s."""
    monkeypatch.setattr(Ledger, "eager_step_s", 0.001)
    monkeypatch.setattr(memory, "expected_speedup", lambda *_: 1.25)
    monkeypatch.setattr(compile_cost, "BASE_COMPILE_S", 0.09)
    monkeypatch.setattr(compile_cost, "TOOLCHAIN_S", 0.0)
    monkeypatch.setattr(memory, "_keeps_code", lambda backend: True)


def the_profile(folder: Path) -> Profile | None:
    files = Store(folder)._records.profiles()
    return Profile.from_bytes(files[0].read_bytes()) if files else None


def test_runs_that_are_too_short_one_by_one_compile_after_a_while(
    tmp_path: Path, a_long_compile: None
) -> None:
    runs, known = [learning(tmp_path / "s", scope="step") for _ in range(3)], []
    for callback in runs:
        fit(seeded(Small), [callback], max_epochs=20)
        known.append(the_profile(tmp_path / "s"))
    assert [callback.report.phase for callback in runs] == ["declined", "declined", "steady"]
    assert [p and p.verdict for p in known] == ["declined", "declined", "good"]
    saved = 0.048 - forecast.WARM_SHARE * 0.09
    assert [p and p.forgone_s for p in known[:2]] == pytest.approx([saved, 2 * saved], rel=1e-3)
    assert known[2] is not None
    assert known[2].forgone_s is None
    assert "worth it for the runs to come" in runs[2].report.decision
    assert "earlier runs that declined would have saved 0.1 s" in runs[2].report.decision


def test_after_a_compile_in_vain_counting_begins_anew(tmp_path: Path, a_long_compile: None) -> None:
    def broken(graph: Any, inputs: Any, **_: Any) -> Any:
        raise RuntimeError("no compiler yet")

    phases, sums = [], []
    for _ in range(4):
        callback = HotCompile(
            threshold=5, backend=broken, scope="step", store=str(tmp_path / "s"), fused_optimizer=False
        )
        fit(seeded(Small), [callback], max_epochs=20)
        known = the_profile(tmp_path / "s")
        assert known is not None
        phases.append(callback.report.phase)
        sums.append(known.forgone_s)
    assert phases == ["declined", "declined", "reverted", "declined"]
    assert sums[2] == 0
    assert sums[3] == pytest.approx(sums[0], rel=1e-3)


def test_a_first_run_lends_to_the_next_which_lends_nothing_if_that_was_in_vain(
    tmp_path: Path, a_long_compile: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: Any, inputs: Any, **_: Any) -> Any:
        raise RuntimeError("no compiler yet")

    monkeypatch.setattr(compile_cost, "BASE_COMPILE_S", 0.05)  # 0.046 s of 0.23 s are saved
    reports = []
    for _ in range(2):
        callback = HotCompile(
            threshold=5, backend=broken, scope="step", store=str(tmp_path / "s"), fused_optimizer=False
        )
        fit(seeded(Small), [callback], max_epochs=20)
        reports.append(callback.report)
    assert [report.phase for report in reports] == ["reverted", "declined"]
    assert "worth it for the runs to come" in reports[0].decision
    assert "one more run like this would save" in reports[0].decision


def test_only_the_first_run_lends_also_where_the_code_is_lost_each_time(
    tmp_path: Path, a_long_compile: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cost, "BASE_COMPILE_S", 0.05)
    monkeypatch.setattr(StoreInUse, "holds_graphs", lambda self: False)
    asked: list[list[bool]] = []
    is_lasting = Memory.is_lasting

    def spied(self: Memory, signature: Any) -> bool:
        asked[-1].append(is_lasting(self, signature))
        return asked[-1][-1]

    monkeypatch.setattr(Memory, "is_lasting", spied)
    reports = []
    for _ in range(2):
        asked.append([])
        callback = learning(tmp_path / "s", scope="step")
        fit(seeded(Small), [callback], max_epochs=20)
        reports.append(callback.report)
    assert "one more run like this would save" in reports[0].decision
    assert reports[0].phase == "steady"
    assert set(asked[0]) == {True}
    assert set(asked[1]) == {False}


def test_a_rank_that_would_have_compiled_has_not_begun_to_where_another_declined() -> None:
    gain = forecast.Expectation(compile_s=10.0, speedup=1.25)
    unused: Any = None
    context: Any = SimpleNamespace(
        trainer=unused,
        config=unused,
        stage="train",
        watch=SimpleNamespace(op_statistics=None),
        ledger=SimpleNamespace(eager_step_s=0.1),
        memory=SimpleNamespace(expectation=lambda *_: gain),
    )
    asked = Weighing(context, unused, unused)
    go = forecast.Decision(go=True, reason="worth it", expected_cost_s=10.0, expected_saving_s=11.0)

    def forgone(phase: Phase, flips: int = 0) -> float | None:
        state = SimpleNamespace(reason="another rank declined", flips=flips)
        track: Any = SimpleNamespace(phase=phase, state=state, steps=1000)
        with patch.object(Weighing, "_on_cpu", True):
            return asked.forgone_s(track, go)

    assert forgone(Phase.DECLINED) == pytest.approx(20.0 - forecast.WARM_SHARE * 10.0)
    assert forgone(Phase.DECLINED, flips=1) == 0.0
    assert forgone(Phase.PREWARMING) == 0.0
    assert forgone(Phase.OBSERVING) is None


@pytest.mark.parametrize(("left", "pays"), [(100, False), (1_000_000, True), (None, True)])
def test_whether_a_step_is_recorded_is_not_asked_of_the_store(
    monkeypatch: pytest.MonkeyPatch, left: int | None, pays: bool
) -> None:
    monkeypatch.setattr(weighing, "remaining_batches", lambda *_: left)
    monkeypatch.setattr(compile_cost, "BASE_COMPILE_S", 2.5)
    unused: Any = None  # the store among them
    plan = replace(plan_compile(seeded(Small), scope="step"), regions=())
    ledger = SimpleNamespace(eager_step_s=0.001, wait_s=0.0)
    config = HotCompileConfig()
    context: Any = SimpleNamespace(
        trainer=unused, config=config, stage="train", watch=unused, ledger=ledger, memory=unused
    )
    asked = Weighing(context, plan, unused)
    assert asked.may_pay() is pays


def test_a_first_run_lends_nothing_that_no_other_would_find(
    tmp_path: Path, a_long_compile: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cost, "BASE_COMPILE_S", 0.05)
    alone = HotCompile(threshold=5, backend="aot_eager", scope="step", store=None, on_error="raise")
    fit(seeded(Small), [alone], max_epochs=20)
    assert alone.report.phase == "declined"


def test_a_short_run_does_not_forget_what_longer_ones_have_forgone(
    tmp_path: Path, a_long_compile: None
) -> None:
    sums = []
    for epochs in (20, 1):
        fit(seeded(Small), [learning(tmp_path / "s", scope="step")], max_epochs=epochs)
        known = the_profile(tmp_path / "s")
        assert known is not None
        sums.append(known.forgone_s)
    assert sums[0] == sums[1] > 0


def test_what_no_cache_keeps_is_not_added_up(
    tmp_path: Path, a_long_compile: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_keeps_code", KEEPS_CODE)
    callback = learning(tmp_path / "s", scope="step", backend="aot_eager")
    fit(seeded(Small), [callback], max_epochs=20)
    assert callback.report.phase == "declined"
    assert the_profile(tmp_path / "s") is None


def test_a_run_that_would_save_nothing_forgoes_nothing(tmp_path: Path, a_long_compile: None) -> None:
    callback = learning(tmp_path / "s", scope="step")
    fit(seeded(Small), [callback], max_epochs=1)
    assert callback.report.phase == "declined"
    assert the_profile(tmp_path / "s") is None


def test_what_is_declined_since_it_was_slow_forgoes_nothing(tmp_path: Path, a_long_compile: None) -> None:
    def one() -> HotCompile:
        return learning(tmp_path / "s", min_speedup=50.0)

    fit(seeded(Small), [one()], max_epochs=60)
    before = the_profile(tmp_path / "s")
    fit(seeded(Small), [one()], max_epochs=20)
    assert before is not None
    assert before.verdict == "bad"
    assert the_profile(tmp_path / "s") == before


def test_a_plan_that_was_too_slow_is_declined_at_once_in_the_next_run(tmp_path: Path) -> None:
    one, two = learning(tmp_path / "s", min_speedup=50.0), learning(tmp_path / "s", min_speedup=50.0)
    fit(seeded(Small), [one], max_epochs=6)
    assert one.report.phase == "reverted"
    fit(seeded(Small), [two], max_epochs=1)
    assert two.report.phase == "declined"
    assert "an earlier run (" in two.report.reason
    assert "below min_speedup=50" in two.report.reason
    assert flipped_at(two) is None
    declined = next(e for e in two.report.events if e["kind"] == "declined")
    assert declined["step"] == 0


@pytest.mark.parametrize(
    "other",
    [{"scope": "regions"}, {"backend": "eager"}, {"dynamic": False}, {"compile_optimizer": "auto"}],
    ids=str,
)
def test_another_plan_or_backend_is_not_known(tmp_path: Path, other: dict[str, Any]) -> None:
    fit(seeded(Small), [learning(tmp_path / "s", min_speedup=50.0)], max_epochs=6)
    callback = learning(tmp_path / "s", min_speedup=50.0, **other)
    fit(seeded(Small), [callback], max_epochs=1)
    assert "an earlier run" not in callback.report.reason
    assert flipped_at(callback) is not None


def test_another_model_is_not_known(tmp_path: Path) -> None:
    fit(seeded(Small), [learning(tmp_path / "s", min_speedup=50.0)], max_epochs=6)
    callback = learning(tmp_path / "s", min_speedup=50.0)
    fit(seeded(Small, width=24), [callback], max_epochs=1)
    assert "an earlier run" not in callback.report.reason
    assert flipped_at(callback) is not None


def test_what_compiling_cost_is_the_next_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = learning(tmp_path / "s", scope="step", compile_optimizer="auto")
    fit(seeded(Small), [one], max_epochs=6)
    monkeypatch.setattr(Store, "compile_samples", READ_SAMPLES)
    (sample,) = Store(tmp_path / "s").compile_samples()
    assert sample.seconds == pytest.approx(one.report.compile_s)
    two = learning(tmp_path / "s", scope="step", compile_optimizer=True)
    fit(seeded(Small, width=24), [two], max_epochs=1)
    assert f"costs about {sample.seconds:.0f} s" in two.report.decision


def test_runs_that_find_their_code_in_the_cache_do_not_push_out_what_compiling_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "compile_samples", READ_SAMPLES)
    monkeypatch.setattr(samples, "MOST_SAMPLES", 3)
    plan, config = plan_compile(seeded(Small), scope="step"), HotCompileConfig()
    signature = StepSignature("train", "a", (), b"", b"", "grad", (), "32", None)

    def opened() -> memory.Memory:
        return memory.Memory(StoreInUse(str(tmp_path / "s"), "inductor"), plan, config, "train")

    Store(tmp_path / "s").add_compile_sample(examples.sample(7.0))
    known = opened().expectation(plan, None, 0.01)
    for seconds in (0.5, 0.6, 0.7):
        opened().learn(signature, report(), plan, compile_s=seconds, warm=True)
    assert opened().expectation(plan, None, 0.01) == known


def test_how_fast_one_backend_compiles_says_nothing_about_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "compile_samples", READ_SAMPLES)
    plan = plan_compile(seeded(Small), scope="step")
    signature = StepSignature("train", "a", (), b"", b"", "grad", (), "32", None)

    def opened(backend: Any) -> memory.Memory:
        config = HotCompileConfig(backend=backend)
        return memory.Memory(StoreInUse(str(tmp_path / "s"), backend), plan, config, "train")

    def seconds(backend: Any) -> float:
        return opened(backend).expectation(plan, None, 0.01).compile_s

    own = partial(broken, reason="long " * 100)
    assumed, backends = seconds("inductor"), ("eager", "aot_eager", broken, own)
    for took, backend in enumerate(backends, 1):
        opened(backend).learn(signature, report(), plan, compile_s=float(took), warm=False)
    assert [seconds(each) for each in backends] == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert seconds("inductor") == assumed
    opened("inductor").learn(signature, report(), plan, compile_s=30.0, warm=False)
    assert [seconds("inductor"), seconds("eager")] == pytest.approx([30.0, 1.0])


def broken(graph: Any, inputs: Any, reason: str = "no compiler") -> Any:
    """A backend."""
    raise RuntimeError(reason)


def test_what_a_child_process_took_is_the_next_forecast_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "compile_samples", READ_SAMPLES)
    plan, config = plan_compile(seeded(Small), scope="step"), HotCompileConfig()

    def opened() -> memory.Memory:
        return memory.Memory(StoreInUse(str(tmp_path / "s"), "inductor"), plan, config, "train")

    assumed = compile_cost.assumed_compile_s(plan.regions)
    assert opened().child_s(plan, 1.25) == pytest.approx(1.25 * assumed)
    opened().learn_child(plan, 5.0, 1.25)
    learned = opened()
    assert [learned.child_s(plan, crowding) for crowding in (1.25, 1.0)] == pytest.approx([5.0, 4.0])
    assert learned.expectation(plan, None, 0.01).compile_s == pytest.approx(assumed), "with all cores"


@pytest.mark.parametrize("tuned", [{"mode": "max-autotune"}, {"options": {"max_autotune": True}}])
def test_kernels_that_the_user_has_timed_take_their_time(tmp_path: Path, tuned: dict[str, Any]) -> None:
    plan = plan_compile(seeded(Small), scope="step")
    usual, timed = (
        memory.Memory(StoreInUse(str(tmp_path / "s"), "inductor"), plan, config, "train")
        for config in (HotCompileConfig(), HotCompileConfig(**tuned))
    )
    seconds = [each.expectation(plan, None, 0.01).compile_s for each in (usual, timed)]
    assert seconds[1] == pytest.approx(compile_cost.AUTOTUNE * seconds[0])


@pytest.mark.parametrize(("is_there", "step"), [(True, 1), (False, 5)])
def test_a_plan_that_was_good_waits_for_a_hot_step_if_its_code_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool, step: int
) -> None:
    monkeypatch.setattr(memory, "_keeps_code", lambda backend: True)
    fit(seeded(Small), [learning(tmp_path / "s", scope="step")], max_epochs=6)
    _forget_costs(tmp_path / "s")
    monkeypatch.setattr(StoreInUse, "holds_graphs", lambda self: is_there)
    again = learning(tmp_path / "s", scope="step")
    fit(seeded(Small), [again], max_epochs=6)
    assert flipped_at(again) == step


def test_what_runs_forgo_is_counted_for_a_plan_whose_code_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_keeps_code", lambda backend: True)
    monkeypatch.setattr(memory, "expected_speedup", lambda *_: 2.0)
    monkeypatch.setattr(StoreInUse, "holds_graphs", lambda self: False)
    fit(seeded(Small), [learning(tmp_path / "s", scope="step")], max_epochs=6)
    first = the_profile(tmp_path / "s")
    assert first is not None
    Store(tmp_path / "s").remember(
        replace(first, compile_s=1e4, speedup=2.0, speedup_low=1.9, speedup_high=2.1)
    )
    forgone = []
    for _ in range(2):
        run = learning(tmp_path / "s", scope="step", cost_gate=True)
        fit(seeded(Small), [run], max_epochs=6)
        assert run.report.phase == "declined"
        known = the_profile(tmp_path / "s")
        assert known is not None
        assert (known.verdict, known.compile_s) == (first.verdict, 1e4)
        forgone.append(known.forgone_s or 0.0)
    assert 0 < forgone[0] < forgone[1]


@pytest.mark.parametrize(("warm_s", "expected"), [(None, forecast.WARM_SHARE * 20.5), (3.0, 3.0)])
def test_a_known_plan_is_only_loaded_where_the_cache_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_s: float | None, expected: float
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    plan, config = plan_compile(seeded(Small), scope="step"), HotCompileConfig()
    in_use = StoreInUse(str(tmp_path), "inductor")
    in_use.begin()
    known = replace(examples.profile(), warm_compile_s=warm_s)
    assert memory.Memory(in_use, plan, config, "train").expectation(plan, known, 0.01).compile_s == 20.5
    (Store(tmp_path).compiler_cache_dir / inductor_paths.GRAPHS / "ab" / "abcdef").mkdir(parents=True)
    warm = memory.Memory(in_use, plan, config, "train").expectation(plan, known, 0.01)
    assert warm.compile_s == pytest.approx(expected)
    other = HotCompileConfig(backend="aot_eager")
    again = memory.Memory(StoreInUse(str(tmp_path), "aot_eager"), plan, other, "train")
    assert again.expectation(plan, known, 0.01).compile_s == 20.5, "which keeps nothing"


def test_a_compilers_folder_that_cannot_be_made_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor_paths, "default_folder", lambda: str(tmp_path / "torchs"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    in_use = StoreInUse(str(tmp_path / "s"), "inductor")
    store = in_use.begin()
    assert store is not None
    (tmp_path / "s" / "compiler").write_text("in the way")
    with pytest.raises(StoreError):
        _ = store.compiler_cache_dir
    assert (in_use.has_toolchain(), in_use.holds_graphs()) == (False, False)


class TestToolchain:
    """The C++ compiler's own start happens once in a lasting folder; the forecast knows whether it did."""

    @pytest.fixture(autouse=True)
    def _takes_a_while(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compile_cost, "TOOLCHAIN_S", 6.0)
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def opened(self, folder: Path) -> StoreInUse:
        in_use = StoreInUse(str(folder), "inductor")
        in_use.begin()
        return in_use

    def header(self, folder: Path, name: str = "c.h.gch") -> None:
        headers = Store(folder).compiler_cache_dir / inductor_paths.HEADERS
        headers.mkdir(parents=True, exist_ok=True)
        (headers / name).write_bytes(b"")

    def test_once_it_was_started_a_compile_is_expected_to_be_shorter(self, tmp_path: Path) -> None:
        plan, config = plan_compile(seeded(Small), scope="step"), HotCompileConfig()

        def expected() -> tuple[float, float]:
            known = memory.Memory(self.opened(tmp_path), plan, config, "train")
            return known.expectation(plan, None, 0.01).compile_s, known.child_s(plan, 1.25)

        before = expected()
        self.header(tmp_path, "c.h.gch.part")  # of a compile that was killed
        assert expected() == before
        self.header(tmp_path)
        assert expected() == pytest.approx((before[0] - 6.0, before[1] - 1.25 * 6.0))

    def test_it_is_asked_where_the_code_will_be(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        default = tmp_path / "torchs"
        monkeypatch.setattr(inductor_paths, "default_folder", lambda: str(default))
        self.header(tmp_path)
        in_use = self.opened(tmp_path)
        assert in_use.has_toolchain()
        in_use.begin_compiling()
        assert in_use.has_toolchain()
        in_use.end()
        assert not in_use.has_toolchain(), "without a store it is torch's own folder"
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "chosen"))
        assert not self.opened(tmp_path).has_toolchain(), "torch keeps headers in its own folder then"
        (default / inductor_paths.HEADERS).mkdir(parents=True)
        (default / inductor_paths.HEADERS / "c.h.pch").write_bytes(b"")
        assert self.opened(tmp_path).has_toolchain()
        assert not StoreInUse(str(tmp_path), "aot_eager").has_toolchain()

    def test_what_a_compile_took_is_held_against_what_was_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Store, "compile_samples", READ_SAMPLES)
        plan, config = plan_compile(seeded(Small), scope="step"), HotCompileConfig()
        memory.Memory(self.opened(tmp_path), plan, config, "train").learn_child(plan, 9.0, 1.5)
        self.header(tmp_path)
        learned = memory.Memory(self.opened(tmp_path), plan, config, "train")
        assert learned.child_s(plan, 1.5) == pytest.approx(0.0, abs=1e-3), "9 s were the toolchain's"
        learned.learn_child(plan, 9e-6, 1.0, had_toolchain=True)
        second, first = sorted(Store(tmp_path).compile_samples(), key=lambda sample: sample.assumed_s)
        assert first.assumed_s == pytest.approx(second.assumed_s * 1.5 + 9.0)


def test_a_failure_is_tried_again(tmp_path: Path) -> None:
    def broken(graph: Any, inputs: Any, **_: Any) -> Any:
        raise RuntimeError("no compiler yet")

    one = HotCompile(threshold=3, backend=broken, store=str(tmp_path / "s"))
    fit(seeded(Small), [one])
    assert one.report.phase == "reverted"
    two = HotCompile(threshold=3, backend=broken, store=str(tmp_path / "s"))
    fit(seeded(Small), [two])
    assert two.report.phase == "reverted"


def test_what_failed_while_it_was_slow_is_tried_again(tmp_path: Path) -> None:
    def learned(reason: str) -> str | None:
        in_use = StoreInUse(str(tmp_path / reason[:4]), "aot_eager")
        config, module = HotCompileConfig(backend="aot_eager"), seeded(Small)
        found = Memory(in_use, plan := plan_compile(module), config, "train")
        signature = SignatureReader(module).read(())
        slow = Ratio(value=0.8, low=0.7, high=0.9, n=10, confidence=0.98)
        ended = replace(report(), phase="reverted", reason=reason, speedup=slow)
        found.learn(signature, ended, plan, compile_s=1.0, warm=False)
        known = Memory(in_use, plan, config, "train").of(signature)
        return None if known is None else known.verdict

    assert learned("slower: 0.80x [0.70, 0.90], below min_speedup=1.02") == "bad"
    assert learned("nothing is left that can be used: compiled code raised in run 9") is None


@pytest.mark.parametrize(
    ("speedup", "then", "now", "is_declined"),
    [(2.0, 50.0, 0.0, False), (2.0, 50.0, 1.02, False), (2.0, 0.0, 3.0, True), (2.0, 50.0, 3.0, True)],
)
def test_a_verdict_is_by_the_speed_up_that_is_asked_for_now(
    tmp_path: Path, speedup: float, then: float, now: float, is_declined: bool
) -> None:
    fit(seeded(Small), [learning(tmp_path / "s", min_speedup=then)], max_epochs=6)
    _forget_costs(tmp_path / "s")  # as if it had been twice as fast
    callback = learning(tmp_path / "s", min_speedup=now)
    fit(seeded(Small), [callback], max_epochs=6)
    assert flipped_at(callback) == (None if is_declined else 1)
    if is_declined:
        assert callback.report.reason.startswith("an earlier run (")
        assert f"below min_speedup={now if then == 0 else then:g}" in callback.report.reason


@pytest.mark.parametrize(("high", "verdict"), [(6.1, "unknown"), (0.9, "bad")])
def test_a_few_pairs_that_were_enough_for_another_min_speedup_are_no_reason_against_this_one(
    high: float, verdict: str
) -> None:
    """With ``min_speedup=0`` ten pairs are enough, be it on a machine that others use as well."""
    known = examples.profile(speedup=0.51, speedup_low=0.16, speedup_high=high, pairs=10)
    found = memory._judged_anew(known, 1.02)
    assert found is not None
    assert found.verdict == verdict
    assert found.speedup == (None if verdict == "unknown" else 0.51)
    assert memory._judged_anew(known, 0.0) is known


@pytest.mark.parametrize("is_full", [True, False])
def test_why_no_compiled_code_is_kept_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    monkeypatch.delenv(inductor_paths.FOLDER, raising=False)
    if is_full:
        monkeypatch.setattr(compiler_cache, "LEAST_FREE_BYTES", 1 << 62)
    callback = learning(tmp_path / "s", scope="step")
    callback._store._backend = "inductor"  # so that there is a compiler whose code could be kept
    monkeypatch.setattr(StoreInUse, "follow", lambda self, config: None)
    fit(seeded(Small), [callback], max_epochs=6)
    assert callback.report.phase == "steady"
    (*told,) = (
        note for note in callback.report.notes if note.startswith("the store keeps no compiled code: ")
    )
    assert ["MiB left, less than 1 GiB" in note for note in told] == ([True] if is_full else [])


def test_without_store_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTCOMPILE_STORE", str(tmp_path / "s"))
    callback = HotCompile(threshold=3, backend="aot_eager", min_speedup=0.0, store=None)
    fit(seeded(Small), [callback], max_epochs=6)
    assert not (tmp_path / "s").exists()


class TestWithoutAForecast:
    """Who compiles whatever it costs is told nothing, but those after him are."""

    def test_a_plan_that_was_good_flips_at_once_in_the_next_run(self, tmp_path: Path) -> None:
        one = learning(tmp_path / "s", scope="step", cost_gate=False, prewarm=False)
        fit(seeded(Small), [one], max_epochs=6)
        assert one.report.phase == "steady"
        _forget_costs(tmp_path / "s")
        two = learning(tmp_path / "s", scope="step")
        fit(seeded(Small), [two], max_epochs=6)
        assert (flipped_at(one), flipped_at(two)) == (5, 1)

    def test_one_that_was_too_slow_is_declined_by_the_next_run(self, tmp_path: Path) -> None:
        slow = {"scope": "step", "min_speedup": 99.0, "prewarm": False}
        one = learning(tmp_path / "s", cost_gate=False, **slow)
        fit(seeded(Small), [one], max_epochs=6)
        assert one.report.phase == "reverted"
        two = learning(tmp_path / "s", **slow)
        fit(seeded(Small), [two], max_epochs=6)
        assert two.report.phase == "declined"
        assert flipped_at(two) is None

    def test_it_tries_what_was_too_slow_before(self, tmp_path: Path) -> None:
        slow = {"scope": "step", "min_speedup": 99.0, "prewarm": False, "cost_gate": False}
        for _ in range(2):
            callback = learning(tmp_path / "s", **slow)
            fit(seeded(Small), [callback], max_epochs=6)
            assert flipped_at(callback) == 5


def test_a_store_that_cannot_be_used_is_a_warning_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("a file")
    callback = learning(tmp_path / "s")
    with pytest.warns(UserWarning, match="remembers nothing") as told:
        fit(seeded(Small), [callback], max_epochs=6)
    assert callback.report.phase == "steady"
    assert len([each for each in told if "remembers nothing" in str(each.message)]) == 1
    (tmp_path / "s").unlink()
    fit(seeded(Small), [callback], max_epochs=6)
    assert Store(tmp_path / "s")._records.profiles(), "the next fit tries it again"


def test_batches_that_never_come_back_fill_neither_memory_nor_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    find = Store.find
    monkeypatch.setattr(Store, "find", lambda store, key: asked.append(key) or find(store, key))
    plan, config = plan_compile(seeded(Small), scope="step"), HotCompileConfig(store=str(tmp_path / "s"))
    known = Memory(StoreInUse(config.store, config.backend), plan, config, "train")
    reader = SignatureReader(seeded(Small))
    signatures = [reader.read([0] * n) for n in range(1, 40)]
    signatures = [each._replace(batch=(n, each.batch)) for n in range(20) for each in signatures]
    assert all(known.of(signature) is None for signature in signatures)
    assert len(asked) == len(known._known) == memory._MOST_ASKED


def test_a_damaged_profile_is_a_warning_and_is_written_again(tmp_path: Path) -> None:
    fit(seeded(Small), [learning(tmp_path / "s")], max_epochs=6)
    (path,) = Store(tmp_path / "s")._records.profiles()
    path.write_bytes(b"\x80 not a profile")
    with pytest.warns(UserWarning, match=path.name):
        fit(seeded(Small), [learning(tmp_path / "s")], max_epochs=6)
    assert path.read_bytes().startswith(b"{")


def test_copies_in_mid_run_have_no_store_open(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    copies: list[HotCompile] = []

    class Copies(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 10:
                copies.extend([copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))])

    callback = learning(tmp_path / "s")
    fit(seeded(Small), [callback, Copies()], max_epochs=2)
    for clone in copies:
        assert clone.report.steps == 10
        assert clone.config == callback.config
        fit(seeded(Small), [clone], max_epochs=2)
