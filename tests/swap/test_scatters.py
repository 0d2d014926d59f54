"""Loops of Inductor's code that scatter: one of two threads runs them, without atomic operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._inductor.codegen import cpp
from torch.nn import functional as F

from lightning_hotcompile.swap.inductor.scatters import ScattersOnOneThread
from tests.swap.test_tripwire import watched

REPLACED = [
    (cpp.CppKernel, "store"),
    (cpp.CppVecKernel, "store"),
    (cpp.CppTile2DKernel, "store"),
    (cpp.CppKernelProxy, "codegen_nodes"),
    (cpp.OuterLoopFusedKernel, "decide_parallel_depth"),
]
GENERATOR = torch.Generator().manual_seed(0)
FEW = torch.randint(0, 7, (4096,), generator=GENERATOR)  # the same place many times, in one vector too
MANY = torch.randint(0, 300, (4096,), generator=GENERATOR)


@pytest.fixture
def threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, until the test is over."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    before = torch.get_num_threads()
    torch._dynamo.reset()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def written(folder: Path) -> str:
    """All C++ code that was compiled there."""
    return "\n".join(file.read_text(encoding="utf-8") for file in folder.rglob("*.cpp"))


def test_torch_has_its_own_way_back() -> None:
    before = [vars(owner)[name] for owner, name in REPLACED]
    first, second = ScattersOnOneThread(), ScattersOnOneThread()
    with first:
        with second:
            assert not any(vars(o)[name] is b for (o, name), b in zip(REPLACED, before, strict=True))
        assert not any(vars(o)[name] is b for (o, name), b in zip(REPLACED, before, strict=True))
    assert [vars(owner)[name] for owner, name in REPLACED] == before


def embedding(x: Tensor) -> Tensor:
    return F.layer_norm(F.embedding(MANY, x.view(300, 64)).sin(), (64,))


def two_tables(x: Tensor) -> Tensor:
    table = x.view(600, 32)
    return F.embedding(FEW, table[:7]).cos() * F.embedding(MANY, table[7:307])


def added(x: Tensor) -> Tensor:
    return x.new_zeros(7, 4).index_add(0, FEW, x.view(4096 + 704, 4)[:4096].exp())


def within_rows(x: Tensor) -> Tensor:
    rows = x[:16384].view(4, 4096)
    return x.new_zeros(4, 7).scatter_add(1, FEW.expand(4, -1), rows * rows)


def put(x: Tensor) -> Tensor:
    return x.new_zeros(300).index_put((MANY,), x[:4096].sigmoid(), accumulate=True)


def mean_of_groups(x: Tensor) -> Tensor:
    rows = x[: 4096 * 4].view(4096, 4)
    return x.new_zeros(7, 4).scatter_reduce(0, FEW[:, None].expand(-1, 4), rows, "mean", include_self=False)


def bilinear(x: Tensor) -> Tensor:
    return F.interpolate(x.view(3, 1, 80, 80), scale_factor=2, mode="bilinear")


def after_softmax(x: Tensor) -> Tensor:
    return F.embedding(MANY, x.view(300, 64).softmax(-1)).softmax(-1)


def picked(x: Tensor) -> Tensor:
    return x.view(300, 64)[MANY, FEW] * x.view(300, 64)[:, FEW[:5]].sum()


def folded(x: Tensor) -> Tensor:
    patches = x[: 2 * 16 * 36 * 9].view(2, 16, 9, 36).permute(0, 1, 3, 2).reshape(2, 16 * 36, 9)
    return F.fold(patches.transpose(1, 2).reshape(2, 9 * 16, 36), (8, 8), 3)


def same_index_again(x: Tensor) -> Tensor:
    rows = x[:4096]
    return x.new_zeros(300).index_put((MANY,), rows.exp(), accumulate=True).sum() + x[:300][MANY].sin() * rows


FUNCTIONS = [
    *(embedding, two_tables, added, within_rows, put, mean_of_groups, bilinear, after_softmax, picked),
    *(folded, same_index_again),
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_are_those_of_eager_and_the_same_each_time(
    function: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    threads: Callable[[int], None],
    tmp_path: Path,
) -> None:
    threads(2)
    x = torch.randn(19_200, generator=torch.Generator().manual_seed(1))

    def gradients(run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        one = x.clone().requires_grad_()
        output = run(one)
        weights = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view_as(output)
        (output * weights.to(output.dtype)).sum().backward()
        assert one.grad is not None
        return output.detach(), one.grad

    exact, eager = gradients(function, x.double()), gradients(function, x.to(dtype))
    with ScattersOnOneThread():
        witness, compiled = watched("inductor", function)
        first, *others = [gradients(compiled, x.to(dtype)) for _ in range(6)]
    assert witness.error_of("one") is None
    assert witness.runs_of("one") == 6
    for reference, theirs, ours in zip(exact, eager, first, strict=True):
        errors = [float((y.double() - reference).abs().max() / reference.abs().max()) for y in (theirs, ours)]
        assert errors[1] <= 2 * errors[0] + (1e-11 if dtype is torch.float64 else 16 * torch.finfo(dtype).eps)
    for other in others:
        assert all(map(torch.equal, first, other))
    code = written(tmp_path)
    assert "#pragma omp" in code
    assert "atomic_add" not in code


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_other_numbers_of_threads_keep_what_inductor_does(
    count: int, threads: Callable[[int], None], tmp_path: Path
) -> None:
    threads(count)
    with ScattersOnOneThread():
        _, compiled = watched("inductor", embedding)
        compiled(torch.randn(19_200, requires_grad=True)).sum().backward()
    assert ("atomic_add" in written(tmp_path)) == (count == 3)


@pytest.mark.slow
def test_other_loops_are_shared_as_before(threads: Callable[[int], None], tmp_path: Path) -> None:
    threads(2)

    def function(x: Tensor) -> Tensor:
        return torch.zeros(300).index_add(0, MANY, x[:4096]).sum() + x.sin().exp().sum()

    with ScattersOnOneThread():
        _, compiled = watched("inductor", function)
        compiled(torch.randn(200_000, requires_grad=True)).backward()
    code = written(tmp_path)
    assert "#pragma omp for" in code
    assert "atomic_add" not in code
