"""One region of a plan in the running model: compiled code in place of its modules or function, and back."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn

from lightning_hotcompile.errors import HotCompileError
from lightning_hotcompile.plan.scopes import Region, resolve_function
from lightning_hotcompile.plan.sharding import is_sharded
from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import CompiledFn, is_compile_error, skips_all_frames
from lightning_hotcompile.swap.gate import Gate, Lane
from lightning_hotcompile.swap.graphs.fit import Fit
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.onlookers import captures_cuda_graph, needs_eager
from lightning_hotcompile.swap.own_thread import is_traced_here
from lightning_hotcompile.swap.parity.apart import unseen_by_modes
from lightning_hotcompile.swap.process.saved_tensors import Hooks, hooks_in_use
from lightning_hotcompile.swap.repeats import checkpoint_of, graphs_run_in, note_call, repeat_of
from lightning_hotcompile.swap.replaced import put_in_place
from lightning_hotcompile.swap.tracing.signal_handlers import SignalHandlers
from lightning_hotcompile.swap.tracing.tracing_limit import TracingLimit


def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What is compiled for a module: its call with all its hooks, as a frame of ours.

    ``module.compile()`` would do nothing on torch's own modules, since Dynamo skips their frames.
    """
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def call_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What is compiled for a module that FSDP2 shards: its forward alone, its hooks stay outside."""
    return type(module).forward(module, *args, **kwargs)


class _CompiledCall(functools.partial[Any]):
    """What a module is called by while it is a region; a copy has ``None`` there, and its own call.

    ``nn.Module`` leaves it out of what is copied and pickled, a LightningModule does not.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # makes None, also where a pickle is opened without this package


class SwappedRegion:
    """One region of a plan in the running model: a compiled function behind a gate.

    Args:
        region: what the plan says.
        gate: decides at each call whether the compiled function is used.
        witness: makes the backend.
        dynamic: Dynamo's ``dynamic`` argument.
        fullgraph: refuse graph breaks.
    """

    def __init__(
        self, region: Region, gate: Gate, witness: Witness, *, dynamic: bool | None, fullgraph: bool
    ) -> None:
        self.region = region
        self.error: str | None = None
        self.taken_back: str | None = None
        """Why it is eager though it could be compiled."""
        self.calls = 0
        self.could_compile = False
        """Whether one of them came while code was being compiled."""

        self.fit = Fit(region.name, witness)
        self._gate = gate
        self._witness = witness
        self._watch = witness.watch
        self._settings: dict[str, Any] = {"dynamic": dynamic, "fullgraph": fullgraph}
        self._undo: list[Callable[[], object]] = []
        self._root: nn.Module | None = None
        self._compiled_call: CompiledFunction | None = None
        self._compiled_of: Any = None
        """The function that it was made of, where that may be replaced."""

    @property
    def is_in_place(self) -> bool:
        """Whether the model is changed now."""
        return bool(self._undo)

    def compiled(self, function: Callable[..., Any]) -> CompiledFunction:
        """A compiled function whose graphs belong to this region."""
        backend = self._witness.backend_for(self.region.name, checks_at_once=self.region.kind == "optimizer")
        name = self._witness.names.of(getattr(function, "__name__", "call"), self.region.name)
        return CompiledFunction(function, backend, name=name, **self._settings)

    def is_off(self) -> bool:
        """Whether a call is to run as if nothing had been swapped."""
        return is_traced_here() or self._is_left_out()

    def _is_left_out(self) -> bool:
        return self.error is not None or not self._gate.takes(self.region.name) or needs_eager()

    def choose(self, compiled: CompiledFunction, eager: CompiledFn, *args: Any, **kwargs: Any) -> Any:
        """Call one of the two, as the gate says; a frame that cannot be compiled runs eagerly.

        What a checkpoint repeats runs as it did in the forward, whatever the gate says by then.
        """
        if is_traced_here():
            return eager(*args, **kwargs)
        if (hooks := hooks_in_use()) is not None:
            return self._under_hooks(hooks, compiled, eager, args, kwargs)
        return eager(*args, **kwargs) if self._is_left_out() else self.call(compiled, eager, args, kwargs)

    def _under_hooks(
        self,
        hooks: Hooks,
        compiled: CompiledFunction,
        eager: CompiledFn,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        frame, is_repeated = checkpoint_of(hooks) or (None, False)
        if is_repeated:
            if (again := repeat_of(frame, self)) is None:
                return eager(*args, **kwargs)
            self.calls += 1
            with unseen_by_modes() if skips_all_frames() else nullcontext():  # as in the forward
                return again(*args, **kwargs)
        if frame is None:
            return eager(*args, **kwargs) if self._is_left_out() else self.call(compiled, eager, args, kwargs)
        if self._witness.set_and_read.why_not_repeated(self.region.name) is not None:
            note_call(frame, self, None)
            return eager(*args, **kwargs)
        graphs = graphs_run_in(frame)
        runs, before = self._watch.runs_of_all_kinds, len(graphs)
        result = eager(*args, **kwargs) if self._is_left_out() else self.call(compiled, eager, args, kwargs)
        again = None
        if self._watch.runs_of_all_kinds > runs:
            again = compiled.that_runs(graphs[before]) if len(graphs) > before else compiled.reuse
        note_call(frame, self, again)
        return result

    def call(
        self, compiled: CompiledFunction, eager: CompiledFn, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the compiled one, and eager if it cannot be compiled.

        Dynamo's errors come before any code of the frame ran. A frame that comes after a graph break, or is
        called by that code, is not the first one: then the error is raised, since nothing may run twice.
        """
        self.calls += 1
        runs, limit = self._watch.total_runs, None
        try:
            if self._gate.lane is Lane.COMPILE:
                if skips_all_frames() or captures_cuda_graph():
                    return eager(*args, **kwargs)
                limit = TracingLimit(self._gate.limit_s)
                return self._compile_or_reuse(compiled, args, kwargs, limit)
            # a few statements and no more: they are a part of each step, and of the time that it takes
            result = compiled.reuse(*args, **kwargs)
            if self._watch.total_runs == runs:
                self.fit.missed()
            elif self.fit.misses:
                self.fit.ran()
            return result
        except Exception as error:
            if not self._gate.suppresses_errors or not is_compile_error(error):
                raise
            self._gate.failed(error)
            self.error = self._witness.error_of(self.region.name) or self._gate.failures[-1]
            if (limit is not None and limit.frames > 1) or self._watch.total_runs > runs:
                raise
        return eager(*args, **kwargs)

    def _compile_or_reuse(
        self, compiled: CompiledFunction, args: tuple[Any, ...], kwargs: dict[str, Any], limit: TracingLimit
    ) -> Any:
        self.could_compile = True
        witness = self._witness
        before, graphs = self._watch.total_runs, len(witness.graphs)
        newest = witness.numbers.newest()
        witness.begin_call()
        end = functools.partial(self._end_compiling, limit) if self._gate.suppresses_errors else None
        with self._gate.dynamic_dims.marked(args, kwargs), SignalHandlers(on_sigterm=end), limit:
            result = self._gate.as_opened(compiled.compile, *args, **kwargs)
        witness.numbers.look(self.region.name, self._gate.steps, newest)
        if self._watch.total_runs > before:
            self.fit.ran()
        elif len(witness.graphs) == graphs and (refused := limit.reached or self.fit.refused()) is not None:
            self._gate.failed(HotCompileError(refused))
            self.error = refused
        return result

    def _end_compiling(self, limit: TracingLimit) -> None:
        """The rest of this step runs with what there is, so that the training comes to its end soon."""
        self._gate.lane = Lane.REUSE
        limit.end("SIGTERM came while it was compiled")

    def put(self, root: nn.Module) -> None:
        """Change the model; what was put in place is taken out again if that fails half-way."""
        self._root = root
        try:
            if self.region.kind == "function":
                self._put_function(self.region.members[0])
            else:
                self._put_modules(root)
        except BaseException:
            self.take_out()
            raise

    def put_again(self) -> None:
        """Change the model that was changed before."""
        assert self._root is not None
        self.put(self._root)

    def take_out(self) -> None:
        """Change the model back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def undo_later(self, action: Callable[[], object]) -> None:
        """Remember how to take back one change."""
        self._undo.append(action)

    def _put_modules(self, root: nn.Module) -> None:
        modules = [root.get_submodule(name) for name in self.region.members]
        sharded = all(map(is_sharded, modules))
        if self._compiled_call is None:  # once: what is put in place again finds its compiled code
            self._compiled_call = self.compiled(call_forward if sharded else call_module)
        for module in modules:
            if sharded:
                self._put_forward(module, self._compiled_call)
                continue
            ours = _CompiledCall(self.choose, self._compiled_call, call_module, module)
            self.undo_later(put_in_place({(module, "_compiled_call_impl"): ours}))

    def _put_forward(self, module: nn.Module, compiled: CompiledFunction) -> None:
        if "forward" in vars(module):
            raise HotCompileError(f"{self.region.name}: a module has a forward of its own; leave it eager")
        call = functools.partial(self.choose, compiled, call_forward)
        vars(module)["forward"] = types.MethodType(call, module)
        self.undo_later(functools.partial(vars(module).pop, "forward", None))

    def _put_function(self, target: str) -> None:
        owner, name, function = resolve_function(target)
        if self._compiled_call is None or function is not self._compiled_of:
            self._compiled_call, self._compiled_of = self.compiled(function), function
        compiled = self._compiled_call

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.choose(compiled, function, *args, **kwargs)

        places = [(owner, name)] if isinstance(owner, type) else _places_of(function)
        for place, attribute in places:
            self.undo_later(put_in_place({(place, attribute): call}))


def _places_of(function: Callable[..., Any]) -> list[tuple[Any, str]]:
    """Every module attribute that is this function: ``from x import f`` makes more than one."""
    return [
        (module, attribute)
        for module in list(sys.modules.values())
        if module is not None
        for attribute, value in list(getattr(module, "__dict__", {}).items())
        if value is function
    ]
