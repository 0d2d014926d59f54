"""What Dynamo does otherwise while it traces for us: methods of its own that are overridden meanwhile."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import install_guard
from torch._dynamo.resume_execution import ContinueExecutionCache
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import VariableTracker

from lightning_hotcompile.errors import HotCompileError
from lightning_hotcompile.swap.replaced import put_in_place
from lightning_hotcompile.version import __version__

Method = Callable[..., Any]

GET_ATTRIBUTE = "tp_getattro_impl" if hasattr(VariableTracker, "tp_getattro_impl") else "var_getattr"
"""Dynamo's method that reads an attribute of a variable; the first one from torch 2.14 on."""

_MARK = "_hotcompile_overrides"
_WRAPPED = ("backend_compile_fn", "compiler_fn", "__wrapped__", "_torchdynamo_orig_backend")


def mark(backend: Method) -> None:
    """Mark a backend: what is traced for it while an :class:`Override` is put is traced by that.

    What the user compiles is not marked. It is as without the callback, also where it may not break.
    """
    setattr(backend, _MARK, True)


@dataclass(frozen=True)
class Override:
    """A method of a class of Dynamo's, or a function, and what is called in its place.

    Attributes:
        owner: the class, or the module in which the function has its name.
        name: of it.
        instead: called with Dynamo's own method first, then with what that would have been called with.
    """

    owner: type | types.ModuleType
    name: str
    instead: Method

    def put(self) -> Callable[[], None]:
        """Have it called; returns what undoes that, the last one first where several are of one name.

        Raises:
            HotCompileError: this torch has no such method.
        """
        prior = getattr(self.owner, self.name, None)
        if prior is None:
            raise HotCompileError(
                f"torch {torch.__version__} has no {self.owner.__name__}.{self.name}, which "
                f"lightning_hotcompile {__version__} builds on: a newer version of it may know this torch"
            )
        return put_in_place({(self.owner, self.name): _instead_of(prior, self)})


def _instead_of(prior: Method, override: Override) -> Method:
    def method(*args: Any, **kwargs: Any) -> Any:
        if is_traced_for_others():
            return prior(*args, **kwargs)
        return override.instead(prior, *args, **kwargs)

    return method


def end_graph(what: str, context: str, why: str, *hints: str) -> NoReturn:
    """Break the graph here: what follows is left to Python.

    Args:
        what: ends it; the same text each time.
        context: the variable or the place, for who reads the log.
        why: it ends, for the user.
        hints: what the user may do about it.
    """
    unimplemented(gb_type=what, context=context, explanation=why, hints=list(hints))


def add_guard(source: Any, holds: Callable[[Any], bool], words: str) -> None:
    """Have compiled code looked for anew, unless ``holds`` is true of what is at this source before a step.

    Args:
        source: Dynamo's own, of an object that is there before the step.
        holds: asked with the object of that step.
        words: what it asks, for who reads why something was compiled again.
    """

    def guard_object(builder: Any, guard: Any) -> None:
        builder.get_guard_manager(guard).add_lambda_guard(holds, [words], guard.user_stack)

    install_guard(source.make_guard(guard_object))


def as_written(code: types.CodeType) -> types.CodeType:
    """The code of the user's function, where Dynamo has made this one to go on after a graph break in it."""
    made = ContinueExecutionCache.generated_code_metadata.get(code)
    return code if made is None else made.code


def is_traced_for_others() -> bool:
    """Whether what Dynamo traces now, if anything, is for a backend that is not marked."""
    translator = traced_now()
    return translator is not None and not is_marked(getattr(translator.output, "compiler_fn", None))


def traced_now() -> Any:
    """The frame that Dynamo traces in this thread, the outermost one; ``None`` if it traces nothing."""
    try:
        return InstructionTranslator.current_tx()  # None after a trace, before torch 2.13
    except AttributeError:
        return None


def is_marked(backend: Any) -> bool:
    """Whether a backend, or one that it calls, is marked."""
    while backend is not None:
        if getattr(backend, _MARK, False):
            return True
        backend = _inside(backend)
    return False


def _inside(backend: Any) -> Any:
    """What a backend calls; in the forward of DDP that of the user is inside of a method of Dynamo's."""
    if isinstance(backend, types.MethodType):
        return backend.__self__
    return next((getattr(backend, name) for name in _WRAPPED if hasattr(backend, name)), None)
