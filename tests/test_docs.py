"""What the documentation says is what the code holds; ``mkdocs build --strict`` looks at its links."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import re
import shlex
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command

import lightning_hotcompile
from lightning_hotcompile import HotCompile, HotCompileConfig, StepDetector
from lightning_hotcompile.cli.main import app
from lightning_hotcompile.machine import Phase
from lightning_hotcompile.receipt.event_kinds import Event
from lightning_hotcompile.receipt.report import RegionProof
from lightning_hotcompile.run.reporting import empty_report, scalars
from tests.models import Net, loader
from tests.test_readme import README, ROW, documented_options

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(lightning_hotcompile.__file__).parent
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ROWS = [*(f"W{i}" for i in range(1, 13)), *(f"S{i}" for i in range(1, 16))]
ROWS += [*(f"T{i}" for i in range(1, 10)), *(f"B{i}" for i in range(1, 11))]
SUITES = sorted(path.stem for path in (ROOT / "conf" / "suite").glob("*.yaml"))


def blocks(page: str, language: str) -> list[str]:
    fence = rf"^``` ?{re.escape(language)}\n(.*?)^```$"
    return re.findall(fence, PAGES[page], re.DOTALL | re.MULTILINE)


def commands(prefix: str) -> list[str]:
    """Each different command of the pages that begins so, without what a shell leaves away."""
    inline = re.findall(rf"`({prefix}[^`\n]*)`", "\n".join(PAGES.values()))
    lines = [line for page in PAGES for text in blocks(page, "bash") for line in text.splitlines()]
    found = [*inline, *(line for line in lines if line.startswith(prefix))]
    return sorted({" ".join(shlex.split(command, comments=True)) for command in found})


def rows_of_evidence() -> dict[str, str]:
    return dict(re.findall(r"^\| ([WSTB]\d+) \| .*? \| (.*) \|$", PAGES["evidence.md"], re.MULTILINE))


@functools.cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@functools.cache
def texts_of_the_code() -> str:
    """Every string of the package, with what is filled in left out; one a line."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


class TestOptions:
    def test_each_option_is_there_once_with_its_default_and_meaning(self) -> None:
        rows = ROW.findall(PAGES["options.md"])
        defaults = {f.name: f.default for f in dataclasses.fields(HotCompileConfig)}
        assert sorted(name for name, _, _ in rows) == sorted(defaults)
        assert {name: ast.literal_eval(default) for name, default, _ in rows} == defaults
        assert {name: meaning for name, _, meaning in rows} == documented_options()

    def test_the_variables_are_those_of_the_readme(self) -> None:
        variable = re.compile(r"\bHOTCOMPILE(?:_[A-Z]+)*\b")
        assert set(variable.findall(PAGES["options.md"])) == set(variable.findall(README))

    @pytest.mark.parametrize("page", ["index.md", "options.md"])
    def test_the_yaml_makes_the_callback(
        self, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cli = pytest.importorskip("lightning.pytorch.cli")
        (text,) = blocks(page, "yaml")
        (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
        monkeypatch.setattr("sys.argv", ["train.py", f"--config={tmp_path / 'config.yaml'}"])
        made = cli.LightningCLI(Net, run=False, seed_everything_default=False, save_config_callback=None)
        (found,) = (c for c in made.trainer.callbacks if isinstance(c, HotCompile))
        assert found.config == HotCompileConfig(threshold=20, keep_eager=("head",))

    @pytest.mark.parametrize("page", sorted(PAGES))
    def test_options_that_are_set_in_the_text_exist(self, page: str) -> None:
        names = {*HotCompileConfig.names(), *KNOWN_ARGUMENTS}
        given = re.findall(r"`(\w+)=[^`]*`", PAGES[page])
        assert not [name for name in given if name not in names and not name.startswith("HOTCOMPILE")]


KNOWN_ARGUMENTS = ("create_graph", "device", "size", "quick", "case", "output_dir", "format", "suite")
"""Of autograd, and of recipes/benchmark.py in its own configuration."""


class TestTexts:
    @pytest.mark.parametrize("page", ["index.md", "how-it-works.md", "transformer-engine.md"])
    def test_each_script_runs(
        self, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert blocks(page, "python")
        for script in blocks(page, "python"):
            names: dict[str, Any] = {"model": Net(), "data": loader()}
            exec(script, names)
            printed = capsys.readouterr().out
            assert printed.strip()
            if "hot" in names:
                assert "hotcompile receipt" in printed
            if "detector" in names:
                assert isinstance(names["detector"], StepDetector)
                assert "this step is hot now" in printed

    def test_the_phases_are_those_of_the_machine(self) -> None:
        table = PAGES["how-it-works.md"].partition("## Phases\n")[2].partition("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [str(phase) for phase in Phase]

    def test_the_kinds_of_events_are_those_of_the_log_with_their_fields(self) -> None:
        common = {field.name for field in dataclasses.fields(Event)}
        rows = re.findall(r"^\| `(\w+)` \| .+ \| (`.+`) \|$", PAGES["commands.md"], re.MULTILINE)
        told = {kind: re.findall(r"`(\w+)`", fields) for kind, fields in rows}
        kinds = {each.kind_name(): each for each in Event.__subclasses__()}
        assert told == {
            name: [field.name for field in dataclasses.fields(kind) if field.name not in common]
            for name, kind in kinds.items()
        }

    def test_the_scalars_are_those_that_are_logged(self) -> None:
        region = RegionProof(name="r", kind="step", members=(), graphs=1, runs=1, compile_s=1.0, proven=True)
        report = dataclasses.replace(empty_report("steady", ""), regions=(region,))
        (sentence,) = re.findall(r"scalars under `hotcompile/`: (.+?)\. ", PAGES["how-it-works.md"])
        assert set(re.findall(r"`(\w+)`", sentence)) == {*scalars(report), "step_ms"}

    @pytest.mark.parametrize("page", sorted(PAGES))
    def test_files_that_are_named_exist(self, page: str) -> None:
        places = r"(?:recipes|conf|tests|docs|lightning_hotcompile)"
        files = set(re.findall(rf"(?<![\w./-]){places}/[\w./-]*\w", PAGES[page]))
        assert not [name for name in files if not (ROOT / name).exists()]

    def test_each_printed_line_is_in_the_code(self) -> None:
        lines = "".join(blocks("troubleshooting.md", "{.text .printed}")).splitlines()
        parts = [part.strip(" :") for line in lines for part in re.split(r"\.\.\.|: ", line)]
        parts = [part for part in parts if len(part) > 3]
        assert len(parts) > 40
        assert not [part for part in parts if part not in texts_of_the_code()]

    def test_the_public_names_are_on_the_page_of_the_api(self) -> None:
        listed = re.findall(r"^::: lightning_hotcompile\.(\w+)$", PAGES["api.md"], re.MULTILINE)
        assert sorted(listed) == sorted(lightning_hotcompile.__all__)

    def test_ci_builds_the_site(self) -> None:
        assert "mkdocs build --strict" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


class TestCommands:
    @pytest.mark.parametrize("command", commands("hotcompile "))
    def test_each_command_exists_with_its_options(self, command: str) -> None:
        found, words = get_command(app), command.split()[1:]
        while words and hasattr(found, "commands"):
            assert words[0] in found.commands, f"there is no {command!r}"
            found = found.commands[words.pop(0)]
        known = {name for parameter in found.params for name in parameter.opts}
        assert not [word for word in words if word.startswith("-") and word not in known]

    @pytest.mark.parametrize("command", commands("python recipes/"))
    def test_each_recipe_command_composes(self, command: str) -> None:
        hydra = pytest.importorskip("hydra")
        _, script, *arguments = command.split()
        upper = re.compile(r"=[A-Z]+$")  # a place to be filled in
        given = [a for a in arguments if not a.startswith("--") and not upper.search(a)]
        overrides = [a if "[" in a else a.partition(",")[0] for a in given]
        with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            assert hydra.compose(Path(script).stem, overrides=[*overrides, "output_dir=unused"])

    def test_each_suite_has_a_section_with_its_command(self) -> None:
        headings = re.findall(r"^## (\w+)$", PAGES["benchmarks.md"], re.MULTILINE)
        marks = re.findall(r"^<!-- results: (\w+) -->$", PAGES["benchmarks.md"], re.MULTILINE)
        assert sorted(headings) == sorted(set(SUITES) - {"all"})
        assert marks == [*headings, "rest"]
        for suite in headings:
            assert f"python recipes/benchmark.py suite={suite}\n" in PAGES["benchmarks.md"]


class TestEvidence:
    def test_each_row_is_there_once_and_in_order(self) -> None:
        assert re.findall(r"^\| ([WSTB]\d+) \|", PAGES["evidence.md"], re.MULTILINE) == ROWS

    @pytest.mark.parametrize("row", ROWS)
    def test_what_shows_a_row_exists(self, row: str) -> None:
        shown = rows_of_evidence()[row]
        tests = TEST.findall(shown)
        missing = [f"{file}::{name}" for file, name in tests if name not in functions_of(file)]
        assert not missing
        others = [c for c in re.findall(r"`([^`]+)`", shown) if not c.startswith("tests/")]
        assert all(c in commands("hotcompile ") + commands("python recipes/") for c in others)
        assert tests or others or shown.startswith("Not shown"), f"{row} has neither test nor command"


@pytest.fixture(scope="module")
def results() -> ModuleType:
    """The hook that makes pages of results, without MkDocs around it."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("results_hook", ROOT / "docs" / "hooks" / "results.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


class TestResults:
    @pytest.fixture
    def folder(self, results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "results"
        (folder / "mlp").mkdir(parents=True)
        text = "# Suite mlp\n\nA note.\n\n## When it pays\n\n- Often.\n\n## Measurements\n\n| a |\n|---|\n"
        (folder / "mlp" / "mlp.md").write_text(text, encoding="utf-8")
        monkeypatch.setattr(results, "RESULTS", folder)
        return folder

    def test_answers_are_shown_and_numbers_are_linked(self, results: ModuleType, folder: Path) -> None:
        shown = results.on_page_markdown("<!-- results: mlp -->", None, None, None)
        assert shown.startswith("A note.\n\n**When it pays**\n\n- Often.\n\n[")
        assert shown.endswith("](results/mlp/mlp.md)")
        assert "Measurements" not in shown
        assert "Measurements" in results.page_of(folder / "mlp" / "mlp.md")

    def test_a_picture_is_shown_where_there_is_one(self, results: ModuleType, folder: Path) -> None:
        (folder / "mlp" / "mlp.png").write_bytes(b"")
        assert "](results/mlp/mlp.png)" in results.shown("mlp")
        assert "](mlp.png)" in results.page_of(folder / "mlp" / "mlp.md")

    def test_a_link_beside_it_leads_there_from_either_page(self, results: ModuleType, folder: Path) -> None:
        (folder / "mlp" / "mlp.md").write_text("# Suite mlp\n\nFrom [all](mlp.json), not [that](../a.md).\n")
        assert results.shown("mlp").startswith("From [all](results/mlp/mlp.json), not [that](../a.md).")
        assert "[all](mlp.json)" in results.page_of(folder / "mlp" / "mlp.md")

    def test_a_suite_without_results_says_so(self, results: ModuleType, folder: Path) -> None:
        assert results.shown("rope") == results.NONE_YET

    def test_folders_that_no_mark_names_come_last(self, results: ModuleType, folder: Path) -> None:
        both = results.on_page_markdown("<!-- results: rope -->\n<!-- results: rest -->", None, None, None)
        assert "## `mlp`\n\nA note." in both
        named = results.on_page_markdown("<!-- results: mlp -->\n<!-- results: rest -->", None, None, None)
        assert named.count("A note.") == 1


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = ["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site" / "results" / "scopes" / "scopes" / "index.html").is_file()
    assert not (tmp_path / "site" / "hooks").exists()
