"""``recipes/train.py`` as a user starts it: what it writes, what it prints, and where."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import in_a_fork

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "train.py"
FAST = ("trainer.accelerator=cpu", "trainer.limit_val_batches=2", "trainer.log_every_n_steps=5")
TINY_GPT = (
    "model.d_model=16",
    "model.n_head=2",
    "data.block_size=16",
    "data.batch_size=4",
    "trainer.val_check_interval=10",
    *FAST,
)
DIGITS = ("data=digits", *FAST)
FLIP = ("compile.threshold=3", "compile.cost_gate=false", "compile.min_speedup=0")


def train(folder: Path, *arguments: str, as_a_user: bool = False) -> str:
    """Run the recipe in ``folder`` and return all that it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    if as_a_user:
        command = [sys.executable, str(RECIPE), *arguments]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    else:
        done = in_a_fork(folder, RECIPE, *arguments, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def only_run(folder: Path) -> Path:
    """The one folder that a run left behind in ``outputs/``."""
    (run,) = (folder / "outputs").glob("*/*")
    return run


def report_of(run: Path) -> dict[str, object]:
    report: dict[str, object] = json.loads((run / "report.json").read_text(encoding="utf-8"))
    return report


def logged(run: Path) -> dict[str, list[float]]:
    """Columns of the CSV logger, without the gaps."""
    with (run / "csv" / "metrics.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}


def test_char_gpt_ends_with_a_receipt(tmp_path: Path) -> None:
    printed = train(tmp_path, "trainer.max_steps=30", *TINY_GPT, as_a_user=True)
    run = only_run(tmp_path)
    assert printed.count("sha256") == 1
    assert printed.count("receipt:") == 1
    assert report_of(run)["phase"]
    assert (run / "report.md").read_text(encoding="utf-8").strip()
    events = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert events
    assert all(isinstance(json.loads(line), dict) for line in events)
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))


def test_off_is_off_where_an_experiment_sets_options_of_it(tmp_path: Path) -> None:
    printed = train(tmp_path, "experiment=smoke", "compile=off", "trainer.max_steps=5", "logger=csv")
    assert not (only_run(tmp_path) / "report.json").exists()
    assert "receipt:" not in printed


def test_off_trains_without_a_receipt(tmp_path: Path) -> None:
    printed = train(tmp_path, "trainer.max_steps=30", "compile=off", "logger=csv", *TINY_GPT)
    run = only_run(tmp_path)
    assert sorted(path.name for path in run.iterdir()) == [".hydra", "csv"]
    assert "receipt:" not in printed
    columns = logged(run)
    assert columns["train/loss"][-1] < columns["train/loss"][0]
    assert columns["val/perplexity"][-1] < 256
    assert not any(name.startswith("hotcompile") for name in columns)


@pytest.mark.parametrize("model", ["digits_mlp", "digits_cnn"])
def test_digits_are_learnt(model: str, tmp_path: Path) -> None:
    train(tmp_path, f"model={model}", "trainer.max_steps=66", "logger=csv", *DIGITS)
    run = only_run(tmp_path)
    assert report_of(run)["phase"]
    assert logged(run)["val/accuracy"][-1] > 0.5


def test_logger_none_writes_only_the_receipt(tmp_path: Path) -> None:
    train(tmp_path, "trainer.max_steps=5", "logger=none", *TINY_GPT)
    names = {path.name for path in only_run(tmp_path).iterdir()}
    assert names == {".hydra", "events.jsonl", "report.json", "report.md"}


def test_multirun_has_one_folder_a_job(tmp_path: Path) -> None:
    train(tmp_path, "-m", "compile.threshold=5,10,20", "trainer.max_steps=5", *TINY_GPT)
    (sweep,) = (tmp_path / "multirun").glob("*/*")
    assert sorted(path.parent.name for path in sweep.glob("*/report.json")) == ["0", "1", "2"]
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("scope", ["auto", "regions", "step", "pattern"])
def test_char_gpt_flips_to_compiled(scope: str, tmp_path: Path) -> None:
    steps = "trainer.max_steps=60"
    train(tmp_path, f"compile={scope}", "compile.backend=aot_eager", "logger=csv", steps, *FLIP, *TINY_GPT)
    run = only_run(tmp_path)
    assert report_of(run)["phase"] == "steady"
    assert logged(run)["train/loss"][-1] < 5.5


@pytest.mark.parametrize(
    ("model", "backend"),
    [("digits_mlp", "aot_eager"), pytest.param("digits_cnn", "inductor", marks=pytest.mark.slow)],
)
def test_digits_flip_to_compiled(model: str, backend: str, tmp_path: Path) -> None:
    train(
        tmp_path,
        f"model={model}",
        f"compile.backend={backend}",
        "logger=csv",
        "trainer.max_steps=66",
        "compile.prewarm=false",
        *FLIP,
        *DIGITS,
    )
    run = only_run(tmp_path)
    report = report_of(run)
    assert report["phase"] == "steady", report["reason"]
    assert report["regions"]
    assert all(region["proven"] for region in report["regions"])
    assert logged(run)["val/accuracy"][-1] > 0.5


@pytest.mark.slow
def test_the_default_scope_flips_with_inductor(tmp_path: Path) -> None:
    printed = train(tmp_path, "experiment=smoke", "trainer.max_steps=80")
    assert report_of(only_run(tmp_path))["phase"] == "steady"
    assert printed.count("receipt:") == 1


@pytest.mark.slow
def test_two_processes_share_one_folder(tmp_path: Path) -> None:
    overrides = [item for item in TINY_GPT if not item.startswith("trainer.accelerator")]
    printed = train(tmp_path, "trainer=ddp_cpu", "trainer.max_steps=20", *overrides, as_a_user=True)
    run = only_run(tmp_path)
    assert printed.count("sha256") == 1
    assert printed.count("receipt:") == 1
    names = {path.name for path in run.iterdir()}
    assert names == {".hydra", "events.jsonl", "report.json", "report.md", "tensorboard"}
    assert len(list((run / "tensorboard").glob("events.out.tfevents.*"))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outputs"]
