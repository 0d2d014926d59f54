"""From which size on compiled loops are shared among threads, and where that is left as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule, symbolic_trace

from lightning_hotcompile.swap.inductor import loops
from lightning_hotcompile.swap.inductor.compilers import resolve_backend

OURS = {loops.NAME: loops.CHUNK}
LARGE, SMALL = 8 * loops.CHUNK, loops.CHUNK
"""Elements; the small loop is shared by what Inductor does by default."""


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def captured(function: Callable[..., Tensor]) -> GraphModule:
    traced: GraphModule = symbolic_trace(function)
    return traced


def plain() -> GraphModule:
    return captured(lambda t: t.sin() * 2)


def options(graph: GraphModule, *inputs: Tensor, **given: Any) -> dict[str, Any]:
    return loops.options(graph, inputs or [torch.ones(3)], given)


@pytest.mark.parametrize(("threads", "expected"), [(1, {}), (2, OURS), (4, {})])
def test_with_the_threads_that_were_measured(threads: int, expected: dict[str, int]) -> None:
    torch.set_num_threads(threads)
    assert options(plain()) == expected


def test_the_threads_of_inductors_own_setting_count() -> None:
    with inductor_config.patch({"cpp.threads": 4}):
        assert options(plain()) == {}
    torch.set_num_threads(4)
    with inductor_config.patch({"cpp.threads": 2}):
        assert options(plain()) == OURS
        with inductor_config.patch({"cpp.dynamic_threads": True}):
            assert options(plain()) == {}


def test_what_somebody_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options(plain(), **{"cpp.threads": 2}) == {}
    with inductor_config.patch({loops.NAME: 64}):
        assert options(plain()) == {}
    monkeypatch.setenv("TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE", "512")
    assert options(plain()) == {}


def test_code_for_other_devices_has_the_key_that_it_had() -> None:
    assert options(plain(), torch.ones(3, device="meta")) == {}


def test_where_sizes_vary_those_of_one_batch_say_little() -> None:
    """Seen with text of any length: loops that are small in the first batch are not in the next one."""
    seen = list[dict[str, Any]]()

    def backend(graph_module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.append(loops.options(graph_module, inputs, {}))
        forward: Callable[..., Any] = graph_module.forward
        return forward

    for dynamic in (False, True):
        torch._dynamo.reset()
        torch.compile(lambda t: t.sin() * 2, backend=backend, dynamic=dynamic)(torch.ones(5, 7))
    assert seen == [OURS, {}]


def test_graphs_with_many_embeddings_are_as_others() -> None:
    """Their backwards, one loop with much to do for each element, are not shared whatever its size."""

    def forward(rows: Tensor, columns: Tensor) -> Tensor:
        return torch.cat([nn.functional.embedding(columns, rows) for _ in range(16)])

    assert options(captured(forward)) == OURS


def test_an_optimizers_code_shares_loops_as_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 16 of its tensors are one loop, whose size says little: that was not measured."""
    seen = list[dict[str, Any]]()

    class Wrapper:
        def __init__(self, mode: str | None, options: dict[str, Any], dynamic: bool | None) -> None:
            self.options = options

        def __call__(self, graph_module: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            seen.append(self.options)
            forward: Callable[..., Any] = graph_module.forward
            return forward

    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", Wrapper)
    for at_once in (False, True):
        resolve_backend("inductor", None, {"cpp_wrapper": False}, checks_at_once=at_once)(
            plain(), [torch.ones(3)]
        )
    assert [each.get(loops.NAME) for each in seen] == [loops.CHUNK, None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("elements", "given", "is_shared"),
    [(LARGE, {}, True), (SMALL, {}, False), (SMALL, {loops.NAME: 512}, True)],
    ids=["large", "small", "small, as by default"],
)
def test_which_loops_are_shared(elements: int, given: dict[str, int], is_shared: bool) -> None:
    """By the code that Inductor has made."""
    torch._dynamo.reset()
    backend = resolve_backend("inductor", None, {"cpp_wrapper": False, **given})
    x = torch.linspace(0, 1, elements)
    with inductor_config.patch({"force_disable_caches": True}):
        y, (code,) = run_and_get_code(torch.compile(lambda t: t.sin() * 2, backend=backend), x)
    torch.testing.assert_close(y, x.sin() * 2)
    assert ("#pragma omp parallel" in code) is is_shared
