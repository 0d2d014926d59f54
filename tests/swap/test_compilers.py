"""The backends behind Dynamo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_hotcompile.swap.compilers import resolve_backend


@pytest.mark.parametrize("theirs", ["", "mine-"])
def test_caches_are_asked_for_code_as_it_is_written_here(
    theirs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Compiles:
        def __init__(self, *_: Any) -> None:
            pass

        def __call__(self, graph: Any, _: Any) -> Any:
            seen.append(torch.compiler.config.cache_key_tag)  # type: ignore[attr-defined]
            return graph.forward

    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", Compiles)
    with torch.compiler.config.patch(cache_key_tag=theirs):  # type: ignore[attr-defined]
        torch.compile(torch.sin, backend=resolve_backend("inductor", None, None))(torch.ones(3))
        assert torch.compiler.config.cache_key_tag == theirs  # type: ignore[attr-defined]
    assert seen
    assert all(tag.startswith(f"{theirs}hotcompile-") for tag in seen)
