"""What ``hotcompile doctor`` checks: facts about a machine in, findings with their remedies out; pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lightning_hotcompile.cli.facts import Facts
from lightning_hotcompile.swap.inductor.paths import fits_commands
from lightning_hotcompile.swap.inductor.triton import OLDEST_GPU

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 11)
OLDEST_LIGHTNING, TOO_NEW_LIGHTNING = (2, 5), (3,)
ENOUGH_DISK = 1 << 30
ENOUGH_MEMORY = 2 << 30
NEEDS_TORCH = "not looked at: it needs PyTorch"

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding.

    Args:
        name: what was looked at.
        status: ``ok``; ``warning`` if training works but something is lost; ``problem`` if nothing can
            be compiled or nothing be kept.
        found: what is there, in words.
        remedy: what to do; empty if it is ok.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def all_checks(facts: Facts) -> list[Check]:
    """All findings, in the order in which they should be mended."""
    return [check(facts) for check in CHECKS]


def python(facts: Facts) -> Check:
    """The version of Python, and whether ``torch.compile`` supports it."""
    found = "Python " + ".".join(map(str, facts.python))
    if facts.python < OLDEST_PYTHON:
        return _problem("Python", found, "use Python 3.10 or newer in a new environment")
    if facts.compile_error is not None:
        remedy = "use a Python that this PyTorch can compile for, or a newer PyTorch"
        return _problem("Python", f"{found}: {facts.compile_error}", remedy)
    return _ok("Python", found)


def torch(facts: Facts) -> Check:
    """The version of PyTorch."""
    remedy = 'pip install --upgrade "torch>=2.11"'
    if facts.torch is None:
        return _problem("PyTorch", f"not importable: {facts.torch_error}", remedy)
    fits = _release(facts.torch) >= OLDEST_TORCH
    found = f"torch {facts.torch}"
    return _ok("PyTorch", found) if fits else _problem("PyTorch", found, remedy)


def lightning(facts: Facts) -> Check:
    """The version of Lightning."""
    remedy = 'pip install --upgrade "lightning>=2.5,<3"'
    if facts.lightning is None:
        return _problem("Lightning", "not installed", remedy)
    fits = OLDEST_LIGHTNING <= _release(facts.lightning) < TOO_NEW_LIGHTNING
    found = f"lightning {facts.lightning}"
    return _ok("Lightning", found) if fits else _problem("Lightning", found, remedy)


def compiler(facts: Facts) -> Check:
    """Whether there is a C++ compiler, and whether it compiles and links OpenMP."""
    name = "C++ compiler"
    # On a GPU most code is Triton's: only what runs on the CPU is lost.
    grave = _warning if facts.gpus else _problem
    if facts.compiler_found is None:
        remedy = f"install one ({_how_to_install(facts.system)}), or name the program in CXX"
        if " " in facts.compiler:
            remedy = "CXX has to name one program without arguments: write a small script that adds them"
        return grave(name, f"{facts.compiler!r} is not there", remedy)
    if facts.openmp_error is not None:
        # On a Mac PyTorch looks for OpenMP in more places than this trial does.
        grave = _warning if facts.system == "darwin" else grave
        found = f"{facts.compiler_found} cannot build a small OpenMP program: {facts.openmp_error}"
        remedy = (
            "install a compiler that knows C++20, with its OpenMP library (g++: libgomp, clang++: libomp)"
        )
        return grave(name, found, f"{remedy}, or name another one in CXX")
    tried = "not tried" if facts.system == "win32" else "builds OpenMP"
    return _ok(name, f"{facts.compiler_found}, {tried}")


def headers(facts: Facts) -> Check:
    """The headers of Python, which compiled code includes."""
    if facts.header_found:
        return _ok("Python headers", facts.python_header)
    package = f"python{facts.python[0]}.{facts.python[1]}-dev"
    return _problem(
        "Python headers",
        f"{facts.python_header} is not there",
        f"install them (Debian and Ubuntu: apt install {package}; Fedora: dnf install python3-devel), "
        "or use a Python that brings them, such as conda's",
    )


def cuda(facts: Facts) -> Check:
    """CUDA devices, and what Inductor needs to compile for them."""
    if not facts.gpus:
        return _no_gpu(facts)
    found = "; ".join(f"{g.name}, capability {g.capability[0]}.{g.capability[1]}" for g in facts.gpus)
    if facts.triton_error is not None:
        remedy = "install the Triton that belongs to this PyTorch: pip install triton"
        return _problem("CUDA", f"{found}; Triton is not importable: {facts.triton_error}", remedy)
    old = [g.name for g in facts.gpus if g.capability < OLDEST_GPU]
    if old:
        return _problem("CUDA", found, f"train on a GPU of capability 7.0 or more, not on {old[0]}")
    return _ok("CUDA", f"{found}; with Triton")


def _no_gpu(facts: Facts) -> Check:
    if facts.torch is None:
        return _ok("CUDA", NEEDS_TORCH)
    if not facts.nvidia_driver:
        return _ok("CUDA", "no device: compiled code is for the CPU")
    built = f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "built without CUDA"
    return _warning(
        "CUDA",
        f"an NVIDIA driver is loaded, but PyTorch ({built}) finds no device",
        "install a PyTorch for this driver (see pytorch.org/get-started), or look at CUDA_VISIBLE_DEVICES",
    )


def transformer_engine(facts: Facts) -> Check:
    """TransformerEngine, which nobody has to have."""
    name = "TransformerEngine"
    if facts.transformer_engine is None:
        return _ok(name, "not installed; only models that use it need it")
    found = f"transformer-engine {facts.transformer_engine}"
    if facts.transformer_engine_error is not None:
        remedy = "install the build for this PyTorch and this CUDA, or remove it if no model uses it"
        return _warning(name, f"{found}, not importable: {facts.transformer_engine_error}", remedy)
    return _ok(name, found)


def store(facts: Facts) -> Check:
    """The folder of what earlier runs have learned."""
    if facts.store is None or facts.store_refused is not None:
        return _problem(
            "store",
            f"{facts.store or 'no folder'}: {facts.store_refused}",
            "mend that, or name another folder in HOTCOMPILE_STORE; until then runs remember nothing",
        )
    if facts.store_free is not None and facts.store_free < ENOUGH_DISK:
        found = f"{facts.store}: only {facts.store_free / 2**30:.2f} GiB of its disk are free"
        remedy = "make room (1 GiB at least), or name a folder on another disk in HOTCOMPILE_STORE"
        return _warning("store", found, remedy)
    if facts.store_mode is not None and facts.store_mode & 0o077 and facts.system != "win32":
        found = f"{facts.store}: others can look into it (mode {facts.store_mode:04o})"
        return _warning("store", found, f"chmod 700 {shlex.quote(facts.store)}")
    made = "" if facts.store_mode is not None else " (the first run makes it)"
    free = "" if facts.store_free is None else f", {facts.store_free / 2**30:.1f} GiB free"
    return _ok("store", f"{facts.store}{made}{free}")


def cache(facts: Facts) -> Check:
    """Whether compiled code can be loaded from where it is kept."""
    name = "compiler's cache"
    if facts.cache is None:
        return _ok(name, NEEDS_TORCH if facts.torch is None else "in PyTorch's own place: there is no store")
    if facts.cache_runs_code is False:
        found = f"{facts.cache} is on a disk from which no code is loaded (noexec)"
        return _problem(name, found, f"name a folder on another disk in {facts.cache_option}")
    if not facts.gpus and not fits_commands(facts.cache):
        found = f"{facts.cache} has a space or quote, and torch can name no file in it to the C++ compiler"
        return _warning(name, found, f"name another folder in {facts.cache_option}")
    return _ok(name, facts.cache)


def prewarm(facts: Facts) -> Check:
    """Whether a child process would compile ahead while the training goes on."""
    cores = f"{facts.cores} core{'s' if facts.cores != 1 else ''}"
    if facts.free_memory is not None and facts.free_memory < ENOUGH_MEMORY:
        found = f"{cores}, only {facts.free_memory / 2**30:.1f} GiB of memory free"
        return _warning(
            "prewarm", found, "free some memory: a compiler needs about 2 GiB beside the training"
        )
    if facts.no_prewarm is not None:
        return _ok("prewarm", f"{cores}; would not run here: {facts.no_prewarm}")
    return _ok("prewarm", f"{cores}; a child process would compile ahead")


CHECKS: tuple[Callable[[Facts], Check], ...] = (
    python,
    torch,
    lightning,
    compiler,
    headers,
    cuda,
    transformer_engine,
    store,
    cache,
    prewarm,
)


def _ok(name: str, found: str) -> Check:
    return Check(name=name, status="ok", found=found)


def _warning(name: str, found: str, remedy: str) -> Check:
    return Check(name=name, status="warning", found=found, remedy=remedy)


def _problem(name: str, found: str, remedy: str) -> Check:
    return Check(name=name, status="problem", found=found, remedy=remedy)


def _release(version: str) -> tuple[int, ...]:
    """The first numbers of a version: ``(2, 13)`` of ``2.13.0a0+git1``; nothing where there are none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else ()


def _how_to_install(system: str) -> str:
    if system == "win32":
        return "Visual Studio's C++ build tools, started from their own command prompt"
    if system == "darwin":
        return "xcode-select --install"
    return "Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++; conda: conda install gxx"
