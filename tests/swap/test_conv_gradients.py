"""Gradients of depthwise convolutions are computed from images as they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.compiler.config
from torch import Tensor, nn
from torch._inductor.kernel import conv
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hotcompile.swap.dynamo import TORCH
from lightning_hotcompile.swap.inductor.compilers import resolve_backend
from lightning_hotcompile.swap.inductor.conv_gradients import KeepsLayouts

pytestmark = pytest.mark.skipif(TORCH < (2, 13), reason="torch has another rule there")
BACKWARD = torch.ops.aten.convolution_backward.default
CASES: dict[str, Callable[[], nn.Module]] = {
    "depthwise": lambda: nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.GELU()
    ),
    "to one": lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.GELU(), nn.ConvTranspose2d(8, 1, 4, 2, 1)),
    "volumes": lambda: nn.Sequential(
        nn.Conv3d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm3d(8), nn.GELU()
    ),
}


class Seen(TorchDispatchMode):
    """What the gradients of convolutions are computed from: a gradient and the images, for each."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function is BACKWARD:
            self.read += args[:2]
        return function(*args, **(kwargs or {}))


def lies_in_rows_of_channels(x: Tensor) -> bool:
    """Neither image by image nor channels last."""
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return not x.is_contiguous() and not x.is_contiguous(memory_format=last)


def gradients(model: nn.Module, x: Tensor, *, compiled: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Of all weights; and what those of convolutions were computed from."""
    torch._dynamo.reset()
    backend = resolve_backend("inductor", None, {"cpp_wrapper": False, "layout_optimization": True})
    run: Any = torch.compile(model, backend=backend) if compiled else model
    loss = run(x).square().sum()
    with Seen() as seen:
        loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found, seen.read


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_they_are_those_of_eager_and_nothing_is_laid_out_anew(case: str) -> None:
    torch.manual_seed(0)
    model = CASES[case]()
    last = torch.channels_last_3d if case == "volumes" else torch.channels_last
    x = torch.randn(4, 8, *[6] * (3 if case == "volumes" else 2)).contiguous(memory_format=last)
    expected, _ = gradients(model, x, compiled=False)
    with torch.compiler.config.patch(force_disable_caches=True):
        with KeepsLayouts():
            found, read = gradients(model, x, compiled=True)
        _, otherwise = gradients(model, x, compiled=True)
    assert len(read) == len(otherwise) >= 2
    assert not any(map(lies_in_rows_of_channels, read))
    if TORCH <= (2, 14):
        assert any(map(lies_in_rows_of_channels, otherwise)), "torch has its own way back"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_it_is_there_once_for_all_who_want_it() -> None:
    theirs = conv.conv_bwd_weight_layout
    with KeepsLayouts(), KeepsLayouts():
        assert conv.conv_bwd_weight_layout is not theirs
    assert conv.conv_bwd_weight_layout is theirs
