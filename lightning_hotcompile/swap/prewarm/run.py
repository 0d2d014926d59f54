"""One prewarm from end to end: trace in one step, compile in the child, then say that the caches are full."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule
from torch.utils.hooks import RemovableHandle

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.errors import first_line
from lightning_hotcompile.swap.dynamo import LeavesFrame
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.swap.graphs.fused_attention import why_not_as_captured
from lightning_hotcompile.swap.inductor.paths import folder_in_use
from lightning_hotcompile.swap.installation import Installation
from lightning_hotcompile.swap.optimizers.optimizer import SwappedOptimizer
from lightning_hotcompile.swap.prewarm.graphfile import pack
from lightning_hotcompile.swap.prewarm.optimizerfile import pack_optimizer
from lightning_hotcompile.swap.prewarm.parent import Job, Prewarm
from lightning_hotcompile.swap.prewarm.symbols import NotPortable
from lightning_hotcompile.swap.prewarm.threads import FewerThreads

_POLL_EVERY = 10
_POLL_AFTER_S = 0.25  # where steps are long


class PrewarmRun:
    """Fills the compiler's cache for the graphs of one installation.

    The traced step runs the captured graphs eagerly: Dynamo's part of the compile is paid twice, the
    backend's is paid by the child. Optimizers step eagerly in it and are described after that, when their
    gradients and their state are there; the child pays for all of their compile.

    Args:
        trace: an installation of its own, of the same plan.
        config: says how Inductor compiles: mode, options, and which random numbers it draws.
        limit_s: seconds that the child may take for one graph or optimizer, ``None`` for no limit.
        device: such as ``cpu`` or ``cuda:1``, whose toolchain is warmed up first.
        threads: that training may use until the child is done; ``None`` for as many as now.
    """

    def __init__(
        self,
        trace: Installation,
        *,
        config: HotCompileConfig,
        limit_s: float | None,
        device: str,
        threads: int | None = None,
    ) -> None:
        self._trace: Installation | None = trace
        self._fewer = FewerThreads(threads)
        self._compiler = {name: getattr(config, name) for name in ("mode", "options", "random")}
        self._hooks: list[RemovableHandle] = []
        self._described: set[str] = set()
        self._left_out: list[str] = []
        self._is_whole = True  # no optimizer of the plan stays eager
        self._graphs = 0
        self._polls = 0
        self._looked_at = 0.0
        self._over = False
        self._child = Prewarm(cache_dir=folder_in_use(), toolchain=(device,), limit_s=limit_s)

    @property
    def is_tracing(self) -> bool:
        """Whether a step is being traced."""
        return self._trace is not None

    @property
    def is_slowing(self) -> bool:
        """Whether training goes on with fewer threads than it had."""
        return self._fewer.active

    def begin(self) -> None:
        """Start the child, and trace the step that is about to run."""
        assert self._trace is not None
        self._child.start()
        self._trace.witness.collect = self._collect
        self._trace.put()
        optimizers = [swapped for swapped in self._trace.optimizers if swapped.is_in_place]
        for swapped in optimizers:
            after_step = functools.partial(self._after_step, swapped)
            self._hooks.append(swapped.optimizer.register_step_post_hook(after_step))
        self._trace.gate.open(Lane.COMPILE, left_out=frozenset(s.region.name for s in optimizers))

    def end_step(self) -> None:
        """The traced step is over; a second call does nothing."""
        trace, self._trace = self._trace, None
        while self._hooks:
            self._hooks.pop().remove()
        if trace is not None:
            in_place = [swapped for swapped in trace.optimizers if swapped.is_in_place]
            without = [s.region.name for s in in_place if s.region.name not in self._described]
            self._left_out += [f"{name}: made no update in the traced step" for name in without]
            self._is_whole = len(in_place) == len(trace.optimizers)
            trace.take_out()
            self._child.close()
            if self._graphs:  # not before they are packed: the number is part of the code and of its key
                self._fewer.begin()

    def is_over(self) -> bool:
        """Whether there is nothing more to wait for; the child is looked at now and then only."""
        self._polls += 1
        if self._graphs == 0:
            return not self.is_tracing
        now = time.monotonic()
        if self._over or (self._polls % _POLL_EVERY and now - self._looked_at < _POLL_AFTER_S):
            return self._over
        self._looked_at = now
        if self._child.poll().state != "running":
            self._over = True
            self._fewer.end()
        return self._over

    @property
    def elapsed_s(self) -> float:
        """Seconds since the child was started, until it was over."""
        return self._child.poll().seconds

    def in_words(self) -> str:
        """How it went, for a receipt."""
        if self._graphs == 0:
            return f"prewarm: no graph could go to the child process ({self._reasons() or 'none was traced'})"
        status = self._child.poll()
        cached = sum(r.cached for r in status.results if not r.name.startswith("toolchain"))
        words = f"prewarm: {cached} of {self._graphs} graphs compiled by a child process"
        words += f" in {status.seconds:.1f} s"
        if self._fewer.threads is not None:
            words += f", while training used {self._fewer.threads} of its threads"
        reasons = [status.reason, *(r.error for r in status.results), self._reasons()]
        told = "; ".join(r for r in reasons if r)
        return f"{words} ({told})" if told else words

    @property
    def has_compiled(self) -> bool:
        """Whether the compiler's cache has all that was traced."""
        done = [r for r in self._child.poll().results if r.cached and not r.name.startswith("toolchain")]
        return 0 < self._graphs <= len(done) and not self._left_out

    @property
    def crash(self) -> str | None:
        """How compiling the plan, or running its code once, ended the child; ``None`` if it did not."""
        status = self._child.poll()
        return status.reason if status.state == "crashed" else None

    @property
    def took_s(self) -> float | None:
        """Seconds until the child had compiled the whole plan; ``None`` if it found some of it done."""
        if not self._graphs or self._left_out or not self._is_whole or self.is_tracing:
            return None
        status = self._child.poll()
        compiled = [r.new for r in status.results if not r.name.startswith("toolchain")]
        whole = status.state == "done" and len(compiled) == self._graphs and all(compiled)
        return self._child.work_s if whole else None

    def cancel(self) -> None:
        """End the child, whatever it does; a second call does nothing."""
        self.end_step()
        self._fewer.end()
        self._child.cancel()

    def _reasons(self) -> str:
        return "; ".join(dict.fromkeys(self._left_out))

    def _collect(self, region: str, graph_module: GraphModule, example_inputs: Sequence[Any]) -> None:
        """Take one graph at the place where it would be compiled; then it runs as it was captured."""
        if (reason := why_not_as_captured(graph_module)) is not None:
            self._left_out.append(f"{region}: {reason}")
            raise LeavesFrame(reason)
        self._hand_over(region, "graph", lambda: pack(graph_module, example_inputs, **self._compiler))

    def _after_step(self, swapped: SwappedOptimizer, *_: Any) -> None:
        """Take an optimizer after its first step; the hook stays until the traced step is over."""
        name = swapped.region.name
        if name not in self._described:
            self._described.add(name)
            self._hand_over(name, "optimizer", lambda: pack_optimizer(swapped, **self._compiler))

    def _hand_over(self, region: str, kind: str, packed: Callable[[], bytes]) -> None:
        try:
            data = packed()
        except NotPortable as reason:
            self._left_out.append(f"{region}: {reason}")
        except Exception as error:  # noqa: BLE001  # the flip compiles it itself
            self._left_out.append(f"{region}: {first_line(error)}")
        else:
            self._graphs += 1
            self._child.add(Job(name=region, graph=data, kind=kind))
