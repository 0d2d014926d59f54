"""The capture of a real training in this process."""

from __future__ import annotations

import copy
import json
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.profilers import PyTorchProfiler
from torch.profiler import profile

from lightning_hotcompile import HotCompile, environment
from lightning_hotcompile.capture.analysis import STEP_NAME
from lightning_hotcompile.capture.callback import Capture
from lightning_hotcompile.capture.order import VARIABLE, Order
from lightning_hotcompile.capture.summary import complete
from lightning_hotcompile.errors import HotCompileWarning
from lightning_hotcompile.receipt.events import event_to_dict
from lightning_hotcompile.view.run import load_run
from tests.hot import assert_same, hot
from tests.models import Net, fit, loader, seeded


def capture(folder: Path, **wanted: Any) -> Capture:
    return Capture(Order(folder=str(folder), command=("python", "a.py"), **wanted), HotCompile)


def annotated(folder: Path) -> int:
    events = json.loads((folder / "trace.json").read_bytes())["traceEvents"]
    return sum(e.get("name") == STEP_NAME and e.get("ph") == "X" for e in events)


def test_so_many_steps_are_profiled_and_all_are_timed(tmp_path: Path) -> None:
    plain, watched = seeded(Net), seeded(Net)
    fit(plain, max_epochs=2)
    fit(watched, [capture(tmp_path, steps=3, skip=2)], max_epochs=2)
    assert_same(plain, watched, tolerance=0.0)
    assert annotated(tmp_path) == 3
    found = complete(tmp_path)
    assert found is not None
    assert [s.step for s in found.steps] == list(range(1, 25))
    assert [s.step for s in found.steps if s.note == "profiled"] == [3, 4, 5]
    assert (found.profiled_steps, found.device, found.command) == (3, "cpu", ("python", "a.py"))
    assert found.compiled_share == 0.0
    assert found.operators_per_step is not None
    assert found.operators_per_step > 30
    assert found.launches_per_step is None
    assert load_run(tmp_path).captured == found


def test_with_hotcompile_compiled_steps_are_profiled_and_the_report_is_there(tmp_path: Path) -> None:
    callback = hot()
    fit(seeded(Net), [capture(tmp_path, steps=4, after_decision=True), callback], max_epochs=6)
    found = complete(tmp_path)
    assert found is not None
    assert found.profiled_steps == annotated(tmp_path) == 4
    assert found.compiled_share is not None
    assert 0.3 < found.compiled_share <= 1.0
    run = load_run(tmp_path)
    assert run.report is not None
    assert run.report.phase == "steady"
    profiled = [s for s in run.samples if s.note == "profiled"]
    assert len(profiled) == 4
    assert {s.phase for s in profiled} == {"steady"}


@pytest.mark.parametrize("idle", [False, True])
def test_the_story_is_that_of_the_scripts_own_callback(tmp_path: Path, idle: bool) -> None:
    """The one from the environment leaves the work to it, also where it declines before the first step."""
    log = tmp_path / "events.jsonl"
    options = {"scope": "module", "keep_eager": ("*",)} if idle else {}
    own, other = hot(event_log=tmp_path / "own.jsonl", **options), hot(event_log=log)
    other.from_environment = True
    fit(seeded(Net), [own, capture(tmp_path, steps=2), other], max_epochs=2)
    assert "of its own" in other.report.reason
    run = load_run(tmp_path)
    assert run.report is not None
    assert run.report.reason == own.report.reason
    assert log.read_bytes() == (tmp_path / "own.jsonl").read_bytes()
    assert [event_to_dict(event) for event in run.log] == list(own.report.events)


def test_a_training_without_a_decision_says_why_nothing_was_profiled(tmp_path: Path) -> None:
    fit(seeded(Net), [capture(tmp_path, steps=4, after_decision=True), hot(threshold=500)], max_epochs=1)
    found = complete(tmp_path)
    assert found is not None
    assert found.profiled_steps == 0
    assert "HotCompile did not come to a decision" in found.notes[0]
    assert not (tmp_path / "trace.json").exists()


def test_a_training_that_is_too_short_gives_what_there_is(tmp_path: Path) -> None:
    fit(seeded(Net), [capture(tmp_path, seconds=1e6)], max_epochs=1)
    found = complete(tmp_path)
    assert found is not None
    assert found.profiled_steps == annotated(tmp_path) == 12


class Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4:
            raise RuntimeError("out of luck")
        return super().training_step(batch, batch_idx)


def test_a_training_that_fails_gives_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(seeded(Fails), [capture(tmp_path, steps=50)], max_epochs=1)
    found = complete(tmp_path)
    assert found is not None
    assert [s.step for s in found.steps] == [1, 2, 3, 4]
    assert (tmp_path / "trace.json").is_file()


def test_a_training_that_fails_has_its_report(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(seeded(Fails), [capture(tmp_path, steps=2, after_decision=True), hot()], max_epochs=1)
    run = load_run(tmp_path)
    assert run.report is not None
    assert run.report.steps == 4


@pytest.mark.parametrize("whose", ["the Trainer's", "around it", "meanwhile", "later"])
def test_a_profiler_of_the_scripts_own_goes_on(tmp_path: Path, whose: str) -> None:
    """There is one for all: a second one that starts ends the first, and its trace may end the process."""

    class Profiles(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            its_own = batch_idx == {"meanwhile": 1, "later": 6}.get(whose)
            with profile() if its_own else nullcontext() as profiler:
                loss = super().training_step(batch, batch_idx)
            if profiler is not None:
                seen.append(len(profiler.key_averages()))
            return loss

    seen: list[int] = []
    own = PyTorchProfiler(dirpath=tmp_path, filename="own") if whose == "the Trainer's" else None
    around = profile() if whose == "around it" else nullcontext()
    to_capture = capture(tmp_path, steps=3)
    with pytest.warns(HotCompileWarning) if whose != "later" else nullcontext() as told, around:
        trainer = fit(seeded(Profiles), [to_capture], max_epochs=1, profiler=own)
    assert trainer.global_step == 12
    found = complete(tmp_path)
    assert found is not None
    assert len(found.steps) == 12
    assert all(seen)
    assert len(seen) == (whose in ("meanwhile", "later"))
    if told is None:
        assert found.profiled_steps == 3
    else:
        assert found.profiled_steps == 0
        assert "the profiler saw no step: " in found.notes[0]
        assert any(found.notes[0] in str(each.message) for each in told)


def test_only_the_first_training_is_captured(tmp_path: Path) -> None:
    fit(seeded(Net), [capture(tmp_path, steps=2)], max_epochs=1)
    first = (tmp_path / "summary.json").read_bytes()
    fit(seeded(Net), [capture(tmp_path, steps=5)], max_epochs=3)
    assert (tmp_path / "summary.json").read_bytes() == first
    assert annotated(tmp_path) == 2


def test_a_folder_that_cannot_be_written_does_not_stop_the_training(tmp_path: Path) -> None:
    with pytest.warns(HotCompileWarning, match="cannot be written, so nothing is captured"):
        trainer = fit(seeded(Net), [capture(tmp_path / "gone", steps=2)], max_epochs=1)
    assert trainer.global_step == 12


class Copies(Net):
    watching: Any = None
    made: list[Any] = []  # noqa: RUF012 (emptied by the test)

    def on_train_batch_end(self, *args: Any) -> None:
        self.made.append(copy.deepcopy(type(self).watching))
        self.made.append(pickle.loads(pickle.dumps(type(self).watching)))


def test_a_copy_captures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copies, "made", [])
    monkeypatch.setattr(Copies, "watching", capture(tmp_path, steps=2))
    fit(seeded(Copies), [Copies.watching], max_epochs=1, train=loader(16))
    assert annotated(tmp_path) == 2
    before = (tmp_path / "summary.json").read_bytes()
    for other in Copies.made:
        other.on_train_batch_start(None, None, None, 0)
        other.on_train_end(None, None)
    assert len(Copies.made) == 4
    assert (tmp_path / "summary.json").read_bytes() == before


class TestEntryPoint:
    def test_an_order_in_the_environment_adds_the_capture(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(VARIABLE, Order(folder=str(tmp_path), steps=1).to_text())
        (alone,) = environment.callbacks_from_environment()
        monkeypatch.setenv("HOTCOMPILE", "auto")
        both = environment.callbacks_from_environment()
        assert isinstance(alone, Capture)
        assert [type(c) for c in both] == [Capture, HotCompile]

    def test_without_one_there_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(VARIABLE, raising=False)
        assert environment.callbacks_from_environment() == []
