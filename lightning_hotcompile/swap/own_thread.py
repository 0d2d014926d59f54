"""What this thread does: torch itself often answers for all threads of the process."""

from __future__ import annotations

import threading

import torch
from torch._guards import CompileContext

_NO_BACKWARD = -1
"""What torch has as number of the backward pass that is running, where none is."""


def is_traced_here() -> bool:
    """Whether this thread traces or compiles: torch's own answer is of all threads of the process."""
    return torch.compiler.is_compiling() and (
        torch.compiler.is_dynamo_compiling()  # to Dynamo, where it traces, a constant
        or torch.compiler.is_exporting()
        or CompileContext.try_get() is not None
    )


def runs_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != _NO_BACKWARD


class OwnThread:
    """Remembers the thread that made it, to tell later whether it is called there or in a backward pass.

    The backward of an accelerator has a thread of its own, and nothing tells which thread has started it.
    """

    def __init__(self) -> None:
        self._ident = threading.get_ident()

    def is_here(self) -> bool:
        """Whether this is called in that thread, or in one that runs a backward pass."""
        return threading.get_ident() == self._ident or runs_backward()
