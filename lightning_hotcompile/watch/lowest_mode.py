"""A dispatch mode below all others, which may come and go while they do."""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)


class LowestMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what the others let through to torch, and takes no part in their order.

    Callbacks that each open a mode close them in the same order, not in reverse. Torch takes off whichever is
    on top: so that is none of ours. And it puts its notes on what is in use back to what they were when the
    mode was opened: so we are not in them. Once they tell of a mode that is no more, they do so for good, and
    under a selective checkpoint no guard of Dynamo's fits any longer.
    """

    def put(self) -> None:
        """From now on it sees each operation of this thread."""
        have_in_use([self, *_get_current_dispatch_mode_stack()])

    def take_off(self) -> None:
        """No longer; if somebody else has taken it off, nothing happens."""
        have_in_use([mode for mode in _get_current_dispatch_mode_stack() if mode is not self])


def have_in_use(modes: Sequence[TorchDispatchMode]) -> None:
    """Have these modes in use in this thread and no others, the lowest one first."""
    for _ in _get_current_dispatch_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
