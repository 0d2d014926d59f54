"""Which graphs there were, which of them ran, and what failed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from lightning_hotcompile.errors import ConfigError
from lightning_hotcompile.swap.gate import Gate, Lane
from lightning_hotcompile.swap.graphs.witness import Witness, check_backend


class Counting:
    """A backend that runs the captured graph as it is, and can be told to fail."""

    def __init__(self, fails: int = 0) -> None:
        self.calls = 0
        self.given: list[dict[str, Any]] = []
        self._fails = fails

    def __call__(self, graph: Any, inputs: Any, **given: Any) -> Any:
        self.calls += 1
        self.given.append(given)
        if self.calls <= self._fails:
            raise RuntimeError("no code today\nand a long story")
        return graph.forward


def body(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * 2 + 1)


def test_compiles_and_runs_are_counted_by_region() -> None:
    witness, x = Witness(Counting()), torch.ones(2)
    one = torch.compile(body, backend=witness.backend_for("one"))
    other = torch.compile(lambda x: x - 1, backend=witness.backend_for("other"))
    for _ in range(3):
        assert torch.equal(one(x), torch.full((2,), 3.0))
    other(x)
    assert (witness.runs_of("one"), witness.runs_of("other"), witness.watch.total_runs) == (3, 1, 4)
    (graph,) = witness.graphs_of("one")
    assert (graph.region, graph.runs, graph.error, graph.n_ops) == ("one", 3, None, 3)
    assert witness.graphs_of("nobody") == []
    assert witness.error_of("one") is None


def test_arrays_of_the_first_batch_are_let_go_of() -> None:
    def step(array: Any) -> torch.Tensor:
        return torch.from_numpy(array) * 2

    witness, array = Witness(Counting()), np.ones(3, dtype=np.float32)
    memory = weakref.ref(array)
    compiled = torch.compile(step, backend=witness.backend_for("one"))
    assert compiled(array).sum() == 6
    del array
    gc.collect()
    assert memory() is None
    assert witness.runs_of("one") == 1


def test_a_recompile_is_a_second_graph() -> None:
    witness = Witness(Counting())
    compiled = torch.compile(body, backend=witness.backend_for("one"), dynamic=False)
    for size in (2, 3, 2):
        compiled(torch.ones(size))
    assert [g.runs for g in witness.graphs_of("one")] == [2, 1]


def test_the_seconds_are_those_of_the_backend() -> None:
    ticks = iter([10.0, 12.5])
    witness = Witness(Counting(), now=lambda: next(ticks))
    torch.compile(body, backend=witness.backend_for("one"))(torch.ones(2))
    assert witness.graphs[0].seconds == 2.5


@pytest.mark.parametrize(
    ("mode", "options"), [(None, None), ("mine", None), (None, {"a": 1}), ("mine", {"a": 1})]
)
def test_mode_and_options_reach_the_backend(mode: str | None, options: Any) -> None:
    backend = Counting()
    witness = Witness(backend, mode=mode, options=options)
    torch.compile(body, backend=witness.backend_for("one"))(torch.ones(2))
    expected = {"mode": mode, "options": options}
    assert backend.given == [{k: v for k, v in expected.items() if v is not None}]


def test_a_backend_that_fails_is_remembered_and_the_frame_runs_eagerly() -> None:
    backend = Counting(fails=1)
    witness, gate = Witness(backend), Gate()
    compiled = torch.compile(body, backend=witness.backend_for("one"))
    gate.open(Lane.COMPILE)
    try:
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    finally:
        gate.close()
    assert witness.error_of("one") == "RuntimeError: no code today"
    assert (witness.runs_of("one"), witness.watch.total_runs) == (0, 0)


def test_after_a_failure_further_graphs_of_the_region_are_refused_unseen() -> None:
    backend = Counting(fails=1)
    witness = Witness(backend)
    for _ in range(2):
        compiled = torch.compile(body, backend=witness.backend_for("one"))
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
            compiled(torch.ones(2))
        torch._dynamo.reset()
    assert backend.calls == 1
    other = torch.compile(body, backend=witness.backend_for("other"))
    other(torch.ones(2))
    assert backend.calls == 2


def test_the_backward_is_compiled_with_the_forward() -> None:
    witness = Witness("aot_eager")
    x = torch.ones(2, requires_grad=True)
    compiled = torch.compile(body, backend=witness.backend_for("one"))
    loss = compiled(x).sum()
    seconds = witness.graphs[0].seconds
    loss.backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))
    assert (len(witness.graphs), witness.graphs[0].seconds) == (1, seconds)


def test_cache_hits_are_known_for_inductor_only() -> None:
    witness = Witness("aot_eager")
    torch.compile(body, backend=witness.backend_for("one"))(torch.ones(2))
    assert witness.graphs[0].cache_hit is None


class TestParity:
    def backend(self, graph: Any, inputs: Any, **_: Any) -> Any:
        return lambda *args: [t * 1.01 for t in graph.forward(*args)]

    def test_wrong_code_is_not_used_and_named(self) -> None:
        witness = Witness(self.backend)
        compiled = torch.compile(body, backend=witness.backend_for("one"))
        for _ in range(2):
            assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
        assert (witness.error_of("one") or "").startswith("not right: ")
        assert witness.runs_of("one") == 0

    def test_off_does_not_compare(self) -> None:
        witness = Witness(self.backend, parity="off")
        compiled = torch.compile(body, backend=witness.backend_for("one"))
        torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 3.03))
        assert witness.error_of("one") is None

    def test_warn_uses_it_all_the_same(self) -> None:
        witness = Witness(self.backend, parity="warn")
        compiled = torch.compile(body, backend=witness.backend_for("one"))
        with pytest.warns(UserWarning, match="of one is not right"):
            compiled(torch.ones(2))
        assert witness.runs_of("one") == 1

    def test_only_the_first_run_is_compared(self) -> None:
        calls = []

        def backend(graph: Any, inputs: Any, **_: Any) -> Any:
            def run(*args: Any) -> Any:
                calls.append(1)
                return graph.forward(*args)

            return run

        witness = Witness(backend)
        compiled = torch.compile(body, backend=witness.backend_for("one"))
        compiled(torch.ones(2))
        first = len(calls)
        compiled(torch.ones(2))
        assert len(calls) == first + 1
        assert witness.runs_of("one") == 2


class TestCheckBackend:
    @pytest.mark.parametrize("backend", ["inductor", "aot_eager", "eager", Counting()])
    def test_known_ones_pass(self, backend: Any) -> None:
        check_backend(backend, None, None)

    def test_unknown_name(self) -> None:
        with pytest.raises(ConfigError, match=r"'aot_eagr' is not known; did you mean 'aot_eager"):
            check_backend("aot_eagr", None, None)

    def test_unknown_option(self) -> None:
        with pytest.raises(ConfigError, match="max_autotun"):
            check_backend("inductor", None, {"max_autotun": True})

    def test_known_option(self) -> None:
        check_backend("inductor", None, {"max_autotune": False})
