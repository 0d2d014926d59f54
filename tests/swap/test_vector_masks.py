"""Masks in Inductor's code for a CPU, done by vector instructions."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor.codegen.cpp import CppScheduling
from torch.nn import functional as F

from lightning_hotcompile.swap.inductor import vector_masks
from lightning_hotcompile.swap.inductor.vector_masks import SOURCE, VectorMasks, with_vector_masks
from tests.swap.test_tripwire import watched

SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-45)


def test_torch_has_its_own_way_back() -> None:
    before = vars(CppScheduling)["define_kernel"]
    first, second = VectorMasks(), VectorMasks()
    with first:
        with second:
            assert vars(CppScheduling)["define_kernel"] is not before
        assert vars(CppScheduling)["define_kernel"] is not before
    assert vars(CppScheduling)["define_kernel"] is before


def test_this_torch_has_masks_that_it_is_written_for() -> None:
    assert vector_masks.why_not_here() is None


def test_code_without_a_mask_stays_as_it_is() -> None:
    code = "#include <torch/csrc/inductor/cpp_prefix.h>\nextern void kernel() {}\n"
    assert with_vector_masks(code) == code
    assert (
        with_vector_masks(code + "VecMask<float,1>")
        == code.replace("\n", "\n" + SOURCE, 1) + "VecMask<float,1>"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("vec_mask.h", None),
        ("vec_mask.h", "void store(bool* b, int count = size()) {"),
        ("vec_mask.h", "\x80\x81"),
        ("vec512/vec512_mask.h", "inline void VecMask<float, 1>::store(bool* b, int count) {"),
    ],
    ids=["none", "one part", "no text", "specialized there"],
)
def test_another_header_is_left_alone(
    name: str, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = (Path(parent, "include/ATen/cpu/vec") for parent in (Path(torch.__file__).parent, tmp_path))
    for each in ("vec_mask.h", "vec256/vec256_mask.h", "vec512/vec512_mask.h"):
        (here / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(there / each, here / each)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    vector_masks.why_not_here.cache_clear()
    try:
        assert vector_masks.why_not_here() is None
        (here / name).unlink()
        if text is not None:
            (here / name).write_text(text, encoding="latin-1")
        vector_masks.why_not_here.cache_clear()
        assert "mask.h" in str(vector_masks.why_not_here())
        before = vars(CppScheduling)["define_kernel"]
        with VectorMasks():
            assert vars(CppScheduling)["define_kernel"] is before
    finally:
        vector_masks.why_not_here.cache_clear()


def relu(x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return F.relu(x * 1.5).square(), x > 0, x == x, ~(x <= 0)


def picked(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    return torch.where(mask, x.sin(), 2.0), x.masked_fill(mask, -1.0), mask & (x > 0), mask.to(x.dtype) + x


def pooled(x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return (F.max_pool1d(F.relu(x)[None], 2), F.leaky_relu(x), x.clamp(-0.5, 0.5), F.hardtanh(x))


def marked(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """An index says where the mask goes: then code stores more elements than it has."""
    rows = torch.arange(37).flip(0)
    return torch.zeros(37, 83, dtype=torch.bool).index_put((rows,), x > 0), x[rows].where(mask[rows], 0.0)


def dropped(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    return (F.dropout(x.cos(), 0.3) * mask,)


FUNCTIONS = [relu, picked, pooled, dropped, marked]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
LENGTHS = [None, 256]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "dtype", "simdlen"),
    [(f, d, LENGTHS[(i + j) % 2]) for i, f in enumerate(FUNCTIONS) for j, d in enumerate(DTYPES)],
)  # each function with each dtype, and both with each length
def test_results_are_those_of_the_general_way_bit_for_bit(
    function: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    dtype: torch.dtype,
    simdlen: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = (37, 83)  # no multiple of any vector's length, nor are the rows
    torch.manual_seed(0)
    x = torch.randn(shape)
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    mask = torch.rand(shape) > 0.4
    found: list[list[Tensor]] = []
    for name, way in (("general", contextlib.nullcontext()), ("ours", VectorMasks())):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        torch._dynamo.reset()
        with way, inductor_config.patch({"cpp.simdlen": simdlen, "fallback_random": True}):
            compiled = torch.compile(function, fullgraph=True)
            one = x.to(dtype).requires_grad_()
            torch.manual_seed(1)
            outputs = compiled(one, mask)
            sums = [o.float().nan_to_num(0, 0, 0).sum() for o in outputs if o.requires_grad]
            torch.stack(sums).sum().backward()
        assert one.grad is not None
        found.append([*(o.detach() for o in outputs), one.grad])
        written = [file.read_text(encoding="utf-8") for file in (tmp_path / name).rglob("*.cpp")]
        assert any(SOURCE in text for text in written) == (name == "ours")
    for general, ours in zip(*found, strict=True):
        assert ours.dtype is general.dtype
        assert torch.equal(ours.view(torch.uint8), general.view(torch.uint8))


@pytest.mark.slow
def test_a_step_of_a_network_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.ReLU6()
    )
    x = torch.randn(5, 3, 13, 13, requires_grad=True)
    with VectorMasks():
        witness, compiled = watched("inductor", lambda x: net(x).square().mean())
        compiled(x).backward()  # the witness compares it with eager
    assert witness.error_of("one") is None
    assert witness.runs_of("one") == 1
    assert any(SOURCE in file.read_text(encoding="utf-8") for file in tmp_path.rglob("*.cpp"))
