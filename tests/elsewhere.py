"""What another training in the same process does meanwhile, in a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

from lightning_hotcompile.swap.dynamo import TORCH

threads_may_compile = pytest.mark.skipif(
    TORCH < (2, 13), reason="torch 2.11 ends the process where a third thread compiles"
)

# Before torch 2.13 nothing tells of the process what a thread does.
_session = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)


@contextlib.contextmanager
def compiling_elsewhere() -> Iterator[None]:
    """Another thread compiles for as long as this lasts."""
    began, may_end = threading.Event(), threading.Event()

    def compiles() -> None:
        with _session():
            began.set()
            may_end.wait()

    thread = threading.Thread(target=compiles, daemon=True)
    thread.start()
    try:
        assert began.wait(60)
        yield
    finally:
        may_end.set()
        thread.join()
