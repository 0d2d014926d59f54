"""Scripts that train, for commands that run one in a process of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from tests.cli.command import in_a_process

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


def script(folder: Path, body: str) -> Path:
    """A file ``train.py`` that imports what trainings of tests need."""
    file = folder / "train.py"
    file.write_text(HEAD + body, encoding="utf-8")
    return file


def run(folder: Path, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """``hotcompile`` with these arguments, in that folder."""
    return in_a_process(*map(str, arguments), cwd=folder, **options)
