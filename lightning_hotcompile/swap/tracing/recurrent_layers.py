"""Recurrent layers of torch (``nn.RNN``, ``nn.LSTM``, ``nn.GRU``) are called by Python, between two graphs.

Dynamo refuses to look at one, be it only to read ``self.lstm``, where no graph can end: all of the function
was left to eager, the layers around the recurrent one included. Traced, a layer would be unrolled over time.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn
from torch._dynamo import config
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables.builder import VariableBuilder
from torch.nn.utils import rnn

from lightning_hotcompile.swap.tracing.overrides import Override, end_graph

RECURRENT = "recurrent layer"
"""Ends the graph."""

_KINDS = (nn.RNN, nn.LSTM, nn.GRU)

_LEFT_TO_PYTHON = frozenset(
    found.__code__
    for owner, name in (
        *itertools.product(_KINDS, ("forward", "flatten_parameters")),
        *((rnn, name) for name in ("pack_padded_sequence", "pad_packed_sequence")),
    )
    if hasattr(found := getattr(owner, name), "__code__")
)
"""Code of theirs that is never traced. What packs sequences reads their lengths; torch 2.11 fails on it."""


def overrides() -> list[Override]:
    """What Dynamo does otherwise, but where the user has allowed it to trace them."""

    def wrap(prior: Any, builder: Any, value: Any) -> Any:
        if not isinstance(value, _KINDS) or builder.tx.output.root_tx.f_code in _LEFT_TO_PYTHON:
            return prior(builder, value)
        with config.patch(allow_rnn=True):
            return prior(builder, value)

    def inline(prior: Any, function: Any) -> Any:
        if not config.allow_rnn and function.get_code() in _LEFT_TO_PYTHON:
            end_graph(
                RECURRENT,
                f"{function}",
                "It is torch's own, and has kernels that a compiled one, unrolled over time, would not have.",
            )
        return prior(function)

    return [
        Override(VariableBuilder, "wrap_module", wrap),
        Override(InliningInstructionTranslator, "check_inlineable", inline),
    ]
