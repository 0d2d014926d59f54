"""Compiled code is run once where it can do no harm: in the child process that has compiled it.

Code that writes beyond its memory ends a process, and no comparison with eager comes in time. A child that
ends so is a reason to leave the training eager.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from lightning_hotcompile.swap.parity.captured import nodes_in, operation_of

_log = logging.getLogger(__name__)

_DRAWN = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

MOST_BYTES = 1 << 30
"""Of all that a step has and makes: beyond that another one beside the training's takes too much memory."""


def rehearse(compiled: Callable[..., Any], inputs: Sequence[Any], graph_module: GraphModule) -> None:
    """Run code of a CPU, forward and backward, on numbers that mean nothing, as does what it raises.

    Args:
        compiled: what Inductor has made of the graph.
        inputs: as :meth:`.TensorSpec.empty` makes them, without memory; they get it here.
        graph_module: the graph, with its nodes' ``example_value``; the tensors that it holds get their memory
            here as well.
    """
    tensors = [*inputs, *graph_module.parameters(), *graph_module.buffers()]
    if not all(isinstance(t, Tensor) and t.device.type == "cpu" for t in tensors):
        return  # a size that varies has no value here, and an accelerator's memory is the training's
    try:
        if _may_not_end(graph_module) or sum(map(_bytes, tensors)) + _made(graph_module) > MOST_BYTES:
            return
        for tensor in tensors:
            _fill(tensor)
        _forward_and_backward(compiled, inputs)
        gc.collect()  # the allocator looks at what it is given back
    except Exception:  # noqa: BLE001  # such as numbers out of range: the step's own are others
        _log.debug("compiled code refused numbers that mean nothing", exc_info=True)


def _may_not_end(graph_module: GraphModule) -> bool:
    """Whether numbers decide how often something is done."""
    return any(operation_of(node) == "while_loop" for node in nodes_in(graph_module))


def _made(graph_module: GraphModule) -> int:
    """Bytes of what all of its operations give, as far as each has memory of its own."""
    values = tree_leaves([node.meta.get("example_value") for node in nodes_in(graph_module)])
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor))


def _forward_and_backward(compiled: Callable[..., Any], inputs: Sequence[Any]) -> None:
    outputs = compiled(*inputs)
    tensors = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    results = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
    if results:
        torch.autograd.backward(results, [torch.ones_like(t) for t in results])


def _bytes(tensor: Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.element_size() * max(1, 1 + tensor.storage_offset() + last))


def _fill(tensor: Tensor) -> None:
    """Random numbers, and zeros where a number may name a place."""
    storage = tensor.untyped_storage()
    storage.resize_(_bytes(tensor))
    torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
    if tensor.dtype in _DRAWN:
        torch.empty(0, dtype=tensor.dtype).set_(storage).normal_()
