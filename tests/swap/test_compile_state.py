"""The state of the thread that a graph was captured in is that in which another process compiles it."""

from __future__ import annotations

import pickle

import pytest
import torch

from lightning_hotcompile.swap.prewarm.compile_state import ThreadState


def now() -> tuple[bool, bool, torch.dtype, bool, torch.dtype]:
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
    )


@pytest.mark.parametrize("cache", [True, False])
def test_it_is_set_and_taken_back(cache: bool) -> None:
    before = now()
    with torch.no_grad(), torch.autocast("cpu", torch.float16, cache_enabled=cache):
        torch.set_default_dtype(torch.float64)
        inside, wanted = ThreadState.now(), now()
        torch.set_default_dtype(torch.float32)
    assert now() == before
    with pickle.loads(pickle.dumps(inside)).applied():
        assert now() == wanted
    assert now() == before


def test_autocast_of_the_process_is_left_where_there_was_none() -> None:
    outside = ThreadState.now()
    with torch.autocast("cpu", torch.bfloat16):
        with outside.applied():
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


def test_after_an_error_too() -> None:
    before = now()
    with torch.no_grad():
        state = ThreadState.now()
    with pytest.raises(KeyError), state.applied():
        raise KeyError
    assert now() == before
