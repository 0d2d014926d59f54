"""The optimizer's step, compiled, with closure, hooks, schedulers and state dict as before."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hotcompile.plan.optimizers import why_not_compiled
from lightning_hotcompile.plan.scopes import Region
from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.gate import Gate, Lane
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.inductor.layout_checks import LayoutChangedError
from lightning_hotcompile.swap.optimizers.first_settings import FirstSettings
from lightning_hotcompile.swap.optimizers.gradients import with_usual_strides
from lightning_hotcompile.swap.optimizers.optimizer_step import ReplacedStep, bare_step
from lightning_hotcompile.swap.optimizers.optimizer_values import OptimizerValues
from lightning_hotcompile.swap.optimizers.static_marks import static_marks_as_before
from lightning_hotcompile.swap.swapped_region import SwappedRegion

_AS_THEY_ARE = contextlib.nullcontext()


class SwappedOptimizer(SwappedRegion):
    """An optimizer whose step is one compiled function; the closure runs before it, eagerly.

    Args:
        region: what the plan says.
        gate: decides at each step whether the compiled one is used.
        witness: makes the backend.
        optimizer: one of PyTorch's own.
        dynamic: Dynamo's ``dynamic`` argument.
        first_settings: of the optimizers when training began; by default those of now.
    """

    def __init__(
        self,
        region: Region,
        gate: Gate,
        witness: Witness,
        *,
        optimizer: Optimizer,
        dynamic: bool | None,
        first_settings: FirstSettings | None = None,
    ) -> None:
        # All or nothing: a half-compiled step would meet tensors where eager wants floats.
        super().__init__(region, gate, witness, dynamic=dynamic, fullgraph=True)
        self.optimizer = optimizer
        self._values = OptimizerValues(optimizer)
        self._first_settings = first_settings or FirstSettings()
        self._first_settings.keep(optimizer)
        self._pair: tuple[Callable[[Optimizer], None], CompiledFunction] | None = None
        self._has_graph = False
        self.dynamic = dynamic

    @property
    def backward_outside(self) -> bool:
        """Whether what the plan compiles runs its backwards outside of the autocast around the forward."""
        return self._watch.backward_outside

    def put(self, root: nn.Module) -> None:
        """Give the optimizer a ``step`` of its own; ``take_out`` removes it."""
        optimizer = self.optimizer
        # It may have been wrapped since the plan was made.
        self.error = self.error or why_not_compiled(optimizer) or self._what_moves()
        if self.error is not None:
            return
        if self._pair is None:  # once: what is put in place again finds its compiled code
            self._pair = self._bodies()
        update = functools.partial(self._update, *self._pair)
        step = ReplacedStep(optimizer, update, lambda: self.taken_back is not None or self.is_off())
        self.undo_later(step.put())
        hook = optimizer.register_state_dict_post_hook(self._values.in_state_dict, prepend=True)
        self.undo_later(hook.remove)

    def _what_moves(self) -> str | None:
        """Settings that a schedule changes: some are constants of the graph, for a compile in each step."""
        if self._pair is not None:
            return None  # it is compiled already, and one change later on is one recompile
        moved = self._first_settings.moved(self.optimizer)
        return f"its {' and '.join(moved)} changed since training began (a schedule?)" if moved else None

    def _bodies(self) -> tuple[Callable[[Optimizer], None], CompiledFunction]:
        """The step without its wrappers, as it is and compiled."""
        original, values = bare_step(type(self.optimizer)), self._values

        def optimizer_step(optimizer: Optimizer) -> None:
            if not torch.compiler.is_dynamo_compiling():
                values.as_given()  # this call was not compiled after all: eager takes floats only
            with torch.no_grad():
                original(optimizer)

        return optimizer_step, self.compiled(optimizer_step)

    @contextlib.contextmanager
    def _while_it_compiles(self) -> Iterator[None]:
        """Dynamo has no guard on strides of gradients, and once it has compiled needs no marks on tensors."""
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        with static_marks_as_before(self.optimizer), with_usual_strides(parameters):
            yield

    def _is_for_eager(self, *, compiles: bool) -> bool:
        """Whether no compiled code is to make this update, or none is there that could."""
        if self._values.rates.has_zero:
            return True
        if compiles:
            return self._values.counts.are_missing
        self._has_graph = self._has_graph or bool(self._witness.graphs_of(self.region.name))
        return not self._has_graph

    def _update(self, eager: Callable[[Optimizer], None], compiled: CompiledFunction) -> None:
        compiles = self._gate.lane is Lane.COMPILE
        self.could_compile |= compiles
        if self._is_for_eager(compiles=compiles):
            self.calls += 1
            eager(self.optimizer)
            return
        with self._values.for_compiled(), self._while_it_compiles() if compiles else _AS_THEY_ARE:
            try:
                self.choose(compiled, eager, self.optimizer)
            except LayoutChangedError:
                if self._watch.raise_errors:
                    raise
                eager(self.optimizer)  # no code of the compiled one has run
