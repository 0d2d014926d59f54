"""The backends behind Dynamo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_hotcompile.swap.inductor.compilers import resolve_backend


@pytest.fixture
def tags(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What caches are asked with, one for each compile."""
    seen: list[str] = []

    class Compiles:
        def __init__(self, *_: Any) -> None:
            pass

        def __call__(self, graph: Any, _: Any) -> Any:
            seen.append(torch.compiler.config.cache_key_tag)  # type: ignore[attr-defined]
            return graph.forward

    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", Compiles)
    return seen


@pytest.mark.parametrize("theirs", ["", "mine-"])
def test_caches_are_asked_for_code_as_it_is_written_here(theirs: str, tags: list[str]) -> None:
    with torch.compiler.config.patch(cache_key_tag=theirs):  # type: ignore[attr-defined]
        torch.compile(torch.sin, backend=resolve_backend("inductor", None, None))(torch.ones(3))
        assert torch.compiler.config.cache_key_tag == theirs  # type: ignore[attr-defined]
    assert tags
    assert all(tag.startswith(f"{theirs}hotcompile-") for tag in tags)


@pytest.mark.parametrize(("version", "apart"), [((2, 11), True), ((2, 13), False)])
def test_older_caches_are_told_the_type_of_autocast(
    version: tuple[int, int], apart: bool, tags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_hotcompile.swap.inductor.compilers.TORCH", version)
    for dtype in (torch.bfloat16, torch.float16):
        torch._dynamo.reset()
        with torch.autocast("cpu", dtype):
            torch.compile(torch.sin, backend=resolve_backend("inductor", None, None))(torch.ones(3))
    assert len(set(tags)) == (2 if apart else 1)
