"""``hotcompile report``, ``events``, ``timeline`` and ``trace``: what a run has left, in a readable form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_hotcompile.cli.telling import CommandError, count_text, errors_told, json_text, note

if TYPE_CHECKING:
    from lightning_hotcompile.receipt.report import Report
    from lightning_hotcompile.view.run import Run

FORMATS = ("text", "md", "latex", "html", "json")
_FORMAT_OF_SUFFIX = {
    ".txt": "text",
    ".md": "md",
    ".tex": "latex",
    ".html": "html",
    ".htm": "html",
    ".json": "json",
}
_MOST_WARNINGS = 10

RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder, its report.json, or its event log (.jsonl).")
]


def show_report(
    run: RunPath,
    form: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="|".join(FORMATS), help="Without it by the ending of -o, else text."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file to write, instead of printing it.")
    ] = None,
) -> None:
    """Show the receipt of a run. As HTML it has a timeline, and needs no network."""
    from lightning_hotcompile.plan.tree import printable

    with errors_told():
        chosen = _format_of(form, output)
        text = _harmless(_rendered(_loaded(run), chosen))
        if output is None:
            typer.echo(printable(text), nl=False)
        else:
            _write(output, text)


def show_events(
    run: RunPath, as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False
) -> None:
    """List what happened in a run, also in one that is under way."""
    from lightning_hotcompile.plan.tree import printable
    from lightning_hotcompile.receipt.events import event_to_dict
    from lightning_hotcompile.view.listing import event_lines

    with errors_told():
        found = _loaded(run)
        if as_json:
            listed = {"run": found.name, "events": [event_to_dict(e) for e in found.log]}
            typer.echo(_harmless(json_text(listed)))
        elif not found.log:
            typer.echo(f"Nothing happened in {found.name}: there are no events.")
        else:
            typer.echo(printable("\n".join(event_lines(found.log))))


def draw_timeline(
    run: RunPath,
    other: Annotated[
        Path | None, typer.Argument(metavar="[RUN2]", help="A second run to compare with the first.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture to write (.png).")] = Path(
        "timeline.png"
    ),
) -> None:
    """Draw the step times of a run, or of two as before and after, into a PNG."""
    with errors_told():
        if output.suffix.lower() != ".png":
            raise CommandError(f"-o {str(output)!r} is not allowed: the picture is a PNG, name a file.png.")
        _check_folder(output)
        runs = [_loaded(path) for path in (run, other) if path is not None]
        try:
            from lightning_hotcompile.view.picture import write_timeline
        except ModuleNotFoundError as error:
            raise CommandError(
                f"a timeline needs {error.name}, which is not installed: pip install "
                "'lightning-hotcompile[recipes]'."
            ) from None
        write_timeline(runs, output)
    _wrote(output)


def write_trace(
    run: RunPath,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("trace.json"),
) -> None:
    """Write a run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    with errors_told():
        from lightning_hotcompile.view.chrome_trace import trace_json

        text = trace_json(_loaded(run))
        _write(output, text)


def add_to(app: typer.Typer) -> None:
    """Put these commands into the command ``hotcompile``."""
    app.command("report")(show_report)
    app.command("events")(show_events)
    app.command("timeline")(draw_timeline)
    app.command("trace")(write_trace)


def _loaded(path: Path) -> Run:
    """The run; what of it cannot be read is told on the error stream."""
    from lightning_hotcompile.view.run import load_run

    run = load_run(path)
    for problem in run.problems[:_MOST_WARNINGS]:
        note(f"warning: {problem}")
    if len(run.problems) > _MOST_WARNINGS:
        note(f"warning: {count_text(len(run.problems) - _MOST_WARNINGS, 'more problem')} of this kind")
    return run


def _format_of(form: str | None, output: Path | None) -> str:
    if form is None:
        return _FORMAT_OF_SUFFIX.get(output.suffix.lower(), "text") if output else "text"
    if form not in FORMATS:
        raise CommandError(
            f"--format={form!r} is not allowed: use {', '.join(FORMATS[:-1])} or {FORMATS[-1]}."
        )
    return form


def _rendered(run: Run, form: str) -> str:
    if form == "html":
        from lightning_hotcompile.view.page import run_to_html

        return run_to_html(run)
    report = _report_of(run)
    if form == "latex":
        from lightning_hotcompile.view.latex import report_to_latex

        return report_to_latex(report)
    return {"text": report.to_text, "md": report.to_markdown, "json": report.to_json}[form]()


def _harmless(text: str) -> str:
    from lightning_hotcompile.view.listing import harmless

    return "\n".join(map(harmless, text.split("\n")))


def _report_of(run: Run) -> Report:
    if run.report is None:
        raise CommandError(
            f"RUN={run.name!r} is a capture without HotCompile, so it has no receipt: use --format html, or "
            "'hotcompile timeline'."
        )
    return run.report


def _write(output: Path, text: str) -> None:
    _check_folder(output)
    output.write_text(text, encoding="utf-8")
    _wrote(output)


def _wrote(output: Path) -> None:
    typer.echo(f"Wrote {output}.")


def _check_folder(output: Path) -> None:
    if not output.absolute().parent.is_dir():
        raise CommandError(f"{output} cannot be written: make the folder {output.absolute().parent} first.")
    if output.is_dir():
        raise CommandError(f"{output} is a folder: name the file to write.")
