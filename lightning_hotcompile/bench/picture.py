"""The picture of a suite."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from lightning_hotcompile.bench.records import Record


def picture(name: str, records: Sequence[Record]) -> Figure:
    """Each arm's ratio to eager with its interval, row by row."""
    found = [r for r in records if r.get("speedup") is not None]
    rows = list(dict.fromkeys(r["row"] for r in found))
    arms = list(dict.fromkeys(r["arm"] for r in found))
    figure = Figure(figsize=(9, 1.8 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for i, (arm, marker) in enumerate(zip(arms, "osD^v<>*" * len(arms), strict=False)):
        its = [r for r in found if r["arm"] == arm]
        shift = 0.5 * (i + 1) / (len(arms) + 1) - 0.25
        ratios = [r["speedup"] for r in its]
        spread = [
            [r["speedup"] - r["speedup_low"] for r in its],
            [r["speedup_high"] - r["speedup"] for r in its],
        ]
        places = [rows.index(r["row"]) + shift for r in its]
        axes.errorbar(ratios, places, xerr=spread, fmt=marker, label=arm, alpha=0.85, capsize=2)
    axes.axvline(1.0, color="0.6", linewidth=1)
    axes.set(title=f"Suite {name}", xlabel="eager time / other time (above 1: faster than eager)")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    _under(figure, found)
    return figure


def _under(figure: Figure, found: Sequence[Record]) -> None:
    """Notes below the picture, so that it never stands without them."""
    notes = [note for note in dict.fromkeys(r.get("note") for r in found) if note]
    if notes:
        figure.supxlabel("; ".join(notes), fontsize="small")
