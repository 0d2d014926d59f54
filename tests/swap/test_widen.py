"""What names its own dtypes has a 64-bit run all the same, and is held against it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

from lightning_hotcompile.bench.char_gpt import attend
from lightning_hotcompile.swap.parity.compare import compare
from lightning_hotcompile.swap.parity.verdict import Parity
from lightning_hotcompile.swap.parity.widen import Widened

TIME, HEADS, WIDTH = 128, 4, 256


def inputs() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, TIME, 3 * WIDTH, generator=generator).mul(2).bfloat16().requires_grad_()
    angles = torch.outer(torch.arange(TIME).float(), torch.logspace(0, -4, WIDTH // HEADS // 2))
    return [qkv, angles.cos(), angles.sin()]


def attention(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
    return (attend(qkv, HEADS, cos, sin),)


def captured(qkv: Tensor, cos: Tensor, sin: Tensor, *, narrow: bool = True) -> tuple[Tensor]:
    """The same as a graph has it, with the dtype as a constant; the gradients of what is rotated are two."""
    heads = qkv.view(2, TIME, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
    rotated = []
    for x in heads[:2]:
        first, second = (x if narrow else x.float()).chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
        rotated.append(turned.to(torch.bfloat16))
    attended = F.scaled_dot_product_attention(*rotated, heads[2], is_causal=True)
    return (attended.transpose(1, 2).reshape(2, TIME, WIDTH),)


def rounded_once(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
    """As a compiler does it: the two gradients are added in 32 bit, and their sum is rounded."""
    return captured(qkv, cos, sin, narrow=False)


def turned_back(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
    return captured(qkv, cos, -sin * 1.05)


def held_against(function: Callable[..., Any]) -> Parity:
    with torch.autocast("cpu", torch.bfloat16):
        return compare(captured, function, inputs())


def test_fewer_roundings_than_eagers_are_right() -> None:
    parity = held_against(rounded_once)
    assert parity.agrees, parity.reason
    assert parity.error is not None
    assert parity.error > 1e-2, "more than the tolerance, so that the 64-bit run was asked"


def test_another_rotation_is_wrong() -> None:
    assert held_against(turned_back).failed


@pytest.mark.slow
def test_attention_between_two_layers_by_inductor() -> None:
    found: list[Parity] = []

    def compared(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        compiled = lookup_backend("inductor")(graph, example)

        def run(*args: Any) -> Any:
            found.append(compare(graph.forward, compiled, args, backward_outside=True))
            return compiled(*args)

        return run

    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(attention, backend=compared)(*inputs())
    assert [parity.agrees for parity in found] == [True], found


@pytest.mark.parametrize(
    "narrow",
    [
        lambda x: x.to(torch.bfloat16),
        lambda x: x.to(dtype=torch.float16),
        lambda x: x.to("cpu", torch.float32),
        lambda x: x.bfloat16(),
        lambda x: x.half(),
        lambda x: x.float(),
        lambda x: x.long().float(),
        lambda x: x.type(torch.bfloat16),
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        lambda x: x.sum(dtype=torch.float32),
        lambda x: x.new_zeros(2, dtype=torch.bfloat16),
        lambda x: torch.ones(2, dtype=torch.float32),
    ],
)
def test_narrow_dtypes_are_wide_ones(narrow: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(3, dtype=torch.float64)
    assert narrow(x).dtype is not torch.float64
    with Widened():
        assert narrow(x).dtype is torch.float64


def test_complex_and_whole_numbers() -> None:
    x = torch.ones(3, dtype=torch.complex128)
    with Widened():
        assert x.to(torch.complex64).dtype is torch.complex128
        assert x.real.to(torch.int32).dtype is torch.int32
        assert x.real.bool().dtype is torch.bool


def test_what_draws_draws_the_same() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3, dtype=torch.float32)
    torch.manual_seed(0)
    with Widened():
        seen = torch.rand(3, dtype=torch.float32)
    torch.testing.assert_close(seen, wanted, rtol=0, atol=0)


def test_bits_that_are_read_as_another_dtype_have_no_wider_form() -> None:
    with Widened(), pytest.raises(TypeError, match="64-bit"):
        torch.ones(2, dtype=torch.int16).view(torch.bfloat16)
    with Widened():
        assert torch.ones(2, 2).view(4).shape == (4,)


def test_autocast_that_a_graph_opens_leaves_it_wide_and_says_nothing() -> None:
    x = torch.ones(2, 2, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Widened():
            mode = torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, None)
            try:
                product = x @ x
            finally:
                torch.amp.autocast_mode._exit_autocast(mode)
    assert product.dtype is torch.float64
