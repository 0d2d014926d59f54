"""What the table of a suite says: where compiling helps, how it scales, and when it pays."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_hotcompile.bench.measurement import OK
from lightning_hotcompile.bench.records import Record, measured
from lightning_hotcompile.bench.regret import geometric_mean
from lightning_hotcompile.bench.workloads.workload import COMPILED, COMPILED_OPTIMIZER, EAGER
from lightning_hotcompile.receipt.wording import count

MOST_NAMED = 5
TOO_NOISY = 1.5
STEP_CLASSES = ((1.0, "under 1 ms"), (10.0, "1 to 10 ms"), (100.0, "10 to 100 ms"), (float("inf"), "longer"))


def answers(records: Sequence[Record]) -> dict[str, list[str]]:
    """Sentences by question; questions that the records do not answer are left out."""
    found = {
        "Where compiling helps and where it hurts": _helps(records),
        "How it scales with size": _scales(records),
        "Forward, forward and backward, full step": _passes(records),
        "What the optimizer does to it": _optimizer(records),
        "Beside fused and other eager code": _others(records),
        "When it pays": _pays(records),
        "What watching costs": _watching(records),
        "Rows without a number": _without(records),
    }
    return {question: lines for question, lines in found.items() if lines}


def name_of(record: Mapping[str, Any]) -> str:
    """Row and arm."""
    return record["row"] if record["arm"] == COMPILED else f"{record['row']} ({record['arm']})"


def shown_ratio(record: Mapping[str, Any]) -> str:
    """The ratio with its interval."""
    return f"{record['speedup']:.2f}x [{record['speedup_low']:.2f}, {record['speedup_high']:.2f}]"


def _helps(records: Sequence[Record]) -> list[str]:
    rows = measured(records)
    if not rows:
        return []
    mean = geometric_mean(r["speedup"] for r in rows)
    lines = [f"Over {count(len(rows), 'compiled measurement')} the geometric mean is {mean:.2f}x."]
    for verdict, words, sign in (("faster", "Faster", -1), ("slower", "Slower", 1)):
        found = sorted((r for r in rows if r["verdict"] == verdict), key=lambda r: sign * r["speedup"])
        named = ", ".join(f"{name_of(r)} {shown_ratio(r)}" for r in found[:MOST_NAMED])
        more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        lines.append(f"{words} in {len(found)}{f': {named}{more}' if found else ''}.")
    same = sum(r["verdict"] == "no difference" for r in rows)
    lines.append(f"No difference in {same}{': the 95% interval contains 1' if same else ''}.")
    noisy = [name_of(r) for r in rows if r["speedup_high"] > TOO_NOISY * r["speedup_low"]]
    if noisy:
        lines.append(
            f"Too noisy to say much, the interval's ends are more than {TOO_NOISY:g} times apart: "
            f"{', '.join(noisy)}. Was something else running?"
        )
    return lines


def _scales(records: Sequence[Record]) -> list[str]:
    """Along each size, all other sizes equal."""
    lines = []
    for size in _sizes(records):
        series: dict[tuple[Any, ...], list[Record]] = {}
        for r in measured(records):
            if isinstance(r.get(size), (int, float)) and not isinstance(r.get(size), bool):
                series.setdefault(_others_than(size, r, _sizes(records)), []).append(r)
        for key, found in series.items():
            ordered = sorted(found, key=lambda r: r[size])
            if len({r[size] for r in ordered}) > 1:
                shown = ", ".join(f"{r[size]}: {r['speedup']:.2f}x" for r in ordered)
                lines.append(f"{_label(key)}, {size} {shown} ({_trend(ordered)}).")
    return lines


def _sizes(records: Sequence[Record]) -> list[str]:
    """Names of the sizes, which stand between the row's name and the arm."""
    names: dict[str, None] = {}
    for r in records:
        keys = list(r)
        names.update(dict.fromkeys(keys[keys.index("row") + 1 : keys.index("arm")]))
    return list(names)


def _others_than(size: str, record: Record, sizes: Sequence[str]) -> tuple[Any, ...]:
    varied = [f"{name}={record[name]}" for name in sizes if name != size and f" {name}=" in record["row"]]
    return (record["case"], record["arm"], *varied)


def _label(key: tuple[Any, ...]) -> str:
    case, arm, *others = key
    return " ".join([case, *others]) + ("" if arm == COMPILED else f" ({arm})")


def _trend(ordered: Sequence[Record]) -> str:
    """In words; only what goes one way all along, and beyond the intervals of its ends."""
    ratios, first, last = [r["speedup"] for r in ordered], ordered[0], ordered[-1]
    if all(b > a for a, b in itertools.pairwise(ratios)) and last["speedup_low"] > first["speedup_high"]:
        return "the gain grows with it"
    if all(b < a for a, b in itertools.pairwise(ratios)) and last["speedup_high"] < first["speedup_low"]:
        return "the gain shrinks with it"
    return "no clear trend"


def _mean_of(records: Iterable[Record], column: str) -> str | None:
    mean = geometric_mean(r[column] for r in records)
    return None if mean is None else f"{mean:.2f}x"


def _passes(records: Sequence[Record]) -> list[str]:
    lines = []
    rows = measured(records)
    for column, words in (
        ("forward_speedup", "forward"),
        ("backward_speedup", "backward"),
        ("forward_backward_speedup", "forward and backward"),
        ("full_step_speedup", "full step with the optimizer"),
    ):
        found = [r for r in rows if r.get(column) is not None and r["arm"] != COMPILED_OPTIMIZER]
        if found:
            lines.append(f"{words}: {_mean_of(found, column)} (geometric mean of {len(found)}).")
    return lines if len(lines) > 1 else []


def _optimizer(records: Sequence[Record]) -> list[str]:
    rows = {(r["row"], r["arm"]): r for r in measured(records)}
    pairs = [
        (rows[row, COMPILED], r)
        for (row, arm), r in rows.items()
        if arm == COMPILED_OPTIMIZER and (row, COMPILED) in rows
    ]
    if not pairs:
        return []
    eager, compiled = ([pair[i] for pair in pairs] for i in (0, 1))
    share = statistics.median(r["optimizer_median_ms"] / r["total_median_ms"] for r in eager)
    return [
        f"Without the optimizer the gain is {_mean_of(eager, 'forward_backward_speedup')}; an eager "
        f"optimizer in the step makes it {_mean_of(eager, 'full_step_speedup')}, a compiled one "
        f"{_mean_of(compiled, 'full_step_speedup')} (geometric means of {len(pairs)}).",
        f"Behind a compiled model the eager optimizer takes {share:.0%} of the step (median).",
    ]


def _others(records: Sequence[Record]) -> list[str]:
    others = [
        r for r in records if not r.get("compiled") and r.get("speedup") is not None and r["arm"] != "watched"
    ]
    compiled = {r["row"]: r for r in measured(records) if r["arm"] == COMPILED}
    lines = []
    for r in others:
        beside = compiled.get(r["row"])
        words = f", compiled {shown_ratio(beside)}" if beside else ""
        lines.append(f"{r['row']}: {r['arm']} {shown_ratio(r)} of eager{words}.")
    return lines


def _pays(records: Sequence[Record]) -> list[str]:
    return [
        f"A step that takes {r['eager_step']} eagerly: {r['paid']} of {r['measured']} paid"
        + (f", after {shown_steps(r)}." if r["paid"] else ".")
        for r in rule_of_thumb(records)
    ]


def shown_steps(line: Mapping[str, Any]) -> str:
    """After how many steps compiling had paid, in a line of :func:`rule_of_thumb` where it did."""
    steps = f"{line['median_steps']:,.0f} steps"
    return f"{steps} in the median ({line['range']})" if line["range"] else steps


def rule_of_thumb(records: Sequence[Record]) -> list[dict[str, Any]]:
    """From the break-even that was measured: by the length of an eager step, when compiling pays."""
    eager_ms = {r["row"]: r["total_median_ms"] for r in records if r["arm"] == EAGER and r["status"] == OK}
    lines, below = [], 0.0
    for above, words in STEP_CLASSES:
        found = [r for r in measured(records) if below <= eager_ms.get(r["row"], -1.0) < above]
        below = above
        if found:
            lines.append({"eager_step": words, **_class(found)})
    return lines


def _class(found: Sequence[Record]) -> dict[str, Any]:
    steps = [r["break_even_steps"] for r in found if r.get("break_even_steps") is not None]
    return {
        "measured": len(found),
        "paid": len(steps),
        "median_speedup": statistics.median(r["speedup"] for r in found),
        "median_compile_s": statistics.median(r["compile_s"] for r in found),
        "median_steps": statistics.median(steps) if steps else None,
        "range": f"{min(steps):,} to {max(steps):,}" if len(steps) > 1 else "",
    }


def _watching(records: Sequence[Record]) -> list[str]:
    return [
        f"{r['row']}: signature and detector take {r['detector_us']:.1f} us a step, all hooks of a steady "
        f"step {r['at_rest_us']:.1f} us; while it observes a step takes {1 / r['speedup']:.2f}x of a plain "
        f"one (95% interval {1 / r['speedup_high']:.2f} to {1 / r['speedup_low']:.2f}), and the one that is "
        f"recorded takes {r['recorded_ms']:.1f} ms more, once in a run."
        for r in records
        if r.get("at_rest_us") is not None and r.get("speedup") is not None
    ]


def _without(records: Sequence[Record]) -> list[str]:
    return [f"{r['row']} ({r['arm']}): {r['status']}: {r['reason']}" for r in records if r["status"] != OK]
