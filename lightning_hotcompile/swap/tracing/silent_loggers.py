"""Calls of a logger that write nothing end no graph.

Dynamo ends the graph at each of them, and leaves a function with one in a loop (``log.debug`` for each layer)
to Python as a whole. A call below the logger's level does nothing, nor does one that was for the first time
only (``logger.warning_once`` of transformers, a method behind ``functools.cache``). Guards look before each
step whether that is still so. What is written is written by Python, where the graph ends.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.misc import LoggingLoggerVariable

from lightning_hotcompile.swap.tracing.cached_functions import is_held
from lightning_hotcompile.swap.tracing.overrides import Override, add_guard

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "exception": logging.ERROR,
    "critical": logging.CRITICAL,
    "fatal": logging.CRITICAL,
}
_ASKS = ("isEnabledFor", "getEffectiveLevel")
_GUARDED = "_hotcompile_silent"
"""Where a graph in the making keeps what of its loggers is guarded."""


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def call(prior: Any, variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        known = None if variable.source is None else _known(variable.value, name, args, kwargs)
        if known is None:
            return prior(variable, tx, name, args, kwargs)
        answer, question, asks = known
        _guard(tx, variable.source, question, asks, answer)
        return ConstantVariable.create(answer if name in _ASKS else None)

    return [Override(LoggingLoggerVariable, "call_method", call)]


_Question = Callable[[logging.Logger], Any]


def _known(value: logging.Logger, name: str, args: Any, kwargs: Any) -> tuple[Any, str, _Question] | None:
    """What a logger answers, the question in words and as a function; ``None`` if Python is to call it."""
    if _is_pythons(value, name):
        return _below_the_level(value, name, args)
    function = inspect.getattr_static(type(value), name, None)
    if name in vars(value) or not all(each.is_python_constant() for each in (*args, *kwargs.values())):
        return None
    given = tuple(each.as_python_constant() for each in args)
    named = {key: each.as_python_constant() for key, each in kwargs.items()}

    def was_called(logger: logging.Logger) -> bool:
        same = inspect.getattr_static(type(logger), name, None) is function
        return same and is_held(function, (logger, *given), named)

    return (True, f"{name}{given}{named} was called", was_called) if was_called(value) else None


def _below_the_level(value: logging.Logger, name: str, args: Any) -> tuple[Any, str, _Question] | None:
    level = _LEVELS.get(name)
    if name in ("log", "isEnabledFor") and args and args[0].is_python_constant():
        level = args[0].as_python_constant()
    if name == "getEffectiveLevel":
        return value.getEffectiveLevel(), name, lambda logger: logger.getEffectiveLevel()
    if type(level) is not int:
        return None

    def is_enabled(logger: logging.Logger) -> Any:
        return logger.isEnabledFor(level) if _is_pythons(logger, name) else None

    answer = is_enabled(value)
    return None if answer and name not in _ASKS else (answer, f"{name}, level {level}", is_enabled)


def _is_pythons(logger: logging.Logger, name: str) -> bool:
    """Whether a method is that of ``logging``, and so is what it asks."""
    own = getattr(logging.Logger, name, None)
    if not (name in _LEVELS or name in _ASKS or name == "log"):
        return False
    return all(
        getattr(type(logger), each) is method and each not in vars(logger)
        for each, method in ((name, own), ("isEnabledFor", logging.Logger.isEnabledFor))
    )


def _guard(tx: Any, source: Any, words: str, question: _Question, answer: Any) -> None:
    """It is asked once for each graph, however often the step calls it."""
    guarded: set[tuple[str, str]] = vars(tx.output).setdefault(_GUARDED, set())
    if (source.name, words) in guarded:
        return
    guarded.add((source.name, words))
    text = f"{source.name}: {words}: {answer}"
    add_guard(source, lambda logger: bool(question(logger) == answer), text)
