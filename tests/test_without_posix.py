"""Windows: what Python has on POSIX systems only is not needed to import the package, nor for a training."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import importlib
import os
import pkgutil
import signal
import sys

import filelock, hydra, jinja2, lightning.pytorch, matplotlib.pyplot, pandas, platformdirs, typer
import torch._dynamo, torch._inductor.compile_fx, typer.testing
import lightning.pytorch.trainer.connectors.signal_connector as connector

OF_POSIX = {
    signal: "SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 "
    "ITIMER_REAL alarm getitimer setitimer pthread_kill pthread_sigmask siginterrupt sigwait",
    os: "confstr fork geteuid getpgid getpgrp getuid getpriority killpg nice register_at_fork "
    "sched_getaffinity sched_setaffinity setpgid setsid statvfs sysconf uname",
}
for module, names in OF_POSIX.items():
    for name in names.split():
        vars(module).pop(name, None)
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
connector._IS_WINDOWS = True
signal.valid_signals = lambda: {signal.SIGINT, signal.SIGTERM}
sys.platform = "win32"

import lightning_hotcompile

for module in pkgutil.walk_packages(lightning_hotcompile.__path__, "lightning_hotcompile."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

from lightning.pytorch.demos.boring_classes import BoringModel

hot = lightning_hotcompile.HotCompile(
    threshold=2, backend="aot_eager", cost_gate=False, on_error="raise", prewarm=False, store=None
)
trainer = lightning.pytorch.Trainer(
    accelerator="cpu", max_steps=8, limit_val_batches=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[hot],
)
trainer.fit(BoringModel())
print("phase", hot.report.phase, "runs", sum(region.runs for region in hot.report.regions))
"""


def test_a_training_is_compiled_where_python_is_that_of_windows() -> None:
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert out.returncode == 0, out.stderr
    phase, runs = out.stdout.splitlines()[-1].split()[1::2]
    assert phase == "settling"
    assert int(runs) > 0
