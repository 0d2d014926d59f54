"""Dynamo as the package meets it: its errors and counts, and a step in which it may compile.

Other modules use private API of torch's, too: ``PRIVATE_TORCH`` in ``tests/test_rooms.py`` lists them all.
What is relied on without a promise of torch's has a contract test in ``tests/test_torch_contract.py``, so
that an upgrade of torch that changes it fails with its name.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.utils as dynamo_utils
import torch.compiler.config
from torch import Tensor
from torch._dynamo import convert_frame
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    RestartAnalysis,
    SkipFrame,
    TorchDynamoException,
    exceptions_allowed_to_be_fallback,
)
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.symbolic_convert import SpeculationLogDivergence
from torch._dynamo.utils import counters, same
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _StopRecomputationError

from lightning_hotcompile.swap.graphs.kept_buffers import KeepsBuffers
from lightning_hotcompile.swap.replaced import Replacement, Replaces, put_in_place
from lightning_hotcompile.swap.tracing.breaks import GraphBreak, graph_breaks_told
from lightning_hotcompile.swap.tracing.failures_told import FailuresTold
from lightning_hotcompile.swap.tracing.float_inputs import beyond_tensors
from lightning_hotcompile.swap.tracing.numpy_numbers import comparisons_are_calls
from lightning_hotcompile.swap.tracing.otherwise import all_overrides
from lightning_hotcompile.swap.tracing.overrides import end_graph, is_traced_for_others

_log = logging.getLogger(__name__)

CompiledFn = Callable[..., Any]

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

_GUARDS: dict[str, Any] = {
    "skip_nnmodule_hook_guards": False,
    **({"skip_tensor_guards_with_matching_dict_tags": False} if TORCH < (2, 13) else {}),
    **({"computed_lazy_constant_max_nodes": 0} if TORCH >= (2, 14) else {}),
}
"""What guards look at, too: hooks, and whether a parameter requires gradients, which 2.11 overlooks.

And what is computed of numbers: 2.14 makes a constant of it, with no guard, where one is left to Python.
"""

CompilerError: tuple[type[Exception], ...] = (
    TorchDynamoException,
    FailOnRecompileLimitHit,  # with fullgraph, and no error of Dynamo's own kind
    SpeculationLogDivergence,  # an AssertionError: SGD with momentum, two groups and no state yet
    GuardOnDataDependentSymNode,
)
"""What Dynamo raises when it cannot compile a frame, before any code of the frame ran."""

_RAISED_AS_THEY_ARE = (AssertionError, IndexError, ConstraintViolationError)
"""Of a compiler, too, where an error is not suppressed; so may a program raise them."""


def is_compile_error(error: BaseException) -> bool:
    """Whether it says that a frame cannot be compiled."""
    if isinstance(error, CompilerError):
        return True
    trace = error.__traceback__ if isinstance(error, _RAISED_AS_THEY_ARE) else None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == convert_frame.__file__:
            return True
        trace = trace.tb_next
    return False


def cause_of(error: BaseException) -> BaseException:
    """The error of a backend, where Dynamo has put one of its own around it."""
    return error.inner_exception if isinstance(error, BackendCompilerFailed) else error


def skips_all_frames() -> bool:
    """Whether Dynamo compiles nothing now: a mode sees each operation (one that counts FLOPs).

    Before torch 2.13 what is called then is skipped for good, also where the user compiles it later. Since
    then torch raises with ``fullgraph``, after the function has run.
    """
    return any(
        not mode.is_infra_mode() and not mode.ignore_compile_internals()
        for mode in _get_current_dispatch_mode_stack()
    )


def is_seen_by_a_mode() -> bool:
    """Whether a mode sees each operation, be it one that Dynamo compiles under."""
    return bool(_get_current_dispatch_mode_stack())


RestartCompile: tuple[type[Exception], ...] = (RestartAnalysis, *exceptions_allowed_to_be_fallback)
"""What a backend raises when the frame has to be traced again, once more or without an operation that no
graph can have; never to be swallowed."""

LeavesFrame: type[Exception] = SkipFrame
"""What a backend raises to have the frame run as the user wrote it; no error."""

StopRecompute = _StopRecomputationError
"""How activation checkpointing leaves a forward that it repeats, once it has what it needs: no error."""


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; ``None`` for one of inference mode, where nobody counts."""
    return None if tensor.is_inference() else int(tensor._version)


@contextlib.contextmanager
def compiling_allowed(
    *,
    suppress_errors: bool,
    on_failure: Callable[[BaseException], None] = lambda error: None,
    on_break: Callable[[GraphBreak], None] = lambda found: None,
) -> Iterator[None]:
    """A step in which new graphs may be compiled.

    With ``suppress_errors`` a frame that cannot be compiled runs as the user wrote it, and ``on_failure`` is
    told in place of Dynamo's warning; ``on_break`` is told where a graph ends before its function does.
    Guards look at module hooks too, or one that a single one of equal blocks has would silently not run.
    Integers of modules (``self.steps += 1``) become symbols once they change, where each new value would be
    a recompile. What numpy computes and draws is left to numpy, and state of Python's own objects to Python,
    as are collectives.
    """
    dynamo_utils.graph_break_dup_warning_checker.reset()  # other trainings may have told of the same places
    told = FailuresTold(on_failure)
    names = ("_dynamo.convert_frame", "_dynamo.variables.tensor", "_dynamo.exc", "_guards")
    loggers = [logging.getLogger(f"torch.{name}") for name in names]
    for logger in loggers:
        logger.addFilter(told)
    try:
        with (
            torch._dynamo.config.patch(
                suppress_errors=suppress_errors,
                allow_unspec_int_on_nn_module=True,
                **_GUARDS,
            ),
            graph_breaks_told(on_break),
            KeepsBuffers(),
            _TracesOtherwise(),
        ):
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(told)


def _trace_otherwise() -> Callable[[], None]:
    ours = {
        (dynamo_utils, "warn_once"): functools.partial(_instead_of_a_warning, dynamo_utils.warn_once),
        (GuardBuilder, _NO_HOOKS): _unless_needless(getattr(GuardBuilder, _NO_HOOKS)),
        **beyond_tensors(),
    }
    with contextlib.ExitStack() as undo:
        undo.callback(put_in_place(ours))
        undo.enter_context(comparisons_are_calls())
        for each in all_overrides():
            undo.callback(each.put())
        return undo.pop_all().close


class _TracesOtherwise(Replaces):
    replacement = Replacement(_trace_otherwise)


_NO_HOOKS, _WITH_KWARGS = "EMPTY_NN_MODULE_HOOKS_DICT", "_with_kwargs"


def _unless_needless(guard_no_hooks: Callable[[GuardBuilder, Any], None]) -> Callable[..., None]:
    """Of a module that has no hooks it is guarded that it has none, and not also that none takes keywords.

    Guards are a part of each step; in a model of many modules these are a third of those about hooks. Where
    there is a hook it does matter: Dynamo looks at its function, and not at how it was registered.
    """

    @functools.wraps(guard_no_hooks)
    def guard_unless_needless(builder: GuardBuilder, guard: Any) -> None:
        if not _has_no_hooks_at_all(builder, guard):
            guard_no_hooks(builder, guard)

    return guard_unless_needless


def _has_no_hooks_at_all(builder: GuardBuilder, guard: Any) -> bool:
    """Of a guard on hooks with keywords: whether the module has none at all, which has a guard of its own."""
    if not guard.name.endswith(f"_hooks{_WITH_KWARGS}"):
        return False
    try:
        source = guard.originating_source
        hooks = getattr(builder.get(source.base), source.member.removesuffix(_WITH_KWARGS))
    except Exception:  # noqa: BLE001  # of another torch: guard as ever
        return False
    return not hooks


def _instead_of_a_warning(prior: Callable[..., None], msg: str, stacklevel: int = 1) -> None:
    """A function behind ``functools.cache`` is called and not traced, at the price of a graph break.

    Dynamo looks past the cache, with a warning and no more. Only of a call that could not be answered while
    it is traced, see :mod:`~lightning_hotcompile.swap.tracing.cached_functions`. Its other warnings go to the
    debug log: the user asked for no compile, and graph breaks are in the receipt.
    """
    if is_traced_for_others():
        prior(msg, stacklevel)
        return
    if "functools.lru_cache" in msg:
        end_graph(
            "call of a function with a cache",
            "functools.lru_cache",
            "Its body would run at each call, cached or not.",
        )
    _log.debug("Dynamo warns: %s", msg)


def dynamic_integers(patterns: Sequence[str]) -> contextlib.AbstractContextManager[Any]:
    """Integers whose Dynamo source matches a pattern become symbols instead of constants."""
    config: Any = torch.compiler.config
    given = [config.dynamic_sources] if config.dynamic_sources else []
    patch: contextlib.AbstractContextManager[Any] = config.patch(
        dynamic_sources=",".join([*given, *patterns])
    )
    return patch


def graph_break_count() -> int:
    """Graph breaks that Dynamo has counted in this process so far."""
    return sum(counters["graph_break"].values())


def graph_count() -> int:
    """Graphs that Dynamo has captured in this process so far, the user's included."""
    return int(counters["stats"]["unique_graphs"])


def cache_hits() -> int:
    """Graphs that Inductor or AOTAutograd found in their caches in this process so far."""
    return int(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])


def agree_within_tolerance(
    eager: Tensor, compiled: Tensor, reference: Tensor | None, tolerance: float
) -> bool:
    """PyTorch's own rule for compiled results: close, or as near to a 64-bit reference as eager is."""
    reference = eager if reference is None else reference
    agrees: bool = same(
        eager, compiled, reference, tol=tolerance, equal_nan=True, log_error=lambda *_, **__: None
    )
    return agrees
