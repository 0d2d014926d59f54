"""The suites of measurements as ``recipes/benchmark.py`` builds and runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from lightning_hotcompile.bench.all_suites import AllSuites
from lightning_hotcompile.bench.suite import Suite
from tests.recipes.test_benchmark import benchmark

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("hotpath", "mlp", "patterns", "attention", "transformer", "rope", "surgical", "detector")
MOST_QUICK_ROWS = 2


def built(name: str, *overrides: str) -> Suite:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("benchmark", overrides=[f"suite={name}", *overrides])
    suite = instantiate(config.suite)
    assert isinstance(suite, Suite)
    return suite


@pytest.mark.parametrize("name", NAMES)
def test_every_suite_is_built_from_its_config(name: str) -> None:
    suite = built(name)
    assert (suite.name, suite.device, suite.size, suite.backend) == (name, "cpu", "default", "inductor")
    assert set(suite.rows) == {"quick", "default", "full"}
    assert len(suite.chosen_rows()) >= 4
    assert 1 <= len(suite.chosen(None, True).chosen_rows()) <= MOST_QUICK_ROWS
    assert built(name, "size=full", "format=csv").wanted_formats == ["csv"]


def test_all_is_all_of_them() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        suite = instantiate(compose("benchmark", overrides=["suite=all", "size=full"]).suite)
    assert isinstance(suite, AllSuites)
    assert tuple(suite.suites) == NAMES
    assert {one.size for one in suite.suites.values()} == {"full"}
    assert (suite.budget_s["quick"] or 0) < 600


def test_full_sizes_are_those_of_the_sources() -> None:
    rows = [row.sizes for row in built("attention", "size=full").chosen_rows()]
    assert {row["batch_size"] for row in rows} == {8}
    assert {row["d_model"] for row in rows} == {16, 32, 64, 128}
    assert (min(r["seq_len"] for r in rows), max(r["seq_len"] for r in rows)) == (256, 16384)
    rows = [row.sizes for row in built("transformer", "size=full").chosen_rows()]
    assert {row["model_size"] for row in rows} == {"small", "medium", "large", "xl", "2.7B"}
    assert {row["context_length"] for row in rows} == {128, 256, 512, 1024}
    rows = [row.sizes for row in built("rope", "size=full").chosen_rows()]
    assert {(r["batch_size"], r["seq_len"], r["heads"], r["head_dim"]) for r in rows} == {(8, 2048, 32, 128)}
    assert {row["dtype"] for row in rows} == {"fp32", "bf16"}
    surgical = [row.sizes for row in built("surgical", "size=full").chosen_rows()]
    wanted = {"batch_size": 8, "seq_len": 2048, "hidden": 2048, "heads": 16, "layers": 4, "ffn": 4096}
    assert all(row.items() >= wanted.items() for row in surgical)


TINY = (
    "suite=patterns",
    "case=simple",
    "threads=1",
    "suite.backend=aot_eager",
    "suite.rounds=10",
    "quick=true",
)


def test_a_tiny_suite_writes_everything_and_is_not_repeated(tmp_path: Path) -> None:
    done = benchmark(tmp_path, *TINY, "output_dir=out")
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "out"
    ends = ("csv", "json", "md", "tex", "png")
    assert {path.name for path in folder.iterdir()} == {".hydra", *(f"patterns.{end}" for end in ends)}
    table = pd.read_csv(folder / "patterns.csv")
    assert list(table["arm"]) == ["eager", "compiled"]
    assert set(table["status"]) == {"ok"}
    content = json.loads((folder / "patterns.json").read_text(encoding="utf-8"))
    assert content["command"] == f"python recipes/benchmark.py {' '.join(TINY)}"
    assert "Where compiling helps and where it hurts" in done.stdout
    again = benchmark(tmp_path, *TINY, "output_dir=out")
    assert again.returncode == 0, again.stderr[-3000:]
    assert "0 rows" in again.stdout
    assert pd.read_csv(folder / "patterns.csv").equals(table)
    other = benchmark(tmp_path, *TINY, "suite.rounds=11", "output_dir=out")
    assert other.returncode == 1
    assert "rounds is 10 there and 11 now. Take another output_dir" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("suite=mlp", "case=wid"), "did you mean 'wide'"),
        (("suite=mlp", "format=[pgn]"), "did you mean 'png'"),
        (("suite=mlp", "size=fulll"), "did you mean 'full'"),
        (("suite=all", "case=atention"), "did you mean 'attention'"),
        (("suite=hotpath", "case=matmul_chain", "quick=true"), "is not in size=quick: use size=default"),
        (("suite=mlp", "case=5"), "case='5' is unknown: use mlp, wide"),
    ],
)
def test_a_wrong_name_is_one_line(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    done = benchmark(tmp_path, *arguments, "output_dir=out")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert words in line
