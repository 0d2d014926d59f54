"""One compiled graph at work: compared, then looked at, then left alone; errors are answered by eager."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule
from torch.nn import Parameter

from lightning_hotcompile.errors import HotCompileError, ParityError, first_line, warn
from lightning_hotcompile.swap.compiled_function import mark_graph, without_disable
from lightning_hotcompile.swap.dynamo import CompiledFn, StopRecompute
from lightning_hotcompile.swap.graphs.backward import SeparateBackwards
from lightning_hotcompile.swap.graphs.graph import Graph, Watch
from lightning_hotcompile.swap.graphs.repeated_runs import EagerAnswer, RunsUnderHooks
from lightning_hotcompile.swap.graphs.saved_inputs import (
    at_positions,
    can_be_copied,
    watch_until_backward,
    with_copies,
)
from lightning_hotcompile.swap.graphs.traced_once import once_real
from lightning_hotcompile.swap.graphs.unbounded import divides_by_numbers
from lightning_hotcompile.swap.graphs.uncounted import holds_noise, written_behind_autograd
from lightning_hotcompile.swap.inductor.layout_checks import LayoutChangedError
from lightning_hotcompile.swap.onlookers import captures_cuda_graph
from lightning_hotcompile.swap.parity.captured import eager_forward, tensors_of
from lightning_hotcompile.swap.parity.compare import compare
from lightning_hotcompile.swap.parity.difference import flat
from lightning_hotcompile.swap.parity.tripwire import Before, Tripwire
from lightning_hotcompile.swap.parity.verdict import Parity, changes_what_is_held
from lightning_hotcompile.swap.process.free_memory import let_go
from lightning_hotcompile.swap.process.saved_tensors import hooks_in_use
from lightning_hotcompile.swap.tracing.signal_handlers import comes_from_a_handler

_log = logging.getLogger(__name__)

RUNS_WATCHED = 10
"""Armed runs of a graph, after its first one, whose outputs are looked at."""


class GraphAtWork:
    """What runs in place of one captured graph.

    The first run is compared with eager. Where the compiled backward needs what eager's does not, see
    :mod:`~lightning_hotcompile.swap.graphs.saved_inputs`, or there may be several backwards, it is eager's.
    In the next :data:`RUNS_WATCHED` armed runs NaN and Inf that only the compiled code makes are found.
    After that a run is the compiled code and no more.

    Compiled code that raises is answered by the captured graph on the same inputs, and not used again. What
    it had changed in place already is put back in runs that are looked at; else there is no copy of it, so
    statistics of a batch norm may be changed twice in that one step, random numbers may be drawn twice, and
    the error of a graph that changes what it holds (an optimizer) is raised. So is that of a tensor with
    another layout, after which nothing has run.

    Args:
        graph: what is known about it.
        captured: the graph as it was captured.
        compiled: what the backend made of it.
        watch: shared by all graphs.
        neutral: makes the captured graph without random numbers, eager and compiled, from real inputs.
    """

    def __init__(
        self,
        graph: Graph,
        captured: GraphModule,
        compiled: CompiledFn,
        watch: Watch,
        neutral: Callable[[Sequence[Any]], tuple[CompiledFn, CompiledFn]],
    ) -> None:
        self._graph = graph
        self._eager = EagerAnswer(eager_forward(captured))  # a call would print a traceback of any error
        self._compiled = compiled
        self._watch = watch
        self._neutral = neutral
        self._held = tensors_of(captured)
        self._writes = written_behind_autograd(captured)
        self._by_numbers = divides_by_numbers(captured)
        self._left = RUNS_WATCHED
        self._tripwire: Tripwire | None = None
        self._instead: CompiledFn | None = once_real(self._first, compiled, graph, watch)
        self._rest: CompiledFn | None = None  # in place of compiled code whose runs are no longer watched
        self._copied, self._fixed = frozenset[int](), frozenset[int]()
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._waited, self._is_decided = 0, False
        self._open = weakref.WeakSet[SeparateBackwards]()  # eager runs that may still have a backward
        if watch.parity == "off":
            graph.parity = Parity(agrees=None, reason="parity='off'")
            self._instead = None

    def entry(self) -> CompiledFn:
        """The function that Dynamo calls, with itself switched off."""
        graph, watch, compiled = self._graph, self._watch, without_disable(self._compiled)

        def answer(*args: Any) -> Any:
            if (instead := self._instead) is not None:
                return (self._eager if captures_cuda_graph() else instead)(*args)
            try:
                return compiled(*args)
            except Exception as error:  # noqa: BLE001  # whatever it is, eager answers
                failure = error
            return self._answered(failure, args)

        under = RunsUnderHooks(graph, watch, self._eager, self._repeats, self._give_up)

        def run(*args: Any) -> Any:
            graph.runs += 1
            watch.total_runs += 1
            if (hooks := hooks_in_use()) is None:
                return answer(*args)
            return under.run(hooks, answer, args)

        return mark_graph(run, under)

    def _repeats(self) -> tuple[CompiledFn, Tripwire | None]:
        """What repeats a compiled run, and what looks at it."""
        is_looked_at = self._graph.error is not None or (self._watch.armed and self._left > 0)
        return with_copies(self._compiled, self._copied), self._tripwire if is_looked_at else None

    def _first(self, *args: Any) -> Any:
        """Compare, then run what may be used."""
        parity = compare(
            self._eager.captured,
            self._compiled,
            args,
            self._held,
            lambda: self._neutral(args),
            draws_as_eager=self._watch.draws_as_eager,
            backward_outside=self._watch.backward_outside,
            behind_autograd=self._watch.hidden.seen_by(args, self._writes),
        )
        untold = hooks_in_use() is not None or holds_noise(parity.hidden, self._writes, args)
        if parity.agrees and parity.hidden and untold:
            parity = replace(parity, agrees=False, reason="its backward needs what it changes through .data")
        self._graph.parity = parity
        if parity.failed and (answer := self._about_wrong_code(parity.reason)) is not None:
            return answer(*args)
        if parity.agrees:
            self._tripwire = Tripwire(self._eager.captured, self._held, parity)
            self._graph.unwatched = self._tripwire.why_not(args)
            self._watch.backwards.begin(self, parity)
        else:
            self._graph.unwatched = parity.reason
        self._instead = self._watched if self._graph.unwatched is None else self._rest
        waits = hooks_in_use() is None and (parity.needed or parity.hidden or parity.several)
        if parity.agrees and waits:  # a checkpoint, which has hooks, compares its two runs
            self._fixed = frozenset((*parity.changed, *parity.hidden))
            self._instead = self._before_a_backward
            return self._before_a_backward(*args)
        return self._watched_run(args) if self._graph.unwatched is None else self._unwatched(*args)

    def wrap(self, around: Callable[[CompiledFn], CompiledFn]) -> None:
        """Put something around the compiled code, which runs as before."""
        self._compiled, self._rest = around(self._compiled), self._rest or self._unwatched
        self._instead = self._instead or self._rest

    def _before_a_backward(self, *args: Any) -> Any:
        """Eager's answer, as long as no backward has told what becomes of what it needs."""
        assert self._graph.parity is not None
        outputs, parity = self._eager(*args), self._graph.parity
        apart = SeparateBackwards(args, flat(outputs), self._come_apart, by_numbers=self._by_numbers)
        self._open.add(apart)
        needed = at_positions((*parity.needed, *parity.hidden), args, flat(outputs))
        self._fixed |= {i for i, t in needed.items() if i < 0 or not can_be_copied(t, flat(outputs))}
        self._seen = {i: weakref.ref(t) for i, t in needed.items() if i >= 0 and not isinstance(t, Parameter)}
        self._waited += 1
        none_comes = self._waited - len(self._open) > RUNS_WATCHED  # to a teacher without no_grad, say
        if none_comes and not parity.several and self._fixed.isdisjoint(needed):
            self._decide(frozenset(self._seen))  # parameters mostly stay as they are
        elif not watch_until_backward(needed, flat(outputs), self._decide):
            self._decide(frozenset())
        return outputs

    def _come_apart(self, reason: str) -> None:
        if self._graph.error is None:
            self._give_up(reason)

    def _decide(self, changed: frozenset[int]) -> None:
        """What the step changes before the backward is copied before compiled code runs.

        A graph may run several times before a backward: each run may tell of others.
        """
        if self._graph.error is not None:
            return
        if not self._fixed.isdisjoint(changed):
            self._give_up("an input or output that its backward needs is changed before the backward")
        elif not self._is_decided or not changed <= self._copied:
            self._is_decided, self._copied = True, self._copied | changed
            self._instead = self._decided

    def _decided(self, *args: Any) -> Any:
        """The first run after it: what is there in run after run (a buffer) may be changed in a later one."""
        # Parameters mostly are not, before the backward, and a copy of each would cost too much.
        lasting = {i for i, seen in self._seen.items() if seen() is args[i]}
        self._copied |= lasting - self._fixed
        instead = self._watched if self._graph.unwatched is None and self._left > 0 else self._rest
        if self._copied:
            instead = with_copies(instead or self._unwatched, self._copied)
            self._rest = with_copies(self._unwatched, self._copied)
        self._instead = instead
        return self._unwatched(*args) if instead is None else instead(*args)

    def _watched(self, *args: Any) -> Any:
        if not self._watch.armed:
            return self._unwatched(*args)
        self._left -= 1
        if self._left == 0:
            self._instead = self._rest
        return self._watched_run(args)

    def _watched_run(self, args: Sequence[Any]) -> Any:
        assert self._tripwire is not None
        if (before := self._tripwire.before(args)) is None:
            in_run = f"it ran out in run {self._graph.runs}"
            self._graph.unwatched = f"not looked at for NaN for lack of memory: {in_run}"
            self._instead = self._rest
            return self._unwatched(*args)
        try:
            outputs = self._compiled(*args)
        except Exception as error:  # noqa: BLE001  # whatever it is, eager answers
            failure = error
        else:
            found = self._tripwire.finds(outputs, args, before)
            return self._tripped(outputs, args, before) if found else outputs
        return self._answered(failure, args, before)

    def _unwatched(self, *args: Any) -> Any:
        try:
            return self._compiled(*args)
        except Exception as error:  # noqa: BLE001  # whatever it is, eager answers
            failure = error
        return self._answered(failure, args)

    def _tripped(self, outputs: Any, args: Sequence[Any], before: Before) -> Any:
        """Compiled code made NaN or Inf where eager does not."""
        reason = f"NaN or Inf in run {self._graph.runs}, where eager has finite numbers"
        answer = self._about_wrong_code(reason)
        if answer is None:
            return outputs
        before.put_back()
        return answer(*args)

    def _about_wrong_code(self, reason: str) -> CompiledFn | None:
        """What is to run from now on in place of wrong code, ``None`` if that is used all the same."""
        message = f"compiled code of {self._graph.region} is not right: {reason}"
        if self._watch.parity == "raise":
            raise ParityError(f"{message}. Set parity='auto' to train on eagerly.")
        if self._watch.parity == "warn" and not (self._graph.parity and self._graph.parity.raised):
            warn(f"{message}. It is used all the same: parity='warn'.")
            return None
        return self._give_up(f"not right: {reason}", ParityError(message))

    def _answered(self, failure: Exception, args: Sequence[Any], before: Before | None = None) -> Any:
        """Eager's answer to a run that raised; eager's own error, if it raises as well, is the user's."""
        if isinstance(failure, StopRecompute) or self._watch.raise_errors or comes_from_a_handler(failure):
            raise failure
        reason = f"compiled code raised in run {self._graph.runs}: {first_line(failure)}"
        half_done = before is None and changes_what_is_held(self._graph.parity, holds=bool(self._held))
        if half_done or isinstance(failure, LayoutChangedError):  # or not begun: the optimizer's own answers
            self._give_up(reason, failure)
            raise failure
        let_go(failure)
        if before is not None:
            before.put_back()
        answer = self._eager(*args)
        self._give_up(reason, failure)
        return answer

    def _give_up(self, reason: str, error: BaseException | None = None) -> CompiledFn:
        error = error or HotCompileError(f"compiled code of {self._graph.region}: {reason}")
        _log.debug("%s: %s", self._graph.region, reason, exc_info=error)
        self._graph.error = reason
        self._instead = self._eager
        self._watch.on_failure(error)
        return self._eager
