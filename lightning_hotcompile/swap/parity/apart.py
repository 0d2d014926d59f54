"""Runs of a graph beside the step, for a comparison: nothing around the step notices them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from lightning_hotcompile.swap.dynamo import is_seen_by_a_mode
from lightning_hotcompile.swap.parity.clones import random_state_kept
from lightning_hotcompile.swap.process.saved_tensors import not_of_the_user


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def unseen_by_modes() -> contextlib.AbstractContextManager[object]:
    """A context in which no dispatch mode of the user's or torch's sees the operations.

    A selective checkpoint keeps what the policy names, one result after the other, and gives it to the
    repeat in that order; others count operations.
    """
    return _disable_current_modes() if is_seen_by_a_mode() else contextlib.nullcontext()


@contextlib.contextmanager
def apart_from_the_step() -> Iterator[None]:
    """No mode and no hook on saved tensors (checkpoints, offloading) sees it; random states are put back."""
    hooks = saved_tensors_hooks(not_of_the_user(_as_it_is), _as_it_is)
    with random_state_kept(), unseen_by_modes(), hooks:
        yield
