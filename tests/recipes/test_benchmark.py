"""``recipes/benchmark.py`` as a user starts it, without a compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from lightning_hotcompile.bench.arms import USUAL
from lightning_hotcompile.bench.regret_suite import RegretSuite
from tests.forks import in_a_fork

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "suite=regret",
    "case=mlp",
    "threads=1",
    "suite.lengths=[20]",
    "suite.probe_steps=20",
    "suite.arms=[eager,hotcompile]",
    "suite.turns=1",
    "+suite.options.backend=aot_eager",
)
RECIPE = ROOT / "recipes" / "benchmark.py"


def benchmark(folder: Path, *arguments: str, as_a_user: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200"}
    if not as_a_user:
        return in_a_fork(folder, RECIPE, *arguments, env=environment)
    command = [sys.executable, str(RECIPE), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_suite_is_built_from_its_config() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("benchmark", overrides=["suite=regret"])
    suite = instantiate(config.suite)
    assert isinstance(suite, RegretSuite)
    assert list(suite.lengths) == [50, 500, 5000]
    assert list(suite.arms) == list(USUAL)
    assert (config.quick, config.case, config.threads) == (False, None, 0)


def test_a_tiny_measurement_writes_everything_and_is_not_repeated(tmp_path: Path) -> None:
    done = benchmark(tmp_path, *TINY, "output_dir=out", as_a_user=True)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "out"
    names = {path.name for path in folder.iterdir()}
    assert names == {".hydra", "regret.csv", "regret.json", "regret.md", "regret.png"}
    table = pd.read_csv(folder / "regret.csv")
    assert list(table["cache"]) == ["cold", "warm", "prepared"]
    assert (table["regret"] > 0).all()
    assert set(table["best"]) == {"eager"}
    content = json.loads((folder / "regret.json").read_text(encoding="utf-8"))
    assert content["command"] == f"python recipes/benchmark.py {' '.join(TINY)}"
    assert content["failures"] == []
    assert "Geometric mean of regret" in done.stdout
    again = benchmark(tmp_path, *TINY, "output_dir=out")
    assert again.returncode == 0, again.stderr[-3000:]
    assert "0 tasks" in again.stdout
    assert pd.read_csv(folder / "regret.csv").equals(table)


@pytest.mark.parametrize(
    ("argument", "words"),
    [("case=mpl", "did you mean 'mlp'"), ("suite.arms=[stepp]", "did you mean 'step'")],
)
def test_a_wrong_name_is_one_line(argument: str, words: str, tmp_path: Path) -> None:
    done = benchmark(tmp_path, argument, "output_dir=out")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert words in line


RUN_WITH = """
import runpy, sys
from pathlib import Path
from lightning_hotcompile.bench.case_suite import CaseSuite

def told(suite, folder, *, threads, command):
    also = [Path(file).resolve() for file in getattr(suite, "also", ())]
    print("told", suite.name, threads, Path(folder).resolve(), *also)

CaseSuite.run = told
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def told(folder: Path, *arguments: str) -> list[list[str]]:
    """Suite, threads, folder and files of each job of a command that measures nothing."""
    program = folder / "told.py"
    program.write_text(f"import sys; sys.argv = {[str(RECIPE), *arguments]!r}\n{RUN_WITH}", "utf-8")
    done = in_a_fork(folder, program)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("told ")]


def test_files_and_folders_are_meant_where_the_command_was_given(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    given = ("suite=scopes", "suite.also=[other.json]", "output_dir=out", "hydra.job.chdir=true")
    assert told(tmp_path, *given) == [["scopes", "0", str(tmp_path / "out"), str(tmp_path / "other.json")]]
    assert not (tmp_path / "out" / "out").exists()


def test_each_job_of_a_sweep_has_a_folder_of_its_own(tmp_path: Path) -> None:
    sweep = ("--multirun", "suite=heap", "threads=1,2", "output_dir=out")
    folders = [str(tmp_path / "out" / job) for job in ("0", "1")]
    assert told(tmp_path, *sweep) == [["heap", str(n + 1), folder] for n, folder in enumerate(folders)]
    assert all((Path(folder) / ".hydra" / "overrides.yaml").is_file() for folder in folders)


def test_so_have_the_suites_of_a_sweep(tmp_path: Path) -> None:
    found = told(tmp_path, "--multirun", "suite=scopes,steady", "hydra.job.chdir=true", "output_dir=out")
    folders = [str(tmp_path / "out" / job) for job in ("0", "1")]
    assert found == [["scopes", "0", folders[0]], ["steady", "0", folders[1]]]
