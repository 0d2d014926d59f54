"""Where numbers come from: machine, versions, command, date and commit."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import lightning_hotcompile
from lightning_hotcompile.run.trainer_facts import versions
from lightning_hotcompile.store.hardware import Machine
from lightning_hotcompile.store.profiles import utc_now


def setting(threads: int = 0) -> dict[str, Any]:
    """What has to be equal for times to be compared.

    Args:
        threads: of PyTorch's operations in the processes that are measured; 0 means PyTorch's choice.
    """
    machine = Machine.here()
    if threads:
        machine = dataclasses.replace(machine, threads=threads)
    return {"machine": str(machine), "versions": versions(), "commit": commit()}


def origin(command: str) -> dict[str, Any]:
    """How and when numbers were made."""
    return {"command": command, "date": utc_now()}


def commit(folder: Path = Path(lightning_hotcompile.__file__).parent) -> str | None:
    """The commit of the package's sources, ``+`` behind it if files were changed; None without git."""
    # An installed package may lie inside of somebody else's repository.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    found = _git(folder, "rev-parse", "--short", "HEAD")
    return f"{found}+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else found


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        ran = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None
