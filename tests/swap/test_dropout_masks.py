"""Masks of dropouts that Inductor's code for a CPU draws itself are eager's, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
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


def dropped(x: Tensor, *p: float) -> tuple[Tensor, ...]:
    """Inside of larger loops, and the numbers that come after them."""
    return *(F.dropout(x.sin(), each) * 2 for each in p), torch.rand(3)


def leaves_of(inputs: Sequence[Any]) -> list[Any]:
    return [x.detach().clone().requires_grad_() if isinstance(x, Tensor) else x for x in inputs]


def assert_ours(code: Callable[..., Any], *inputs: Any, masks: int = 1) -> None:
    """How many its C++ code draws; a compile that fails there would silently be another one."""
    _, (text, *_) = run_and_get_code(code, *leaves_of(inputs))
    assert text.count(OURS) == masks * IS_DRAWN_HERE


def assert_as_eager(
    function: Callable[..., Any], code: Callable[..., Any], *inputs: Any, before: int = 0
) -> None:
    """The same elements are dropped, the others are close, and so are gradients; the state is the same."""
    found, strides = [], []
    for run in (function, code):
        leaves = leaves_of(inputs)
        torch.manual_seed(3)
        torch.empty(before, dtype=torch.int32).random_()  # so many words of the generator
        outputs = run(*leaves)
        weighted = [2**n * out.sum().double() for n, out in enumerate(outputs) if out.requires_grad]
        gradients = torch.autograd.grad(sum(weighted), [x for x in leaves if isinstance(x, Tensor)])
        found.append((torch.get_rng_state(), *outputs, *gradients))
        strides.append([out.stride() for out in outputs])
    (state, *eager), (state_after, *ours) = found
    assert torch.equal(state, state_after)
    assert strides[0] == strides[1]
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
def test_masks_are_those_of_eager_at_any_length_and_any_state() -> None:
    p = (0.1, 0.5, 1e-9, 0.999)
    with DropoutMasks():
        code = compiled(dropped, dynamic=True)
        assert_ours(code, torch.ones(7), *p, masks=4)
        for size in (0, 1, 2, 311, 312, 313, 623, 624, 625, 936, 5000, 65_537):
            for before in (0, 1, 2, 621, 622, 623, 624, 625, 1247):
                assert_as_eager(dropped, code, torch.rand(size) + 0.5, *p, before=before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lay_out", "ours"),
    [
        (lambda x: x, True),
        (lambda x: x.to(memory_format=torch.channels_last), True),
        (lambda x: x.permute(3, 1, 0, 2), True),
        (lambda x: x[:, ::2], False),
        (lambda x: x[:, :1].expand(-1, 6, -1, -1), False),
    ],
    ids=["contiguous", "channels_last", "permuted", "every other", "expanded"],
)
def test_elements_are_dropped_in_the_order_in_memory(lay_out: Callable[[Tensor], Tensor], ours: bool) -> None:
    x = torch.rand(4, 6, 9, 13) + 0.5
    if TORCH < (2, 13) and not lay_out(x).is_contiguous() and ours:
        pytest.skip("torch 2.11 draws in the order that Inductor has chosen; the comparison finds that out")
    each = [x.to(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)]
    step = lambda *each: (*(F.dropout(lay_out(x), 0.3) for x in each), torch.rand(3))  # noqa: E731
    with DropoutMasks():
        code = compiled(step)
        assert_ours(code, *each, masks=4 * ours)
        assert_as_eager(step, code, *each)


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
@pytest.mark.parametrize(("shapes", "masks"), [([(), (1,), (1, 1)], 3), ([(0, 5), (0,)], 0)])
def test_one_element_and_none(shapes: list[tuple[int, ...]], masks: int) -> None:
    each = [torch.rand(shape) + 0.5 for shape in shapes]
    step = lambda *each: (*(F.dropout(x.sin(), 0.4) * 2 for x in each), torch.rand(3))  # noqa: E731
    with DropoutMasks():
        code = compiled(step)
        assert_ours(code, *each, masks=masks)
        assert_as_eager(step, code, *each)


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


KINDS = (twice, attended, of_a_channel, alpha, nothing_dropped)
DRAWN_HERE = (twice, attended)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "options", "masks"),
    [
        (DRAWN_HERE, {}, 3),
        (tuple(step for step in KINDS if step not in DRAWN_HERE), {}, 0),
        (KINDS, {"cpp_wrapper": False}, 0),
    ],
    ids=["drawn here", "others", "not in C++"],
)
def test_each_kind_of_dropout_is_right(steps: Sequence[Any], options: dict[str, Any], masks: int) -> None:
    def together(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(out for step in steps for out in step(x))

    x = torch.rand(4000) + 0.5
    with DrawsInOrder(), DropoutMasks():
        code = compiled(together, **options)
        assert_ours(code, x, masks=masks)
        assert_as_eager(together, code, x)


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
