"""What compiles in the child process: the toolchain's warm-up first, then each graph as it comes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lightning_hotcompile.errors import first_line
from lightning_hotcompile.swap.inductor.compiler_ways import compiler_ways
from lightning_hotcompile.swap.inductor.compilers import backward_with_forward, resolve_backend
from lightning_hotcompile.swap.inductor.cpp_beside import start_toolchain
from lightning_hotcompile.swap.inductor.paths import use_headers
from lightning_hotcompile.swap.inductor.silent_imports import import_in_silence
from lightning_hotcompile.swap.prewarm.graphfile import compile_packed, graphs_found, graphs_in_cache
from lightning_hotcompile.swap.prewarm.optimizerfile import compile_optimizer

_COMPILE: dict[str, Callable[[bytes], None]] = {"graph": compile_packed, "optimizer": compile_optimizer}


def warm_toolchain(device: str) -> None:
    """Probes and precompiled headers; other than on a CPU by compiling a function of no use."""
    if device == "cpu":
        start_toolchain({})
        return
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)  # the keys of Inductor's cache have the name of the current one
    backend = resolve_backend("inductor", None, None)
    x = torch.ones(8, device=device, requires_grad=True)
    with backward_with_forward():
        torch.compile(lambda x: (x * x).sin().sum(), backend=backend)(x).backward()


def report(folder: Path, name: str, work: Callable[[], None]) -> None:
    """Do it and write down how it went; an error ends only this piece of work."""
    start, before, found, error = time.perf_counter(), graphs_in_cache(), graphs_found(), None
    try:
        work()
    except MemoryError:
        error = "out of memory"
    except Exception as failure:  # noqa: BLE001  # the compiler runs over any model
        error = first_line(failure)
    result = {
        "seconds": time.perf_counter() - start,
        "error": error,
        "cached": error is None and graphs_in_cache() > before,
        "new": error is None and graphs_in_cache() > before and graphs_found() == found,
    }
    unfinished = folder / f"{name}.part"
    unfinished.write_text(json.dumps(result), encoding="utf-8")
    os.replace(unfinished, folder / f"{name}.json")


def main(folder: Path) -> None:
    """Compile what the lines of the standard input name, until it ends, or one names nothing."""
    headers = json.loads((folder / "settings.json").read_text(encoding="utf-8"))["headers"]
    if headers is not None:  # the parent's may lie elsewhere than torch's own
        use_headers(Path(headers))
    import_in_silence()
    with contextlib.ExitStack() as settings:
        for each in compiler_ways():
            settings.enter_context(each)
        for name in map(str.strip, sys.stdin):
            if not name:
                break
            report(folder, name, work_named(folder, name))


def work_named(folder: Path, name: str) -> Callable[[], None]:
    """What a line of the standard input asks for."""
    kind, _, rest = name.partition("-")
    if kind == "toolchain":
        return functools.partial(warm_toolchain, rest.removeprefix("on-"))
    return lambda: _COMPILE[kind]((folder / name).read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
