"""What a checkpoint keeps of the verdict on a plan, and what a resumed run makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_hotcompile.receipt.report import Report
from lightning_hotcompile.stage_run import StageRun
from lightning_hotcompile.trainer_facts import versions

CHECKPOINT_KEY = "hotcompile"
"""Where a checkpoint has the verdict."""


def to_keep(run: StageRun | None, report: Report | None) -> dict[str, Any] | None:
    """The verdict on the run that is under way, else on the one that has ended; ``None`` before there is one.

    In plain types. A run is asked for no report: that takes long, and a checkpoint may be saved at any time.
    """
    if run is not None:
        phase, reason, digest = str(run.state.phase), run.state.reason, run.session.plan.digest
    elif report is not None:
        phase, reason, digest = report.phase, report.reason, report.plan_digest
    else:
        return None
    if phase not in ("steady", "reverted"):
        return None
    return {
        "format": 1,
        "phase": phase,
        "reason": reason,
        "plan_digest": digest,
        "versions": versions(),
        "final": phase == "reverted" and not (run is not None and run.state.may_retry),
    }


def why_not_again(kept: Mapping[str, Any], digest: str) -> str | None:
    """Why a plan is not tried in a resumed run: the same versions found it too slow, or did not compile."""
    same = kept.get("plan_digest") == digest and kept.get("versions") == versions()
    return f"before the run was resumed: {kept['reason']}" if same and kept.get("final") else None
