"""The suite ``regret`` without a training: a runner that knows what each arm takes."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from lightning_hotcompile.bench.arms import USUAL
from lightning_hotcompile.bench.one_run import steady_s
from lightning_hotcompile.bench.other_ways import AGAIN, carried_on, slowness
from lightning_hotcompile.bench.process_runner import ProcessRunner
from lightning_hotcompile.bench.record_file import OtherResults
from lightning_hotcompile.bench.regret import (
    Cell,
    cells_of,
    drift,
    geometric_mean,
    rows,
    summary,
    trained_otherwise,
)
from lightning_hotcompile.bench.regret_suite import RegretSuite
from lightning_hotcompile.bench.results import Results, Task
from lightning_hotcompile.bench.runs import Mark, Run, RunFailed, environment_for
from lightning_hotcompile.bench.tables import page, picture
from lightning_hotcompile.errors import ConfigError

STEP_S = {"eager": 0.010, "model": 0.010, "blocks": 0.012, "step": 0.008, "step+optimizer": 0.005}
STEP_S |= {"eager+fused": 0.009, "step+fused": 0.004}
COMPILE_S = {"eager": 0.0, "model": 4.0, "blocks": 5.0, "step": 10.0, "step+optimizer": 20.0}
COMPILE_S |= {"eager+fused": 0.0, "step+fused": 10.0}
PROBE = 96


def a_run(
    steps: int, step_s: float, *, first_s: float = 0.0, marks: Sequence[int] = (), **changes: object
) -> Run:
    """A training whose first step takes longer, with 0.1 s before and 0.2 s after its steps."""
    reached = [n for n in {*marks, steps} if n <= steps]
    made = {
        n: Mark(elapsed_s=first_s + n * step_s, steady_s=step_s, weights=10.0, moved=1.0) for n in reached
    }
    run = Run(
        steps=steps,
        wall_s=0.3 + first_s + steps * step_s,
        before_s=0.1,
        worst_step_s=first_s + step_s,
        mean_s=step_s,
        marks=made,
    )
    return dataclasses.replace(run, **changes)  # type: ignore[arg-type]


class FakeRunner:
    """Gives runs as above and remembers what it was asked for."""

    def __init__(self, fail: Mapping[str, str] | None = None, stop_after: int | None = None) -> None:
        self.calls: list[tuple[str, str, int]] = []
        self.folders: list[Path] = []
        self._fail = fail or {}
        self._stop_after = stop_after

    def __call__(self, case: str, arm: str, steps: int, marks: Sequence[int], folder: Path) -> Run:
        if self._stop_after is not None and len(self.calls) >= self._stop_after:
            raise KeyboardInterrupt
        self.calls.append((case, arm, steps))
        self.folders.append(folder)
        if arm in self._fail:
            raise RunFailed(self._fail[arm])
        warm = folder in self.folders[:-1]
        if arm in ("hotcompile", "preparing"):
            return a_run(steps, 0.010, marks=marks, phase="declined", reason="too short")
        first_s = COMPILE_S[arm] * (0.1 if warm else 1.0)
        return a_run(steps, STEP_S[arm], first_s=first_s, marks=marks)


def a_suite(**changes: object) -> RegretSuite:
    suite = RegretSuite(cases=["mlp"], lengths=[50, 5000], quick_cases=["gan"], quick_lengths=[50], turns=1)
    return dataclasses.replace(suite, **changes)  # type: ignore[arg-type]


def measure(folder: Path, runner: FakeRunner, **changes: object) -> list[Cell]:
    return a_suite(**changes).run(folder, runner=runner, console=Console(file=io.StringIO()), command="test")


def by_place(cells: Sequence[Cell]) -> dict[tuple[str, int, str], Cell]:
    return {(c.case, c.steps, c.cache): c for c in cells}


def written(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / "regret.json").read_text(encoding="utf-8"))
    return content


# --- the steady step ------------------------------------------------------------------------------


def test_the_steady_step_leaves_out_compiling_and_a_hiccup() -> None:
    seconds = [9.0] + [0.01] * 95
    seconds[70] = 3.0
    assert steady_s(seconds) == pytest.approx(0.01)


def test_the_steady_step_counts_each_batch_of_the_cycle() -> None:
    lengths = [0.001] * 12 + [0.009] * 4
    assert steady_s(lengths * 6) == pytest.approx(0.003)  # the plain median would say 0.001


def test_a_short_run_has_a_plain_median() -> None:
    assert steady_s([5.0, 0.3, 0.1, 0.2]) == pytest.approx(0.15)


# --- estimates ------------------------------------------------------------------------------------


def test_a_short_run_is_carried_on_by_its_steady_step() -> None:
    run = a_run(96, 0.01, first_s=20.0)
    assert carried_on(run, 5000) == pytest.approx(0.3 + 20.0 + 50.0)


def test_what_was_reached_is_measured_and_not_estimated() -> None:
    run = a_run(96, 0.01, first_s=20.0, marks=(50,))
    slow_start = dataclasses.replace(run.marks[50], elapsed_s=33.0)
    assert carried_on(dataclasses.replace(run, marks={**run.marks, 50: slow_start}), 50) == pytest.approx(
        33.3
    )


def test_slow_steps_of_long_runs_count_for_short_ones_too() -> None:
    eager = a_run(5000, 0.010)
    slow = dataclasses.replace(
        eager, marks={5000: dataclasses.replace(eager.end, steady_s=0.008)}
    )  # a mean of 10 ms
    assert slowness([slow]) == pytest.approx(1.25)
    assert slowness([]) == 1.0
    run = a_run(96, 0.005)
    assert carried_on(run, 5000, slowness([slow])) == pytest.approx(run.wall_s + 4904 * 0.005 * 1.25)


# --- cells ----------------------------------------------------------------------------------------


def test_the_best_arm_depends_on_length_and_cache(tmp_path: Path) -> None:
    cells = by_place(measure(tmp_path, FakeRunner()))
    assert cells["mlp", 50, "cold"].best in ("eager", "model")
    assert cells["mlp", 5000, "cold"].best == "step+optimizer"
    assert cells["mlp", 5000, "cold"].regret == pytest.approx(50.3 / (0.3 + 20 + 25))
    assert cells["mlp", 5000, "warm"].regret == pytest.approx(50.3 / (0.3 + 2 + 25))
    assert cells["mlp", 50, "warm"].regret == pytest.approx(1.0)


def test_the_best_way_is_chosen_by_one_time_and_timed_by_the_other() -> None:
    """Ways that do the same are no regret, however lucky one training of one of them was."""
    lucky, usual = a_run(96, 0.009, marks=(50,)), a_run(96, 0.010, marks=(50,))
    runs = {
        ("eager", 50, "cold"): a_run(50, 0.010),
        (AGAIN, 50, "cold"): a_run(50, 0.010),
        ("model", 96, "warm"): lucky,
        ("model", 96, "warm again"): usual,
        ("blocks", 96, "warm"): usual,
        ("blocks", 96, "warm again"): lucky,
        ("hotcompile", 50, "warm"): a_run(50, 0.010),
    }
    (cell,) = cells_of("mlp", runs, [50])
    assert cell.others_s["model"] == pytest.approx((0.75, 0.80))
    assert cell.best in ("model", "blocks")
    assert cell.best_s == pytest.approx(0.80)
    assert cell.regret == pytest.approx(1.0)


def test_a_way_that_is_really_faster_is_the_best_one_in_both_times() -> None:
    runs = {
        ("eager", 50, "cold"): a_run(50, 0.010),
        (AGAIN, 50, "cold"): a_run(50, 0.011),
        ("model", 96, "warm"): a_run(96, 0.006, marks=(50,)),
        ("model", 96, "warm again"): a_run(96, 0.005, marks=(50,)),
        ("hotcompile", 50, "warm"): a_run(50, 0.010),
    }
    (cell,) = cells_of("mlp", runs, [50])
    assert cell.best == "model"
    assert cell.regret == pytest.approx(0.80 / ((0.60 + 0.55) / 2))


def test_a_cold_training_is_carried_on_by_its_own_step_and_by_that_of_the_warm_one() -> None:
    runs = {
        ("model", 96, "cold"): a_run(96, 0.010, first_s=20.0),
        ("model", 96, "warm"): a_run(96, 0.008, first_s=2.0),
        ("hotcompile", 5000, "cold"): a_run(5000, 0.010),
    }
    (cell,) = cells_of("mlp", runs, [5000])
    start = 0.3 + 20.0 + 96 * 0.010
    assert cell.others_s["model"] == pytest.approx((start + 4904 * 0.010, start + 4904 * 0.008))


def test_a_run_of_the_callback_alone_is_no_cell() -> None:
    assert cells_of("mlp", {("hotcompile", 50, "cold"): a_run(50, 0.01)}, [50]) == []


@pytest.mark.parametrize("order", [(5000, 200), (200, 5000)])
def test_eager_of_the_right_length_is_preferred(order: tuple[int, int]) -> None:
    step_s = {5000: 0.02, 200: 0.01}
    runs = {
        **{("eager", steps, "cold"): a_run(steps, step_s[steps]) for steps in order},
        ("hotcompile", 200, "warm"): a_run(200, 0.01),
    }
    (cell,) = cells_of("mlp", runs, [200])
    assert cell.regret == pytest.approx(1.0)


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([]) is None


def test_the_summary_names_cells_above_the_goal(tmp_path: Path) -> None:
    found = summary(measure(tmp_path, FakeRunner()))
    assert found["above_goal"] == [f"mlp, 5000 steps, {cache}" for cache in ("cold", "warm", "prepared")]
    cold, warm = math.sqrt(50.3 / 45.3), math.sqrt(50.3 / 27.3)
    assert found["geometric_mean"] == pytest.approx({"cold": cold, "warm": warm, "prepared": warm})


def test_a_prepared_training_is_compared_with_warm_ones() -> None:
    runs = {
        ("model", 50, "cold"): a_run(50, 0.01, first_s=20.0),
        ("model", 50, "warm"): a_run(50, 0.01, first_s=2.0),
        ("hotcompile", 50, "prepared"): a_run(50, 0.02, first_s=2.0),
    }
    (cell,) = cells_of("mlp", runs, [50])
    assert cell.cache == "prepared"
    assert cell.regret == pytest.approx((0.3 + 2 + 50 * 0.02) / (0.3 + 2 + 50 * 0.01), rel=0.01)


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        (Mark(elapsed_s=1, steady_s=1, weights=10.05, moved=1.05), None),
        (Mark(elapsed_s=1, steady_s=1, weights=10.2, moved=1.0), "norm 10.2 where eager has 10"),
        (Mark(elapsed_s=1, steady_s=1, weights=math.nan, moved=1.0), "norm nan"),
        (Mark(elapsed_s=1, steady_s=1, weights=10.0, moved=0.0), "moved its weights by 0"),
    ],
)
def test_wrong_training_is_noticed(mark: Mark, words: str | None) -> None:
    said = trained_otherwise(mark, Mark(elapsed_s=1, steady_s=1, weights=10.0, moved=1.0))
    assert said is None if words is None else words in (said or "")


def test_an_arm_that_did_not_learn_gets_a_note() -> None:
    idle = a_run(96, 0.001)
    idle = dataclasses.replace(idle, marks={96: dataclasses.replace(idle.end, moved=0.0)})
    runs = {
        ("eager", 200, "cold"): a_run(200, 0.01, marks=(96,)),
        ("step", 96, "cold"): idle,
        ("hotcompile", 200, "cold"): a_run(200, 0.01),
    }
    (cell,) = cells_of("mlp", runs, [200])
    assert [note for note in cell.notes if note.startswith("step moved its weights by 0")]


@pytest.mark.parametrize(
    ("cache", "wrong"),
    [
        ("cold", "cold"),
        ("warm", "warm"),
        ("warm", "warm again"),
        ("prepared", "warm"),
        ("prepared", "warm again"),
    ],
)
def test_each_training_that_a_cell_is_compared_with_is_looked_at(cache: str, wrong: str) -> None:
    right = a_run(96, 0.001)
    idle = dataclasses.replace(right, marks={96: dataclasses.replace(right.end, moved=0.0)})
    runs = {
        ("eager", 200, "cold"): a_run(200, 0.01, marks=(96,)),
        ("hotcompile", 200, cache): a_run(200, 0.01),
        **{
            ("step", 96, state): idle if state == wrong else right for state in ("cold", "warm", "warm again")
        },
    }
    (cell,) = cells_of("mlp", runs, [200])
    assert [note for note in cell.notes if note.startswith("step moved its weights by 0")]


def test_a_machine_that_changes_in_between_gets_a_note() -> None:
    runs = {
        ("eager", 200, "cold"): a_run(200, 0.01),
        (AGAIN, 200, "cold"): a_run(200, 0.02),
        ("hotcompile", 200, "cold"): a_run(200, 0.015),
    }
    assert drift(runs) == pytest.approx(2.0)
    (cell,) = cells_of("mlp", runs, [200])
    assert "the machine changed" in cell.notes[0]
    assert cell.regret == pytest.approx(1.0)  # what changes steadily falls on both alike


def test_an_arm_that_compiled_nothing_is_named() -> None:
    """A model without repeated blocks, or whose parts are called by themselves: eager by another name."""
    runs = {
        ("eager", 200, "cold"): a_run(200, 0.01),
        ("blocks", 200, "cold"): a_run(200, 0.01, first_s=0.1),
        ("blocks", 200, "warm"): a_run(200, 0.01),
        ("step", 200, "cold"): a_run(200, 0.01, first_s=9.0),
        ("step", 200, "warm"): a_run(200, 0.01, first_s=1.0),
        ("hotcompile", 200, "cold"): a_run(200, 0.01),
    }
    (cell,) = cells_of("mlp", runs, [200])
    assert cell.notes == ("blocks compiled nothing: its first training took no longer than its second",)


# --- the order of work ----------------------------------------------------------------------------


def test_the_callback_runs_between_the_other_arms() -> None:
    arms = [(task.arm, task.steps) for task in a_suite(lengths=[50, 500, 5000]).tasks()]
    assert arms == [
        ("model", 96),
        *((arm, 50) for arm in ("eager", "hotcompile", AGAIN)),
        ("blocks", 96),
        *((arm, 500) for arm in ("eager", "hotcompile", AGAIN)),
        ("step", 96),
        ("step+optimizer", 96),
        *((arm, 5000) for arm in ("eager", "hotcompile", AGAIN)),
    ]


def test_short_trainings_are_done_more_than_once() -> None:
    tasks = a_suite(turns=2, lengths=[50, 400, 401], turns_up_to=400).tasks()
    assert len({task.key for task in tasks}) == len(tasks)
    ours = ("eager", "hotcompile", AGAIN)
    found = [(task.arm, task.steps, task.turn) for task in tasks if task.arm in ours]
    short = [(arm, steps, turn) for steps in (50, 400) for turn in (0, 1) for arm in ours]
    assert found == [*short, *((arm, 401, 0) for arm in ours)]


def test_the_longest_length_may_be_a_short_one() -> None:
    tasks = a_suite(turns=2, lengths=[50]).tasks()
    assert [task.turn for task in tasks if (task.arm, task.steps) == ("eager", 50)] == [0, 1]
    assert (tasks[-1].arm, tasks[-1].steps) == (AGAIN, 50)


def test_without_eager_there_is_none_after_it_either() -> None:
    assert {task.arm for task in a_suite(arms=["model", "hotcompile"]).tasks()} == {"model", "hotcompile"}


FUSED = [*USUAL, "eager+fused", "step+fused"]


def test_arms_with_torchs_fused_optimizer_are_measured_where_they_are_chosen() -> None:
    assert {task.arm for task in a_suite().tasks()} == {*USUAL, AGAIN}
    tasks = a_suite(arms=FUSED, lengths=[50, 5000], turns_up_to=0).tasks()
    around = ["eager", "eager+fused", "hotcompile", "eager+fused again", AGAIN]
    for steps in (50, 5000):
        assert [task.arm for task in tasks if task.steps == steps] == around
    assert {t.caches for t in tasks if t.arm.startswith("eager")} == {("cold",)}
    assert [(t.arm, t.steps, t.caches) for t in tasks if t.arm == "step+fused"] == [
        ("step+fused", 96, ("cold", "warm", "warm again"))
    ]


def test_the_fused_eager_arm_is_compared_like_eager(tmp_path: Path) -> None:
    runner = FakeRunner()
    cells = by_place(measure(tmp_path, runner, arms=FUSED))
    assert runner.calls.count(("mlp", "eager+fused", 50)) == 2
    for cache in ("cold", "warm", "prepared"):
        short, long = cells["mlp", 50, cache], cells["mlp", 5000, cache]
        assert short.others_s["eager+fused"] == pytest.approx((0.75, 0.75))
        assert (short.best, long.best) == ("eager+fused", "step+fused")
        assert short.notes == long.notes == ()
    table = pd.read_csv(tmp_path / "regret.csv")
    assert list(table["eager+fused_s"]) == pytest.approx([0.75] * 3 + [45.3] * 3)
    again = FakeRunner()
    measure(tmp_path, again, arms=FUSED)
    assert again.calls == []


def test_an_optimizer_without_a_fused_kernel_is_a_gap(tmp_path: Path) -> None:
    why = "NotImplementedError: an optimizer has no fused kernel"
    cells = measure(tmp_path, FakeRunner(fail={"eager+fused": why, "step+fused": why}), arms=FUSED)
    note = "not compared with eager+fused, step+fused: not run, or not possible"
    assert {c.notes for c in cells} == {(note,)}
    text = (tmp_path / "regret.md").read_text(encoding="utf-8")
    assert f"mlp: eager+fused again, 5000 steps: {why}" in text


def test_a_fused_eager_arm_that_did_not_learn_gets_a_note() -> None:
    right = a_run(200, 0.01)
    idle = dataclasses.replace(right, marks={200: dataclasses.replace(right.end, moved=0.0)})
    runs = {
        ("eager", 200, "cold"): right,
        ("eager+fused", 200, "cold"): right,
        ("eager+fused again", 200, "cold"): idle,
        ("hotcompile", 200, "cold"): right,
    }
    (cell,) = cells_of("mlp", runs, [200])
    (note,) = cell.notes
    assert note.startswith("eager+fused moved its weights by 0")


def test_the_training_with_the_median_time_counts(tmp_path: Path) -> None:
    results, runs = Results(tmp_path, {}), [a_run(50, step_s) for step_s in (0.04, 0.01, 0.02)]
    for turn, run in enumerate(runs):
        results.add(Task(case="mlp", arm="eager", steps=50, caches=("cold",), turn=turn), {"cold": run})
    assert results.runs("mlp") == {("eager", 50, "cold"): runs[2]}


def test_trainings_of_an_arm_share_a_folder_that_nobody_else_has(tmp_path: Path) -> None:
    runner = FakeRunner()
    measure(tmp_path, runner)
    by_call: dict[tuple[str, str, int], list[Path]] = {}
    for call, folder in zip(
        runner.calls[1:], runner.folders[1:], strict=True
    ):  # the first one is thrown away
        by_call.setdefault(call, []).append(folder)
    (prepared,) = by_call["mlp", "preparing", 200]
    for (_, arm, _), folders in by_call.items():
        own = 2 if arm == "eager" else 1  # before and after the callback's
        if arm == "hotcompile":
            assert folders.pop() == prepared
        assert len(set(folders)) == own
        assert len(folders) == {"eager": own, "preparing": 1, "hotcompile": 2}.get(arm, 3)
    assert len({folder for folders in by_call.values() for folder in folders}) == len(by_call) + 2
    assert not any(folder.exists() for folder in runner.folders)


def test_a_compile_that_is_not_measured_comes_first(tmp_path: Path) -> None:
    runner = FakeRunner()
    measure(tmp_path, runner)
    assert runner.calls[0] == ("mlp", "step", 3)
    without = FakeRunner()
    measure(tmp_path / "other", without, arms=["eager", "hotcompile"])
    assert without.calls[0] == ("mlp", "eager", 50)


def test_quick_and_case_choose() -> None:
    suite = a_suite()
    assert suite.chosen(None, True).cases == ["gan"]
    assert suite.chosen(None, True).lengths == [50]
    assert suite.chosen("cnn", False).cases == ["cnn"]
    assert suite.chosen(["cnn", "mlp"], False).lengths == [50, 5000]
    assert len(suite.chosen("all", False).cases) > 10
    assert suite.chosen(["all"], True).cases == suite.chosen("all", False).cases


def test_wrong_choices_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mlp'"):
        a_suite().chosen("mpl", False)
    with pytest.raises(ConfigError, match="cases: '24' is unknown"):
        a_suite().chosen(24, False)
    with pytest.raises(ConfigError, match="'stepp' is unknown"):
        a_suite(arms=["stepp"])
    with pytest.raises(ConfigError, match="length of 0"):
        a_suite(lengths=[0])
    with pytest.raises(ConfigError, match="turns of 0"):
        a_suite(turns=0)
    with pytest.raises(ConfigError, match="no length is left"):
        a_suite(lengths=[])


# --- failures and going on ------------------------------------------------------------------------


def test_what_an_error_and_a_folder_say_is_no_markup(tmp_path: Path) -> None:
    told, why = io.StringIO(), "no [mask], no [/cpu]"
    folder = tmp_path / "[new]"
    folder.mkdir()
    runner = FakeRunner(fail={"step": why, "step+optimizer": why})
    a_suite().run(folder, runner=runner, console=Console(file=told))
    assert f"it failed: {why}" in told.getvalue()
    assert f"cannot be run: {why}" in told.getvalue()
    assert str(folder) in told.getvalue()


def test_an_arm_that_fails_is_named_and_hides_nothing(tmp_path: Path) -> None:
    cells = measure(tmp_path, FakeRunner(fail={"step": "NotImplementedError: manual optimization"}))
    assert len(cells) == 6
    assert all(set(c.others_s) == set(USUAL) - {"step", "hotcompile"} for c in cells)
    assert {c.notes for c in cells} == {("not compared with step: not run, or not possible",)}
    text = (tmp_path / "regret.md").read_text(encoding="utf-8")
    assert "mlp: step, 96 steps: NotImplementedError: manual optimization" in text


def test_a_callback_that_fails_leaves_the_other_cases(tmp_path: Path) -> None:
    class Runner(FakeRunner):
        def __call__(self, case: str, arm: str, steps: int, marks: Sequence[int], folder: Path) -> Run:
            if (case, arm) == ("mlp", "hotcompile"):
                raise RunFailed("boom")
            return super().__call__(case, arm, steps, marks, folder)

    cells = measure(tmp_path, Runner(), cases=["mlp", "cnn"])
    assert {c.case for c in cells} == {"cnn"}
    assert "mlp: hotcompile, 50 steps: boom" in (tmp_path / "regret.md").read_text(encoding="utf-8")


def test_each_task_is_told_with_its_result(tmp_path: Path) -> None:
    told = io.StringIO()
    a_suite().run(tmp_path, runner=FakeRunner(fail={"step": "boom"}), console=Console(file=told, width=200))
    lines = told.getvalue().splitlines()
    took = ", ".join(f"{cache} 50.30 s declined" for cache in ("cold", "warm", "prepared"))
    assert f"mlp: hotcompile, 5000 steps: {took}" in lines
    assert "mlp: step, 96 steps: cannot be run: boom" in lines


def test_what_is_finished_is_not_run_again(tmp_path: Path) -> None:
    stopped = FakeRunner(stop_after=10)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, stopped)
    assert len(written(tmp_path)["tasks"]) == 4  # type: ignore[arg-type]
    rest = FakeRunner()
    cells = measure(tmp_path, rest)
    assert ("mlp", "model", 96) not in rest.calls
    assert ("mlp", "hotcompile", 50) not in rest.calls
    assert rest.calls.count(("mlp", "blocks", 96)) == 3
    assert len(cells) == 6
    nothing = FakeRunner()
    assert measure(tmp_path, nothing) == cells
    assert nothing.calls == []


def test_a_case_is_prepared_once(tmp_path: Path) -> None:
    """Its trainings are one after the other in a folder in which it was compiled before."""
    runner = FakeRunner()
    measure(tmp_path, runner, cases=["mlp", "cnn"])
    for case in ("mlp", "cnn"):
        assert runner.calls.count((case, "preparing", 200)) == 1
        first = runner.calls.index((case, "preparing", 200))
        after = [f for f, call in zip(runner.folders, runner.calls, strict=True) if call[1] == "hotcompile"]
        assert after.count(runner.folders[first]) == 2  # one of each length


def test_a_case_that_cannot_be_prepared_is_told(tmp_path: Path) -> None:
    told = io.StringIO()
    a_suite().run(
        tmp_path, runner=FakeRunner(fail={"preparing": "no compiler"}), console=Console(file=told, width=200)
    )
    lines = told.getvalue().splitlines()
    assert "mlp: hotcompile, 50 steps: cannot be run: no compiler" in lines
    assert "mlp: hotcompile, 5000 steps: cannot be run: no compiler" in lines


def test_what_failed_is_tried_again(tmp_path: Path) -> None:
    measure(tmp_path, FakeRunner(fail={"blocks": "boom"}))
    again = FakeRunner()
    cells = measure(tmp_path, again)
    assert {arm for _, arm, _ in again.calls} == {"step", "blocks"}  # "step" is the one before all
    assert written(tmp_path)["failures"] == []
    assert all("blocks" in c.others_s for c in cells)


def test_a_case_with_long_steps_has_a_shorter_longest_training(tmp_path: Path) -> None:
    suite = a_suite(cases=["mlp", "cnn"], lengths=[50, 5000], most_steps={"cnn": 700})
    assert suite.lengths_of("mlp") == [50, 5000]
    assert suite.lengths_of("cnn") == [50, 700]
    assert max(t.steps for t in suite.tasks() if t.case == "cnn") == 700
    assert suite.marks("cnn") == [50, 96, 700]
    cells = measure(tmp_path, FakeRunner(), cases=["mlp", "cnn"], lengths=[50, 5000], most_steps={"cnn": 700})
    assert {(c.case, c.steps) for c in cells} == {("mlp", 50), ("mlp", 5000), ("cnn", 50), ("cnn", 700)}
    with pytest.raises(ConfigError, match="'cnnn' is unknown"):
        a_suite(most_steps={"cnnn": 700})


def test_other_cases_are_added_to_the_same_folder(tmp_path: Path) -> None:
    measure(tmp_path, FakeRunner(), cases=["mlp"])
    cells = measure(tmp_path, FakeRunner(), cases=["cnn"])
    assert {c.case for c in cells} == {"mlp", "cnn"}


def test_results_of_another_setting_are_refused(tmp_path: Path) -> None:
    measure(tmp_path, FakeRunner())
    with pytest.raises(OtherResults, match=r"threads is 0 there and 1 now.*Take another output_dir"):
        a_suite().run(tmp_path, runner=FakeRunner(), threads=1, console=Console(file=io.StringIO()))
    (tmp_path / "regret.json").write_text("{", encoding="utf-8")
    with pytest.raises(OtherResults, match="cannot be read"):
        measure(tmp_path, FakeRunner())


def test_results_come_back_from_the_file(tmp_path: Path) -> None:
    task = Task(case="mlp", arm="step", steps=96, caches=("cold", "warm"))
    run = a_run(96, 0.01, marks=(50,))
    results = Results(tmp_path, {"machine": "m"})
    results.add(task, {"cold": run, "warm": run})
    results.write({})
    back = Results(tmp_path, {"machine": "m"})
    assert back.is_done(task)
    assert back.runs("mlp") == {("step", 96, "cold"): run, ("step", 96, "warm"): run}


# --- what is written ------------------------------------------------------------------------------


def test_the_files_say_the_same(tmp_path: Path) -> None:
    cells = measure(tmp_path, FakeRunner())
    table = pd.read_csv(tmp_path / "regret.csv")
    assert list(table["regret"]) == [round(c.regret, 3) for c in cells]
    content = written(tmp_path)
    assert content["cells"] == rows(cells)
    assert content["command"] == "test"
    assert {"machine", "versions", "date", "commit", "summary", "threads"} <= set(content)
    assert (tmp_path / "regret.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_has_reasons_notes_and_checks(tmp_path: Path) -> None:
    measure(tmp_path, FakeRunner())
    text = (tmp_path / "regret.md").read_text(encoding="utf-8")
    assert "3 of 6 cells above 1.05" in text
    assert "mlp, 5000 steps, warm: 1.842 (50.30 s; step+optimizer 27.30 s); declined: too short" in text
    assert "## Eager's longest training after the callback's\n\n- mlp: 1.000 of the first" in text
    assert "- command: `test`" in text


def test_without_trouble_there_are_no_empty_sections(tmp_path: Path) -> None:
    cells = [dataclasses.replace(c, hotcompile_s=0.1) for c in measure(tmp_path, FakeRunner())]
    text = page(cells, [], {})
    assert "## Above the goal" not in text
    assert "## Could not be run" not in text
    assert "## Notes" not in text


def test_the_picture_has_a_panel_a_cache_with_the_goal(tmp_path: Path) -> None:
    panels = picture(measure(tmp_path, FakeRunner())).axes
    titles = ["cold compiler cache", "warm compiler cache", "after one that compiled"]
    assert [panel.get_title() for panel in panels] == titles
    for panel in panels:
        labels = [str(line.get_label()) for line in panel.get_lines()]
        assert {"50 steps", "5000 steps", "goal 1.05"} <= set(labels)


# --- processes ------------------------------------------------------------------------------------


def test_a_process_is_cold_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOTCOMPILE", "HOTCOMPILE_THRESHOLD", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "mine")
    eager = environment_for("eager", tmp_path, 0)
    assert eager["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiler")
    assert not {"HOTCOMPILE", "HOTCOMPILE_THRESHOLD", "TRITON_CACHE_DIR"} & set(eager)
    hot = environment_for("hotcompile", tmp_path, 2)
    assert "TORCHINDUCTOR_CACHE_DIR" not in hot  # or the callback would leave the compiler's cache there
    assert hot["HOTCOMPILE_STORE"] == str(tmp_path / "store")
    assert hot["OMP_NUM_THREADS"] == "2"
    assert Path(hot["TMPDIR"]).is_dir()
    assert "PATH" in hot


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"NotImplementedError: manual optimization"):
        ProcessRunner(threads=1)("gan", "step", 3, (), tmp_path)
