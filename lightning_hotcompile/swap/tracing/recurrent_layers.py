"""Recurrent layers of torch (``nn.RNN``, ``nn.LSTM``, ``nn.GRU``) are called by Python, between two graphs.

Dynamo refuses to look at one, be it only to read ``self.lstm``, where no graph can end: all of the function
was left to eager, the layers around the recurrent one included. Traced, a layer would be unrolled over time.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._dynamo import config
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables.builder import VariableBuilder

from lightning_hotcompile.swap.tracing.overrides import Override, end_graph

_KINDS = (nn.RNN, nn.LSTM, nn.GRU)

_LEFT_TO_PYTHON = frozenset(
    found.__code__
    for kind in _KINDS
    for name in ("forward", "flatten_parameters")
    if hasattr(found := getattr(kind, name), "__code__")
)
"""Code of theirs that is never traced."""


def called_between_graphs() -> list[Override]:
    """What Dynamo does otherwise, but where the user has allowed it to trace them."""

    def wrap(prior: Any, builder: Any, value: Any) -> Any:
        if not isinstance(value, _KINDS) or builder.tx.output.root_tx.f_code in _LEFT_TO_PYTHON:
            return prior(builder, value)
        with config.patch(allow_rnn=True):
            return prior(builder, value)

    def inline(prior: Any, function: Any) -> Any:
        if not config.allow_rnn and function.get_code() in _LEFT_TO_PYTHON:
            end_graph(
                "recurrent layer",
                f"{function}",
                "Compiled, it would be unrolled over time; torch has kernels for all of it.",
            )
        return prior(function)

    return [
        Override(VariableBuilder, "wrap_module", wrap),
        Override(InliningInstructionTranslator, "check_inlineable", inline),
    ]
