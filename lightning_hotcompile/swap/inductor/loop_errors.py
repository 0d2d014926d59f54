"""An index out of range in a loop that threads share is raised after the loop.

Inductor's code for a CPU checks an index where it is used and throws. No exception may leave a loop that
OpenMP shares among threads: C++ ends the process there, without a word of Python.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

from lightning_hotcompile.swap.replaced import Replacement, Replaces, put_in_place

_CHECK = "TORCH_CHECK("
_BEFORE = "std::atomic<bool> hotcompile_failed{false}; std::exception_ptr hotcompile_error;"
_CATCH = "catch (...) { if (!hotcompile_failed.exchange(true)) hotcompile_error = std::current_exception(); }"
_AFTER = "if (hotcompile_error) std::rethrow_exception(hotcompile_error);"
_NEEDED = (
    ("KernelGroup", "finalize_kernel"),
    ("KernelGroup", "codegen_group"),
    ("CppKernelProxy", "gen_body"),
)


class _Group(threading.local):
    """The C++ function that this thread writes a loop of."""

    now: Any = None


def _is_known(cpp: Any) -> bool:
    found: list[Any] = [getattr(getattr(cpp, owner, None), name, None) for owner, name in _NEEDED]
    return all(found) and list(inspect.signature(found[-1]).parameters) == ["self", "code"]


def _replace() -> Callable[[], None] | None:
    # Not at the top: a run without a flip does not owe the compiler's import.
    from torch._inductor.codegen import cpp

    return _replace_in(cpp) if _is_known(cpp) else None


def _replace_in(cpp: Any) -> Callable[[], None]:
    group = _Group()
    finalize_kernel, codegen_group, gen_body = (getattr(getattr(cpp, o), name) for o, name in _NEEDED)

    def finalize(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, group.now = group.now, self
        try:
            return finalize_kernel(self, *args, **kwargs)
        finally:
            group.now = before

    def body_of(self: Any, code: Any = None) -> None:
        body = cpp.BracesBuffer()
        gen_body(self, body)
        if group.now is None or not any(_CHECK in str(getattr(line, "line", line)) for line in body._lines):
            code.splice(body)
            return
        group.now.hotcompile_keeps_errors = True
        code.writeline("try")
        with code.indent():
            code.splice(body)
        code.writeline(_CATCH)

    def function_of(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.stack.close()  # ends the loops, as the original does first
        if vars(self).pop("hotcompile_keeps_errors", False):
            loops, self.loops_code = self.loops_code, cpp.BracesBuffer()
            self.loops_code.writeline(_BEFORE)
            self.loops_code.splice(loops)
            self.loops_code.writeline(_AFTER)
        return codegen_group(self, *args, **kwargs)

    ours = zip(_NEEDED, (finalize, function_of, body_of), strict=True)
    return put_in_place({(getattr(cpp, owner), name): function for (owner, name), function in ours})


class RaisesAfterLoops(Replaces):
    """While any is entered, code that Inductor writes keeps the first error of a loop until its end.

    Each turn of the loop is left where its check fails, so nothing is read or written by a wrong index.
    Nothing happens where this torch writes its loops in another way.
    """

    replacement = Replacement(_replace)
