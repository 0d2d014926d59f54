"""Where memory runs out while what is ours looks at a run, the training goes on with the right numbers."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hotcompile.swap.parity.clones import Kept
from lightning_hotcompile.swap.parity.compare import compare
from lightning_hotcompile.swap.parity.tripwire import Before
from tests.swap.test_tripwire import Scripted, watched


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")


@pytest.fixture
def no_memory_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where random states are in main memory and all else is not."""
    equal = torch.equal
    monkeypatch.setattr(
        torch, "equal", lambda a, b: (out_of_memory if a.is_floating_point() else equal)(a, b)
    )


def counts(x: Tensor, count: Tensor) -> Tensor:
    count.add_(1)
    return x * count


class TestPuttingBack:
    @pytest.mark.usefixtures("no_memory_to_compare")
    def test_all_tensors_have_their_values_again(self) -> None:
        tensors = [torch.zeros(2), torch.ones(3, 4).t()]
        kept = Kept(tensors)
        for tensor in tensors:
            tensor.add_(5)
        kept.put_back()
        assert torch.stack([t.sum() for t in tensors]).tolist() == [0, 12]

    @pytest.mark.usefixtures("no_memory_to_compare")
    def test_what_a_comparison_without_memory_has_changed_is_put_back(self) -> None:
        held = [torch.zeros(1), torch.ones(2)]

        def step(x: Tensor) -> tuple[Tensor]:
            for tensor in held:
                tensor.sub_(x)
            return (x * 2,)

        def runs_out(x: Tensor) -> tuple[Tensor]:
            step(x)
            return out_of_memory()  # type: ignore[no-any-return]

        parity = compare(step, runs_out, [torch.ones(1)], held)
        assert parity.agrees is None
        assert [t.tolist() for t in held] == [[0], [1, 1]]

    def test_the_failed_run_holds_no_buffers_by_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        buffers, alive = list[weakref.ref[Tensor]](), list[bool]()
        put_back = Before.put_back

        def runs_out(forward: Any, args: tuple[Any, ...]) -> Any:
            buffer = torch.empty(100)
            buffers.append(weakref.ref(buffer))
            return out_of_memory()

        def look(self: Before) -> None:
            alive.append(any(ref() is not None for ref in buffers))
            put_back(self)

        monkeypatch.setattr(Before, "put_back", look)
        _, compiled = watched(Scripted(runs_out, run=3), counts)
        count = torch.zeros(1)
        for _ in range(2):
            compiled(torch.ones(2), count)
        assert len(buffers) == 1
        assert alive == [False]
        assert count.item() == 2
