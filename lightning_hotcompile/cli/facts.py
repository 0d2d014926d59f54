"""What there is on a machine, as far as compiling depends on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A CUDA device: its name and compute capability."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What there is on a machine. ``None`` where something is missing or cannot be told.

    Args:
        system: as ``sys.platform``.
        python: version of Python.
        torch: version of PyTorch.
        torch_error: why PyTorch cannot be imported.
        compile_error: why ``torch.compile`` refuses this Python.
        lightning: version of Lightning.
        compiler: what Inductor calls to compile C++: a program's name or path.
        compiler_found: where that program is.
        openmp_error: why a small program with OpenMP could not be compiled and linked; ``None`` if it was,
            or was not tried.
        python_header: where ``Python.h`` should be.
        header_found: whether it is there.
        gpus: CUDA devices that can be used.
        torch_cuda: version of CUDA that PyTorch was built for.
        nvidia_driver: whether the driver for NVIDIA GPUs is loaded.
        triton_error: why Triton cannot be imported; ``None`` if it can, or nobody needs it.
        transformer_engine: version of TransformerEngine.
        transformer_engine_error: why it cannot be imported.
        store: the store's folder.
        store_refused: why it is not used.
        store_mode: rights of the folder; ``None`` if it is not made yet.
        store_free: free bytes on its disk.
        cache: the folder of the compiler's cache.
        cache_option: the environment variable that names it.
        cache_runs_code: whether its disk allows to load code; ``None`` where there is no folder.
        cores: processor cores that may be used.
        free_memory: bytes that a new process may take.
        no_prewarm: why no child process would compile ahead.
    """

    system: str
    python: tuple[int, int, int]
    torch: str | None
    torch_error: str | None
    compile_error: str | None
    lightning: str | None
    compiler: str
    compiler_found: str | None
    openmp_error: str | None
    python_header: str
    header_found: bool
    gpus: tuple[Gpu, ...]
    torch_cuda: str | None
    nvidia_driver: bool
    triton_error: str | None
    transformer_engine: str | None
    transformer_engine_error: str | None
    store: str | None
    store_refused: str | None
    store_mode: int | None
    store_free: int | None
    cache: str | None
    cache_option: str
    cache_runs_code: bool | None
    cores: int
    free_memory: int | None
    no_prewarm: str | None
