"""The C++ compiler, by which Inductor makes its kernels for a CPU."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_INSTALLS_ONE = "TORCH_INDUCTOR_INSTALL_GXX"
"""With this variable torch gets one from conda-forge if there is none."""


def why_no_compiler(device: torch.device) -> str | None:
    """Why Inductor can make no kernels for this device, or ``None``: it says so itself late in a compile.

    On Windows torch has its own ways to find one.
    """
    from torch._inductor import config

    if device.type != "cpu" or sys.platform == "win32" or getattr(config, "cpu_backend", "cpp") != "cpp":
        return None
    asked = config.cpp.cxx if isinstance(config.cpp.cxx, (list, tuple)) else (config.cpp.cxx,)
    if None in asked and sys.platform == "linux" and os.environ.get(_INSTALLS_ONE):
        return None
    names = [name for name in asked if name is not None]
    if any(map(_is_there, names)):
        return None
    none = f"there is no {' or '.join(names)}" if names else "torch._inductor.config.cpp.cxx names none"
    return f"Inductor needs a C++ compiler on a CPU: {none} (install one, or name it in CXX)"


def _is_there(name: str) -> bool:
    """Whether there is such a program; from torch 2.14 on it may be one with arguments (``ccache g++``)."""
    try:
        first = shlex.split(name)[:1]
    except ValueError:  # a quote that is not closed
        first = []
    return any(shutil.which(each) is not None for each in (name, *first))
