"""What is freed stays with the process, where each step had given it back."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys

import pytest

from lightning_hotcompile.swap.process import heap

GLIBC = heap.why_not_kept() != "the C library is not glibc"

STEPS = """
import ctypes
from lightning_hotcompile.swap.process import heap

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
addresses = [0] * 12
sizes = [3 << 20] * 12

def step():
    start = heap.page_faults()
    for i in range(12):
        addresses[i] = libc.malloc(sizes[i])
        libc.memset(addresses[i], 1, sizes[i])
    for i in range(12):
        libc.free(addresses[i])
    return heap.page_faults() - start

free_in_heap
before = [step() for _ in range(5)][-1]
assert heap.keep_freed_memory()
assert heap.keep_freed_memory()
print(before, [step() for _ in range(5)][-1])
"""


LARGE_FREE_CHUNK = """
libc.free(libc.malloc(24 << 20))  # mapped: blocks of less come from the heap now
for block in [libc.malloc(23 << 20) for _ in range(2)]:
    libc.free(block)
"""
"""Leaves 46 MiB free at the end of the heap, less than what is given back."""


@pytest.mark.skipif(not GLIBC, reason="needs glibc")
@pytest.mark.parametrize("free_in_heap", ["", LARGE_FREE_CHUNK], ids=["a clean heap", "a large free chunk"])
def test_steps_take_no_memory_from_the_system_any_longer(free_in_heap: str) -> None:
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    script = [sys.executable, "-c", STEPS.replace("free_in_heap", free_in_heap)]
    run = subprocess.run(script, env=settings, capture_output=True, text=True, check=True, timeout=120)
    before, after = map(int, run.stdout.split())
    assert before > 1000 or free_in_heap, "9 thousand pages are touched"
    assert after <= before / 20


class Allocator:
    """Not glibc's: its blocks are Python's own."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self._block = ctypes.create_string_buffer(16)

    def malloc(self, size: int) -> int:
        return ctypes.addressof(self._block)

    def free(self, block: int) -> None:
        self.freed.append(block)


class Library:
    """What ``dlopen`` gives for the process: functions that can be given types."""

    def __init__(self, allocator: Allocator) -> None:
        self.malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(allocator.malloc)
        self.free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(allocator.free)


@pytest.mark.skipif(not GLIBC, reason="needs glibc")
def test_another_allocator_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, other = ctypes.CDLL, Allocator()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: usual(name) if name else Library(other))
    assert heap.keep_freed_memory() is False
    assert len(other.freed) == 4


def test_nor_can_a_process_that_does_not_show_its_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert heap.keep_freed_memory() is False


@pytest.mark.skipif(not GLIBC, reason="needs glibc")
@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "1000000"), ("GLIBC_TUNABLES", "glibc.malloc.top_pad=1")]
)
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert heap.why_not_kept() == f"{name} is set"


@pytest.mark.parametrize("error", [ValueError("unrecognized configuration name"), AttributeError("confstr")])
def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def confstr(name: str) -> str:
        raise error

    monkeypatch.setattr(os, "confstr", confstr)
    assert heap.why_not_kept() == "the C library is not glibc"


def test_page_faults_are_counted() -> None:
    start = heap.page_faults()
    with mmap.mmap(-1, 8 << 20) as block:  # new pages, whatever the heap holds
        block[:] = b"x" * len(block)
    assert heap.page_faults() - start > 100
