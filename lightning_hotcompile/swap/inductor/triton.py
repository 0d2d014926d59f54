"""Triton, by which Inductor writes its kernels for a GPU."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

OLDEST_GPU = (7, 0)
"""Compute capability of the oldest NVIDIA GPU for which it does."""


def why_no_kernels(device: torch.device) -> str | None:
    """Why Inductor can write none for this device, or ``None``: it says so itself late in a compile."""
    import torch  # not at the top: ``hotcompile doctor`` runs without

    if device.type != "cuda":
        return None
    none = "Inductor cannot write kernels for this GPU"
    if importlib.util.find_spec("triton") is None:
        return f"{none}: Triton is not installed (pip install triton)"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < OLDEST_GPU:
        found, least = ("{}.{}".format(*each) for each in (capability, OLDEST_GPU))
        return f"{none}: it has compute capability {found}, and Triton needs {least} or more"
    return None
