"""``python -m lightning_hotcompile.trace``: capture a script that trains with Lightning.

The script is not changed: Lightning asks this package for callbacks, and an environment variable says
that one is to capture.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from lightning_hotcompile.capture.order import (
    EVENTS_FILE,
    REPORT_FILE,
    SUMMARY_FILE,
    TRACE_FILE,
    VARIABLE,
    Order,
)
from lightning_hotcompile.capture.summary import complete
from lightning_hotcompile.cli.launch import NO_TRAINER, SETTINGS, run_script
from lightning_hotcompile.cli.telling import CommandError, errors_told, note
from lightning_hotcompile.receipt import wording
from lightning_hotcompile.switch import SWITCH
from lightning_hotcompile.view.captured import MARK, Captured

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

_SECONDS = 5.0


@app.command(context_settings=SETTINGS)
def trace(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The script: python train.py.")],
    folder: Annotated[Path, typer.Option("--dir", help="The folder to write into; made if missing.")],
    seconds: Annotated[
        float | None, typer.Option("-s", "--seconds", help="Capture so many seconds of training (5).")
    ] = None,
    steps: Annotated[int | None, typer.Option("-n", "--steps", help="Capture so many steps instead.")] = None,
    skip: Annotated[int, typer.Option(help="Steps to let pass before.")] = 0,
    hotcompile: Annotated[
        bool,
        typer.Option("--hotcompile", help="With HotCompile, and from the step on that follows its decision."),
    ] = False,
) -> None:
    """Run a script that trains with Lightning, and capture its steps with torch's profiler.

    The exit code is that of the script. Into the folder go trace.json (for Perfetto or
    chrome://tracing), summary.json, and with HotCompile its report.json and events.jsonl. Compare two of
    them with 'hotcompile timeline BEFORE AFTER -o x.png'.
    """
    with errors_told():
        _check(seconds, steps, skip)
        folder = _prepared(folder)
        order = Order(
            folder=str(folder),
            steps=steps,
            seconds=None if steps is not None else seconds if seconds is not None else _SECONDS,
            skip=skip,
            after_decision=hotcompile,
            command=tuple(command),
        )
        code = run_script(command, _environment(os.environ, order))
        _tell(folder)
    raise typer.Exit(code)


def _check(seconds: float | None, steps: int | None, skip: int) -> None:
    if seconds is not None and steps is not None:
        raise CommandError(f"-s {seconds:g} and -n {steps} contradict each other: give one of them.")
    if seconds is not None and not 0 < seconds < float("inf"):
        raise CommandError(f"-s {seconds:g} is not allowed: give a number of seconds above 0.")
    if steps is not None and steps < 1:
        raise CommandError(f"-n {steps} is not allowed: give a number of steps of 1 or more.")
    if skip < 0:
        raise CommandError(f"--skip {skip} is not allowed: give a number of steps of 0 or more.")


def _prepared(folder: Path) -> Path:
    """The folder, absolute, without what an earlier capture has left in it.

    Raises:
        CommandError: it holds such files of something else.
    """
    folder = folder.expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in (SUMMARY_FILE, TRACE_FILE, REPORT_FILE, EVENTS_FILE)]
    found = [file for file in files if file.exists()]
    if found and not _is_of_a_capture(files[0]):
        raise CommandError(f"{str(found[0])!r} is of no capture: give another --dir, or move that file away.")
    for file in found:
        file.unlink()
    return folder


def _is_of_a_capture(summary: Path) -> bool:
    """Whether a capture has written it; one that was killed leaves it empty, or cut off."""
    if not summary.is_file():
        return False
    content = summary.read_bytes()
    return not content or MARK.encode() in content[:100]


def _environment(own: Mapping[str, str], order: Order) -> dict[str, str]:
    environment = {**own, VARIABLE: order.to_text()}
    if order.after_decision:
        environment["HOTCOMPILE_EVENT_LOG"] = str(Path(order.folder, EVENTS_FILE))
        if own.get(SWITCH, "").strip().lower() in ("", "off"):
            environment[SWITCH] = "auto"
    return environment


def _tell(folder: Path) -> None:
    try:
        captured = complete(folder)
    except (OSError, ValueError, KeyError) as error:
        note(f"warning: the capture in {folder} was cut off ({error}): capture it again")
        return
    if captured is None:
        note(f"warning: nothing was captured into {folder}: {NO_TRAINER}")
        return
    note(f"captured {wording.count(captured.profiled_steps, 'step')} into {folder}: {_in_words(captured)}")


def _in_words(captured: Captured) -> str:
    number = wording.number
    parts = [
        *captured.notes,
        f"{number(captured.compiled_share, '.1%', '')} of the step time inside compiled regions",
        f"{number(captured.operators_per_step, ',.0f', '')} operators a step",
    ]
    if captured.launches_per_step is not None:
        parts.append(f"{number(captured.launches_per_step, ',.0f', '')} kernel launches a step")
    return ", ".join(parts if captured.profiled_steps else captured.notes)


if __name__ == "__main__":
    app(prog_name="python -m lightning_hotcompile.trace")
