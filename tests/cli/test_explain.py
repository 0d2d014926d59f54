"""``hotcompile explain`` with real scripts, in processes of their own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from lightning_hotcompile.capture.explanation import Explanation, RegionSeen
from lightning_hotcompile.cli.explain import _print
from tests.cli.command import refused
from tests.cli.scripts import ROOT, run, script

NOISY = """
class Noisy(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        print("in the step")
        return loss * 1

model = seeded(Noisy)
before = weights(model)
try:
    for _ in range(2):
        fit(model, train=loader(64), val=loader(8))
    print("after fit")
finally:
    after = weights(model)
    print("changed:", any((before[n] != after[n]).any().item() for n in before), sys.argv[1:])
"""

FAILS = """
class Fails(Net):
    def training_step(self, batch, batch_idx):
        raise ValueError("no label")

fit(seeded(Fails))
"""


def test_a_graph_break_is_shown_and_nothing_is_trained(tmp_path: Path) -> None:
    file = script(tmp_path, NOISY)
    done = run(tmp_path, "explain", file.name, "max_epochs=1", "--lr", "3")
    assert done.returncode == 0, done.stderr
    assert "changed: False ['max_epochs=1', '--lr', '3']" in done.stdout
    assert "after fit" not in done.stdout
    assert "Noisy.training_step as a whole, loss included" in done.stdout
    assert "Forecast: compiling is taken to cost about" in done.stdout
    line = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if '"in the step"' in text)
    assert f"1 graph break:\n1. train.py:{line} in training_step: " in done.stdout
    assert '   > print("in the step")\n' in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]


def test_json_is_all_of_stdout(tmp_path: Path) -> None:
    script(tmp_path, "print('hello')\nfit(seeded(Net), [hot(scope='step')])")
    command = ("explain", "--json", "--scope", "regions", "--", sys.executable, "train.py")
    done = run(tmp_path, *command, env={**os.environ, "HOTCOMPILE": "off"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "hello" in done.stderr
    assert (found["scope"], found["declined"], found["breaks"]) == ("regions", None, [])
    assert {r["name"]: len(r["graphs"]) for r in found["regions"] if r["calls"]}
    assert found["model"] == "Net"


def test_names_of_modules_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    region = RegionSeen(name="heads.[mask]", kind="module", members=(), calls=1, graphs=(7,), error="[/b]")
    _print(Explanation(model="Net", plan="heads.[mask]", looked=True, regions=(region,)))
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "heads.[mask]", "module", "", "1", "1", "7", "[/b]"
    ]  # fmt: skip


def test_a_script_without_a_trainer_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "explain", "--", sys.executable, "-c", "print('hello')")
    assert (done.returncode, done.stdout) == (2, "hello\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("hotcompile: error: there is nothing to explain: the command did not train with")


def test_a_script_that_fails_keeps_its_exit_code(tmp_path: Path) -> None:
    script(tmp_path, "raise SystemExit(7)", head="")
    done = run(tmp_path, "explain", "train.py")
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr == "hotcompile: error: the script failed with exit code 7 before its first batch\n"


def test_a_step_that_fails_is_shown_with_its_plan(tmp_path: Path) -> None:
    script(tmp_path, FAILS)
    done = run(tmp_path, "explain", "--quiet", "train.py")
    assert done.returncode == 1
    assert "Fails.training_step as a whole" in done.stdout
    assert "failed in its first batch: ValueError: no label" in done.stderr.splitlines()[-1]
    assert "ValueError: no label" in done.stderr.splitlines()[:-1]


@pytest.mark.slow
def test_a_config_of_lightning_cli_is_run_by_it(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse")
    config = tmp_path / "config.yaml"
    trainer = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1}
    data = {"class_path": "lightning.pytorch.demos.boring_classes.BoringDataModule"}
    model = {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"}
    config.write_text(json.dumps({"trainer": trainer, "model": model, "data": data}), encoding="utf-8")
    done = run(tmp_path, "explain", "--quiet", "config.yaml", "--trainer.max_epochs=2")
    assert done.returncode == 0, done.stderr
    assert "BoringModel.training_step as a whole" in done.stdout
    assert "with 128 steps" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.slow
def test_the_recipe_can_be_explained(tmp_path: Path) -> None:
    pytest.importorskip("hydra", reason="hydra is in the extra 'recipes'")
    command = (sys.executable, ROOT / "recipes" / "train.py", "experiment=smoke", f"hydra.run.dir={tmp_path}")
    done = run(tmp_path, "explain", "-q", *command)
    assert done.returncode == 0, done.stderr
    assert "CharGPT.training_step as a whole" in done.stdout
    assert "No graph breaks." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--scope", "all", "train.py"), "--scope='all' is not allowed: use auto, step, regions or module."),
        (("--scope", "pattern", "train.py"), "--scope='pattern' needs targets"),
        (("no.py",), "'no.py' is not there"),
        (("no.yaml",), "'no.yaml' is not there"),
        (("no-such-program",), "'no-such-program' cannot be started"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: tuple[str, ...], why: str) -> None:
    assert why in refused("explain", *arguments)
