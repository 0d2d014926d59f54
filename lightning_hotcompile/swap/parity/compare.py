"""Is compiled code right: one captured graph, run eagerly and compiled on the same real inputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_hotcompile.swap.dynamo import CompiledFn
from lightning_hotcompile.swap.parity.apart import apart_from_the_step
from lightning_hotcompile.swap.parity.clones import why_not_cloned
from lightning_hotcompile.swap.parity.difference import (
    Run,
    all_agree,
    has_zero_gradients,
    largest_difference,
    out_of_proportion,
    same_dtypes,
    same_kinds,
)
from lightning_hotcompile.swap.parity.masks import run_with_masks
from lightning_hotcompile.swap.parity.strict import Strict, is_spoiled
from lightning_hotcompile.swap.parity.trial import Trial
from lightning_hotcompile.swap.parity.uncertain import is_as_uncertain
from lightning_hotcompile.swap.parity.verdict import Parity
from lightning_hotcompile.swap.process.free_memory import why_memory_is_short
from lightning_hotcompile.swap.process.thread_state import without_autocast_cache

_log = logging.getLogger(__name__)

NOISE_FACTOR = 3.0
"""A graph with random numbers may differ from eager by so many times what two eager runs differ."""

_SEEDS = (20_011, 20_021)

_UNCERTAIN = "one is as near to eager as eager is to itself where its inputs differ in the last digit"

_COPIES = 3.0
"""Sets of inputs that must fit into the free memory: two, and as much again for outputs and gradients."""


class NotNeutral(Exception):
    """Why a graph cannot be compared without its random numbers."""


@without_autocast_cache()
def compare(
    eager: CompiledFn,
    compiled: CompiledFn,
    inputs: Sequence[Any],
    held: Sequence[Tensor] = (),
    neutral: Callable[[], tuple[CompiledFn, CompiledFn]] | None = None,
    *,
    draws_as_eager: bool = False,
    backward_outside: bool = False,
    behind_autograd: Collection[int] = (),
) -> Parity:
    """Run both on clones of the same inputs, forward and backward, and compare.

    The rule is that of PyTorch's benchmarks (``torch._dynamo.utils.same``): close within a tolerance
    by dtype, else as near to a 64-bit run as eager is. What is small has to be close in proportion, too, see
    :mod:`~lightning_hotcompile.swap.parity.proportion`, and what hangs on the last digit as near as eager is
    to itself, see :mod:`~lightning_hotcompile.swap.parity.uncertain`. Gradients are taken with one random
    cotangent. Both start from the same seed. Where they differ and two eager runs with other seeds differ as
    well, the difference must be within that noise, and the two functions that ``neutral`` returns, the same
    graph eager and compiled without its random numbers, must agree by the strict rule. With
    ``draws_as_eager`` both must have drawn as many numbers as well, since after one that was left out the
    next draws are others, and on a CPU nothing is held against noise: it hides that two changed places.

    With ``backward_outside`` gradients are taken without the autocast around this. ``behind_autograd`` are
    positions of inputs that this graph, or another one of the step, writes to through ``.data``.

    ``held`` are tensors that both hold by themselves and may change (an optimizer's parameters and
    state). Afterwards inputs, held tensors, gradients and the random state are as before; no user code
    runs, since a captured graph is tensor code only. Needs memory for two more sets of inputs and outputs.
    What cannot be compared for a reason that is not foreseen counts as wrong: in doubt, eager.
    """
    everything = [*inputs, *held]
    reason = why_not_cloned(everything)
    if reason is not None:
        return Parity(agrees=None, reason=f"not compared: {reason}")
    tensors = [t for t in everything if isinstance(t, Tensor)]
    if (reason := why_memory_is_short(tensors, _COPIES)) is not None:
        return Parity(agrees=None, reason=f"not compared for lack of memory: {reason}")
    try:
        with apart_from_the_step():
            trial = Trial(inputs, held, backward_outside=backward_outside)
            return _Comparison(trial, draws_as_eager, behind_autograd).between(eager, compiled, neutral)
    except torch.OutOfMemoryError as error:
        return Parity(agrees=None, reason=f"not compared for lack of memory: {str(error).splitlines()[0]}")
    except Exception as error:  # noqa: BLE001
        _log.debug("the comparison failed", exc_info=True)
        return Parity(agrees=False, reason=f"could not be compared: {type(error).__name__}: {error}")


class _Raised(Exception):
    """Compiled code raised; the cause is what it raised."""


class _Comparison:
    """The rules, in their order."""

    def __init__(self, trial: Trial, draws_as_eager: bool, behind_autograd: Collection[int]) -> None:
        self._trial = trial
        self._draws_as_eager = draws_as_eager
        self._behind_autograd = behind_autograd

    def between(
        self,
        eager: CompiledFn,
        compiled: CompiledFn,
        neutral: Callable[[], tuple[CompiledFn, CompiledFn]] | None,
    ) -> Parity:
        """Compare two functions: strictly, else against the noise and without random numbers."""
        first = self._trial.run(eager, _SEEDS[0])
        learned = Parity(
            agrees=True,
            changed=first.changed,
            changed_held=first.changed_held,
            late=first.late,
            stochastic=first.random,
            reach=first.reach,
            apart=first.apart,
            several=first.several,
            hidden=tuple(i for i in self._behind_autograd if i in first.saved),
        )
        if any(i in first.moved for i in learned.hidden):
            reason = "its backward needs an input whose .data it replaces"
            return replace(learned, agrees=False, reason=reason)
        if self._trial.shares_what_changes(first.changed):
            return replace(
                learned, agrees=False, reason="an input is changed that may share memory with another"
            )
        if self._needs_all_outputs(first, eager):
            return replace(learned, agrees=False, reason="an output that is not used would change gradients")
        try:
            found = self._strictly(first, eager, compiled)
            learned = replace(learned, error=found.difference, needed=found.needed, sharing=found.sharing)
            learned = replace(learned, uncounted=found.uncounted)
            if found.spoiled:
                reason = "writes to an input that its backward needs as it was, and eager's does not"
                return replace(learned, agrees=False, reason=reason)
            if self._draws_as_eager and not found.as_many:  # if all else agrees, the next draw is another
                return replace(learned, agrees=False, reason="does not draw as many random numbers as eager")
            if found.agrees:
                return replace(learned, reason=_UNCERTAIN if found.uncertain else "")
            if self._draws_as_eager and first.on_cpu and found.kinds:
                reason = f"differs by up to {found.difference:.3g} from eager with the same random numbers"
                return replace(learned, agrees=False, reason=reason)
            noise = largest_difference(first, self._trial.run(eager, _SEEDS[1]))
            del first
            if noise > 0:
                return self._within(noise, found, replace(learned, stochastic=True), neutral)
        except _Raised as error:
            return replace(learned, agrees=False, raised=True, reason=str(error))
        return replace(learned, agrees=False, reason=found.why_not)

    def _needs_all_outputs(self, first: Run, eager: CompiledFn) -> bool:
        """Whether zero gradients of outputs, as compiled code takes for unused ones, give others than zero.

        The root of a zero has no derivative that could be multiplied by 0, and a hook, or the user's own
        backward, may divide by the norm of what it is given. Eager runs neither.
        """
        return first.several and not has_zero_gradients(self._trial.run(eager, _SEEDS[0], unused=True))

    def _strictly(self, first: Run, eager: CompiledFn, compiled: CompiledFn) -> Strict:
        """Numbers that a GPU has drawn are not counted: kernels take more of them than they use."""
        with self._trial.held_put_back():
            try:
                result = self._trial.run(compiled, _SEEDS[0], last=True)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                _log.debug("compiled code raised", exc_info=True)
                raise _Raised(f"compiled code raised {type(error).__name__}: {error}") from error
            difference = largest_difference(first, result)
            kinds = same_kinds(first, result) and same_dtypes(first, result)
            agrees = kinds and all_agree(first, result, lambda: self._reference(first, eager))
            if kinds and not agrees and self._draws_as_eager:
                wide = run_with_masks(self._trial, eager, _SEEDS[0], first)
                agrees = wide is not None and all_agree(first, result, lambda: wide)
            alike = self._draws_as_eager or not first.random  # other numbers than eager's say nothing
            asked = kinds and not agrees and alike
            uncertain = asked and is_as_uncertain(self._trial, eager, _SEEDS[0], first, result)
            as_many = first.drawn is None or result.drawn is None or torch.equal(first.drawn, result.drawn)
            agrees = agrees or uncertain
            share = out_of_proportion(first, result, strict=True) if kinds and not agrees else 0.0
        return Strict(
            difference=difference,
            share=share,
            kinds=kinds,
            agrees=agrees,
            uncertain=uncertain,
            as_many=as_many,
            needed=tuple(i for i in result.saved if i not in first.saved),
            uncounted=self._uncounted(first, result),
            spoiled=result.by_compiler and is_spoiled(first, result),
            sharing=result.sharing,
        )

    def _uncounted(self, first: Run, result: Run) -> tuple[int, ...]:
        """Not what a backward has saved as counted, nor what shares its count with what eager counts."""
        found = tuple(i for i in result.changed if i not in (*first.changed, *result.saved))
        shared = self._trial.share_memory(found, first.changed)
        return tuple(i for i in found if i not in shared)

    def _reference(self, first: Run, eager: CompiledFn) -> Run | None:
        """Eager in 64 bit; ``None`` where it draws other numbers there, as ``randn_like`` does.

        What an accelerator draws is not known.
        """
        if first.random and not first.on_cpu:
            return None
        wide = self._trial.run_in_64_bit(eager, _SEEDS[0])
        alike = wide is None or wide.drawn is None or first.drawn is None
        return wide if alike or torch.equal(wide.drawn, first.drawn) else None  # type: ignore[union-attr, arg-type]

    def _within(
        self,
        noise: float,
        found: Strict,
        learned: Parity,
        neutral: Callable[[], tuple[CompiledFn, CompiledFn]] | None,
    ) -> Parity:
        """The rules for other random numbers than eager's."""
        learned = replace(learned, other_numbers=True)
        if not found.kinds:
            return replace(learned, agrees=False, reason=found.why_not)
        if found.difference > NOISE_FACTOR * noise:
            reason = f"differs by {found.difference:.3g}, two eager runs by {noise:.3g}"
            return replace(learned, agrees=False, reason=reason)
        try:
            worst, agrees = self._without_random_numbers(neutral)
        except NotNeutral as error:
            return replace(learned, reason=f"held against eager's noise only: {error}")
        except _Raised as error:
            return replace(learned, agrees=False, reason=f"without its random numbers {error}")
        reason = "" if agrees else f"without its random numbers it differs from eager by up to {worst:.3g}"
        return replace(learned, agrees=agrees, reason=reason)

    def _without_random_numbers(
        self, neutral: Callable[[], tuple[CompiledFn, CompiledFn]] | None
    ) -> tuple[float, bool]:
        if neutral is None:
            raise NotNeutral("there is no graph to take them out of")
        eager, compiled = neutral()
        try:
            first = self._trial.run(eager, _SEEDS[0])
        except Exception as error:
            raise NotNeutral(f"its random numbers cannot be taken out ({type(error).__name__})") from error
        if first.random:
            raise NotNeutral("it has random operations that are not known")
        found = self._strictly(first, eager, compiled)
        return found.difference, found.agrees
