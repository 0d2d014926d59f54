"""Which compiled code is of this machine: its folder is named by all on which it depends."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable

import torch

from lightning_hotcompile.store.hardware import Machine, digest_of


def tag_of(machine: Machine) -> str:
    """Names the code that runs on a machine: processor, devices, threads, and the PyTorch and Python here."""
    python = sys.implementation.cache_tag or platform.python_version()
    return digest_of(machine.code_digest, torch.__version__, torch.version.git_version, python)


def tags_here(here: Machine, known: Iterable[tuple[Machine, str]]) -> frozenset[str]:
    """The tags of this machine for each number of threads and each kind of devices that runs had on it.

    A tag tells nothing of its machine: those of runs of which nothing else is known are not found.

    Args:
        here: as this process sees the machine; a shell may have other threads than a run, or no GPU.
        known: machines of earlier runs, each with its version of PyTorch.
    """
    same = {m for m, version in known if version == torch.__version__ and _lasting(m) == _lasting(here)}
    return frozenset(map(tag_of, {here, *same}))


def _lasting(machine: Machine) -> tuple[str, ...]:
    return machine.cpu, machine.vector, machine.system
