"""Runs of a graph that the step knows nothing of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from lightning_hotcompile.swap.dynamo import is_seen_by_a_mode
from lightning_hotcompile.swap.graphs.saved_tensors import not_of_the_user
from lightning_hotcompile.swap.parity.clones import random_state_kept


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def unseen_by_modes() -> contextlib.AbstractContextManager[object]:
    """No mode sees the operations inside.

    A selective checkpoint keeps what the policy names, one result after the other, and gives it to the
    repeat in that order; others count operations.
    """
    return _disable_current_modes() if is_seen_by_a_mode() else contextlib.nullcontext()


@contextlib.contextmanager
def apart_from_the_step() -> Iterator[None]:
    """Hooks (checkpoints, offloading) do not see either what is saved, and no random number is drawn."""
    hooks = saved_tensors_hooks(not_of_the_user(_as_it_is), _as_it_is)
    with random_state_kept(), unseen_by_modes(), hooks:
        yield
