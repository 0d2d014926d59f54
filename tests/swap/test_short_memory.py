"""Where memory runs out while what is ours looks at a run, the training goes on with the right numbers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hotcompile.swap.graphs.saved_inputs import watch_until_backward
from lightning_hotcompile.swap.parity import trial, tripwire
from lightning_hotcompile.swap.parity.clones import Kept, clone_inputs
from lightning_hotcompile.swap.parity.compare import compare
from lightning_hotcompile.swap.parity.tripwire import Before, Tripwire
from lightning_hotcompile.swap.parity.verdict import Parity
from tests.swap.test_tripwire import Scripted, watched


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


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
            raise torch.OutOfMemoryError("CUDA out of memory")

        parity = compare(step, runs_out, [torch.ones(1)], held)
        assert parity.agrees is None
        assert [t.tolist() for t in held] == [[0], [1, 1]]

    def test_the_failed_run_holds_no_buffers_by_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        buffers, alive = list[weakref.ref[Tensor]](), list[bool]()
        put_back = Before.put_back

        def runs_out(forward: Any, args: tuple[Any, ...]) -> Any:
            buffer = torch.empty(100)
            buffers.append(weakref.ref(buffer))
            raise torch.OutOfMemoryError("CUDA out of memory")

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


class TestAutocast:
    """It keeps its casts, and by them what they were made of, until it ends: as late as the step does."""

    @pytest.fixture
    def copies(self, monkeypatch: pytest.MonkeyPatch) -> list[StorageWeakRef]:
        """The memory of all copies of inputs, told weakly."""
        found: list[StorageWeakRef] = []

        def told(inputs: Sequence[Any]) -> list[Any]:
            clones = clone_inputs(inputs)
            found.extend(StorageWeakRef(t.untyped_storage()) for t in clones)
            return clones

        monkeypatch.setattr(trial, "clone_inputs", told)
        return found

    @pytest.mark.parametrize("is_short", [False, True])
    def test_no_copy_of_a_weight_outlives_the_comparison(
        self, copies: list[StorageWeakRef], is_short: bool
    ) -> None:
        def forward(x: Tensor, w: Tensor) -> tuple[Tensor]:
            return ((x @ w).float(),)

        def runs_out(x: Tensor, w: Tensor) -> tuple[Tensor]:
            forward(x, w)
            raise torch.OutOfMemoryError("CUDA out of memory")

        w = nn.Parameter(torch.randn(8, 8))
        with torch.autocast("cpu", torch.bfloat16):
            parity = compare(forward, runs_out if is_short else forward, [torch.randn(4, 8), w])
            assert parity.agrees is (None if is_short else True)
            assert len(copies) == 4
            assert [ref.expired() for ref in copies] == [True] * 4

    def test_nor_a_cast_that_the_search_for_nan_has_made(self) -> None:
        casts: list[StorageWeakRef] = []

        class Told(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                found = func(*args, **(kwargs or {}))
                if func is torch.ops.aten._to_copy.default:
                    casts.append(StorageWeakRef(found.untyped_storage()))
                return found

        def forward(x: Tensor, w: Tensor) -> tuple[Tensor]:
            with Told():
                return ((x @ w).float(),)

        args = [torch.randn(4, 8), nn.Parameter(torch.randn(8, 8))]
        look = Tripwire(forward, [], Parity(agrees=True))
        before = look.before(args)
        assert before is not None
        with torch.autocast("cpu", torch.bfloat16):
            assert look.finds((torch.full((4, 8), float("nan")),), args, before)
            assert len(casts) == 3
            assert [ref.expired() for ref in casts] == [True] * 3


class TestLooking:
    def test_without_memory_to_keep_what_changes_runs_are_no_longer_looked_at(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        witness, compiled = watched(Scripted(lambda forward, args: forward(*args), run=1), counts)
        count = torch.zeros(1)
        compiled(torch.ones(2), count)
        monkeypatch.setattr(tripwire, "Kept", out_of_memory)
        assert compiled(torch.ones(2), count).tolist() == [2, 2]
        monkeypatch.setattr(tripwire, "Kept", lambda _: pytest.fail("kept"))
        assert compiled(torch.ones(2), count).tolist() == [3, 3]
        assert witness.error_of("one") is None
        assert witness.runs_of("one") == 3
        assert witness.graphs[0].unwatched == (
            "not looked at for NaN for lack of memory: it ran out in run 2"
        )

    def test_without_memory_to_look_at_outputs_nothing_is_proven(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        witness, compiled = watched(Scripted(lambda forward, args: forward(*args), run=1), counts)
        count = torch.zeros(1)
        compiled(torch.ones(2), count)
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "isfinite", out_of_memory)
            assert compiled(torch.ones(2), count).tolist() == [2, 2]
        assert count.item() == 2
        assert witness.error_of("one") is None

    def test_nor_without_memory_for_another_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the graph holds by itself would be put back after it."""
        held = torch.zeros(1)
        look = Tripwire(lambda x: (x + held.add_(1),), [held], Parity(agrees=True, changed_held=(0,)))
        before = look.before([torch.ones(1)])
        assert before is not None
        held.add_(1)
        monkeypatch.setattr(tripwire, "Kept", out_of_memory)
        assert not look.finds((torch.tensor([float("nan")]),), [torch.ones(1)], before)
        assert held.item() == 1

    @pytest.mark.usefixtures("no_memory_to_compare")
    @pytest.mark.parametrize("is_counted", [False, True])
    def test_a_backward_goes_by_the_counts_of_changes(self, is_counted: bool) -> None:
        found: list[frozenset[int]] = []
        x, w = torch.ones(3), torch.ones(3, requires_grad=True)
        y = w * 2
        assert watch_until_backward({0: x}, [y], found.append)
        (x if is_counted else x.data).add_(1)
        y.sum().backward()
        assert found == [frozenset({0} if is_counted else ())]
