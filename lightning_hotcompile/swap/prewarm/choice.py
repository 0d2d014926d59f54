"""Whether a child process may compile ahead on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_hotcompile.swap.dynamo import graph_count
from lightning_hotcompile.swap.process.cores import usable_cores
from lightning_hotcompile.swap.process.free_memory import free_for_others, free_host_memory

ENOUGH_MEMORY = 2 * 2**30
"""Bytes that a child with torch, a compiler's workers and a C++ compiler need."""

ENOUGH_ON_DEVICE = 2**30
"""Bytes of an accelerator that a child takes by being there at all, and to start its compiler."""

SLOWED_SHARE = 0.3
"""Share of a child's time that training loses with one of two threads less.

Of seven small models on 2 cores five lose 0.26 to 0.37; two are faster with one thread, by 0.07 and 0.40.
"""


CROWDED = 1.9
"""Time of a child process on the core that training leaves it, over that of a compile with two cores.

Of three small models on 2 cores: 1.5 to 2.1, the most where there is most to compile. With two cores the C++
compiler works beside the tracing.
"""


ON_ACCELERATOR = 2.5
"""The same where the training runs on an accelerator, whose compiler is another one.

Three trainings on one H200: 1.9 to 4.1 times what a compile on a CPU is assumed to take.
"""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What there is beside the training: cores that may be used, threads in use, bytes of free memory.

    ``training_threads`` are those of each of the ``processes`` that train on this machine.
    ``free_memory`` is ``None`` where it cannot be told. ``accelerator`` tells whether the training runs on
    one, so that the CPU's cores are not its bottleneck, and ``device_memory`` how many bytes of it nobody
    holds; ``compiled`` whether anything was compiled in this process, which is for the number of threads that
    it has now.
    """

    posix: bool
    cores: int
    training_threads: int
    accelerator: bool
    free_memory: int | None
    processes: int = 1
    compiled: bool = False
    device_memory: int | None = None
    interpreter: bool = True
    """Whether there is a Python to start; a program that was frozen would start itself."""

    @classmethod
    def here(
        cls, *, accelerator: bool, processes: int = 1, device: torch.device | None = None
    ) -> Surroundings:
        """Of this process, which is one of so many that train on this machine, and trains on this device."""
        return cls(
            posix=os.name == "posix",
            cores=usable_cores(),
            training_threads=torch.get_num_threads(),
            accelerator=accelerator,
            free_memory=free_host_memory(),
            processes=processes,
            compiled=graph_count() > 0,
            device_memory=None if device is None else free_for_others(device),
            interpreter=bool(sys.executable) and not getattr(sys, "frozen", False),
        )


def why_not(prewarm: bool | str, backend: str | Callable[..., Any], around: Surroundings) -> str | None:
    """Why no child process should be started; ``None`` if it should.

    Args:
        prewarm: ``True``, ``False`` or ``"auto"``; ``True`` asks neither for a second core nor for memory.
        backend: the compiler's backend.
        around: the machine.
    """
    if prewarm is False:
        return "prewarm=False"
    if backend != "inductor":
        return f"backend={backend!r} has no cache on disk: only 'inductor' has"
    if not around.posix:
        return "the child process needs a POSIX system"
    if around.accelerator and around.processes > 1:
        return "several accelerators: what is compiled for one is not found by the others"
    if not around.interpreter:
        return "the child process needs a Python interpreter, and there is none beside this program"
    if prewarm is True:
        return None
    if _is_crowded(around) and (around.cores < 2 or threads_meanwhile(around) is None):
        why = ", and compiled code is in use that was made for them" if around.compiled else ""
        return f"no spare core: training uses {_all_threads(around)} threads on {around.cores} cores{why}"
    if around.free_memory is not None and around.free_memory < ENOUGH_MEMORY:
        free, needed = (n / 2**30 for n in (around.free_memory, ENOUGH_MEMORY))
        return f"{free:.1f} GiB of memory are free, {needed:.1f} GiB are needed"
    if around.device_memory is not None and around.device_memory < ENOUGH_ON_DEVICE:
        free, needed = (n / 2**30 for n in (around.device_memory, ENOUGH_ON_DEVICE))
        return f"{free:.1f} GiB of the accelerator's memory are free, {needed:.1f} GiB are needed"
    return None


def threads_meanwhile(around: Surroundings) -> int | None:
    """Threads that training may use while the child compiles, ``None`` for as many as now.

    A spare core is best. Where there is none, training gives one up: with ``n`` threads a step takes at
    most ``n / (n - 1)`` of its time, where a compile in this process would let it stand still. Not where
    compiled code is in use: it has a guard on the number of threads, and would be compiled again. Nor
    where several processes train: this one has only its own threads to give.
    """
    alone = around.processes == 1
    if not (_is_crowded(around) and alone) or around.training_threads < 2 or around.compiled:
        return None
    return max(1, around.cores - 1)


def slowed_share(around: Surroundings) -> float:
    """Share of a child's time by which training falls behind while it has a thread less."""
    if not _is_crowded(around):
        return 0.0
    running = min(around.training_threads, around.cores)
    return SLOWED_SHARE / max(1, running - 1)  # one of many threads is missed less


def crowding(around: Surroundings) -> float:
    """Time that a child process takes over that of a compile for the CPU which has all cores."""
    if around.accelerator:
        return ON_ACCELERATOR
    return CROWDED if _is_crowded(around) else 1.0


def _is_crowded(around: Surroundings) -> bool:
    return not around.accelerator and _all_threads(around) >= around.cores


def _all_threads(around: Surroundings) -> int:
    return around.processes * around.training_threads
