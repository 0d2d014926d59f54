"""Gradients of depthwise convolutions from images as they lie.

Torch 2.13 lays out what the gradient of a weight is computed from in the order of that gradient. Where the
weight has one channel (depthwise, or transposed to one channel) and images lie channels last, its strides
give no order: that of the channels and that of the columns are both 1. Torch takes them for one in which
images are copied to rows of channels, which no kernel knows: the gradients of a 7x7 depthwise convolution
took 2.5 to 6.7 ms, and take 0.9 from the images as they lie (16 images of 40 channels, one core of a Xeon).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning_hotcompile.swap.replaced import Replacement, Replaces, put_in_place

_NAME = "conv_bwd_weight_layout"


def _replace() -> Callable[[], None] | None:
    # Not at the top: a run without a flip does not owe the compiler's import.
    from torch._inductor import ir
    from torch._inductor.kernel import conv

    theirs = getattr(conv, _NAME, None)
    if theirs is None:
        return None

    @functools.wraps(theirs)
    def with_an_order(*args: Any, **kwargs: Any) -> Any:
        layout = theirs(*args, **kwargs)
        if not _says_nothing(layout.size, layout.stride):
            return layout
        outermost, _, *kernel = layout.stride
        return ir.FixedLayout(layout.device, layout.dtype, layout.size, [outermost, 0, *kernel])

    return put_in_place({(conv, _NAME): with_an_order})


def _says_nothing(size: Any, stride: Any) -> bool:
    """Whether one channel has a stride that fits channels last, and that of the last dimension as well."""
    is_one_pixel = all(length == 1 for length in size[2:])
    return len(size) > 3 and size[1] == 1 and stride[1] == stride[-1] == 1 and not is_one_pixel


class KeepsLayouts(Replaces):
    """While any is entered, weights of one channel have gradients from images that stay channels last.

    Nothing happens where this torch lays images out by another rule.
    """

    replacement = Replacement(_replace)
