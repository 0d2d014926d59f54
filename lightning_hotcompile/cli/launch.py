"""Runs a script that trains with Lightning, unchanged, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from lightning_hotcompile.cli.telling import CommandError

NO_TRAINER = (
    "the command did not train with a Trainer of 'lightning' or 'pytorch_lightning' in the environment in "
    "which this package is installed"
)

SETTINGS: dict[str, Any] = {"allow_interspersed_args": False}
"""For typer: what follows the script are the script's own options."""

ScriptCommand = Annotated[
    list[str],
    typer.Argument(
        metavar="COMMAND",
        help="The script as you start it (python train.py max_epochs=1), a train.py alone, or a config.yaml "
        "of LightningCLI.",
    ),
]

_LIGHTNING_CLI = "from lightning.pytorch.cli import LightningCLI; LightningCLI(save_config_callback=None)"
_STDERR = 2
_LAST_LINES = 20


def script_command(given: Sequence[str]) -> list[str]:
    """The command to run: a ``*.py`` goes to this Python, a ``*.yaml`` to LightningCLI's ``fit``.

    Raises:
        CommandError: there is no such file.
    """
    suffix = Path(given[0]).suffix.lower()
    if suffix not in (".py", ".yaml", ".yml"):
        return list(given)
    if not Path(given[0]).is_file():
        raise CommandError(
            f"{given[0]!r} is not there: give a script, a config of LightningCLI or a command."
        )
    if suffix == ".py":
        return [sys.executable, *given]
    return [sys.executable, "-c", _LIGHTNING_CLI, "fit", "--config", *given]


def run_script(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | int | None = None
) -> int:
    """The exit code of the script, as a shell tells it.

    Args:
        command: the program and its arguments.
        environment: all of its variables.
        output: where its stdout goes; its stderr as well, if that is a file. None passes both on.

    Raises:
        CommandError: it cannot be started.
    """
    errors = None if output is None or isinstance(output, int) else output
    try:
        child = subprocess.Popen(command, env=environment, stdout=output, stderr=errors)
    except OSError as error:
        raise CommandError(
            f"{command[0]!r} cannot be started ({error.strerror}): give a command, such as python train.py."
        ) from None

    def pass_on(number: int, frame: Any) -> None:
        child.send_signal(number)

    # A terminal sends Ctrl-C to both: the script ends as it likes, and what it has written is still read.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT,)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, pass_on)
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def run_beside(command: Sequence[str], environment: Mapping[str, str], *, quiet: bool, as_json: bool) -> int:
    """The same, for a command that prints something itself.

    Args:
        command: the program and its arguments.
        environment: all of its variables.
        quiet: show of its output only the end, and only if it fails.
        as_json: stdout is for one JSON document: the script's goes to stderr.
    """
    if not quiet:
        return run_script(command, environment, _STDERR if as_json else None)
    with tempfile.TemporaryFile() as output:
        code = run_script(command, environment, output)
        if code:
            output.seek(0)
            for line in output.read().decode(errors="replace").splitlines()[-_LAST_LINES:]:
                typer.echo(line, err=True)
    return code
