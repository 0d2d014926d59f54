"""What a compiled graph depends on besides the graph: configuration and the state of the thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

from lightning_hotcompile.swap.process.thread_state import ThreadState


@dataclass(frozen=True)
class CompileState:
    """The configuration and the state of the thread that a compiled graph depends on."""

    thread: ThreadState
    threads: int
    deterministic: tuple[bool, bool, bool]
    matmul_precision: tuple[str | None, str]
    """By the older setting, which is for all devices, and by CUDA's own."""

    reduced_precision: tuple[bool, bool]
    inductor: bytes
    functorch: bytes

    @classmethod
    def now(cls) -> CompileState:
        """Read it; call this where the graph would be compiled."""
        matmul = torch.backends.cuda.matmul
        return cls(
            thread=ThreadState.now(),
            threads=torch.get_num_threads(),
            deterministic=(
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
                torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            ),
            matmul_precision=(_matmul_precision(), matmul.fp32_precision),
            reduced_precision=(
                matmul.allow_fp16_reduced_precision_reduction,
                matmul.allow_bf16_reduced_precision_reduction,
            ),
            inductor=inductor_config.save_config(),
            functorch=functorch_config.save_config(),
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Set it; only the thread's part is taken back, so this is for a process of its own."""
        inductor_config.load_config(self.inductor)
        functorch_config.load_config(self.functorch)
        inductor_config.compile_threads = 1  # no pool of workers; not part of a key
        torch.set_num_threads(self.threads)  # part of the C++ code and of its key
        deterministic, warn_only, fill = self.deterministic
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        everywhere, on_cuda = self.matmul_precision
        if everywhere is not None and _matmul_precision() != everywhere:
            torch.set_float32_matmul_precision(everywhere)
        matmul = torch.backends.cuda.matmul
        if matmul.fp32_precision != on_cuda:
            matmul.fp32_precision = on_cuda
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = (
            self.reduced_precision
        )
        with self.thread.applied():
            yield


def _matmul_precision() -> str | None:
    """By the older setting; ``None`` where only the newer ones were used: torch refuses to tell then."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
