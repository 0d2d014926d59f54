"""Which command a script, a config or a command is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lightning_hotcompile.cli.launch import run_beside, run_script, script_command
from lightning_hotcompile.cli.telling import CommandError


def test_a_script_goes_to_this_python(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.touch()
    assert script_command([str(file), "a=1", "-x"]) == [sys.executable, str(file), "a=1", "-x"]


@pytest.mark.parametrize("name", ["config.yaml", "CONFIG.YML"])
def test_a_config_goes_to_lightning_cli(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.touch()
    command = script_command([str(file), "--trainer.max_epochs=1"])
    assert command[:2] == [sys.executable, "-c"]
    assert command[-4:] == ["fit", "--config", str(file), "--trainer.max_epochs=1"]


def test_a_command_stays_as_it_is() -> None:
    assert script_command(["torchrun", "train.py"]) == ["torchrun", "train.py"]


@pytest.mark.parametrize("name", ["train.py", "config.yaml"])
def test_a_file_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(CommandError, match=f"'{name}' is not there"):
        script_command([name])


def test_the_exit_code_is_that_of_a_shell() -> None:
    for code, expected in (("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)):
        assert run_script([sys.executable, "-c", code], os.environ) == expected


def test_quiet_shows_the_end_of_a_script_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    code = "for i in range(50): print(i)\nraise SystemExit({})"
    assert run_beside([sys.executable, "-c", code.format(0)], os.environ, quiet=True, as_json=False) == 0
    assert capfd.readouterr() == ("", "")
    assert run_beside([sys.executable, "-c", code.format(4)], os.environ, quiet=True, as_json=False) == 4
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [str(i) for i in range(30, 50)]


def test_with_json_what_the_script_prints_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    for as_json in (False, True):
        run_beside([sys.executable, "-c", "print('x')"], os.environ, quiet=False, as_json=as_json)
        assert capfd.readouterr()[as_json] == "x\n"
