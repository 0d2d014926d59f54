"""Handlers of signals that come while torch traces or compiles: they find torch as between two operations.

Python calls a handler between any two of its own instructions. Lightning's saves a checkpoint there, where
SLURM is about to end a job; amid a trace all new tensors are fake, and the real ones are refused. And what a
handler raises would be taken for an error of the compile, and training would go on.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeGuard

import torch
from torch import overrides
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._guards import tracing
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_hotcompile.swap.process.time_limit import Alarm
from lightning_hotcompile.watch.lowest_mode import have_in_use

_function_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
_pop_function_mode: Callable[[], Any] = overrides._pop_mode
_push_function_mode: Callable[[Any], None] = overrides._push_mode

_Handler = Callable[[int, FrameType | None], Any]

_DYNAMOS = "torch/_dynamo/convert_frame.py"
_SWAP = Path(__file__).parents[1]
_OF_GRAPHS = tuple((_SWAP / folder).as_posix() for folder in ("graphs", "parity"))

_NUMBERS = sorted(signal.valid_signals())

_TOLD = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
"""Where torch keeps that a mode is in use, in all threads."""


class _Raised(BaseException):
    """In place of what a handler has raised; no ``Exception``, so that no compiler takes it for its own."""


class SignalHandlers:
    """While this is entered, handlers of signals that come amid a compile run outside of torch's modes.

    What a handler raises then is raised where this ends, also where something inside has caught it, as Python
    does in the end of a weak reference. Of code that Python runs, between two graphs, nothing is changed.
    After any error no mode is left that was opened inside: one may come between the two instructions of
    torch's that put a mode in force and that remember to take it back. In the main thread only, as handlers
    are.

    Args:
        on_sigterm: called when a handler of ``SIGTERM`` has returned: it has noted that the process is to
            end, as Lightning's does, and whoever asks for that soon kills what has not ended.
    """

    def __init__(self, on_sigterm: Callable[[], None] | None = None) -> None:
        self._on_sigterm = on_sigterm
        self.is_open = False
        self.raised: BaseException | None = None
        self._ours: dict[int, _OutsideOfModes] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._opened_at: FrameType | None = sys._getframe(1)
        self._modes = _get_current_dispatch_mode_stack()
        self._told = {
            name: getattr(_python_dispatch, name) for name in _TOLD if hasattr(_python_dispatch, name)
        }
        self._function_modes = _function_modes()  # one of the user's may give a default device
        self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        self.is_open = True
        for number in _NUMBERS:
            if _is_of_others(handler := signal.getsignal(number)):
                self._ours[number] = ours = _OutsideOfModes(self, handler)
                signal.signal(number, ours)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._opened_at = None  # it would keep what the call was given
        for number, ours in self._ours.items():
            users = ours.handler
            if signal.getsignal(number) is ours:  # a handler may have put another one in its place
                signal.signal(number, users)
        if error is not None and _get_current_dispatch_mode_stack() != self._modes:
            self._leave_modes()
        if error is not None and _function_modes() != self._function_modes:
            _have_functions_seen_by(self._function_modes)
        if (raised := self.raised) is not None and raised is not error:
            raise raised from raised.__cause__

    def returned(self, number: int) -> None:
        """A handler of this signal has returned."""
        if self.is_open and number == signal.SIGTERM and self._on_sigterm is not None:
            self._on_sigterm()

    def is_compiling(self, frame: FrameType | None) -> bool:
        """Whether Dynamo is at work at this frame, or a graph is run or compared, and not the user's code."""
        while frame is not None and frame is not self._opened_at:
            path = frame.f_code.co_filename.replace("\\", "/")
            if path.endswith(_DYNAMOS) or path.startswith(_OF_GRAPHS):
                return True
            frame = frame.f_back
        return False

    def _leave_modes(self) -> None:
        """Whatever is open and was not: each knows best what it has changed, but may not have come to it."""
        for mode in reversed(_get_current_dispatch_mode_stack()):
            if mode not in self._modes:
                with contextlib.suppress(Exception):
                    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        have_in_use(self._modes)
        for name, told in self._told.items():
            setattr(_python_dispatch, name, told)
        with _python_dispatch.BaseTorchDispatchMode():  # type: ignore[no-untyped-call]
            pass  # torch tells its guards at the end of each mode

    @contextlib.contextmanager
    def outside_of_modes(self) -> Iterator[None]:
        """No mode of a compile sees what is done inside, no kernel is above it, and Dynamo is not there.

        What it traces with has a fake mode of its own, which ``torch.load`` would take up.

        Nothing is imported here: a handler may come in the middle of the import of the same module.
        """
        modes, function_modes = _get_current_dispatch_mode_stack(), _function_modes()
        have_in_use([])
        _have_functions_seen_by(self._function_modes)
        before = set_eval_frame(None)
        try:
            with torch._C._ForceDispatchKeyGuard(*self._keys), tracing(None):
                yield
        finally:
            set_eval_frame(before)
            _have_functions_seen_by(function_modes)
            have_in_use(modes)


def _have_functions_seen_by(modes: Sequence[Any]) -> None:
    """These function modes in place of those that are, the lowest one first."""
    for _ in _function_modes():
        _pop_function_mode()
    for mode in modes:
        _push_function_mode(mode)


class _OutsideOfModes:
    """A handler in place of another one."""

    def __init__(self, window: SignalHandlers, handler: _Handler) -> None:
        self.handler = handler
        self._window = window

    def __call__(self, number: int, frame: FrameType | None) -> None:
        window = self._window
        if not window.is_open or not window.is_compiling(frame):  # open no more: somebody has kept this
            self.handler(number, frame)
            window.returned(number)
            return
        try:
            with window.outside_of_modes():
                self.handler(number, frame)
        except Exception as error:  # noqa: BLE001  # whatever a handler raises
            window.raised = error
            raise _Raised from None
        except BaseException as error:
            window.raised = error
            raise
        window.returned(number)


def _is_of_others(handler: object) -> TypeGuard[_Handler]:
    """Whether a handler is neither the system's nor that of a time limit."""
    return (
        callable(handler)
        and not isinstance(handler, _OutsideOfModes)
        and not isinstance(getattr(handler, "__self__", None), Alarm)
    )


def comes_from_a_handler(error: BaseException) -> bool:
    """Whether somebody's handler of signals has raised it: Python calls one wherever it is."""
    handlers = filter(_is_of_others, map(signal.getsignal, _NUMBERS))
    codes = [code for handler in handlers if (code := _code_of(handler)) is not None]
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    """What runs when it is called; ``None`` where that is nothing of Python's."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)  # of a method
    of_objects = (vars(kind).get("__call__") for kind in type(handler).__mro__)
    codes = (getattr(each, "__code__", None) for each in (function, *of_objects))
    return next((code for code in codes if isinstance(code, CodeType)), None)
