"""Runs the command in this process, and its entry points in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from typer.testing import CliRunner

from lightning_hotcompile.cli.main import app


def hotcompile(*arguments: object, answer: str | None = None) -> Any:
    """The result of the command: its exit code, stdout and stderr. No exception gets out of it."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refused(*arguments: object, answer: str | None = None) -> str:
    """The one line with which the command refuses, with exit code 2."""
    result = hotcompile(*arguments, answer=answer)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("hotcompile: error: ")
    return str(line)


def as_json(*arguments: object) -> Any:
    """The JSON document that the command prints."""
    return json.loads(hotcompile(*arguments, "--json").stdout)


def in_a_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """``python -m lightning_hotcompile`` in a process of its own."""
    command = [sys.executable, "-m", "lightning_hotcompile", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
