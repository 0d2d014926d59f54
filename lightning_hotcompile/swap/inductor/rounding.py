"""Where a gradient goes to what is equal to the largest element, code rounds to 16 bits as eager does.

Inductor computes in 32 bits what is of 16, and rounds what it stores. The backward of ``amax`` (of ``max`` of
all elements, ``norm(p=inf)``) asks which elements are equal to the result: that was stored, they were not, so
none is, and the gradient is 0 / 0. With torch 2.13 and bfloat16, which ``precision="bf16-mixed"`` brings,
``(x + 0.37 * x).amax(1)`` has NaN for a gradient.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from lightning_hotcompile.swap.dynamo import TORCH
from lightning_hotcompile.swap.parity.captured import nodes_in, operation_of

NAME = "emulate_precision_casts"
"""Inductor's option: each operation rounds what it makes, as in eager."""

_ROUNDS_FOR_COMPARISONS = (2, 13)
"""With torch 2.11 the gradient is NaN with the option as well."""

_BY_EQUALITY = frozenset(
    {"amax", "amin", "aminmax", "scatter_reduce", "scatter_reduce_", "index_reduce", "index_reduce_"}
)
_NORMS = frozenset({"norm", "vector_norm", "linalg_norm", "linalg_vector_norm"})
_INFINITE = (math.inf, -math.inf, "inf", "-inf")
"""Such an order a norm has to have."""

_OF_ALL = frozenset({"max", "min"})
"""With a dimension they know the place, and with another tensor it is a comparison of two."""

_NO_TOOLKIT = r".*using Triton's bundled "

_NARROW = frozenset({torch.float16, torch.bfloat16})


def options(
    graph_module: GraphModule, example_inputs: Sequence[Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Inductor's option for this graph; none without such a gradient in 16 bits, or if somebody has chosen.

    Args:
        graph_module: as Dynamo has captured it.
        example_inputs: that it was captured with.
        given: Inductor's options, as the user gave them.
    """
    if TORCH < _ROUNDS_FOR_COMPARISONS or NAME in given:
        return {}
    if not any(map(_is_by_equality, nodes_in(graph_module))):
        return {}
    return {NAME: True} if _is_narrow(graph_module, example_inputs) else {}


@contextlib.contextmanager
def without_a_toolkit() -> Iterator[None]:
    """Nothing is said inside of CUDA's toolkit, whose functions Inductor would take where it rounds as eager.

    Where it is not installed Inductor warns that powers may differ in a last place, which the user has not
    asked about; where warnings are errors the code could not be compiled.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NO_TOOLKIT, category=UserWarning)
        yield


def _is_by_equality(node: Node) -> bool:
    name = operation_of(node)
    given = (*node.args, *node.kwargs.values())
    if name in _NORMS:
        return any(isinstance(each, float | str) and each in _INFINITE for each in given)
    return name in _BY_EQUALITY or (name in _OF_ALL and len(given) == 1)


def _is_narrow(graph_module: GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether anything outside of such bodies is of 16 bits, or may be by autocast."""
    devices = {value.device.type for value in example_inputs if isinstance(value, Tensor)}
    if any(torch.is_autocast_enabled(device) for device in devices):
        return True
    made = (node.meta.get("example_value") for node in graph_module.graph.nodes)
    return any(isinstance(v, Tensor) and v.dtype in _NARROW for v in (*example_inputs, *made))
