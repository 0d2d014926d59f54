"""Let go of compiled code that nobody can call any longer.

Dynamo (2.13) keeps what it has compiled as long as the process lives. A code object of ours and what was
compiled for it keep each other (``orig_code_map``); the user's functions, which stay, keep what was compiled
for them; and guards are kept by finalizers of the classes that they compare, which never die. A study of
hundreds of trainings in one process would keep the graphs of all of them.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.utils import get_metrics_context

from lightning_hotcompile.swap.tracing.fake_gradients import forget_fake_gradients, taken_from

_LIFE = "_hotcompile_life"
_WHY = "the training that it was compiled for is over"


class _Life:
    """An attribute of a function and of its copies: it goes when the last of these does."""


@dataclass(frozen=True)
class _Dead:
    """A function that is gone, by what was compiled for it."""

    code: types.CodeType
    region: int | None


_dead: deque[_Dead] = deque()


def note_life(function: Callable[..., Any], region: int | None) -> None:
    """What was compiled for a function may go once neither it nor a function with its attributes is left.

    Args:
        function: has a code object of its own.
        region: by what Dynamo has isolated all that it compiles in its calls, also for the user's functions;
            ``None`` if it has not: then only what is compiled for the function itself is known to be its.
    """
    life = _Life()
    setattr(function, _LIFE, life)
    weakref.finalize(life, _dead.append, _Dead(function.__code__, region)).atexit = False


def forget_gone_functions() -> None:
    """Let go of what was compiled for functions that are gone.

    To be called between steps: what Dynamo goes through to find the code for a call must not change then.
    """
    metrics = get_metrics_context()
    if not metrics.in_progress():
        metrics._edits.clear()  # tracebacks of all compiles so far, for an error message; they keep codes
    forget_fake_gradients()
    gone = list(taken_from(_dead))
    regions = [dead.region for dead in gone if dead.region is not None]
    for code in _seen_codes() if regions else ():
        for region in regions:
            for entry in eval_frame._get_cache_entries_for_region(code, region):
                _empty(entry)
    for dead in gone:
        for entry in eval_frame._debug_get_cache_entry_list(dead.code):
            _empty(entry)
        reset_code(dead.code)


def _seen_codes() -> Iterator[types.CodeType]:
    """Of all frames that Dynamo has looked at."""
    found = (reference() for reference in list(convert_frame.input_codes.seen))
    return (code for code in found if code is not None)


def _empty(entry: Any) -> None:
    """As torch does where an object dies that a guard has compared by identity; its guards go as well."""
    guards = entry.guard_manager
    if guards.cache_entry is not None and guards.extra_state is not None:
        nothing = DeletedGuardManagerWrapper(_WHY)
        guards.extra_state.invalidate(guards.cache_entry, nothing)
        vars(guards).update(vars(nothing))
