"""Whether Inductor's code for a CPU lays out images and weights of convolutions channels last.

By default it does. Weights are then copied in each step, and their gradients are copied back. Where they are
larger than the images that they meet (wide layers, small images) that costs more than channels last gains.
So does a group normalisation, whose groups lie apart in memory there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import group_norm

from lightning_hotcompile.swap.inductor import cpp_wrapper

NAME = "layout_optimization"
"""Inductor's option."""

LARGER = 1.5
"""So much larger weights have to be: at 1.3 (ConvNeXt) channels last were 5% faster, at 1.7 16% slower."""

_CONVOLUTIONS = frozenset(
    {"conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d", "convolution", "_convolution"}
)


def options(
    graph_module: GraphModule, example_inputs: Sequence[Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Inductor's option for this graph; none where it has none of such convolutions, or somebody has chosen.

    Eager time / compiled time on 2 CPU cores, channels last and as in eager: ResNet-18 at 32x32 pixels
    0.57 and 1.03, a U-Net around it at 64x64 0.71 and 1.02, ResNet-10-t at 64x64 0.89 and 1.06. Where weights
    are the smaller part channels last are faster: a small U-Net 1.48 and 1.07, 13 networks of 4 to 13
    convolutions with BatchNorm, InstanceNorm or neither 1.46 and 1.13 (geometric means; from 1.17 to 1.77 and
    0.89 to 1.54). With GroupNorm, 9 networks, it was 1.16 and 1.26 (0.83 to 1.39, 1.02 to 1.79).

    Args:
        graph_module: as Dynamo has captured it.
        example_inputs: that it was captured with.
        given: Inductor's options, as the user gave them.
    """
    import torch._inductor.config as inductor_config  # takes a third of a second: not for a run without flip

    if NAME in given or not inductor_config.layout_optimization or inductor_config.force_layout_optimization:
        return {}
    if cpp_wrapper.why_not_possible(graph_module, example_inputs) is not None:
        return {}  # measured on the CPU only
    found = list(_convolutions(graph_module))
    if found and graph_module.graph.find_nodes(op="call_function", target=group_norm):
        return {NAME: False}
    weights, images = (sum(sizes) for sizes in zip(*found, strict=True)) if found else (0, 0)
    return {NAME: False} if weights > LARGER * images else {}


def _convolutions(graph_module: GraphModule) -> Iterator[tuple[int, int]]:
    """Of each one: elements of its weight, and of what it reads and makes.

    Not of those in the body of a checkpoint: a child process that compiles ahead does not know their sizes.
    """
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or getattr(node.target, "__name__", "") not in _CONVOLUTIONS:
            continue
        arguments = dict(zip(("input", "weight"), node.args, strict=False)) | node.kwargs
        sizes = [_elements(part) for part in (arguments.get("weight"), arguments.get("input"), node)]
        weight, read, made = sizes
        if weight is not None and read is not None and made is not None:  # else sizes vary
            yield weight, read + made


def _elements(node: object) -> int | None:
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    elements = value.numel() if isinstance(value, Tensor) else None
    return elements if isinstance(elements, int) else None
