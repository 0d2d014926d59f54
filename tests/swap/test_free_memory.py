"""How much memory is free, as the system and a container's limit tell it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_hotcompile.swap.process import free_memory as memory
from lightning_hotcompile.swap.process.free_memory import free_host_memory, free_memory, why_memory_is_short
from tests.functions import tells_nothing


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def container(root: Path, limit: str, used: int, cache: int) -> None:
    folder = root / "sys/fs/cgroup"
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon 1\ninactive_file {cache}\n")


def test_what_the_system_calls_available(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 900 kB\nMemFree: 10 kB\nMemAvailable: 500 kB\n")
    assert free_host_memory(tmp_path) == 500 * 1024


def test_a_container_may_leave_less(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemAvailable: 500 kB\n")
    container(tmp_path, "100000", used=90_000, cache=5_000)
    assert free_host_memory(tmp_path) == 15_000
    container(tmp_path, "100000", used=120_000, cache=5_000)
    assert free_host_memory(tmp_path) == 0
    container(tmp_path, "max", used=120_000, cache=5_000)
    assert free_host_memory(tmp_path) == 500 * 1024


def memory_group(folder: Path, limit: int | str, used: int) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", "anon 1\ninactive_file 0\n")


def test_a_batch_system_may_limit_the_job(tmp_path: Path) -> None:
    """Its groups lie below the top, and that of the job above the one that the process is in."""
    write(tmp_path / "proc/meminfo", "MemAvailable: 500 kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/system.slice/job_7/step_0/task_1\n")
    job = tmp_path / "sys/fs/cgroup/system.slice/job_7"
    memory_group(job / "step_0/task_1", "max", used=10_000)
    memory_group(job, 40_000, used=30_000)
    memory_group(tmp_path / "sys/fs/cgroup/system.slice/job_8", 1_000, used=1_000)
    assert free_host_memory(tmp_path) == 10_000


def test_groups_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemAvailable: 500 kB\n")
    write(tmp_path / "proc/self/cgroup", "5:cpu,cpuacct:/job\n4:memory:/job/step\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/memory/job"
    for group, limit in ((folder, 30_000), (folder / "step", 2**63 - 4096)):
        write(group / "memory.limit_in_bytes", f"{limit}\n")
        write(group / "memory.usage_in_bytes", "20000\n")
        write(group / "memory.stat", "inactive_file 0\ntotal_inactive_file 1000\n")
    assert free_host_memory(tmp_path) == 11_000


@pytest.mark.parametrize("own", ["0::/not/there\n", "0::/../../elsewhere\n", "nonsense\n", ""])
def test_a_container_shows_its_own_group_at_the_top(tmp_path: Path, own: str) -> None:
    write(tmp_path / "proc/meminfo", "MemAvailable: 500 kB\n")
    write(tmp_path / "proc/self/cgroup", own)
    memory_group(tmp_path / "sys/fs/cgroup", 40_000, used=30_000)
    assert free_host_memory(tmp_path) == 10_000


def test_elsewhere_free_pages_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.os, "sysconf", {"SC_AVPHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert free_host_memory(tmp_path) == 40_960
    monkeypatch.delattr(memory.os, "sysconf")
    assert free_host_memory(tmp_path) is None
    assert free_memory(torch.device("meta")) is None


def gpu_has(monkeypatch: pytest.MonkeyPatch, *, free: int, fraction: float = 1.0) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)


def test_an_allocator_that_is_not_torchs_may_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what RAPIDS' RMM holds for later nobody knows how much is free."""
    gpu_has(monkeypatch, free=100)
    assert free_memory(torch.device("cuda")) == 120
    monkeypatch.setattr(torch.cuda, "memory_reserved", tells_nothing)
    assert free_memory(torch.device("cuda")) is None


@pytest.mark.parametrize(("fraction", "left"), [(1.0, 120), (0.2, 120), (0.1, 90), (0.03, 20), (0.01, 20)])
def test_a_process_may_be_given_a_share_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, fraction: float, left: int
) -> None:
    """Of which it holds 30 of 1000 bytes, 20 of them for later."""
    gpu_has(monkeypatch, free=100, fraction=fraction)
    assert free_memory(torch.device("cuda")) == left


def test_tensors_that_share_memory_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.zeros(1 << 18)
    monkeypatch.setattr(memory, "free_memory", lambda device: 3 << 20)
    assert why_memory_is_short([base, base[10:], base], 3.0) is None
    assert why_memory_is_short([base, base.clone()], 3.0) == "6 MB are needed, 3 MB are free (cpu)"
    monkeypatch.setattr(memory, "free_memory", lambda device: None)
    assert why_memory_is_short([base], 1e9) is None
