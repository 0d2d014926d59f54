"""Transformers of torch, and their parts, are compiled like code of the user's if Python calls them.

It does after a graph that has ended in one, for it asks a mask for its values, and in a function that was
left to eager. Dynamo compiles no function of torch's own files that Python calls: once any part of a
transformer ended the graph, all its layers stayed eager.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import nn
from torch._dynamo import convert_frame, trace_rules

from lightning_hotcompile.swap.tracing.overrides import Override, as_written, is_marked

_LAYERS = frozenset(
    kind.forward.__code__
    for kind in (
        nn.Transformer,
        nn.TransformerEncoder,
        nn.TransformerDecoder,
        nn.TransformerEncoderLayer,
        nn.TransformerDecoderLayer,
        nn.MultiheadAttention,
    )
)

_now = threading.local()


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def convert(prior: Any, wrapper: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        before = getattr(_now, "code", None)
        _now.code = frame.f_code if as_written(frame.f_code) in _LAYERS and is_marked(wrapper) else None
        try:
            return prior(wrapper, frame, *args, **kwargs)
        finally:
            _now.code = before

    def is_skipped(prior: Any, asked: Any, *args: Any, **kwargs: Any) -> Any:
        return asked is not getattr(_now, "code", None) and prior(asked, *args, **kwargs)

    return [
        Override(convert_frame.CatchErrorsWrapper, "__call__", convert),
        Override(trace_rules, "check", is_skipped),
    ]
