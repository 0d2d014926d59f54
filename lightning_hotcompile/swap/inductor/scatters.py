"""With two threads a loop that adds to places which an index names (a backward of an embedding) runs on one.

Inductor's code for a CPU shares such a loop among threads and adds each element by an atomic operation, since
two threads may meet in one place. One thread alone adds a whole vector at a time: with two threads the
backward of an embedding took 0.44 ms and takes 0.10 ms, that of a bilinear interpolation 6.2 and 1.3 ms. The
order of the additions is then the same each time, too.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

from lightning_hotcompile.swap.inductor.loops import THREADS
from lightning_hotcompile.swap.replaced import Replacement, Replaces, put_in_place

_ADDS = "atomic_add"
_STORE = ["self", "name", "index", "value", "mode"]
_DEPTH = ["self", "max_parallel_depth", "threads"]
_NEEDED = {
    ("OuterLoopFusedKernel", "decide_parallel_depth"): _DEPTH,
    ("CppKernel", "store"): _STORE,
    ("CppVecKernel", "store"): _STORE,
    ("CppTile2DKernel", "store"): _STORE,
    ("CppKernelProxy", "codegen_nodes"): ["self", "nodes"],
}
"""What is replaced, in this order, with the names of its parameters."""

_OF_ONE = {("CppKernel", "decide_parallel_depth"): _DEPTH}
"""What one loop is asked, and some answer for themselves."""


class _Loop(threading.local):
    """What this thread writes now."""

    is_written = False
    adds = False


def _is_known(cpp: Any) -> bool:
    for (owner, name), parameters in (_NEEDED | _OF_ONE).items():
        function = vars(getattr(cpp, owner, object)).get(name)
        if function is None or list(inspect.signature(function).parameters) != parameters:
            return False
    needed = ("ParallelDepth", "parallel_num_threads", "config")
    return (
        all(hasattr(cpp, n) for n in needed)
        and "inner" in cpp.OuterLoopFusedKernel.__init__.__code__.co_names
    )


def _replace() -> Callable[[], None] | None:
    # Not at the top: a run without a flip does not owe the compiler's import.
    from torch._inductor.codegen import cpp

    return _replace_in(cpp) if _is_known(cpp) else None


def _replace_in(cpp: Any) -> Callable[[], None]:
    loop = _Loop()
    theirs = {(owner, name): vars(getattr(cpp, owner))[name] for owner, name in _NEEDED}

    def not_shared(max_parallel_depth: Any, threads: Any) -> Any:
        return cpp.ParallelDepth(parallel_depth=0, start_depth=max_parallel_depth.start_depth)

    def codegen_nodes(self: Any, nodes: Any) -> Any:
        """The body of a loop of its own; templates, which share their loops themselves, do not come here."""
        before = loop.is_written, loop.adds
        loop.is_written = not cpp.config.cpp.dynamic_threads and cpp.parallel_num_threads() == THREADS
        loop.adds = False
        try:
            return theirs["CppKernelProxy", "codegen_nodes"](self, nodes)
        finally:
            if loop.adds:  # held by itself: another thread may be the last to want this meanwhile
                self.decide_parallel_depth = not_shared
            loop.is_written, loop.adds = before

    def store_of(owner: str) -> Callable[..., Any]:
        store = theirs[owner, "store"]

        def one_or_atomic(self: Any, name: Any, index: Any, value: Any, mode: Any = None) -> Any:
            if mode != _ADDS or not loop.is_written:
                return store(self, name, index, value, mode)
            loop.adds, threads, self.num_threads = True, self.num_threads, 1
            # Arrays that it makes of vectors come after all that is computed, which must not use them.
            known = dict(self.cse._cache)
            try:
                return store(self, name, index, value, mode)
            finally:
                self.num_threads, self.cse._cache = threads, known

        return one_or_atomic

    def depth_of_all(self: Any, max_parallel_depth: Any, threads: Any) -> Any:
        """Of loops that are fused: if one of them is not shared, none is."""
        inner = [vars(nest.get_kernel()) for nest in self.inner]
        if any(kernel.get("decide_parallel_depth") is not_shared for kernel in inner):
            return not_shared(max_parallel_depth, threads)
        return theirs["OuterLoopFusedKernel", "decide_parallel_depth"](self, max_parallel_depth, threads)

    ours: dict[tuple[str, str], Callable[..., Any]] = {
        ("OuterLoopFusedKernel", "decide_parallel_depth"): depth_of_all,
        **{(owner, "store"): store_of(owner) for owner, name in _NEEDED if name == "store"},
        ("CppKernelProxy", "codegen_nodes"): codegen_nodes,
    }
    return put_in_place({(getattr(cpp, owner), name): function for (owner, name), function in ours.items()})


class ScattersOnOneThread(Replaces):
    """While any is entered, loops that Inductor writes for two threads and that scatter are not shared.

    Nothing happens with another number of threads, for which nobody has measured it, and where this torch
    writes its loops in another way.
    """

    replacement = Replacement(_replace)
