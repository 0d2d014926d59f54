"""``hotcompile bench``: finds the recipe of a checkout, and runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_hotcompile.cli import bench as command
from lightning_hotcompile.cli.bench import find_recipe
from lightning_hotcompile.cli.telling import CommandError
from tests.cli.command import hotcompile, refused
from tests.cli.scripts import ROOT, run


def checkout(folder: Path, *, ours: bool) -> Path:
    recipe = folder / "recipes" / "benchmark.py"
    recipe.parent.mkdir(parents=True)
    recipe.touch()
    if ours:
        (folder / "lightning_hotcompile" / "bench").mkdir(parents=True)
    return recipe


def test_the_first_checkout_counts(tmp_path: Path) -> None:
    checkout(tmp_path / "another_project", ours=False)
    recipe = checkout(tmp_path / "a", ours=True)
    folders = [tmp_path / "none", tmp_path / "another_project", tmp_path / "a", ROOT]
    assert find_recipe(folders) == recipe


def test_without_a_checkout_it_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"pip install -e '\.\[recipes\]'"):
        find_recipe([tmp_path])


def test_that_is_one_line_and_exit_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "__file__", str(tmp_path / "site" / "lightning_hotcompile" / "cli" / "b.py"))
    assert "recipes" in refused("bench", "suite=mlp")


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        (("suite=mlp", "--cfg", "job"), ("suite=mlp", "--cfg", "job")),
        (("--cfg", "job"), ("--cfg", "job")),
        (("--cfg=job", "suite=mlp", "--help"), ("--cfg=job", "suite=mlp", "--help")),
        (("-m", "suite=mlp,rope", "-c", "job"), ("-m", "suite=mlp,rope", "-c", "job")),
        (("-cjob",), ("-cjob",)),
        (("+a=1", "~b"), ("+a=1", "~b")),
        (("--", "--help"), ("--help",)),
        ((), ()),
    ],
    ids=str,
)
def test_all_arguments_are_the_recipes(
    given: tuple[str, ...], passed_on: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def remember(called_with: list[str], environment: object) -> int:
        called.extend(called_with)
        return 7

    monkeypatch.setattr(command, "run_script", remember)
    result = hotcompile("bench", *given)
    assert result.exit_code == 7, result.output
    assert tuple(called[2:]) == passed_on


def test_the_commands_own_help_is_its_own() -> None:
    result = hotcompile("bench", "--help")
    assert result.exit_code == 0
    assert "Usage: " in result.stdout
    assert "'hotcompile bench -- --help' lists the suites" in result.stdout


@pytest.mark.slow
def test_arguments_and_exit_code_are_the_recipes(tmp_path: Path) -> None:
    pytest.importorskip("hydra", reason="hydra is in the extra 'recipes'")
    done = run(tmp_path, "bench", "suite=mlp", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert "suite:" in done.stdout
    done = run(tmp_path, "bench", "suite=no_such_suite")
    assert done.returncode == 1
    assert "no_such_suite" in done.stderr
