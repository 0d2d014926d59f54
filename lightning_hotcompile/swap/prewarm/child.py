"""The child process that compiles ahead, on a leash: it ends with its parent, however that one ends.

``process.py`` runs this file. It imports nothing but the standard library: the leash is on before anything
slow begins. This process only watches; what compiles is a process below it. A compiler can hold the
interpreter's lock for long, and starts processes of its own: a watcher beside it is always awake, and
ends them all, since they share its process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # Linux: the signal that this process gets when its parent ends
_CHECK_S = 0.5
_LESS_PRIORITY = 10  # on the scale of ``nice``


def end_with_parent(signal_number: int) -> None:
    """Ask Linux for a signal when the parent ends; elsewhere the pipe and the parent's id have to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def end_group(*_: object) -> None:
    """End this process and everything that it has started."""
    os.killpg(0, signal.SIGKILL)


def main(folder: Path) -> int:
    """Watch over the worker; the exit status is the worker's, or 128 and its signal."""
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # started by hand: never end the group of the shell
    signal.signal(signal.SIGTERM, end_group)
    end_with_parent(signal.SIGTERM)
    if os.getppid() != settings["parent"]:
        return 1  # it ended before we could ask for the signal
    _be_modest()
    worker = subprocess.Popen(
        [*settings["worker"], str(folder)],
        stdin=sys.stdin,
        preexec_fn=lambda: end_with_parent(signal.SIGKILL),  # there are no threads here
    )
    leash, parent = settings["leash"], settings["parent"]
    while (status := worker.poll()) is None:
        ended, _, _ = select.select([leash], [], [], _CHECK_S)
        if ended or os.getppid() != parent:
            end_group()
    return status if status >= 0 else 128 - status


def _be_modest() -> None:
    os.nice(_LESS_PRIORITY)
    with contextlib.suppress(OSError):  # where memory runs out, what is compiled goes and not the training
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
