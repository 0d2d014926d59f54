"""How much memory one step on the CPU allocates at most, by torch's own profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def peak_of_step_mb(step: Callable[[], object]) -> float:
    """Run a step and tell the most memory that it held at a time, in MB (2**20 bytes).

    On top of what was there before it: weights, inputs and the optimizer's state are not counted,
    activations, gradients and temporary buffers are. What is not allocated by torch is not seen.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(e["ts"], e["args"]) for e in events if e.get("name") == "[memory]"]
    changes.sort(key=lambda change: change[0])
    return _peak(args for _, args in changes) / 2**20


def _peak(changes: Iterable[Mapping[str, int]]) -> int:
    """Bytes held at most, of what is allocated here; torch's own total goes on from profile to profile."""
    sizes: dict[int, int] = {}
    held = most = 0
    for change in changes:
        address, size = change["Addr"], change["Bytes"]
        if size > 0:
            sizes[address] = size
            held += size
        else:
            held -= sizes.pop(address, 0)
        most = max(most, held)
    return most
