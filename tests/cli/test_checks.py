"""The findings of the doctor, from made-up facts."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

import pytest

from lightning_hotcompile.cli import checks
from lightning_hotcompile.cli.checks import Check, all_checks
from lightning_hotcompile.store.compiler_cache import LEAST_FREE_BYTES
from lightning_hotcompile.swap.prewarm import choice
from tests.cli.examples import NEW_GPU, OLD_GPU, facts

NAMES = [
    "Python",
    "PyTorch",
    "Lightning",
    "C++ compiler",
    "Python headers",
    "CUDA",
    "TransformerEngine",
    "store",
    "compiler's cache",
    "prewarm",
]


def the(name: str, found: list[Check]) -> Check:
    (check,) = (c for c in found if c.name == name)
    return check


def test_a_good_machine_has_nothing_to_mend() -> None:
    found = all_checks(facts())
    assert [c.name for c in found] == NAMES
    assert {(c.status, c.remedy) for c in found} == {("ok", "")}
    assert all(c.found for c in found)


BAD: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("Python", "problem", {"python": (3, 9, 1)}, "Python 3.9.1", "3.10"),
    ("Python", "problem", {"compile_error": "Python 3.15+ not yet supported"}, "not yet", "newer PyTorch"),
    ("PyTorch", "problem", {"torch": "2.10.1"}, "torch 2.10.1", "torch>=2.11"),
    ("PyTorch", "problem", {"torch": "1.13"}, "torch 1.13", "torch>=2.11"),
    ("PyTorch", "problem", {"torch": "unknown"}, "torch unknown", "torch>=2.11"),
    ("PyTorch", "problem", {"torch": None, "torch_error": "libx.so"}, "libx.so", "torch>=2.11"),
    ("Lightning", "problem", {"lightning": None}, "not installed", "lightning>=2.5"),
    ("Lightning", "problem", {"lightning": "2.4.9"}, "2.4.9", "lightning>=2.5"),
    ("Lightning", "problem", {"lightning": "3.0.0"}, "3.0.0", "<3"),
    ("C++ compiler", "problem", {"compiler_found": None}, "'g++' is not there", "apt install g++"),
    ("C++ compiler", "problem", {"compiler_found": None, "system": "darwin"}, "g++", "xcode-select"),
    ("C++ compiler", "problem", {"compiler_found": None, "system": "win32"}, "g++", "Visual Studio"),
    ("C++ compiler", "problem", {"compiler": "ccache g++", "compiler_found": None}, "ccache", "arguments"),
    ("C++ compiler", "warning", {"compiler_found": None, "gpus": (NEW_GPU,)}, "not there", "apt install"),
    ("C++ compiler", "problem", {"openmp_error": "omp.h: No such file"}, "omp.h", "libgomp"),
    ("C++ compiler", "warning", {"openmp_error": "omp.h", "system": "darwin"}, "omp.h", "libomp"),
    ("C++ compiler", "warning", {"openmp_error": "omp.h", "gpus": (NEW_GPU,)}, "omp.h", "CXX"),
    ("Python headers", "problem", {"header_found": False}, "Python.h is not there", "python3.12-dev"),
    ("CUDA", "problem", {"gpus": (NEW_GPU,), "triton_error": "No module"}, "No module", "triton"),
    ("CUDA", "problem", {"gpus": (NEW_GPU, OLD_GPU)}, "P9, capability 6.1", "not on P9"),
    ("CUDA", "warning", {"nvidia_driver": True}, "built without CUDA", "pytorch.org"),
    ("CUDA", "warning", {"nvidia_driver": True, "torch_cuda": "13.0"}, "for CUDA 13.0", "CUDA_VISIBLE"),
    (
        "TransformerEngine",
        "warning",
        {"transformer_engine": "2.20", "transformer_engine_error": "undefined symbol"},
        "2.20, not importable: undefined symbol",
        "this CUDA",
    ),
    ("store", "problem", {"store_refused": "others can write to it"}, "/home/a/store: others", "HOTCOMPILE"),
    ("store", "problem", {"store": None, "store_refused": "no home folder"}, "no home", "HOTCOMPILE_STORE"),
    ("store", "warning", {"store_free": (1 << 30) - 1}, "only 1.00 GiB", "make room"),
    ("store", "warning", {"store_mode": 0o755}, "mode 0755", "chmod 700 /home/a/store"),
    ("store", "warning", {"store": "/a b", "store_mode": 0o750}, "0750", "chmod 700 '/a b'"),
    ("compiler's cache", "problem", {"cache_runs_code": False}, "noexec", "HOTCOMPILE_STORE"),
    (
        "compiler's cache",
        "problem",
        {"cache_runs_code": False, "cache_option": "TORCHINDUCTOR_CACHE_DIR"},
        "noexec",
        "in TORCHINDUCTOR_CACHE_DIR",
    ),
    ("compiler's cache", "warning", {"cache": "/a b"}, "/a b has a space or quote", "HOTCOMPILE_STORE"),
    ("prewarm", "warning", {"free_memory": 1 << 30}, "only 1.0 GiB", "2 GiB"),
]


@pytest.mark.parametrize(("name", "status", "changed", "found", "remedy"), BAD)
def test_what_is_bad_is_told_with_its_remedy(
    name: str, status: str, changed: dict[str, Any], found: str, remedy: str
) -> None:
    check = the(name, all_checks(facts(**changed)))
    assert check.status == status
    assert found in check.found
    assert remedy in check.remedy


FINE: list[tuple[str, dict[str, Any], str]] = [
    ("PyTorch", {"torch": "2.11.0"}, "2.11.0"),
    ("PyTorch", {"torch": "3.0.0a0+git12"}, "3.0.0a0"),
    ("Lightning", {"lightning": "2.5.0rc1"}, "2.5.0rc1"),
    ("C++ compiler", {"system": "win32", "compiler_found": "C:/cl.exe"}, "not tried"),
    ("CUDA", {"gpus": (NEW_GPU,), "nvidia_driver": True}, "H1, capability 9.0; with Triton"),
    ("CUDA", {"gpus": (OLD_GPU.__class__(name="V", capability=(7, 0)),)}, "capability 7.0"),
    ("CUDA", {"torch": None, "nvidia_driver": True}, "not looked at"),
    ("TransformerEngine", {"transformer_engine": "2.20"}, "transformer-engine 2.20"),
    ("store", {"store_mode": None}, "the first run makes it"),
    ("store", {"store_free": None}, "/home/a/store"),
    ("store", {"system": "win32", "store_mode": 0o777}, "/home/a/store"),
    ("compiler's cache", {"cache_runs_code": None}, "/home/a/store"),
    ("compiler's cache", {"cache": None}, "PyTorch's own place"),
    ("compiler's cache", {"cache": None, "torch": None}, "not looked at"),
    ("prewarm", {"no_prewarm": "no spare core", "cores": 1}, "1 core; would not run here: no spare core"),
    ("prewarm", {"free_memory": None}, "8 cores; a child process would compile ahead"),
]


@pytest.mark.parametrize(("name", "changed", "found"), FINE)
def test_what_is_fine_asks_for_nothing(name: str, changed: dict[str, Any], found: str) -> None:
    check = the(name, all_checks(facts(**changed)))
    assert (check.status, check.remedy) == ("ok", "")
    assert found in check.found


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[0])
def test_one_bad_fact_is_one_finding(case: tuple[str, str, dict[str, Any], str, str]) -> None:
    assert [c.name for c in all_checks(facts(**case[2])) if c.status != "ok"] == [case[0]]


def test_the_limits_are_those_of_the_package() -> None:
    assert checks.ENOUGH_DISK == LEAST_FREE_BYTES
    assert checks.ENOUGH_MEMORY == choice.ENOUGH_MEMORY
    needed = {re.split(r"[<>=]", r)[0]: r for r in metadata.requires("lightning-hotcompile") or []}
    assert f">={'.'.join(map(str, checks.OLDEST_TORCH))}" in needed["torch"]
    assert f">={'.'.join(map(str, checks.OLDEST_LIGHTNING))}" in needed["lightning"]
    assert f"<{checks.TOO_NEW_LIGHTNING[0]}" in needed["lightning"]
    python = metadata.metadata("lightning-hotcompile")["Requires-Python"]
    assert python == f">={'.'.join(map(str, checks.OLDEST_PYTHON))}"
