"""Python values that a piece of code reads, and sets for its next call: a count, an average, a list.

An activation checkpoint that is not reentrant repeats such code, and leaves it once it has what it needs. So
in eager what is set before that is set twice, what is set after it once. Compiled code sets all of it at its
end, which the repeat does not reach, and may take what it reads for what it was in the forward.
"""

from __future__ import annotations

import inspect
import types
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch._dynamo.source import (
    AttrSource,
    DictGetItemSource,
    LocalCellSource,
    LocalSource,
    TempLocalSource,
)
from torch._dynamo.variables import ConstDictVariable
from torch._dynamo.variables.misc import NewGlobalVariable

from lightning_hotcompile.swap.tracing.overrides import as_written, traced_now

_WHY = "under an activation checkpoint, and it sets what it reads for its next call"


class SetAndRead:
    """What the code of each region reads and sets.

    By the names of attributes alone: after a graph break an object has another name in the code.
    """

    def __init__(self) -> None:
        self._read: defaultdict[str, set[str]] = defaultdict(set)
        self._found: dict[str, str] = {}

    def look(self, region: str) -> None:
        """At the code whose graph is given to the backend now."""
        translator = traced_now()
        if translator is None:  # a backend that is called by itself
            return
        output: Any = translator.output
        sources = [guard.originating_source for guard in output.guards]
        read = self._read[region]
        read.update(source.member for source in sources if isinstance(source, AttrSource))
        local = [source for source in sources if isinstance(source, LocalSource)]
        read.update(_cell(source.local_name) for source in local if source.is_derefed_cell_contents)
        names = {source.name for source in sources if source is not None}
        items = {source.base.name for source in sources if isinstance(source, DictGetItemSource)}
        code = output.root_tx.f_code
        changed = _changed(output.side_effects, items, code)
        for each in (*_attributes(output.side_effects, read, names, code), *changed):
            self._found.setdefault(region, each)

    def why_not_repeated(self, region: str) -> str | None:
        """Why no compiled code of a region may be repeated by a checkpoint, or ``None``."""
        found = self._found.get(region)
        return None if found is None else f"{_WHY}: {found}"


def _cell(name: str) -> str:
    """A variable of a function around the code, among names of attributes."""
    return f"nonlocal {name}"


def _attributes(effects: Any, read: set[str], names: set[str], code: types.CodeType) -> Iterator[str]:
    """Those that are set, of what was there before, and were read; globals have a variable each."""
    around = as_written(code).co_freevars  # after a graph break the call's own cells are free variables too
    for item, stored in effects.store_attr_mutations.items():
        if not _was_there(item.source):
            continue
        if isinstance(item.source, LocalCellSource):  # which has no name
            name = item.source.local_name
            yield from (name for _ in stored if name in around and _cell(name) in read)
        elif isinstance(item, NewGlobalVariable):
            yield from (item.source.name for _ in stored if item.source.name in names)
        else:
            yield from (f"{item.source.name}.{name}" for name in stored if name in read)


def _changed(effects: Any, items: set[str], code: types.CodeType) -> Iterator[str]:
    """Lists and the like that are changed, and dicts if one of their items was read (``n["calls"] += 1``)."""
    for variable in effects._get_modified_vars():
        source = variable.source
        if effects.is_attribute_mutation(variable) or not _was_there(source) or _is_of_the_call(source, code):
            continue
        if not isinstance(variable, ConstDictVariable) or source.name in items:
            yield str(source.name)


def _was_there(source: Any) -> bool:
    """Whether it is from before this code: what is made in it has no place, or one with no name."""
    while hasattr(source, "base"):
        source = source.base
    return source is not None and not isinstance(source, TempLocalSource)


def _is_of_the_call(source: Any, code: types.CodeType) -> bool:
    """Whether the call has made it: ``**kwargs``, or before a graph break."""
    if not isinstance(source, LocalSource):
        return False
    if as_written(code) is not code:
        return True
    named = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    by_name = code.co_varnames[named : named + 1] if code.co_flags & inspect.CO_VARKEYWORDS else ()
    return source.local_name in by_name
