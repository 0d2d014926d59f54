"""The state of the thread that a graph was captured in is that in which another process compiles it.

And what fails in the middle of a graph leaves it as it was.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from lightning_hotcompile.swap.dynamo import compiling_allowed
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.process.thread_state import (
    ThreadState,
    put_back_after_errors,
    without_autocast_cache,
)


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


@pytest.mark.parametrize("cache", [True, False])
def test_casts_are_kept_again_afterwards_if_they_were(cache: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        with contextlib.suppress(KeyError), without_autocast_cache():
            assert not torch.is_autocast_cache_enabled()
            raise KeyError
        assert torch.is_autocast_cache_enabled() is cache


def test_after_an_error_too() -> None:
    before = now()
    with torch.no_grad():
        state = ThreadState.now()
    with pytest.raises(KeyError), state.applied():
        raise KeyError
    assert now() == before


def everything() -> tuple[object, ...]:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return (
        *now(),
        depth,
        torch._C._functorch.get_dynamic_layer_stack_depth(),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
    )


def half_a_with(x: Tensor) -> Tensor:
    """What comes of a graph whose run fails between two operations that belong together."""
    torch.set_grad_enabled(False)
    torch._C._autograd._saved_tensors_hooks_disable("not here")
    torch.amp.autocast_mode._enter_autocast("cpu", torch.float16, True, False)
    torch._C._functorch._grad_increment_nesting()
    torch._C._functorch._jvp_increment_nesting()
    torch._C._functorch._vmap_increment_nesting(3, "error")
    torch._C._functorch._func_increment_nesting(True)
    torch.set_default_dtype(torch.float64)
    raise KeyError


@pytest.mark.parametrize("outer", [contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16)])
def test_an_error_in_the_middle_leaves_nothing_on(outer: Any) -> None:
    with outer:
        before = everything()
        with pytest.raises(KeyError), put_back_after_errors():
            half_a_with(torch.ones(1))
        assert everything() == before


def test_without_an_error_all_is_left_as_it_becomes() -> None:
    with torch.no_grad(), put_back_after_errors():
        torch.set_grad_enabled(True)
        assert torch.is_grad_enabled()


class Under(nn.Module):
    """A block with an autocast of its own, and in it a number that no 64-bit run can have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.addmv(torch.ones(8), self.linear(x).float(), torch.ones(4))


def test_a_backend_that_fails_between_two_operations() -> None:
    before = everything()

    def backend(graph: GraphModule, inputs: Any, **_: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target is torch.addmv:
                node.target = half_a_with
                node.args, node.kwargs = node.args[:1], {}
        graph.recompile()
        return aot_eager(graph, inputs)

    witness = Witness(backend)
    with compiling_allowed(suppress_errors=True):
        compiled = witness.backend_for("one")
        torch.compile(Under().forward, backend=compiled)(torch.ones(8, 4))
    assert "half_a_with" in str(witness.error_of("one"))
    assert everything() == before


def test_a_checkpoint_that_ends_its_second_forward_in_the_middle_of_a_graph() -> None:
    """Its last saved tensor lies within the block's own autocast: the rest of the graph does not run."""
    before, layer = everything(), nn.Linear(4, 4)

    def block(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x).sin()

    witness = Witness("aot_eager")
    witness.collect = lambda *_: None  # what runs is the captured graph, as while a child process compiles
    compiled = torch.compile(block, backend=witness.backend_for("one"))
    x = torch.ones(2, 4, requires_grad=True)
    checkpoint(compiled, x, use_reentrant=False).float().sum().backward()
    assert x.grad is not None
    assert everything() == before


def test_a_comparison_whose_64_bit_run_fails_between_two_operations() -> None:
    before = everything()

    def backend(graph: GraphModule, inputs: Any, **_: Any) -> Any:
        return lambda *args: [y * 1.0001 for y in graph.forward(*args)]

    witness = Witness(backend)
    with compiling_allowed(suppress_errors=False):
        torch.compile(Under().forward, backend=witness.backend_for("one"))(torch.ones(8, 4))
    assert everything() == before
