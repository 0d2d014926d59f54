"""Made-up facts of machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_hotcompile.cli.facts import Facts, Gpu

GOOD = Facts(
    system="linux",
    python=(3, 12, 4),
    torch="2.13.0+cpu",
    torch_error=None,
    compile_error=None,
    lightning="2.6.1",
    compiler="g++",
    compiler_found="/usr/bin/g++",
    openmp_error=None,
    python_header="/usr/include/python3.12/Python.h",
    header_found=True,
    gpus=(),
    torch_cuda=None,
    nvidia_driver=False,
    triton_error=None,
    transformer_engine=None,
    transformer_engine_error=None,
    store="/home/a/store",
    store_refused=None,
    store_mode=0o700,
    store_free=20 << 30,
    cache="/home/a/store",
    cache_option="HOTCOMPILE_STORE",
    cache_runs_code=True,
    cores=8,
    free_memory=16 << 30,
    no_prewarm=None,
)
"""A machine with 8 cores on which all is well."""

NEW_GPU = Gpu(name="H1", capability=(9, 0))
OLD_GPU = Gpu(name="P9", capability=(6, 1))


def facts(**changed: Any) -> Facts:
    return replace(GOOD, **changed)
