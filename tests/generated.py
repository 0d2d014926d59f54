"""The code that Inductor makes for a script, as torch's own log has it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def output_code(script: str, folder: Path) -> str:
    """Run a script in a process of its own, with empty caches in ``folder``; the code of all its graphs."""
    code = folder / "code.log"
    environment = {
        **os.environ,
        "TORCH_LOGS": "output_code",
        "TORCH_LOGS_OUT": str(code),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=folder, check=True, timeout=500)
    return code.read_text(encoding="utf-8")


def bodies(code: str) -> list[str]:
    """What each graph's code does when it is called, whether it is in Python or in C++."""
    return re.split(r"def call\(|void inductor_entry_impl\(", code)[1:]
