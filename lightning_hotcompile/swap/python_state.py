"""State of Python's own objects that Dynamo takes for a constant: it is left to Python, at a graph break.

Compiled code would draw the number that was drawn while it was traced, step after step, and say nothing:

- ``random.Random`` objects that are there before the step, from torch 2.14 on also the one behind
  ``random.shuffle``, ``random.sample`` and ``random.seed``;
- what ``popitem`` takes from a ``dict`` or an ``OrderedDict``;
- a ``deque`` with ``maxlen``, which is traced as one without;
- from torch 2.14 on, a generator that has not begun.
"""

from __future__ import annotations

import inspect
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch._dynamo.variables as variables
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.misc import RandomVariable

from lightning_hotcompile.swap.overrides import Override


def left_to_python(break_the_graph: Callable[..., Any]) -> list[Override]:
    """What Dynamo does otherwise.

    Args:
        break_the_graph: Dynamo's function that ends a graph, with a reason in its four arguments.
    """

    def broken(what: str, name: str, variable: Any) -> Any:
        return break_the_graph(
            gb_type=what,
            context=f"{name} {variable}",
            explanation="It changes from step to step, and no guard of Dynamo's looks at it.",
            hints=[],
        )

    def random_method(prior: Any, variable: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if variable.source is None:  # made in the step: the same one each time
            return prior(variable, tx, name, *args, **kwargs)
        return broken("state of a random number generator of Python's", name, variable)

    def dict_method(prior: Any, variable: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if variable.source is None or name != "popitem":
            return prior(variable, tx, name, *args, **kwargs)
        return broken("last item of a dict", name, variable)

    def wrapped(prior: Any, builder: Any, value: Any) -> Any:
        if isinstance(value, deque) and value.maxlen is not None:
            return broken("deque with maxlen", "use of", builder)
        if isinstance(value, types.GeneratorType) and inspect.getgeneratorstate(value) == inspect.GEN_CREATED:
            return builder.wrap_user_defined(value)  # as torch before 2.14 does: its use ends the graph
        return prior(builder, value)

    return [
        Override(RandomVariable, "call_method", random_method),
        *(Override(kind, "call_method", dict_method) for kind in _dicts()),
        Override(VariableBuilder, "_wrap", wrapped, translator=lambda builder, value: builder.tx),
    ]


def _dicts() -> list[type]:
    names = ("ConstDictVariable", "OrderedDictVariable")  # the latter from torch 2.13 on
    return [getattr(variables, name) for name in names if hasattr(variables, name)]
