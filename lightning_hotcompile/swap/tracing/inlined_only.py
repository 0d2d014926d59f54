"""Functions that Dynamo traces as a part of others, and never by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.types import FrameAction, FrameExecStrategy  # type: ignore[attr-defined]  # not exported

_Function = TypeVar("_Function", bound=Callable[..., Any])


def inlined_only(function: _Function) -> _Function:
    """Where what calls it runs eagerly, as after a graph break in a loop, it does so, too, with all it calls.

    Dynamo would compile it there, for each value of its arguments that are no tensors.
    """
    strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, strategy)
    return function
