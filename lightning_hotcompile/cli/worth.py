"""``hotcompile worth``: measures whether compiling pays for the model of a script."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from lightning_hotcompile.cli.explain import check_scope
from lightning_hotcompile.cli.launch import NO_TRAINER, ScriptCommand, run_beside, script_command
from lightning_hotcompile.cli.telling import CommandError, errors_told, note, print_json, print_table
from lightning_hotcompile.switch import SWITCH

if TYPE_CHECKING:
    from lightning_hotcompile.capture.order import WorthOrder
    from lightning_hotcompile.cli.answer import Answer

NO_ANSWER = 2

_COMPILERS_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def worth(
    command: ScriptCommand,
    scope: Annotated[
        list[str] | None,
        typer.Option(help="Compile this scope; more than one are measured one after the other."),
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="End without an answer after so many steps.")
    ] = None,
    max_minutes: Annotated[
        float, typer.Option(help="End without an answer after so many minutes of training.")
    ] = 10.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Hide what the script prints.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    backend: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure whether compiling pays for a script.

    The script trains until the step was compiled and timed against eager steps, in turns; no forecast is
    asked. Then it ends with exit code 0: no validation, no checkpoint and nothing after fit comes from that
    end. Callbacks see it as an exception (on_exception). What the script itself writes until then (logs,
    checkpoints on the way) stays.

    Nothing is known from earlier runs and nothing is kept: the store, with the compiler's cache in it, is a
    temporary folder, and no child process compiles ahead. So the compile time is that of a first run; if the
    script sets TORCHINDUCTOR_CACHE_DIR itself, it is what that folder makes of it. Break-even is
    the time for which training stood still / (eager step - compiled step), in steps. The limits are looked
    at after each step: a compile that has begun is waited for.

    A HotCompile in the script's code gives its options, and its report is used. Measure on a machine that
    does nothing else. Exit code 0 if the answer is yes or no, 2 if there is none; that of the script if it
    fails.
    """
    with errors_told():
        for name in scope or ():
            check_scope(name)
        if not 0 < max_minutes < math.inf:
            raise CommandError(f"--max-minutes={max_minutes:g} is not allowed: give a number above 0.")
        _check_temporary_folder(Path(tempfile.gettempdir()))
        answers = _answers(command, scope or [None], max_steps, max_minutes, backend, quiet, as_json)
        if as_json:
            print_json({"answers": [a.to_dict() for a in answers], "best": _best(answers)})
        elif len(answers) > 1:
            print_table(_comparison(answers))
    raise typer.Exit(_exit_code(answers))


def _check_temporary_folder(folder: Path) -> None:
    """The store is put there, with the compiled code in it."""
    from lightning_hotcompile.cli.gathering import runs_code

    if not runs_code(folder):
        raise CommandError(
            f"{folder} is on a disk from which no code is loaded (noexec): name another folder in TMPDIR."
        )


def _answers(
    command: list[str],
    scopes: Sequence[str | None],
    max_steps: int | None,
    max_minutes: float,
    backend: str | None,
    quiet: bool,
    as_json: bool,
) -> list[Answer]:
    """One answer for each scope, the best first; each is told when it is there."""
    from lightning_hotcompile.capture.order import WorthOrder

    found = []
    for scope in dict.fromkeys(scopes):
        with tempfile.TemporaryDirectory(prefix="hotcompile-worth-", ignore_cleanup_errors=True) as folder:
            order = WorthOrder(
                folder=folder, scope=scope, backend=backend, max_steps=max_steps, max_seconds=60 * max_minutes
            )
            answer = _measured(command, order, quiet=quiet, as_json=as_json)
        found.append(answer)
        if not as_json:
            _tell(answer)
    return sorted(found, key=lambda a: a.speed, reverse=True)


def _measured(command: list[str], order: WorthOrder, *, quiet: bool, as_json: bool) -> Answer:
    from lightning_hotcompile.capture.order import VERDICT_FILE
    from lightning_hotcompile.cli.answer import Answer
    from lightning_hotcompile.view.restoring import report_from_dict

    environment = environment_of(os.environ, order.to_text(), Path(order.folder))
    code = run_beside(script_command(command), environment, quiet=quiet, as_json=as_json)
    file = Path(order.folder, VERDICT_FILE)
    if not file.is_file():
        if code == 0:
            raise CommandError(f"there is nothing to measure: {NO_TRAINER}.")
        return Answer(scope=order.scope, report=None, exit_code=code)
    record = json.loads(file.read_text(encoding="utf-8"))
    report, _ = report_from_dict(record["report"])
    return Answer(
        scope=order.scope,
        report=report,
        ended=record["ended"],
        planned_steps=record["planned_steps"],
        exit_code=0 if record["stopped"] else code,
    )


def environment_of(own: Mapping[str, str], order: str, folder: Path) -> dict[str, str]:
    """The script's variables: the callback is forced, and knows nothing from before.

    The compiler is given no folder: the callback points it at the store, its precompiled header included,
    of which TORCHINDUCTOR_CACHE_DIR says nothing. A TMPDIR of its own would do that too, but scripts keep
    data there, and paths of sockets must be short.
    """
    from lightning_hotcompile.capture.order import EXPLAIN_VARIABLE, WORTH_VARIABLE

    left_out = (EXPLAIN_VARIABLE, *_COMPILERS_FOLDERS)
    return {
        **{name: value for name, value in own.items() if name not in left_out},
        WORTH_VARIABLE: order,
        SWITCH: "force",
        "HOTCOMPILE_STORE": str(folder / "store"),
    }


def _tell(answer: Answer) -> None:
    from lightning_hotcompile.cli.answer import numbers, sentences

    for sentence in sentences(answer):
        typer.echo(f"{answer.scope}: {sentence}" if answer.scope else sentence)
    rows = numbers(answer)
    if not rows:
        return
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    print_table(table)
    if answer.report is not None and answer.report.plan:
        typer.echo(answer.report.plan)


def _comparison(answers: Sequence[Answer]) -> Table:
    from lightning_hotcompile.receipt import wording

    table = Table(title="The best first", title_justify="left")
    for name in ("scope", "answer", "eager step", "compiled step", "speed-up", "compiling", "break-even"):
        table.add_column(name, justify="left" if name in ("scope", "answer") else "right", no_wrap=True)
    for answer in answers:
        report, even = answer.report, answer.break_even_steps
        if report is None:
            table.add_row(answer.scope, "failed", *[""] * 5)
            continue
        table.add_row(
            answer.scope,
            answer.kind,
            wording.milliseconds(report.eager_ms.median if report.eager_ms else None),
            wording.milliseconds(report.compiled_ms.median if report.compiled_ms else None),
            Text(str(report.speedup)) if answer.speed else "",
            wording.seconds(report.stall_s),
            f"{even:,} steps" if even is not None else "none",
        )
    return table


def _best(answers: Sequence[Answer]) -> str | None:
    """The scope of the fastest answer that is a yes."""
    yes = [a for a in answers if a.kind == "yes" and a.report is not None]
    return yes[0].report.scope if yes and yes[0].report is not None else None


def _exit_code(answers: Sequence[Answer]) -> int:
    """0 if any measurement has an answer, else the code of a script that failed, else 2."""
    if any(answer.kind != "none" for answer in answers):
        return 0
    failed = next((answer.exit_code for answer in answers if answer.exit_code), None)
    if failed is not None:
        note(f"error: the script failed with exit code {failed}")
    return failed or NO_ANSWER
