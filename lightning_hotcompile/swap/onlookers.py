"""Why a call has to run eagerly for the sake of somebody else: hooks on all modules, tracers, CUDA graphs."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.modules.module import _has_any_global_hook

HOOKS_ON_ALL_MODULES = (
    "a hook on all modules (torch.nn.modules.module.register_module_...) is in place, which compiled code "
    "does not call"
)


def has_hooks_on_all_modules() -> bool:
    """Whether somebody has registered a hook on all modules: no guard of Dynamo's looks for one."""
    return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


def captures_cuda_graph() -> bool:
    """Whether a CUDA graph of the user's is being captured.

    Whoever waits for the GPU then, as to compile or to compare does, ends the capture with an error.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def needs_eager() -> bool:
    """Whether the call that is made now has to run module by module.

    So it is with hooks on all modules, in forward-mode derivatives, and while the model is traced
    (``torch.jit.trace``, ``make_fx``, ``symbolic_trace``, a logger's graph): tracers refuse compiled code.
    """
    return (
        has_hooks_on_all_modules()
        or forward_ad._current_level >= 0
        or is_fx_symbolic_tracing()
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )
