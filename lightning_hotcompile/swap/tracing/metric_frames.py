"""What ``torchmetrics.Metric`` itself does is left to Python where Python calls it, after a graph has ended.

A metric that is made in the step ends the graph, be it by ``self.m1 + self.m2`` or ``self.m1 == 3``. Dynamo
would then compile its constructor, which has nothing to compute, and fails in it: one of a sum hands around
methods of an object that has no states yet, and asked for its hash the object raises.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo import convert_frame
from torch._dynamo.types import (  # type: ignore[attr-defined]  # not exported
    ConvertFrameReturn,
    FrameAction,
    FrameExecStrategy,
)

from lightning_hotcompile.swap.tracing.overrides import Override, is_marked

_METRICS = "/torchmetrics/metric.py"


def overrides() -> list[Override]:
    """What Dynamo does otherwise; what such a function calls (a class's own ``update``) is compiled."""

    def convert(prior: Any, wrapper: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_marked(wrapper) or not _is_of_metrics(frame.f_code.co_filename):
            return prior(wrapper, frame, *args, **kwargs)
        this_time = FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT)
        return ConvertFrameReturn(frame_exec_strategy=this_time, apply_to_code=False)

    return [Override(convert_frame.CatchErrorsWrapper, "__call__", convert)]


def _is_of_metrics(filename: str) -> bool:
    return filename.replace("\\", "/").endswith(_METRICS)
