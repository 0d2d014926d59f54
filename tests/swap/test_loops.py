"""From which size on compiled loops are shared among threads, and who else may say so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule, symbolic_trace

from lightning_hotcompile.swap import loops
from lightning_hotcompile.swap.compilers import resolve_backend

LARGE, SMALL = 4 * loops.SHARED_FROM, loops.SHARED_FROM // 2
"""Elements; the small one is shared by what Inductor does by default."""


def captured(function: Callable[..., Tensor]) -> GraphModule:
    traced: GraphModule = symbolic_trace(function)
    return traced


PLAIN = captured(lambda t: t.sin() * 2)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("threads", "each"), [(1, 1.0), (2, 0.5), (4, 0.25)])
def test_a_loop_of_one_size_is_shared_by_however_many_threads(threads: int, each: float) -> None:
    torch.set_num_threads(threads)
    assert loops.options(PLAIN) == {loops.NAME: int(each * loops.SHARED_FROM)}


@pytest.mark.usefixtures("threads")
def test_the_threads_of_inductors_own_setting_count() -> None:
    torch.set_num_threads(2)
    with inductor_config.patch({"cpp.threads": 4}):
        assert loops.options(PLAIN) == {loops.NAME: loops.SHARED_FROM // 4}


@pytest.mark.usefixtures("threads")
def test_never_less_than_by_default() -> None:
    torch.set_num_threads(2)
    with inductor_config.patch({"cpp.threads": 64}):
        assert loops.options(PLAIN) == {loops.NAME: 512}


def test_what_somebody_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with inductor_config.patch({loops.NAME: 64}):
        assert loops.options(PLAIN) == {}
    monkeypatch.setenv("TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE", "512")
    assert loops.options(PLAIN) == {}


@pytest.mark.parametrize(("embeddings", "is_ours"), [(3, True), (4, False)])
def test_many_embeddings_have_loops_with_much_to_do_for_each_element(embeddings: int, is_ours: bool) -> None:
    def forward(rows: Tensor, columns: Tensor) -> Tensor:
        return torch.cat([nn.functional.embedding(columns, rows) for _ in range(embeddings)])

    assert bool(loops.options(captured(forward))) is is_ours
    inner = captured(lambda rows, columns: rows)
    inner.inner = captured(forward)
    assert bool(loops.options(inner)) is is_ours


@pytest.mark.parametrize("call", [lambda x, at: x.gather(0, at), lambda x, at: torch.gather(x, 0, at)])
def test_methods_and_functions_scatter_alike(call: Callable[..., Tensor]) -> None:
    def forward(x: Tensor, at: Tensor) -> Tensor:
        return call(x, at) + call(x, at) + call(x, at) + call(x, at)

    assert loops.options(captured(forward)) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("elements", "options", "is_shared"),
    [(LARGE, None, True), (SMALL, None, False), (SMALL, {loops.NAME: 512}, True)],
    ids=["large", "small", "small, as by default"],
)
def test_which_loops_are_shared(
    elements: int, options: dict[str, int] | None, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the code that Inductor has made; two threads whatever the machine has."""
    torch.set_num_threads(2)
    torch._dynamo.reset()
    backend = resolve_backend("inductor", None, {"cpp_wrapper": False, **(options or {})})
    x = torch.linspace(0, 1, elements)
    with inductor_config.patch({"force_disable_caches": True}):
        y, (code,) = run_and_get_code(torch.compile(lambda t: t.sin() * 2, backend=backend), x)
    torch.testing.assert_close(y, x.sin() * 2)
    assert bool(re.search(r"#pragma omp parallel", code)) is is_shared
