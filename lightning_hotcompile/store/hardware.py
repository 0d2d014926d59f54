"""On what machine this is: what was fast on one says little about another."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_hotcompile.store import checked
from lightning_hotcompile.swap.process.cores import usable_cores

_LINE = checked.line()


def digest_of(*parts: object, size: int = 8) -> str:
    """Hexadecimal digits (two for each byte of ``size``) that name plain values; the same everywhere."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=size).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The parts of a machine on which speed depends, readable.

    Args:
        cpu: model name of the processor.
        vector: the processor's vector instructions that PyTorch uses, for example ``AVX2``.
        cores: processor cores that this process may use.
        threads: threads of PyTorch's operations on the CPU.
        devices: kinds of accelerators with their capability, each once, sorted.
        system: operating system and architecture.

    Raises:
        InvalidRecord: a field has a wrong type or is out of range.
    """

    cpu: str
    vector: str
    cores: int
    threads: int
    devices: tuple[str, ...]
    system: str

    def __post_init__(self) -> None:
        checked.check(self, _RULES)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits: equal digests, comparable speed."""
        return digest_of(vars(self))

    @property
    def code_digest(self) -> str:
        """The same for machine code: how many cores are free does not change it, all else may."""
        return digest_of({**vars(self), "cores": 1})

    @classmethod
    def here(cls, *, on_cpu: bool = False) -> Machine:
        """The machine that runs this.

        Args:
            on_cpu: whether only the CPU is in use. Else accelerators are asked for their names, which begins
                their use by this process: it may not fork afterwards.
        """
        return cls(
            cpu=_cpu_model()[:200],
            vector=torch.backends.cpu.get_cpu_capability()[:200],
            cores=usable_cores(),
            threads=torch.get_num_threads(),
            devices=() if on_cpu else _devices(),
            system=f"{platform.system()} {platform.machine()}"[:200],
        )

    @classmethod
    def from_dict(cls, data: object) -> Machine:
        """Read what ``dataclasses.asdict`` gave.

        Raises:
            InvalidRecord: fields are missing, unknown or not allowed.
        """
        fields = checked.exact_fields(data, cls)
        return cls(**{**fields, "devices": as_tuple(fields["devices"])})

    def __str__(self) -> str:
        parts = (self.cpu, self.vector, f"{self.cores} cores", f"{self.threads} threads", *self.devices)
        return ", ".join((*parts, self.system))


_RULES = {
    "cpu": _LINE,
    "vector": _LINE,
    "cores": checked.whole(1, 1_000_000),
    "threads": checked.whole(1, 1_000_000),
    "devices": checked.many(_LINE, 64),
    "system": _LINE,
}


def as_tuple(value: object) -> object:
    """JSON knows no tuples: a list becomes one, all else stays as it is."""
    return tuple(value) if isinstance(value, list) else value


@functools.cache
def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model as the system names it, its number where there is no name (ARM)."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found = {name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    for name in ("model name", "cpu model", "cpu part"):
        if found.get(name):
            return " ".join(filter(None, (found.get("cpu implementer"), found[name])))
    return platform.processor() or platform.machine() or "unknown"


def _devices() -> tuple[str, ...]:
    if torch.cuda.is_available():
        return tuple(sorted({_cuda_device(index) for index in range(torch.cuda.device_count())}))
    accelerator = torch.accelerator.current_accelerator(check_available=True)  # a build for CUDA names it
    return () if accelerator is None else (accelerator.type,)


def _cuda_device(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"{torch.cuda.get_device_name(index)} {major}.{minor}"
