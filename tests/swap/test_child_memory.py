"""Of the training's GPU a child process holds what it needs: memory that it had for a moment goes back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_hotcompile.swap.prewarm import graphfile, optimizerfile
from lightning_hotcompile.swap.prewarm.compile_state import CompileState
from lightning_hotcompile.swap.prewarm.optimizerfile import pack_optimizer
from lightning_hotcompile.swap.process import free_memory
from tests.swap.test_prewarm import packed
from tests.swap.test_prewarm_optimizer import sgd, swapped

CASES: list[tuple[Any, Callable[[], Any], str]] = [
    (graphfile, lambda: packed(torch.sin, torch.ones(4)), "compile_packed"),
    (optimizerfile, lambda: pack_optimizer(swapped(sgd())), "compile_optimizer"),
]


@pytest.mark.parametrize(("room", "pack", "compile_it"), CASES, ids=["graph", "optimizer"])
def test_it_goes_back_before_anything_is_compiled(
    room: Any, pack: Callable[[], Any], compile_it: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened, data = list[str](), pack()
    # Not to be set in this process: it is for a process of its own.
    monkeypatch.setattr(CompileState, "applied", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(room, "resolve_backend", lambda *_, **__: lambda *_: happened.append("compiled"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("given back"))
    getattr(room, compile_it)(data)
    assert happened == ["given back", "compiled"]


def test_a_gpu_that_is_not_in_use_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("it would begin to use it"))
    free_memory.give_back_unused()
