"""``hotcompile worth`` with real scripts, in processes of their own."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from lightning_hotcompile.cli import gathering
from lightning_hotcompile.cli.worth import environment_of
from tests.cli.command import refused
from tests.cli.scripts import run, script

PLAIN = """
print("training", sys.argv[1:])
fit(seeded(Net), train=loader(8000), val=loader(8))
print("after fit")
"""


WITH_INDUCTOR = """
from lightning.pytorch import Callback


class Header(Callback):
    def on_train_batch_end(self, *_):
        if (codecache := sys.modules.get("torch._inductor.codecache")) is not None:
            with open("header", "w", encoding="utf-8") as file:
                file.write(codecache._HEADER_DIR)


own = HotCompile(threshold=3, store=None)
fit(seeded(Net), [Header(), own], train=loader(80_000), max_epochs=100)
"""


def test_a_script_that_knows_nothing_gets_an_answer(tmp_path: Path) -> None:
    script(tmp_path, PLAIN)
    done = run(tmp_path, "worth", "--backend", "aot_eager", "train.py", "a=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training ['a=1']" in done.stdout
    assert "after fit" not in done.stdout
    assert any(line.startswith(("yes: ", "no: ")) for line in done.stdout.splitlines())
    for name in ("eager step", "compiled step", "compiling", "break-even", "parity"):
        assert name in done.stdout
    assert "4,000 steps" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]


def test_its_own_callback_measures_and_each_scope_is_a_run(tmp_path: Path) -> None:
    script(tmp_path, "fit(seeded(Net), [hot()], train=loader(8000))")
    command = ("worth", "--json", "--scope", "regions", "--scope", "step", "train.py")
    done = run(tmp_path, *command, env={**os.environ, "HOTCOMPILE": "off"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {a["scope"] for a in found["answers"]} == {"regions", "step"}
    assert all(a["phase"] == "steady" for a in found["answers"])  # it has min_speedup=0
    speeds = [a["speedup"]["value"] for a in found["answers"]]
    assert speeds == sorted(speeds, reverse=True)
    yes = [a["scope"] for a in found["answers"] if a["answer"] == "yes"]
    assert found["best"] == (yes[0] if yes else None)


def test_a_limit_means_no_answer(tmp_path: Path) -> None:
    script(tmp_path, PLAIN)
    done = run(tmp_path, "worth", "-q", "--max-steps", "3", "train.py")
    assert done.returncode == 2, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("no answer: the limit of 3 steps (--max-steps) was reached before there was a")


def test_a_model_that_cannot_be_compiled_is_no_answer(tmp_path: Path) -> None:
    script(tmp_path, "fit(seeded(Net), [hot(scope='module', keep_eager=['*'])])")
    done = run(tmp_path, "worth", "-q", "train.py")
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("no answer: nothing could be compiled: nothing to compile in Net")


def test_a_script_that_fails_keeps_its_exit_code(tmp_path: Path) -> None:
    script(tmp_path, "raise SystemExit(7)", head="")
    done = run(tmp_path, "worth", "train.py")
    assert done.returncode == 7
    assert done.stderr == "hotcompile: error: the script failed with exit code 7\n"


def test_a_script_without_a_trainer_is_refused(tmp_path: Path) -> None:
    script(tmp_path, "", head="")
    done = run(tmp_path, "worth", "train.py")
    assert done.returncode == 2
    assert "there is nothing to measure: the command did not train with a Trainer" in done.stderr


@pytest.mark.slow
def test_with_inductor_there_is_an_answer_with_its_numbers(tmp_path: Path) -> None:
    script(tmp_path, WITH_INDUCTOR)
    done = run(tmp_path, "worth", "--json", "--scope", "regions", "train.py")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["answers"]
    assert found["answer"] in ("yes", "no")
    assert found["phase"] in ("steady", "reverted")
    assert found["compile_s"] > 0
    assert found["speedup"]["n"] >= 10
    assert found["planned_steps"] == 1_000_000
    compiled = [region for region in found["regions"] if region["proven"]]
    assert compiled
    assert found["parity"].startswith(f"{len(compiled)} of {len(compiled)} graphs agree")
    header = Path((tmp_path / "header").read_text(encoding="utf-8"))
    assert any(part.startswith("hotcompile-worth-") for part in header.parts), header
    assert not header.exists(), "the next scope, and the next run, precompile it anew"


def test_the_script_knows_nothing_from_before(tmp_path: Path) -> None:
    own = {"HOTCOMPILE": "off", "HOTCOMPILE_STORE": "/a", "TORCHINDUCTOR_CACHE_DIR": "/b", "X": "1"}
    own["TRITON_CACHE_DIR"] = "/c"
    environment = environment_of(own, "order", tmp_path)
    assert (environment["HOTCOMPILE"], environment["HOTCOMPILE_WORTH"], environment["X"]) == (
        "force",
        "order",
        "1",
    )
    assert Path(environment["HOTCOMPILE_STORE"]).parent == tmp_path
    # With a folder of its own, the compiler's header would lie where the last run has left one.
    assert not {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"} & environment.keys()
    assert own["HOTCOMPILE"] == "off"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--scope", "stop"), "--scope='stop' is not allowed"),
        (("--scope", "step", "--scope", "pattern"), "--scope='pattern' needs targets"),
        (("--max-minutes", "0"), "--max-minutes=0 is not allowed"),
        (("--max-minutes", "inf"), "--max-minutes=inf is not allowed"),
    ],
)
def test_wrong_options_are_one_line(arguments: tuple[str, ...], why: str) -> None:
    assert why in refused("worth", *arguments, "train.py")


def test_a_temporary_folder_that_loads_no_code_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "runs_code", lambda folder: False)
    line = refused("worth", "train.py")
    assert tempfile.gettempdir() in line
    assert "another folder in TMPDIR" in line
