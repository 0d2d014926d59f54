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

_OF_GRAPHS = r"<string>$|torch\.fx\."
"""Modules whose lines run the operations of a captured graph; its own code has no name."""


@contextlib.contextmanager
def nothing_said_in_vain() -> Iterator[None]:
    """Nothing is said of what the receipt tells; where warnings are errors the graph would stay eager.

    AOTAutograd traces with anomaly detection on, and gives up. Inductor has no code of its own for complex
    numbers, and warns that it may be slower: it is timed. For a diagonal it calls a function that torch has
    deprecated. What an operation warns of it says in the user's own line, while that is eager: each line of a
    captured graph would say it once more. Filters of the user's come first.
    """
    with warnings.catch_warnings():
        for message in _MESSAGES:
            warnings.filterwarnings("ignore", message=message)
        warnings.filterwarnings("ignore", category=UserWarning, module=_OF_GRAPHS, append=True)
        yield
