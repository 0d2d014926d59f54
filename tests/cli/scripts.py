"""Scripts that train, for commands that run one in a process of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from tests.forks import in_a_fork

ROOT = Path(__file__).parents[2]

HEAD = f"""
import sys
import torch

sys.path.insert(0, {str(ROOT)!r})
torch.set_num_threads(1)
from lightning_hotcompile import HotCompile
from tests.hot import hot
from tests.models import Net, fit, loader, make_trainer, seeded, weights
"""


def script(folder: Path, body: str, head: str = HEAD) -> Path:
    """A file ``train.py`` that imports what trainings of tests need, or what ``head`` says."""
    file = folder / "train.py"
    file.write_text(head + body, encoding="utf-8")
    return file


def run(folder: Path, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """``hotcompile`` with these arguments, in that folder; what it starts is a process as any other."""
    return in_a_fork(folder, "lightning_hotcompile", *arguments, **options)
