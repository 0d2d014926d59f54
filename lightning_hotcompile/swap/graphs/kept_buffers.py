"""What a compiled backward leaves for another one."""

from __future__ import annotations

from typing import Any

import torch._functorch.config as functorch_config


class KeepsBuffers:
    """A compiled backward leaves what the forward has saved, so that ``retain_graph=True`` works as in eager.

    AOTAutograd reads this when it compiles and once more in each backward, so it is on for as long as
    compiled code is in place. Code that the user compiles meanwhile keeps its buffers too, and is as right.
    Since torch 2.13 a thread has settings of its own, and the backward pass of an accelerator has a thread of
    its own: what a thread finds that has set nothing is changed as well.
    """

    def __enter__(self) -> None:
        self._prior = functorch_config.donated_buffer
        functorch_config.donated_buffer = False
        entry = _entry()
        self._prior_of_threads = entry.env_value_default
        entry.env_value_default = False

    def __exit__(self, *_: object) -> None:
        functorch_config.donated_buffer = self._prior
        _entry().env_value_default = self._prior_of_threads


def _entry() -> Any:
    return vars(functorch_config)["_config"]["donated_buffer"]
