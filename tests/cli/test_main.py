"""The command itself: its version, its help, and that it answers before torch is imported."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from tests.cli.command import hotcompile, in_a_process

VERSION = importlib.metadata.version("lightning-hotcompile")


def test_it_tells_its_version() -> None:
    result = hotcompile("--version")
    assert (result.exit_code, result.stdout) == (0, f"lightning-hotcompile {VERSION}\n")


def test_the_help_names_all_commands() -> None:
    result = hotcompile("--help")
    assert result.exit_code == 0
    commands = result.stdout.partition("Commands:")[2]
    assert [line.split()[0] for line in commands.splitlines() if line.strip()] == [
        "doctor",
        "explain",
        "worth",
        "report",
        "events",
        "timeline",
        "trace",
        "bench",
        "store",
    ]


@pytest.mark.parametrize("arguments", [(), ("store",)], ids=str)
def test_without_a_command_there_is_help(arguments: tuple[str, ...]) -> None:
    result = hotcompile(*arguments)
    assert result.output.startswith("Usage: ")
    assert "Commands:" in result.output


@pytest.mark.parametrize("arguments", [("stores",), ("--versions",), ("store", "ls", "--all")], ids=str)
def test_a_wrong_name_is_told_without_a_traceback(arguments: tuple[str, ...]) -> None:
    result = hotcompile(*arguments)
    assert result.exit_code == 2
    assert arguments[-1] in result.stderr
    assert "Traceback" not in result.output


def test_the_module_is_the_same_command() -> None:
    done = in_a_process("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: hotcompile ")
    assert done.stdout.split() == hotcompile("--help").stdout.replace("root", "hotcompile").split()


def test_the_console_script_is_the_main_function() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="hotcompile")
    assert script.value == "lightning_hotcompile.cli.main:main"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["store", "clear", "--help"], ["stores"]])
def test_it_answers_without_torch_and_lightning(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from lightning_hotcompile.cli.main import main\n"
        f"sys.argv = ['hotcompile', *{arguments!r}]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    print('heavy:', {'torch', 'lightning', 'pytorch_lightning'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: set()"
