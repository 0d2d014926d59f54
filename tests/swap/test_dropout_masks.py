"""Masks of dropouts that Inductor's code for a CPU draws itself are eager's, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor import lowering
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

from lightning_hotcompile.swap.dynamo import TORCH
from lightning_hotcompile.swap.inductor import compilers, dropout_masks
from lightning_hotcompile.swap.inductor.compilers import resolve_backend
from lightning_hotcompile.swap.inductor.draw_order import DrawsInOrder
from lightning_hotcompile.swap.inductor.dropout_masks import DropoutMasks, why_not_drawn_here
from tests.hot import assert_compiled_as_eager
from tests.models import Net

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DROPOUT = torch.ops.aten.native_dropout.default
OURS = "hotcompile::draw("

IS_DRAWN_HERE = TORCH >= (2, 13) and why_not_drawn_here() is None

drawn_here = pytest.mark.skipif(not IS_DRAWN_HERE, reason=f"{why_not_drawn_here()}")


@pytest.fixture
def asked_anew() -> Iterator[None]:
    why_not_drawn_here.cache_clear()
    yield
    why_not_drawn_here.cache_clear()


def compiled(function: Callable[..., Any], *, dynamic: bool | None = None, **options: Any) -> Any:
    backend = resolve_backend("inductor", None, options)
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)


def dropped(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Inside of a larger loop, and the numbers that come after it."""
    return F.dropout(x.sin(), p) * 2, torch.rand(3)


def assert_ours(code: Callable[..., Any], *inputs: Any, ours: bool = True) -> None:
    """Whether its C++ code draws the mask; a compile that fails there would silently be another one."""
    _, (text, *_) = run_and_get_code(code, inputs[0].clone().requires_grad_(), *inputs[1:])
    assert (OURS in text) == (ours and IS_DRAWN_HERE)


def assert_as_eager(
    function: Callable[..., Any], code: Callable[..., Any], *inputs: Any, before: int = 0
) -> None:
    """The same elements are dropped, the others are close, and so is the gradient; the state is the same."""
    found = []
    for run in (function, code):
        x = inputs[0].detach().clone().requires_grad_()
        torch.manual_seed(3)
        torch.empty(before, dtype=torch.int32).random_()  # so many words of the generator
        outputs = run(x, *inputs[1:])
        (gradient,) = torch.autograd.grad(outputs[0].sum(), x)
        found.append((torch.get_rng_state(), *outputs, gradient))
    (state, *eager), (state_after, *ours) = found
    assert torch.equal(state, state_after)
    assert ours[0].stride() == eager[0].stride()
    for one, other in zip(eager, ours, strict=True):
        torch.testing.assert_close(other, one, equal_nan=True)
        assert torch.equal(other == 0, one == 0)


def test_torch_has_its_own_way_back() -> None:
    before = lowering.lowerings[DROPOUT]
    with DropoutMasks():
        with DropoutMasks():
            assert lowering.lowerings[DROPOUT] is not before
        assert lowering.lowerings[DROPOUT] is not before
    assert lowering.lowerings[DROPOUT] is before


@pytest.mark.slow
@drawn_here
@pytest.mark.parametrize("p", [0.1, 1e-9, 0.999])
def test_masks_are_those_of_eager_at_any_length_and_any_state(p: float) -> None:
    with DropoutMasks():
        code = compiled(dropped, dynamic=True)
        assert_ours(code, torch.ones(7), p)
        for size in (0, 1, 2, 311, 312, 313, 623, 624, 625, 936, 5000, 65_537):
            for before in (0, 1, 2, 621, 622, 623, 624, 625, 1247):
                assert_as_eager(dropped, code, torch.rand(size) + 0.5, p, before=before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lay_out", "ours", "dtype"),
    [
        *((lambda x: x, True, dtype) for dtype in DTYPES),
        *((lambda x: x.to(memory_format=torch.channels_last), True, dtype) for dtype in DTYPES[::2]),
        *((lambda x: x.permute(3, 1, 0, 2), True, dtype) for dtype in DTYPES[1::2]),
        (lambda x: x[:, ::2], False, torch.float32),
        (lambda x: x[:, :1].expand(-1, 6, -1, -1), False, torch.bfloat16),
    ],
    ids=[
        *(f"contiguous-{dtype}" for dtype in DTYPES),
        *(f"channels_last-{dtype}" for dtype in DTYPES[::2]),
        *(f"permuted-{dtype}" for dtype in DTYPES[1::2]),
        "every other",
        "expanded",
    ],
)
def test_elements_are_dropped_in_the_order_in_memory(
    lay_out: Callable[[Tensor], Tensor], ours: bool, dtype: torch.dtype
) -> None:
    x = torch.rand(4, 6, 9, 13) + 0.5
    if TORCH < (2, 13) and not lay_out(x).is_contiguous() and ours:
        pytest.skip("torch 2.11 draws in the order that Inductor has chosen; the comparison finds that out")
    step = lambda x: (F.dropout(lay_out(x), 0.3), torch.rand(3))  # noqa: E731
    with DropoutMasks():
        code = compiled(step)
        assert_ours(code, x.to(dtype), ours=ours)
        assert_as_eager(step, code, x.to(dtype))


def joined(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is dropped lies in Inductor's code in the larger tensor, with gaps."""
    y = x.sin()
    both = torch.cat([y, x], 1)
    return F.dropout(y, 0.5), both, torch.rand(3)


@pytest.mark.slow
def test_eagers_order_counts_and_not_the_one_that_inductor_has_chosen() -> None:
    x = torch.rand(64, 8) + 0.5
    with DropoutMasks():
        code = compiled(joined)
        assert_ours(code, x)
        assert_as_eager(joined, code, x)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0, 5), (0,)])
def test_one_element_and_none(shape: tuple[int, ...]) -> None:
    with DropoutMasks():
        code = compiled(dropped)
        assert_ours(code, torch.rand(shape) + 0.5, 0.4, ours=0 not in shape)
        assert_as_eager(dropped, code, torch.rand(shape) + 0.5, 0.4)


@pytest.mark.slow
def test_what_is_not_a_number_stays_so() -> None:
    x = torch.ones(1000)
    x[::3], x[1::3] = float("nan"), float("inf")
    with DropoutMasks():
        code = compiled(dropped)
        assert_ours(code, x, 0.4)
        assert_as_eager(dropped, code, x, 0.4)


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first one is in no use."""
    F.dropout(x, 0.2)
    return F.dropout(x, 0.5), torch.rand(3)


def attended(x: Tensor) -> tuple[Tensor, Tensor]:
    heads = x.view(2, 4, 20, 25)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2), torch.rand(3)


def of_a_channel(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.dropout2d(x.view(2, 4, 20, 25), 0.2), torch.rand(3)


def alpha(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.alpha_dropout(x, 0.2, training=True), torch.rand(3)


def nothing_dropped(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.dropout(x, 0.0) * F.dropout(x, 0.4, training=False), torch.rand(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "in_cpp"),
    [
        *((step, None) for step in (twice, attended, of_a_channel, alpha, nothing_dropped)),
        *((step, False) for step in (twice, of_a_channel)),
    ],
)
def test_each_kind_of_dropout_is_right(step: Callable[[Tensor], Any], in_cpp: bool | None) -> None:
    options = {} if in_cpp is None else {"cpp_wrapper": in_cpp}
    x = torch.rand(4000) + 0.5
    with DrawsInOrder(), DropoutMasks():
        code = compiled(step, **options)
        assert_ours(code, x, ours=in_cpp is None and step in (twice, attended))
        assert_as_eager(step, code, x)


@pytest.mark.slow
def test_a_kernel_called_from_python_has_torchs_own_dropout() -> None:
    with DropoutMasks():
        _, text = run_and_get_code(compiled(dropped, cpp_wrapper=False), torch.ones(7, 9), 0.3)
    assert "native_dropout" in text[0]
    assert OURS not in text[0]


@pytest.mark.slow
@pytest.mark.usefixtures("asked_anew")
@pytest.mark.skipif(TORCH < (2, 13), reason="kernels are called from Python")
def test_where_eager_draws_in_another_way_eager_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout_masks, "_eager_takes_two_words", lambda: False)
    assert "another way" in str(why_not_drawn_here())
    with DropoutMasks():
        code = compiled(dropped)
        x = torch.rand(50, 70) + 0.5
        _, text = run_and_get_code(code, x, 0.3)
        assert "bernoulli_" in text[0]
        assert OURS not in text[0]
        assert_as_eager(dropped, compiled(dropped), x, 0.3)


@pytest.mark.usefixtures("asked_anew")
def test_code_of_the_two_ways_has_different_names_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    tags = []
    for takes in (True, False):
        monkeypatch.setattr(dropout_masks, "_eager_takes_two_words", lambda takes=takes: takes)
        why_not_drawn_here.cache_clear()
        with compilers._own_keys():
            tags.append(torch.compiler.config.cache_key_tag)  # type: ignore[attr-defined]
    assert len(set(tags)) == 2


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("CPUGeneratorImpl.h", None),
        ("core/MT19937RNGEngine.h", None),
        ("CPUGeneratorImpl.h", "at::mt19937 engine();"),
        ("core/MT19937RNGEngine.h", "uint32_t next_;"),
        ("core/MT19937RNGEngine.h", "\x80\x81"),
    ],
    ids=["no generator", "no engine", "one part of it", "other state", "no text"],
)
def test_another_header_leaves_it_to_eager(
    name: str, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why_not_drawn_here() is not None:
        pytest.skip(str(why_not_drawn_here()))
    there, here = (Path(parent, "include/ATen") for parent in (Path(torch.__file__).parent, tmp_path))
    for each in ("CPUGeneratorImpl.h", "core/MT19937RNGEngine.h"):
        (here / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(there / each, here / each)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    why_not_drawn_here.cache_clear()
    assert why_not_drawn_here() is None
    (here / name).unlink()
    if text is not None:
        (here / name).write_text(text, encoding="latin-1")
    why_not_drawn_here.cache_clear()
    assert name in str(why_not_drawn_here())


@pytest.mark.usefixtures("asked_anew")
def test_the_question_does_not_move_the_generator() -> None:
    before = torch.get_rng_state()
    with torch.device("meta"):
        why_not_drawn_here()
    assert torch.equal(torch.get_rng_state(), before)


class Drops(Net):
    """Dropout before, inside and after what Inductor fuses."""

    def __init__(self) -> None:
        super().__init__(n_block=1)
        self.inp = nn.Sequential(  # type: ignore[assignment]
            nn.Dropout(0.1), nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 16)
        )


@pytest.mark.slow
@pytest.mark.parametrize("simdlen", [None, 256, 1])
def test_a_training_drops_what_eager_drops(simdlen: int | None) -> None:
    with inductor_config.patch({"cpp.simdlen": simdlen}):
        assert_compiled_as_eager(Drops)
