"""What a checkpoint keeps of the verdict on a plan, and what a resumed run makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.machine import TOO_SLOW
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.receipt.report import Report
from lightning_hotcompile.run.plan_key import key_of
from lightning_hotcompile.run.stage_run import StageRun
from lightning_hotcompile.run.stages import TRAIN
from lightning_hotcompile.run.trainer_facts import versions
from lightning_hotcompile.store.hardware import Machine

CHECKPOINT_KEY = "hotcompile"
"""Where a checkpoint has the verdict."""


def circumstances(
    config: HotCompileConfig, plan: CompilePlan, *, precision: object, on_cpu: bool
) -> dict[str, Any]:
    """What a verdict depends on, in plain types: where any of it is another one, it says nothing."""
    machine = Machine.here(on_cpu=on_cpu)
    return {
        "plan": key_of(plan, config, TRAIN),
        "min_speedup": float(config.min_speedup),
        "precision": str(precision),
        "machine": [machine.cpu, machine.vector, *machine.devices, machine.system],
        "versions": versions(),
    }


def to_keep(
    run: StageRun | None, report: Report | None, depends_on: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The verdict on the run that is under way, else on the one that has ended; ``None`` before there is one.

    In plain types. A run is asked for no report: that takes long, and a checkpoint may be saved at any time.
    What was measured too slow is final. What failed may be mended, so it is tried again.
    """
    if run is not None:
        phase, reason, may_retry = str(run.state.phase), run.state.reason, run.state.may_retry
        ratio = run.session.watch.tracks.main_pairs.ratio()
    elif report is not None:
        phase, reason, may_retry, ratio = report.phase, report.reason, False, report.speedup
    else:
        return None
    if phase not in ("steady", "reverted"):
        return None
    is_slow = ratio is not None and TOO_SLOW in reason
    final = phase == "reverted" and is_slow and not may_retry
    return {"format": 2, "phase": phase, "reason": reason, "depends_on": dict(depends_on), "final": final}


def why_not_again(kept: Mapping[str, Any], depends_on: Mapping[str, Any]) -> str | None:
    """Why a plan is not tried in a resumed run: under the same circumstances it was found too slow."""
    same = kept.get("depends_on") == dict(depends_on)
    return f"before the run was resumed: {kept['reason']}" if same and kept.get("final") else None
