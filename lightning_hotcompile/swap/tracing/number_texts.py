"""The text of a number that varies (``f"step {n}"``, ``str(n)``, ``"%d" % n``) is made after the graph.

Dynamo has a variable for such a text, but uses it for ``str.format`` alone. Elsewhere the number is a
constant, or its text another name of the number (torch 2.13), or an error; and a graph break there leaves
all that follows in the function to eager, since these instructions cannot be left out of a graph by
themselves. In a dict it looks for such a text by the address of its variable, and never finds it. And of
``format(n, ">5")`` it takes the number for the format.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from string import Formatter
from typing import Any, NoReturn

from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, StringFormatVariable, TupleVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import SymNodeVariable

from lightning_hotcompile.swap.tracing.overrides import Override, end_graph

CONVERSIONS = {0: "", 1: "!s", 2: "!r", 3: "!a"}
"""By the lower bits of the instruction's argument."""

_LATE = "It is known once the graph has run."
_SLASH = "/"
_NUMBER = "\0"
"""Stands for a number."""

_OF_NUMBERS = frozenset("0123456789+-.,_ %eEinfaob")
"""What the text of a number is made of, if nothing but :data:`_SPEC` says how it is written."""

_SPEC = re.compile(r"[-+ #0-9.,_<>=^]*[bdeEfFgGnos%]?")
_PLACE = re.compile(r"%[-+ #0-9.]*[deEfFgGirs%]")
"""Where ``%`` puts a number."""


def overrides() -> list[Override]:
    """What Dynamo does otherwise.

    Not for a number that the graph computes of floats: as an output of the graph it would be a constant.
    """

    def formatted(prior: Any, tx: Any, spec: Any, flags: int) -> Any:
        if isinstance(spec, LateText):
            end_graph("format that has a number in it", str(spec), _LATE)
        number = tx.stack[-1]
        if not isinstance(number, SymNodeVariable):
            return prior(tx, spec, flags)
        if (found := _formatted(number, spec, CONVERSIONS[flags & 3])) is None:
            end_graph("format of a number", str(spec), _LATE)
        tx.stack[-1] = found
        return None

    def call(prior: Any, function: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        way = None if kwargs else _WAYS.get(function.fn)
        found = None if way is None else way(*(arg.realize() for arg in args))
        return prior(function, tx, args, kwargs) if found is None else found

    def created(prior: Any, *args: Any) -> Any:
        found = prior(*args)
        return LateText(*args) if isinstance(found, StringFormatVariable) else found

    return [
        Override(InstructionTranslatorBase, "_format_value", formatted),
        Override(BuiltinVariable, "call_function", call),
        Override(StringFormatVariable, "create", created),
    ]


class LateText(StringFormatVariable):
    """A text that nobody knows while the graph is traced."""

    def python_type(self) -> type:
        """Called by Dynamo, which has none for such a text before torch 2.13."""
        return str

    def sq_contains(self, tx: Any, item: Any) -> Any:
        """Called by Dynamo for ``in``, from torch 2.13 on."""
        if (found := _has(self, item)) is None:
            end_graph("search in a text", f"{item} in {self}", _LATE)
        return ConstantVariable.create(found)

    sq_contains_impl = sq_contains  # from torch 2.14 on

    def sq_length(self, tx: Any) -> NoReturn:
        """Called by Dynamo for ``len`` and, from torch 2.13 on, for whether a text is empty."""
        end_graph("length of a text", str(self), _LATE)

    sq_length_impl = sq_length  # from torch 2.14 on

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Called by Dynamo for methods and, before torch 2.13, for ``in``."""
        if name == "__contains__":
            return self.sq_contains(tx, *args)
        return super().call_method(tx, name, args, kwargs)

    def hash_impl(self, tx: Any) -> NoReturn:
        """Called by Dynamo for keys, from torch 2.13 on."""
        self._is_no_key()

    def is_python_hashable(self) -> NoReturn:
        """Called by Dynamo for keys, before torch 2.13."""
        self._is_no_key()

    def _is_no_key(self) -> NoReturn:
        end_graph("text that is a key", str(self), _LATE)


class _Filled(VariableTracker):
    """``text % numbers``, once the graph has run."""

    def __init__(self, text: Any, numbers: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.text, self.numbers = text, numbers

    def python_type(self) -> type:
        """Called by Dynamo."""
        return str

    @property
    def without_numbers(self) -> str | None:
        """With something else in place of each number, or ``None`` where it is made of more."""
        given = [self.numbers] if isinstance(self.numbers, SymNodeVariable) else self.numbers.items
        known = _PLACE.sub(_NUMBER, self.text.value)
        return known if "%" not in known and all(isinstance(n, SymNodeVariable) for n in given) else None

    def reconstruct(self, codegen: Any) -> None:
        """Called by Dynamo for the code that is run after the graph."""

        def method() -> None:
            codegen(self.text)
            codegen.append_output(codegen.create_load_attr("__mod__"))

        codegen.add_push_null(method)
        codegen(self.numbers)
        codegen.extend_output(create_call_function(1, False))


def _formatted(value: Any, spec: Any, conversion: str = "") -> Any:
    """``format(value, spec)``, and what an f-string makes of a number."""
    if spec is not None and not _is_plain(spec):
        return None
    if isinstance(value, SymNodeVariable):
        _refuse_computed(value)
        return text_of(value, spec, conversion)
    if isinstance(value, ConstantVariable):
        return ConstantVariable.create(format(value.as_python_constant(), "" if spec is None else spec.value))
    return None


def text_of(number: VariableTracker, spec: Any, conversion: str = "") -> LateText:
    """``format(number, spec)``; the number is one that is known after the graph."""
    written = spec.value if spec is not None else ""
    if "{" in written or "}" in written:
        return LateText("{" + conversion + ":{}}", [number, spec], {})
    return LateText("{" + conversion + (f":{written}" if written else "") + "}", [number], {})


def _by_format(value: Any, spec: Any = None) -> Any:
    if (found := _formatted(value, spec)) is None:
        end_graph("call of format", str(value), "Dynamo takes what is formatted for the format.")
    return found


def _alone(number: Any, *others: Any) -> Any:
    if not isinstance(number, SymNodeVariable) or others:
        return None
    return _formatted(number, None)


def _asked(*values: Any) -> None:
    """What needs the text itself is Python's: to Dynamo it is no other's equal, or has no length."""
    is_with_none = any(isinstance(value, ConstantVariable) and value.value is None for value in values)
    if any(isinstance(value, LateText) for value in values) and not is_with_none:
        end_graph("use of a text", f"{values}", _LATE)


def _joined(*texts: Any) -> Any:
    if not any(isinstance(text, LateText) for text in texts):
        return None
    forms: list[str] = []
    numbers: list[Any] = []
    for text in texts:
        if isinstance(text, LateText) and not text.sym_kwargs:
            forms.append(text.format_string)
            numbers += text.sym_args
        elif _is_plain(text):
            forms.append(text.value.replace("{", "{{").replace("}", "}}"))
        else:
            return None
    return LateText("".join(forms), numbers, {})


def _repeated(text: Any, times: Any) -> Any:
    if isinstance(times, LateText):
        text, times = times, text
    if not isinstance(text, LateText) or text.sym_kwargs:
        return None
    if not isinstance(times, ConstantVariable) or type(times.value) is not int:
        return None
    return LateText(text.format_string * times.value, text.sym_args * times.value, {})


def _filled(text: Any, numbers: Any) -> Any:
    items: list[Any] = numbers.items if isinstance(numbers, TupleVariable) else [numbers]
    if not _is_plain(text) or not any(isinstance(item, SymNodeVariable) for item in items):
        return None
    if not all(isinstance(item, (SymNodeVariable, ConstantVariable)) for item in items):
        return None
    for item in items:
        _refuse_computed(item)
    return LateText("{}", [_Filled(text, numbers)], {})


def _refuse_computed(number: Any) -> None:
    if isinstance(number, SymNodeVariable) and number.source is None and number.python_type() is not int:
        end_graph("text of a number", str(number), "Compiled code would have it as a constant.")


def _is_plain(text: Any) -> bool:
    return isinstance(text, ConstantVariable) and isinstance(text.value, str)


def _has(text: LateText, part: Any) -> bool | None:
    """Whether a text with numbers in it has a part that begins with a slash, if that is sure without them."""
    known = _without_numbers(text)
    if known is None or not (_is_plain(part) and part.value.startswith(_SLASH)):
        return None
    for rest in (known[at:] for at, character in enumerate(known) if character == _SLASH):
        before, number, _ = rest.partition(_NUMBER)
        if before.startswith(part.value):
            return True
        if number and part.value.startswith(before) and part.value[len(before)] in _OF_NUMBERS:
            return None
    return False


def _without_numbers(text: LateText) -> str | None:
    """A text with something else in place of each number, or ``None`` where it is made of more."""
    known, given = "", iter(text.sym_args)
    for literal, field, spec, _ in Formatter().parse(text.format_string):
        known += literal
        if field is None:  # the last literal
            break
        value: Any = next(given, None)
        if field or not _SPEC.fullmatch(spec or ""):
            return None
        if isinstance(value, SymNodeVariable):
            known += _NUMBER
        elif _is_plain(value) and not spec:
            known += value.value
        elif isinstance(value, _Filled) and not spec and value.without_numbers is not None:
            known += value.without_numbers
        else:
            return None
    return known


_WAYS: dict[Any, Callable[..., Any]] = {
    str: _alone,
    repr: _alone,
    format: _by_format,
    operator.add: _joined,
    operator.iadd: _joined,
    operator.mul: _repeated,
    operator.mod: _filled,
    **dict.fromkeys((operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge), _asked),
    **dict.fromkeys((operator.is_, operator.is_not), _asked),
    **dict.fromkeys(
        (len, int, float, ord, hash, iter, reversed, enumerate, list, tuple, set, sorted), _asked
    ),
    **dict.fromkeys((min, max, zip, map, filter), _asked),
}
