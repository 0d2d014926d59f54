"""Gathers the facts for ``hotcompile doctor``.

It writes into a temporary folder only: a store that is not there yet is not made.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import stat
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

from lightning_hotcompile.cli.compiler_trial import COMPILE_TIMEOUT_S, cpp_compiler, why_failed, why_no_openmp
from lightning_hotcompile.cli.facts import Facts, Gpu
from lightning_hotcompile.errors import HotCompileError

IMPORT_TIMEOUT_S = 30.0

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

_IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError)
"""What broken installations raise when they are imported: also a missing or foreign library."""


def facts_of_this_machine(timeout: float = COMPILE_TIMEOUT_S) -> Facts:
    """What there is here; each look that fails is a fact too.

    Args:
        timeout: seconds that the C++ compiler may take.
    """
    compiler = cpp_compiler()
    found = shutil.which(compiler)
    tried = found is not None and sys.platform != "win32"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return Facts(
        system=sys.platform,
        python=sys.version_info[:3],
        lightning=version_of("lightning"),
        compiler=compiler,
        compiler_found=found,
        openmp_error=why_no_openmp(str(found), timeout) if tried else None,
        python_header=str(header),
        header_found=header.is_file(),
        nvidia_driver=NVIDIA_DRIVER.exists(),
        **transformer_engine_facts(),
        **store_facts(),
        **torch_facts(),
    )


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, without importing it."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None


def transformer_engine_facts() -> dict[str, Any]:
    """TransformerEngine's part of the facts."""
    version = version_of("transformer-engine") or version_of("transformer_engine")
    # In a process of its own: a broken build may end the process that imports it.
    # Torch first: it loads the CUDA libraries that TransformerEngine's own need.
    command = [sys.executable, "-c", "import torch, transformer_engine.pytorch"]
    error = None if version is None else why_failed(command, IMPORT_TIMEOUT_S)
    return {"transformer_engine": version, "transformer_engine_error": error}


def store_facts() -> dict[str, Any]:
    """The part about the store's folder."""
    from lightning_hotcompile.store.folder import default_folder

    facts: dict[str, Any] = dict.fromkeys(("store", "store_refused", "store_mode", "store_free"))
    try:
        folder = default_folder().absolute()
        facts["store"] = str(folder)
        facts["store_refused"] = why_no_store(folder)
        facts["store_free"] = shutil.disk_usage(nearest(folder)).free
        facts["store_mode"] = stat.S_IMODE(folder.stat().st_mode)
    except FileNotFoundError:
        pass  # the first run makes it
    except (HotCompileError, OSError) as error:
        facts["store_refused"] = facts["store_refused"] or str(error)
    return facts


def why_no_store(folder: Path) -> str | None:
    """Why a run would not use this folder, or could not make it; ``None`` if it can.

    Raises:
        OSError: it cannot be looked at.
    """
    from lightning_hotcompile.store.folder import why_not_trusted, why_replaceable

    if os.path.lexists(folder):
        reason = why_not_trusted(folder)
        if reason is None and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return "this user may not write to it"
        return reason
    parent = nearest(folder)
    if not parent.is_dir():
        return f"it cannot be made: {parent} is a file"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"it cannot be made: this user may not write to {parent}"
    return why_replaceable(parent / folder.name)  # those in between are not there yet


def nearest(folder: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def runs_code(folder: Path) -> bool:
    """Whether libraries may be loaded from the disk of this folder; yes where the system does not say."""
    from lightning_hotcompile.store.folder import is_mounted

    try:
        return not is_mounted(nearest(folder), "ST_NOEXEC")
    except OSError:
        return True


def torch_facts() -> dict[str, Any]:
    """What only PyTorch can tell; without it there is little to tell."""
    try:
        torch = importlib.import_module("torch")
    except _IMPORT_ERRORS as error:
        return _without_torch(str(error))
    gpus = gpus_of(torch)
    return {
        "torch": torch.__version__,
        "torch_error": None,
        "compile_error": why_no_compile(torch),
        "gpus": gpus,
        "torch_cuda": torch.version.cuda,
        "triton_error": why_no_triton() if gpus else None,
        **cache_facts(),
        **prewarm_facts(accelerator=_has_accelerator(torch)),
    }


def _without_torch(error: str) -> dict[str, Any]:
    unknown = (
        "torch",
        "compile_error",
        "torch_cuda",
        "triton_error",
        "cache",
        "cache_runs_code",
        "free_memory",
    )
    return {
        **dict.fromkeys(unknown),
        "torch_error": error,
        "gpus": (),
        "cache_option": "",
        "cores": os.cpu_count() or 1,
        "no_prewarm": "it needs PyTorch",
    }


def _has_accelerator(torch: Any) -> bool:
    accelerator = getattr(torch, "accelerator", None)  # not in a PyTorch that is too old for us
    return bool(accelerator and accelerator.is_available())


def why_no_compile(torch: Any) -> str | None:
    """``torch.compile`` itself refuses a Python that it does not support; nothing is compiled here."""
    try:
        torch.compile(_nothing, backend="eager")
    except _IMPORT_ERRORS as error:
        return str(error)
    return None


def _nothing() -> None:
    """What is never called."""


def gpus_of(torch: Any) -> tuple[Gpu, ...]:
    """The CUDA devices that this PyTorch can use."""
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return tuple(
            Gpu(name=torch.cuda.get_device_name(i), capability=torch.cuda.get_device_capability(i))
            for i in range(count)
        )
    except RuntimeError:  # devices that cannot be used count as none
        return ()


def why_no_triton() -> str | None:
    """Why Triton cannot be imported, ``None`` if it can."""
    try:
        importlib.import_module("triton")
    except _IMPORT_ERRORS as error:
        return str(error) or type(error).__name__
    return None


def cache_facts() -> dict[str, Any]:
    """The part about the folder of the compiler's cache."""
    from lightning_hotcompile.store.folder import ENVIRONMENT, default_folder
    from lightning_hotcompile.swap.inductor.paths import FOLDER, chosen_by_user

    option = ENVIRONMENT
    try:
        chosen = chosen_by_user()
        option = ENVIRONMENT if chosen is None else FOLDER
        folder = (default_folder() if chosen is None else Path(chosen)).absolute()
    except (HotCompileError, ImportError):  # told by the check of the store, or of PyTorch
        return {"cache": None, "cache_option": option, "cache_runs_code": None}
    return {"cache": str(folder), "cache_option": option, "cache_runs_code": runs_code(folder)}


def prewarm_facts(*, accelerator: bool) -> dict[str, Any]:
    """The part about compiling ahead, for a training on an accelerator or on the CPU."""
    from lightning_hotcompile.swap.prewarm.choice import Surroundings, why_not

    around = Surroundings.here(accelerator=accelerator)
    reason = why_not("auto", "inductor", around)
    return {"cores": around.cores, "free_memory": around.free_memory, "no_prewarm": reason}
