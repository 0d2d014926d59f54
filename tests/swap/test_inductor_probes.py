"""Torch chooses the same vector instructions, and asks for no more than it needs."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator

import pytest
import torch._inductor.config as inductor_config
import torch._inductor.cpu_vec_isa as torch_isa

from lightning_hotcompile.swap.inductor.probes import AsNeeded, ProbesAsNeeded

pytestmark = pytest.mark.skipif(
    sys.platform not in ("linux", "win32") or platform.machine() not in ("x86_64", "AMD64"),
    reason="probes of several instruction sets are made on x86 only",
)


class Isa(torch_isa.VecISA):  # type: ignore[misc]  # its base is not typed
    """An instruction set whose probe is counted and not built."""

    def __init__(self, name: str, bits: int, works: bool) -> None:
        self.name, self._bit_width, self.works, self.probes = name, bits, works, 0

    def __str__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        self.probes += 1
        return self.works


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    torch_isa.valid_vec_isa_list.cache_clear()
    yield
    torch_isa.valid_vec_isa_list.cache_clear()


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[Isa]:
    """Sets of instructions, the widest first; the compiler can do those that are named."""
    works = request.param
    kinds = [("amx_tile", 512), ("avx512", 512), ("avx2", 256), ("asimd", 128)]
    isas = [Isa(name, bits, name in works) for name, bits in kinds]
    monkeypatch.setattr(torch_isa, "supported_vec_isa_list", isas)
    monkeypatch.setattr(torch_isa, "x86_isa_checker", lambda: ["avx2", "avx512"])
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    return isas


WORKING = [("avx512", "avx2"), ("avx2",), ()]


@pytest.mark.parametrize("cpu", WORKING, indirect=True)
@pytest.mark.parametrize("width", [None, 512, 256, 128])
@pytest.mark.parametrize("capability", [None, "default", "avx2", "avx512", "no such"])
@pytest.mark.filterwarnings("ignore:ignoring invalid value")
def test_the_choice_is_torchs_own(
    cpu: list[Isa], width: int | None, capability: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if capability is not None:
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    with inductor_config.patch({"cpp.simdlen": width}):
        with ProbesAsNeeded():
            ours = torch_isa.pick_vec_isa()
        assert torch_isa.pick_vec_isa() is ours


@pytest.mark.parametrize(
    ("cpu", "probes"), [(WORKING[0], [0, 1, 0, 0]), (WORKING[1], [0, 1, 1, 0])], indirect=["cpu"]
)
def test_what_is_not_needed_is_not_probed(cpu: list[Isa], probes: list[int]) -> None:
    with ProbesAsNeeded():
        torch_isa.pick_vec_isa()
    assert [min(isa.probes, 1) for isa in cpu] == probes  # torch itself remembers the answer


@pytest.mark.parametrize("cpu", WORKING[:1], indirect=True)
def test_torch_has_its_own_way_back(cpu: list[Isa]) -> None:
    before = torch_isa.valid_vec_isa_list
    outer, inner = ProbesAsNeeded(), ProbesAsNeeded()
    for _ in range(2):
        with outer:
            assert torch_isa.valid_vec_isa_list is not before
            with inner:
                torch_isa.pick_vec_isa()
        assert torch_isa.valid_vec_isa_list is before


@pytest.mark.parametrize("cpu", WORKING[:1], indirect=True)
def test_nothing_is_changed_where_torch_has_its_list(cpu: list[Isa]) -> None:
    known = torch_isa.valid_vec_isa_list()
    with ProbesAsNeeded():
        assert torch_isa.valid_vec_isa_list() is known


@pytest.mark.parametrize("name", ["valid_vec_isa_list", "supported_vec_isa_list", "x86_isa_checker"])
def test_this_torch_has_what_is_replaced(name: str) -> None:
    assert hasattr(torch_isa, name)


def test_an_empty_list_is_false() -> None:
    assert not AsNeeded([0, None])
    assert len(AsNeeded([0, 3, 4])) == 2
    assert AsNeeded([0, 3, 4])[1] == 4
    with pytest.raises(IndexError):
        AsNeeded([0])[0]
