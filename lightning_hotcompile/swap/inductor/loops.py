"""From which size on Inductor's code for a CPU shares a loop among threads.

By default each thread gets 512 elements or more. Two threads then share a loop of 1,024 elements, which one
of them has done in a fraction of a microsecond; to start and to meet takes them longer than that. PyTorch's
own operations share from 32,768 elements on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from lightning_hotcompile.swap.inductor import cpp_wrapper

NAME = "cpp.min_chunk_size"
"""Inductor's option: the least number of elements for each thread."""

CHUNK = 8_192
"""Elements for each of two threads, by how many loops are shared here.

Most steps of 24 small models took 1 to 6% less time than by default, the others as long, within what a
measurement is good to. Loops that scatter are not shared at all: see ``scatters.py``.
"""

THREADS = 2
"""With which this was measured. For more of them Inductor's number decides as well which of nested loops are
shared, and nobody has measured that."""

_BY_DEFAULT = 512
_VARIABLE = "TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE"
_OF_THREADS = frozenset({"cpp.threads", "cpp.dynamic_threads"})


def options(
    graph_module: GraphModule, example_inputs: Sequence[Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Inductor's option for this graph; none where it was not measured, or somebody has chosen.

    Args:
        graph_module: as Dynamo has captured it.
        example_inputs: that it was captured with.
        given: Inductor's options, as the user gave them.
    """
    import torch._inductor.config as inductor_config  # takes a third of a second: not for a run without flip

    cpp = inductor_config.cpp
    if _VARIABLE in os.environ or cpp.min_chunk_size != _BY_DEFAULT or _OF_THREADS & given.keys():
        return {}
    if cpp.dynamic_threads or (cpp.threads if cpp.threads > 0 else torch.get_num_threads()) != THREADS:
        return {}
    if cpp_wrapper.why_not_possible(graph_module, example_inputs) is not None:
        return {}  # elsewhere than on the CPU it would only be a part of the key
    if any(map(_varies, example_inputs)):
        return {}  # the sizes that decide are those of one batch, which may be a short one
    return {NAME: CHUNK}


def _varies(value: Any) -> bool:
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)
