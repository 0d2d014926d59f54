"""An index out of range in a loop of Inductor's that two threads share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.codegen import cpp

from lightning_hotcompile.swap.inductor.loop_errors import RaisesAfterLoops
from tests.swap.test_tripwire import watched

REPLACED = [
    (cpp.KernelGroup, "finalize_kernel"),
    (cpp.KernelGroup, "codegen_group"),
    (cpp.CppKernelProxy, "gen_body"),
]


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_torch_has_its_own_way_back() -> None:
    before = [vars(owner)[name] for owner, name in REPLACED]
    first, second = RaisesAfterLoops(), RaisesAfterLoops()
    with first:
        with second:
            assert not any(vars(o)[name] is b for (o, name), b in zip(REPLACED, before, strict=True))
        assert not any(vars(o)[name] is b for (o, name), b in zip(REPLACED, before, strict=True))
    assert [vars(owner)[name] for owner, name in REPLACED] == before


@pytest.mark.slow
@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("bad", [-101, 100])
def test_it_is_raised_as_by_eager_and_does_not_end_the_process(bad: int) -> None:
    table = torch.randn(100, 64)

    def picks(index: Tensor) -> Tensor:
        return nn.functional.layer_norm(table[index].sin(), (64,))

    good = torch.randint(0, 100, (32, 32))
    wrong = good.clone()
    wrong[31, 5] = bad
    with RaisesAfterLoops():
        witness, compiled = watched("inductor", picks)
        torch.testing.assert_close(compiled(good), picks(good))
        with pytest.raises(IndexError, match="out of"):
            compiled(wrong)
        torch.testing.assert_close(compiled(good), picks(good))
    assert witness.error_of("one") is None
    assert witness.runs_of("one") == 3
