"""Frames of a region that come after a graph break: one code at a time while a checkpoint is to repeat it.

Which code runs for such a frame is Dynamo's to find. Several may fit one call (that for one number, and that
for any), so what an activation checkpoint repeats would find what was compiled after its forward.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections import defaultdict
from collections.abc import Callable

from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.types import FrameAction, FrameExecStrategy  # type: ignore[attr-defined]  # not exported

from lightning_hotcompile.swap.dynamo import CompiledFn
from lightning_hotcompile.swap.graphs.repeated_runs import RunsUnderHooks
from lightning_hotcompile.swap.tracing.overrides import traced_now

_WHY = "under an activation checkpoint, and after a graph break there would be more than one code"


class LaterFrames:
    """What was compiled for the frames of each region, but for the first ones of its calls.

    Args:
        is_first: whether the code of this name is the first frame of a region's calls.
    """

    def __init__(self, is_first: Callable[[str, str], bool]) -> None:
        self._is_first = is_first
        self._runs: defaultdict[tuple[str, types.CodeType], weakref.WeakSet[RunsUnderHooks]]
        self._runs = defaultdict(weakref.WeakSet)

    def why_not_another(self, region: str) -> str | None:
        """Why the frame that is traced now is not to have another code, or ``None``."""
        code = self._traced(region)
        runs = () if code is None else self._runs[region, code]
        return _WHY if any(each.is_to_be_repeated for each in runs) else None

    def keep_those_before(self, region: str, backend: CompiledFn, error: Exception) -> None:
        """Raise the error so that a frame that has code already keeps that, if a checkpoint is to repeat it.

        Dynamo would skip the frame from now on, with all that was compiled for it.
        """
        if self.why_not_another(region) is not None:
            failed = BackendCompilerFailed(backend, error, inspect.currentframe())
            failed.frame_exec_strategy = FrameExecStrategy(FrameAction.RUN_ONLY, FrameAction.DEFAULT)
            raise failed from error

    def compiled(self, region: str, runs: RunsUnderHooks) -> None:
        """The frame that is traced now has code, whose graph has these runs."""
        if (code := self._traced(region)) is not None:
            self._runs[region, code].add(runs)

    def _traced(self, region: str) -> types.CodeType | None:
        translator = traced_now()
        if translator is None:  # a backend that is called by itself
            return None
        code: types.CodeType = translator.output.root_tx.f_code
        return None if self._is_first(code.co_name, region) else code
