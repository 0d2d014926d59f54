"""The C++ compiler works beside tracing and lowering, which use one core, and not after them.

Inductor finds out which vector instructions there are, and precompiles its header, when it has its first C++
code; then it waits for the code of the forward before it lowers the backward. Here the toolchain is started
with the flip, and code is built while the next graph is lowered. With full caches there is something to gain
too: each process asks once more whether the instructions work, and which header fits.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.fx import GraphModule

from lightning_hotcompile.swap.dynamo import TORCH, CompiledFn
from lightning_hotcompile.swap.inductor import cpp_wrapper
from lightning_hotcompile.swap.inductor.whole_files import WholeFiles
from lightning_hotcompile.swap.process.cores import usable_cores

_log = logging.getLogger(__name__)

_SETTINGS_OF_A_THREAD_SINCE = (2, 13)
"""Before, the compiler's settings were those of the process."""

LONGEST_WAIT_S = 60.0
"""For the toolchain, at the end of a run: it takes 6 s, and may wait for another process that starts it."""


def why_not_early(root: nn.Module, options: Mapping[str, Any]) -> str | None:
    """Why nothing is begun beside the tracing, or ``None``.

    Args:
        root: the model.
        options: Inductor's, as the user gave them.
    """
    if options and TORCH < _SETTINGS_OF_A_THREAD_SINCE:
        return f"options would be those of all threads with torch {torch.__version__}"
    elsewhere = next((p.device for p in root.parameters() if p.device.type != "cpu"), None)
    if elsewhere is not None:
        return f"the model is on {elsewhere}"
    return None if usable_cores() > 1 else "there is no second core"


class EarlyToolchain:
    """Starts the C++ compiler in a thread of its own when it is entered for the first time.

    Torch's locks keep it apart from the compile that needs the same files: what comes second waits, and finds
    them. An error here is one that the compile will have, and tell.

    Args:
        root: the model.
        options: Inductor's, as the user gave them.
    """

    def __init__(self, root: nn.Module, options: Mapping[str, Any] | None) -> None:
        self._root = root
        self._options = options or {}
        self.thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self.thread is not None or why_not_early(self._root, self._options) is not None:
            return
        # Here and not in the thread: two that import torch's modules, which import each other, can break it.
        import torch._inductor.codecache  # noqa: F401

        in_context = contextvars.copy_context().run  # the compiler's settings of this thread
        thread = threading.Thread(
            target=in_context, args=(self._begin,), name="hotcompile-toolchain", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # there are as many threads as there may be
            thread.start()
            self.thread = thread

    def __exit__(self, *_: object) -> None:
        """What is being made is of use to a later flip: nobody waits for it before :meth:`wait`."""

    def wait(self) -> None:
        """Until the thread has ended, if there is one, so that a run leaves no compiler behind.

        Not longer than :data:`LONGEST_WAIT_S`: a compiler that hangs must not hold a training. After an
        interruption (Ctrl-C, Lightning's error of a SIGTERM) nobody waits: the training is to end at once.
        """
        error = sys.exc_info()[1]
        interrupted = error is not None and not isinstance(error, Exception)
        if self.thread is not None and not interrupted:
            self.thread.join(LONGEST_WAIT_S)

    def _begin(self) -> None:
        try:
            with WholeFiles():
                start_toolchain(self._options)
        except Exception:  # noqa: BLE001  # whatever it is, the compile finds it too
            _log.debug("the C++ compiler could not be started early", exc_info=True)


def start_toolchain(options: Mapping[str, Any]) -> None:
    """Probe the vector instructions and precompile the header, if that has not been done in this process.

    Args:
        options: Inductor's, as the user gave them.

    Raises:
        Exception: whatever the compiler raises.
    """
    # Not at the top: a run without a flip does not owe the compiler's import.
    from torch._inductor import codecache, config

    in_cpp = cpp_wrapper.why_not_asked(options) is None or options.get(cpp_wrapper.NAME, config.cpp_wrapper)
    cache: Any = codecache.CppWrapperCodeCache if in_cpp else codecache.CppPythonBindingsCodeCache
    with config.patch(dict(options)):
        cache.load_async("", "cpu")  # of no code; what it returns would compile that, and is not called


def beside(backend: CompiledFn) -> CompiledFn:
    """A backend that builds the C++ code of a forward while it lowers the backward, where there is a core.

    After an interruption (a time limit, Ctrl-C) nobody waits for what is being built.
    """

    def compile_graph(graph_module: GraphModule, example_inputs: Sequence[Any]) -> CompiledFn:
        compiled: CompiledFn
        if usable_cores() < 2:
            compiled = backend(graph_module, example_inputs)
            return compiled
        # in here all of it can be interrupted, which the end of a ``with`` cannot
        with builds_beside() as builds:
            try:
                compiled = backend(graph_module, example_inputs)
                for build in builds:
                    build.wait()
            except TimeoutError:
                raise
            except Exception:
                for build in builds:
                    build.join()  # what comes next has the cores for itself
                raise
        return compiled

    return compile_graph


@contextlib.contextmanager
def builds_beside() -> Iterator[list[_Build]]:
    """Graphs whose kernels are called from C++ are built in threads, and are in the list that this gives."""
    from torch._inductor.codecache import CppWrapperCodeCache

    prior, thread, active = CppWrapperCodeCache.load_pybinding, threading.get_ident(), True
    builds: list[_Build] = []

    def load_pybinding(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        if not active or threading.get_ident() != thread:
            return prior(*args, **kwargs)  # type: ignore[no-any-return]
        builds.append(build := _Build(functools.partial(prior, *args, **kwargs)))
        return build.call

    try:
        with patch.object(CppWrapperCodeCache, "load_pybinding", load_pybinding):
            yield builds
    finally:
        active = False


class _Build:
    """A function that is being built, under the compiler's settings of this thread."""

    def __init__(self, build: Callable[[], Callable[..., Any]]) -> None:
        self._function: Callable[..., Any] | None = None
        self._error: Exception | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run, build), name="hotcompile-build", daemon=True
        )
        self._thread.start()

    def _run(self, build: Callable[[], Callable[..., Any]]) -> None:
        try:
            with WholeFiles():
                self._function = build()
        except Exception as error:  # noqa: BLE001  # raised where it is waited for
            self._error = error

    def join(self) -> None:
        """Until it is built, or could not be."""
        self._thread.join()

    def wait(self) -> Callable[..., Any]:
        """The function.

        Raises:
            Exception: what building it raised.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._function is not None
        return self._function

    def call(self, *args: Any) -> Any:
        """Call the function, once it is there."""
        return (self._function or self.wait())(*args)
