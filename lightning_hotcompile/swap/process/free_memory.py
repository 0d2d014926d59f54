"""How much memory is free, and what frees some: nothing of ours is to take what the training needs."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from lightning_hotcompile.swap.process.control_groups import groups_of


def why_memory_is_short(tensors: Iterable[Tensor], copies: float) -> str | None:
    """Why ``copies`` copies of the tensors do not fit into the memory where they are; ``None`` if they do.

    Tensors that share memory count once. Where the free memory is not known, it is taken to suffice.
    """
    needed: dict[torch.device, dict[int, int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        needed.setdefault(tensor.device, {})[storage.data_ptr()] = storage.nbytes()
    for device, storages in needed.items():
        wanted, free = copies * sum(storages.values()), free_memory(device)
        if free is not None and wanted > free:
            return f"{int(wanted) >> 20} MB are needed, {free >> 20} MB are free ({device.type})"
    return None


def free_memory(device: torch.device) -> int | None:
    """Free bytes on a device, ``None`` where that is not known: only torch's own allocator tells.

    A process may be given no more than a share of a GPU, whatever else is free there
    (``torch.cuda.set_per_process_memory_fraction``).
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        with contextlib.suppress(RuntimeError):
            reserved = torch.cuda.memory_reserved(device)
            share = int(total * torch.cuda.get_per_process_memory_fraction(device))
            return max(0, min(free, share - reserved)) + reserved - torch.cuda.memory_allocated(device)
    return free_host_memory() if device.type == "cpu" else None


def free_for_others(device: torch.device) -> int | None:
    """Free bytes on an accelerator that another process could take, ``None`` where that is not known."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def give_back_unused() -> None:
    """What the allocator of an accelerator keeps for later is free for another process.

    In a child process only: the training's own allocator would have to ask for it anew.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Free bytes of main memory: the least of what the system and limits of containers and jobs leave."""
    left = (group.memory_left() for group in groups_of("memory", root))
    known = [n for n in (_available(root), *left) if n is not None]
    return min(known) if known else _free_pages()


def _available(root: Path) -> int | None:
    """Linux's own estimate, which counts the page cache as free."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _free_pages() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def let_go(error: BaseException) -> None:
    """Free what the frames hold that it has passed through, such as buffers: eager needs the memory."""
    chain, seen = [error], set[int]()
    while chain:
        each = chain.pop()
        if id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            chain += [other for other in (each.__cause__, each.__context__) if other is not None]
