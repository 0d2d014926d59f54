"""What the README and its neighbours say is what the code holds."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

import lightning_hotcompile
from lightning_hotcompile import HotCompile, HotCompileConfig, StepDetector
from lightning_hotcompile.receipt.report import RegionProof
from lightning_hotcompile.run.reporting import empty_report, scalars
from tests.models import Net, loader

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(lightning_hotcompile.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/semantics.md")
COMMANDS = {
    "recipes": "pip install -e '.[recipes]' && python recipes/train.py",
    "test": "pip install -e '.[test]' && pytest",
}
ROW = re.compile(r"^\| `(\w+)` \| `(.+)` \| (.+) \|$", re.MULTILINE)


def section(title: str) -> str:
    """The text below a heading, up to the next heading of the same or a higher level."""
    level, _, rest = README.partition(f"# {title}\n")
    marks = "#" * (len(level) - len(level.rstrip("#")) + 1)
    return re.split(rf"^#{{1,{len(marks)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def documented_options() -> dict[str, str]:
    """Each option's docstring in ``config.py``, as one line of Markdown."""
    tree = ast.parse((PACKAGE / "config.py").read_text(encoding="utf-8"))
    (config,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "HotCompileConfig")
    return {
        field.target.id: " ".join(str(doc.value.value).replace("``", "`").split())
        for field, doc in zip(config.body, config.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }


def test_the_options_table_has_each_option_with_its_default_and_meaning() -> None:
    rows = ROW.findall(section("Options"))
    defaults = {f.name: f.default for f in dataclasses.fields(HotCompileConfig)}
    assert [name for name, _, _ in rows] == list(defaults)
    assert {name: ast.literal_eval(default) for name, default, _ in rows} == defaults
    assert {name: meaning for name, _, meaning in rows} == documented_options()


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link}
    places = r"(?:recipes|conf|tests|docs|\.ci|lightning_hotcompile)"
    files = set(re.findall(rf"(?<![\w./-]){places}/[\w./-]*\w", text))
    assert not [name for name in links | files if name and not (ROOT / name).exists()]


@pytest.mark.parametrize("extra", sorted(COMMANDS))
def test_ci_runs_the_commands_of_the_readme(extra: str) -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (function,) = re.findall(r"^readme_command\(\) .*$", script, re.MULTILINE)
    command = ["bash", "-c", f"{function}\nreadme_command {extra}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found == COMMANDS[extra] + "\n"
    assert README.splitlines().count(COMMANDS[extra]) == 1
    assert f"$(readme_command {extra})" in script
    assert COMMANDS[extra] not in script


def test_ci_can_be_run() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=True)


def recipe_commands() -> list[str]:
    lines = "".join(blocks("bash")).splitlines()
    return [line for line in lines if line.startswith("python recipes/train.py ")]


@pytest.mark.parametrize("command", recipe_commands())
def test_each_recipe_command_composes(command: str) -> None:
    hydra = pytest.importorskip("hydra")
    arguments = [a for a in shlex.split(command, comments=True)[2:] if a != "-m"]
    # Of a sweep the first value.
    overrides = [a if "[" in a else a.partition(",")[0] for a in arguments]
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        assert hydra.compose("train", overrides=[*overrides, "output_dir=unused"])


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_each_script_runs(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"model": Net(), "data": loader()}
    exec(blocks("python")[number], names)
    printed = capsys.readouterr().out
    if "hot" in names:
        assert "hotcompile receipt" in printed
    if "detector" in names:
        assert isinstance(names["detector"], StepDetector)
        assert "this step is hot now" in printed


def test_the_yaml_makes_the_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = pytest.importorskip("lightning.pytorch.cli")
    (text,) = blocks("yaml")
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["train.py", f"--config={file}"])
    trainer = cli.LightningCLI(
        Net, run=False, seed_everything_default=False, save_config_callback=None
    ).trainer
    (found,) = (c for c in trainer.callbacks if isinstance(c, HotCompile))
    assert found.config == HotCompileConfig(threshold=20, keep_eager=("head",))


def test_the_variables_are_those_of_the_code() -> None:
    variable = re.compile(r"\bHOTCOMPILE(?:_[A-Z]+)*\b")
    places = ("asked_for.py", "environment.py", "switch.py", "store/folder.py")
    code = "".join((PACKAGE / name).read_text(encoding="utf-8") for name in places)
    assert set(variable.findall(README)) == set(variable.findall(code))


def test_the_scalars_are_those_that_are_logged() -> None:
    region = RegionProof(name="r", kind="step", members=(), graphs=1, runs=1, compile_s=1.0, proven=True)
    report = dataclasses.replace(empty_report("steady", ""), regions=(region,))
    (sentence,) = re.findall(r"scalars under `hotcompile/`: (.+?)\. ", README)
    assert set(re.findall(r"`(\w+)`", sentence)) == {*scalars(report), "step_ms"}


def test_there_is_a_place_for_a_receipt() -> None:
    (receipt,) = re.findall(r"<!-- receipt -->\n(.+?)<!-- /receipt -->", README, re.DOTALL)
    assert "hotcompile receipt" in receipt
    assert "proven" in receipt


def test_the_licence_is_the_whole_one() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert text.lstrip().startswith("Apache License")
    assert "END OF TERMS AND CONDITIONS" in text
    assert len(text) == 11358
