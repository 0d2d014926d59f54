"""One prewarm from end to end: trace in one step, compile in the child, then say that the caches are full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.swap.graph import first_line
from lightning_hotcompile.swap.inductor_paths import folder_in_use
from lightning_hotcompile.swap.installation import Installation
from lightning_hotcompile.swap.prewarm.graphfile import NotPortable, pack
from lightning_hotcompile.swap.prewarm.parent import Job, Prewarm
from lightning_hotcompile.swap.warmup import Capture

_POLL_EVERY = 10


class PrewarmRun:
    """Fills the compiler's cache for the graphs of one installation.

    The traced step runs the captured graphs eagerly: Dynamo's part of the compile is paid twice, the
    backend's is paid by the child.

    Args:
        trace: an installation of its own, of the same plan.
        mode: Inductor's mode.
        options: Inductor's options.
        random: the option ``random``, which decides how Inductor draws.
        limit_s: seconds that the child may take for its last graph.
        device: ``cpu`` or ``cuda``, whose toolchain is warmed up first.
    """

    def __init__(
        self,
        trace: Installation,
        *,
        mode: str | None,
        options: Mapping[str, Any] | None,
        random: str,
        limit_s: float | None,
        device: str,
    ) -> None:
        self._trace: Installation | None = trace
        self._mode = mode
        self._options = options
        self._random = random
        self._left_out: list[str] = []
        self._graphs = 0
        self._polls = 0
        self._child = Prewarm(
            cache_dir=folder_in_use(), toolchain=(device,), limit_s=600.0 if limit_s is None else limit_s
        )

    @property
    def is_tracing(self) -> bool:
        """Whether a step is being traced."""
        return self._trace is not None

    def begin(self, captures: Mapping[str, Capture]) -> None:
        """Start the child, and trace: captured calls at once, the rest in the step that is about to run."""
        assert self._trace is not None
        self._child.start()
        self._trace.witness.collect = self._collect
        self._trace.put(captures)
        self._trace.gate.open(Lane.COMPILE)

    def end_step(self) -> None:
        """The traced step is over; a second call does nothing."""
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.take_out()
            self._child.close()

    def is_over(self) -> bool:
        """Whether there is nothing more to wait for; the child is looked at now and then only."""
        self._polls += 1
        if self._graphs == 0:
            return not self.is_tracing
        return self._polls % _POLL_EVERY == 0 and self._child.poll().state != "running"

    def in_words(self) -> str:
        """How it went, for a receipt."""
        if self._graphs == 0:
            return f"prewarm: no graph could go to the child process ({self._reasons() or 'none was traced'})"
        status = self._child.poll()
        cached = sum(r.cached for r in status.results if not r.name.startswith("toolchain"))
        words = f"prewarm: {cached} of {self._graphs} graphs compiled by a child process"
        words += f" in {status.seconds:.1f} s"
        reasons = [status.reason, *(r.error for r in status.results), self._reasons()]
        told = "; ".join(r for r in reasons if r)
        return f"{words} ({told})" if told else words

    def cancel(self) -> None:
        """End the child, whatever it does; a second call does nothing."""
        self.end_step()
        self._child.cancel()

    def _reasons(self) -> str:
        return "; ".join(dict.fromkeys(self._left_out))

    def _collect(self, region: str, graph_module: GraphModule, example_inputs: Sequence[Any]) -> None:
        """Take one graph at the place where it would be compiled."""
        try:
            data = pack(
                graph_module,
                example_inputs,
                mode=self._mode,
                options=self._options,
                random=self._random,
            )
        except NotPortable as reason:
            self._left_out.append(f"{region}: {reason}")
        except Exception as error:  # noqa: BLE001  # the flip compiles it itself
            self._left_out.append(f"{region}: {first_line(error)}")
        else:
            self._graphs += 1
            self._child.add(Job(name=region, graph=data))
