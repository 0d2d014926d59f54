"""Where a compile can be interrupted without leaving torch in the middle of something.

An error can be thrown between any two instructions of Python, and so between the two of torch's that put a
mode in force and that remember to take it back: for the rest of the process all tensors are then fake.
(Torch 2.13: 6 of 300 alarms at any moment of a trace left a ``FakeTensorMode`` behind, 0 of 300 here.)
"""

from __future__ import annotations

import functools
import inspect
import sysconfig
from pathlib import Path
from types import FrameType

import torch

_TORCH = Path(torch.__file__).parent
_OWN = Path(__file__).parents[2]
_STANDARD = Path(sysconfig.get_path("stdlib"))
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_TYPED = ("<stdin", "<ipython-input", "<command-")
"""How names begin that are no file's, of code that the user has typed; other such names: generated code."""

_WAITING = {
    "threading.py": ("wait", "join", "_wait_for_tstate_lock"),
    "subprocess.py": ("wait", "_wait", "_try_wait", "communicate", "_communicate"),
    "selectors.py": ("select",),
    "socket.py": ("readinto", "accept"),
    "ssl.py": ("read",),
    "multiprocessing/popen_fork.py": ("poll", "wait"),
    "multiprocessing/connection.py": ("_recv", "wait"),
}
"""Functions of the standard library that wait: for a thread, a compiler, a child process, a server."""

_ENDS_THAT_WAIT = ("/filelock/", "/torch/utils/_filelock.py", "/concurrent/futures/", "/subprocess.py")
"""Whose ``with`` waits at its beginning or its end, and can be interrupted there: parts of paths."""

_STEPS = {
    "_dynamo/symbolic_convert.py": ("step",),
    "fx/interpreter.py": ("run", "run_node", "fetch_args_kwargs_from_env", "call_function", "call_method"),
    "_inductor/graph.py": ("run_node", "call_function"),
    "_inductor/scheduler.py": (),
    "_inductor/dependencies.py": (),
    "_inductor/ir.py": (),
    "_inductor/loop_body.py": (),
    "_inductor/codegen/common.py": (),
    "_inductor/codegen/cpp.py": (),
    "_inductor/codegen/simd.py": (),
    "_inductor/codegen/triton.py": (),
    "_inductor/codegen/wrapper.py": (),
}
"""Functions of torch's that go from one instruction or node to the next, or that only compute; (): all."""


def can_be_interrupted(frame: FrameType | None) -> bool:
    """Whether an error thrown at this frame looks like one of what it just called.

    It does where the code waits, where one of torch's loops goes on to the next instruction or node, and in
    code of others (a backend, a kernel's description, sympy), unless any of it was called by the beginning
    or the end of a ``with``, or by an import: a module that is half imported is not imported again in full.
    This takes it from Python that it looks for no signal between the beginning of a ``with`` and its body
    (seen with 3.11).
    """
    return frame is not None and _is_a_pause(frame) and not _is_amid_something(frame)


def _is_a_pause(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_flags & inspect.CO_GENERATOR:
        return False  # perhaps a context manager, about to put back what it found
    functions = _functions_of(code.co_filename)
    return functions is not None and (not functions or code.co_name in functions)


@functools.lru_cache(maxsize=4096)
def _functions_of(filename: str) -> tuple[str, ...] | None:
    """The functions of a file that can be interrupted, () for all of them, ``None`` for none."""
    if filename.startswith("<"):
        return () if filename.startswith(_TYPED) else None
    path = Path(filename)
    if path.is_relative_to(_OWN):
        return None
    if path.is_relative_to(_TORCH):
        return _STEPS.get(path.relative_to(_TORCH).as_posix())
    if path.is_relative_to(_STANDARD) and not _PACKAGES & set(path.parts):
        return _WAITING.get(path.relative_to(_STANDARD).as_posix())
    return ()


def _is_amid_something(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code.co_filename.startswith("<frozen importlib"):
            return True
        if code.co_name in ("__enter__", "__exit__") and not _waits(code.co_filename):
            return True
        frame = frame.f_back
    return False


def _waits(filename: str) -> bool:
    path = filename.replace("\\", "/")
    return any(part in path for part in _ENDS_THAT_WAIT)
