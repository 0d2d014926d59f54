"""Warnings of torch's that say nothing to whoever trains."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

_MESSAGES = (
    "Error detected in ",
    "Torchinductor does not support code generation for complex",
    "`torch._prims_common.check` is deprecated",
)


@contextlib.contextmanager
def nothing_said_in_vain() -> Iterator[None]:
    """Nothing is said of what the receipt tells; where warnings are errors the graph would stay eager.

    AOTAutograd traces with anomaly detection on, and gives up. Inductor has no code of its own for complex
    numbers, and warns that it may be slower: it is timed. For a diagonal it calls a function that torch has
    deprecated.
    """
    with warnings.catch_warnings():
        for message in _MESSAGES:
            warnings.filterwarnings("ignore", message=message)
        yield
