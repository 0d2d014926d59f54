"""A warning of torch's own that Python gives only once is given while the step is traced, and ends no graph.

``nn.Transformer`` warns in each layer of a mask of numbers beside one of bools, which is what most give it. A
warning ends the graph, and where that is in a loop over layers all of them were left to eager.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, SkipFunctionVariable

from lightning_hotcompile.swap.tracing.overrides import Override

_TORCH = str(Path(torch.__file__).parent)
_ONCE = frozenset(["default", "ignore", "module", "once"])


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def call(prior: Any, function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        is_one = function.value is warnings.warn and len(args) == 1 and kwargs.keys() <= {"stacklevel"}
        given = [each.unwrap() for each in (*args, *kwargs.values())] if is_one else []
        if is_one and _is_torchs(tx) and all(isinstance(each, ConstantVariable) for each in given):
            text, level = given[0].value, given[1].value if kwargs else 1
            frame = _caller(tx, level)
            if isinstance(text, str) and frame is not None and _is_torchs(frame) and _is_given(text, frame):
                return ConstantVariable.create(None)
        return prior(function, tx, args, kwargs)

    return [Override(SkipFunctionVariable, "call_function", call)]


def _is_torchs(frame: Any) -> bool:
    return bool(frame.f_code.co_filename.startswith(_TORCH))


def _caller(tx: Any, level: int) -> Any:
    """The frame that a warning is of; ``None`` where it is none of those that are traced."""
    for _ in range(level - 1):
        tx = getattr(tx, "parent", None)
    return tx


def _is_given(text: str, frame: Any) -> bool:
    """Give a warning, unless Python would give it again and again; whether that is done."""
    line, module = frame.lineno, str(frame.f_globals.get("__name__"))
    if not _is_given_once(text, line, module):
        return False
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, line, module, registry)
    return True


def _is_given_once(text: str, line: int, module: str) -> bool:
    """Whether what filters say of a warning is that it is not given again at this place."""
    for action, message, category, of_module, of_line in warnings.filters:
        if (
            (message is None or re.match(_pattern(message), text, re.IGNORECASE))
            and issubclass(UserWarning, category)
            and (of_module is None or re.match(_pattern(of_module), module))
            and of_line in (0, line)
        ):
            return action in _ONCE
    return True


def _pattern(given: Any) -> str:
    return given if isinstance(given, str) else str(given.pattern)
