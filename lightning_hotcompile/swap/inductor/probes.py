"""Inductor's choice among the CPU's vector instructions, with no more probes than the choice needs.

Torch compiles and loads a probe for each set of instructions that an x86 CPU has (two to three seconds each)
and then takes the first set whose probe worked. Asked one after the other, most of them are never asked.
"""

from __future__ import annotations

import itertools
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from lightning_hotcompile.swap.replaced import Replacement, Replaces, put_in_place

_NEEDED = ("valid_vec_isa_list", "supported_vec_isa_list", "x86_isa_checker")


_ASKING = threading.RLock()


class AsNeeded:
    """A list of those that are true, in order; each is asked when somebody wants to know.

    Two threads do not ask at the same time: the second one takes the answer that the first one got. That
    holds for all lists, since torch's candidates are the same ones, and change while they are asked.
    """

    def __init__(self, candidates: Iterable[Any]) -> None:
        self._candidates = tuple(candidates)

    def __iter__(self) -> Iterator[Any]:
        return filter(self._holds, self._candidates)

    def _holds(self, candidate: Any) -> bool:
        with _ASKING:
            return bool(candidate)

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index: int) -> Any:
        for found in itertools.islice(self, index, None):
            return found
        raise IndexError(index)


def _replace() -> Callable[[], None] | None:
    # Not at the top: a run without a flip does not owe the compiler's import.
    import torch._inductor.cpu_vec_isa as torch_isa

    if not _can_be_asked(torch_isa):
        return None
    flags = set(torch_isa.x86_isa_checker())
    here = AsNeeded(isa for isa in torch_isa.supported_vec_isa_list if set(str(isa).split()) <= flags)
    return put_in_place({(torch_isa, "valid_vec_isa_list"): lambda: here})


def _can_be_asked(torch_isa: ModuleType) -> bool:
    if sys.platform not in ("linux", "win32") or platform.machine() not in ("x86_64", "AMD64"):
        return False
    known = all(hasattr(torch_isa, name) for name in _NEEDED)
    cached = getattr(getattr(torch_isa, "valid_vec_isa_list", None), "cache_info", None)
    return known and cached is not None and not cached().currsize


class ProbesAsNeeded(Replaces):
    """While any is entered, torch probes vector instructions one after the other, as they are asked for.

    What is chosen is the same. Nothing happens where torch has its list already, on other than x86 CPUs, and
    where this torch does it in another way.
    """

    replacement = Replacement(_replace)
