"""A compiled backward does not reuse the memory of saved tensors: another backward may need them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch._functorch.config as functorch_config

from lightning_hotcompile.swap.replaced import Replacement, Replaces


def _entry() -> Any:
    return vars(functorch_config)["_config"]["donated_buffer"]


def _keep_where_nothing_is_set() -> Callable[[], None]:
    prior = _entry().env_value_default
    _entry().env_value_default = False

    def undo() -> None:
        _entry().env_value_default = prior

    return undo


def _set_here() -> Any:
    """What this thread has set, torch's mark for nothing included; before 2.13 it is that of all threads."""
    found = _entry().user_override
    return found.get() if isinstance(found, ContextVar) else found


class KeepsBuffers(Replaces):
    """A compiled backward leaves what the forward has saved, so that ``retain_graph=True`` works as in eager.

    AOTAutograd reads this when it compiles and once more in each backward, so it is on for as long as
    compiled code is in place. Code that the user compiles meanwhile keeps its buffers too, and is as right.
    Since torch 2.13 a thread has settings of its own, and the backward pass of an accelerator has a thread of
    its own: what a thread finds that has set nothing is changed as well.
    """

    replacement = Replacement(_keep_where_nothing_is_set)

    def __enter__(self) -> None:
        super().__enter__()
        self._prior = _set_here()
        functorch_config.donated_buffer = False

    def __exit__(self, *_: object) -> None:
        functorch_config.donated_buffer = self._prior
        super().__exit__()
