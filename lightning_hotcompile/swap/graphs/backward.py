"""Gradients that compiled code returns in another way than eager: ``None``, none, and memory of their own.

AOTAutograd's backward is one function of the gradients of all outputs. It takes zeros for the one of an
output that is not used (a pooler, an auxiliary head whose loss comes later), so parameters that nothing else
depends on would get zeros, and optimizers would go on with weight decay and momentum where eager leaves them
alone.

To autograd that function depends on all inputs that want a gradient, those of a teacher under ``no_grad`` or
behind a ``detach()`` too. Their hooks would be called with ``None`` for a gradient, and DDP with
``static_graph=True`` raises once a parameter has one that had none before.

What it returns for two parameters may be one memory (``a + b.view(...)`` has one gradient for both). Eager
copies one of them; here autograd keeps both as they are, and whatever is done in place (clipping, a second
backward into the same gradients) would be done twice.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.nn import Parameter

from lightning_hotcompile.swap.compiled_function import untraced, without_disable
from lightning_hotcompile.swap.dynamo import CompiledFn, version_of
from lightning_hotcompile.swap.graphs.unbounded import asked_in_vain, unbounded
from lightning_hotcompile.swap.graphs.uncounted import not_counting
from lightning_hotcompile.swap.parity.difference import flat
from lightning_hotcompile.swap.parity.reach import Reach, made_by
from lightning_hotcompile.swap.parity.verdict import Parity


class BackwardAsEager:
    """Compiled code with a hook on its backward.

    Args:
        compiled: the code of one graph.
        reach: of that graph, as of :func:`~lightning_hotcompile.swap.parity.reach.reach_of`.
        sharing: positions of inputs whose gradients get a memory of their own.
    """

    def __init__(self, compiled: CompiledFn, reach: Reach, sharing: Collection[int] = ()) -> None:
        self._compiled = compiled
        self._reach = reach
        self._sharing = sharing
        self._is_known = False
        self._places: list[int] = []
        """Of outputs that the function has made."""

        self._outputs: dict[int, int] = {}
        """These, by their number among the outputs of the function."""

        self._depending: dict[int, frozenset[int]] = {}
        """The reach, by the number among the inputs of the function."""

        self._copied: frozenset[int] = frozenset()
        """Numbers of the inputs that share."""

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        if not torch.is_grad_enabled():
            return self._compiled(*args)
        # Before the run, which may change an input in place: it then comes from the function itself.
        edges, earlier = ({}, []) if self._is_known else (self._edges(args), _makers(args))
        outputs = self._compiled(*args)
        tensors = [output for output in flat(outputs) if isinstance(output, Tensor)]
        if not self._is_known:
            self._learn(edges, earlier, tensors)
        for place in self._places:
            if (node := made_by(tensors[place])[0]) is not None:
                node.register_hook(self._as_eager)
                break
        return outputs

    def _edges(self, args: Sequence[Any]) -> dict[int, tuple[Any, int]]:
        return {i: _edge(args[i]) for i in (*self._reach, *self._sharing) if args[i].requires_grad}

    def _learn(
        self, edges: Mapping[int, tuple[Any, int]], earlier: Sequence[Node], tensors: Sequence[Tensor]
    ) -> None:
        """Whatever is held here stays alive, and so has a number of its own.

        An output that is an input, or a view of one, leads to the function that has made the input.
        """
        made = {place: made_by(tensor) for place, tensor in enumerate(tensors)}
        node = next((n for n, _ in made.values() if n is not None and n not in earlier), None)
        if node is None:  # a run without gradients, or code that is not AOTAutograd's
            return
        following = [(getattr(to, "variable", to), number) for to, number in node.next_functions]
        numbers = {(id(to), number): j for j, (to, number) in enumerate(following) if to is not None}
        by_number = {i: numbers.get((id(to), number)) for i, (to, number) in edges.items()}
        found = {i: j for i, j in by_number.items() if j is not None}
        self._outputs = {number: place for place, (by, number) in made.items() if by is node}
        self._depending = {j: self._reach[i] for i, j in found.items() if i in self._reach}
        self._copied = frozenset(j for i, j in found.items() if i in self._sharing)
        self._places = list(self._outputs.values())
        self._is_known = True

    @untraced
    def _as_eager(self, grad_inputs: Sequence[Any], grad_outputs: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            gradient.clone() if j in self._copied and gradient is not None else gradient
            for j, gradient in enumerate(self._none_for_unused(grad_inputs, grad_outputs))
        )

    def _none_for_unused(self, grad_inputs: Sequence[Any], grad_outputs: Sequence[Any]) -> Sequence[Any]:
        numbers = {number for number, gradient in enumerate(grad_outputs) if gradient is not None}
        if not numbers <= self._outputs.keys():
            return grad_inputs  # an input that was changed in place is used, too
        used = {self._outputs[number] for number in numbers}
        return [
            None if used.isdisjoint(self._depending.get(j, used)) else gradient
            for j, gradient in enumerate(grad_inputs)
        ]


def as_autograd_has_eager(compiled: CompiledFn, parity: Parity) -> CompiledFn:
    """Compiled code, with the backward and the counts of changes that eager has."""
    code = without_disable(compiled)
    if parity.apart:
        code = _kept_apart(code, frozenset(parity.apart))
    if parity.reach or parity.sharing:
        code = BackwardAsEager(code, parity.reach, parity.sharing)
    return not_counting(code, parity.uncounted) if parity.uncounted else code


def _kept_apart(run: CompiledFn, positions: frozenset[int]) -> CompiledFn:
    """What gets some inputs without their part in a backward."""

    def with_them_apart(*args: Any) -> Any:
        return run(*(arg.detach() if i in positions else arg for i, arg in enumerate(args)))

    return with_them_apart


class AtWork(Protocol):
    """A graph at work, with compiled code that something can be put around."""

    def wrap(self, around: Callable[[CompiledFn], CompiledFn]) -> None:
        """Have it run inside of that."""


class Backwards:
    """Gives the compiled code of all graphs the backwards that eager has.

    Where that of one graph gives no gradient to what others have made, autograd calls theirs all the same,
    with none, for which AOTAutograd has zeros: weights of a branch that the loss does not use, and that goes
    through several graphs, would get zeros. As long as there is no such graph the others are left alone.
    """

    def __init__(self) -> None:
        self._gives_none = False
        self._others: weakref.WeakSet[AtWork] = weakref.WeakSet()

    def begin(self, graph: AtWork, parity: Parity) -> None:
        """Compiled code that agrees with eager is at work from now on."""
        if parity.is_other_to_autograd:
            graph.wrap(functools.partial(as_autograd_has_eager, parity=parity))
        if not parity.reach and not parity.sharing:
            self._others.add(graph)
        self._gives_none = self._gives_none or bool(parity.reach)
        while self._gives_none and self._others:
            self._others.pop().wrap(functools.partial(BackwardAsEager, reach={}))


class SeparateBackwards:
    """Tells when outputs of an eager run have backwards, or have none, as compiled code could not have it.

    To autograd a compiled graph is one function. A backward through one output frees what those of all others
    need, and weights that an optimizer has changed since are of no use to any of them. An output without a
    backward is given zeros, see :mod:`~lightning_hotcompile.swap.graphs.unbounded`. And no output depends on
    another one: a loss has no gradient by an activation that is an output as well.

    It is held by the outputs and what has made them alone: once they are gone there is no backward to come.

    Args:
        args: of the run.
        outputs: of the run, before any backward.
        on_found: called then with a reason, perhaps more than once.
        by_numbers: whether the graph divides by numbers that it computes.
    """

    def __init__(
        self,
        args: Sequence[Any],
        outputs: Sequence[Any],
        on_found: Callable[[str], None],
        *,
        by_numbers: bool = True,
    ) -> None:
        self._on_found = on_found
        weights = (arg for arg in args if isinstance(arg, Parameter))
        self._weights = [(weakref.ref(weight), version_of(weight)) for weight in weights]
        self._task: int | None = None
        self._is_freed = False
        self._unbounded = unbounded(outputs, by_numbers=by_numbers)
        self._used: set[int] = set()
        self._outputs: dict[int, weakref.ref[Tensor]] = {}
        self._reached: set[int] = set()
        self._passed: set[int] = set()
        """In the backward that runs now: outputs with a gradient, and those past which it has gone on."""

        for place, output in enumerate(outputs):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                self._outputs[place] = weakref.ref(output)
                output.register_hook(functools.partial(self._see, place))  # type: ignore[no-untyped-call]
                output.grad_fn.register_hook(functools.partial(self._go_past, place))

    @untraced
    def _see(self, place: int, _: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if self._unbounded and not self._used:
            Variable._execution_engine.queue_callback(self._look_at_unused)  # at the end of this backward
        self._used.add(place)
        if self._task is not None and task != self._task:
            now = ((weight(), version) for weight, version in self._weights)
            changed = any(weight is not None and version_of(weight) != version for weight, version in now)
            if self._is_freed or changed:
                self._on_found(
                    "its outputs have backwards of their own, and one frees or changes what another needs"
                )
        if task != self._task:
            self._task, self._reached, self._passed = task, set(), set()
            if len(self._outputs) > 1:
                Variable._execution_engine.queue_callback(self._look_at_asked)
            self._is_freed = self._is_freed or not torch._C._autograd._get_current_graph_task_keep_graph()
        self._reached.add(place)

    @untraced
    def _go_past(self, place: int, *_: object) -> None:
        self._passed.add(place)

    @untraced
    def _look_at_asked(self) -> None:
        reached = sorted(self._reached) if len(self._reached) > 1 else []
        if any(place not in self._passed or _is_looked_at(self._outputs[place]()) for place in reached):
            self._on_found("the gradient of an output is asked for, and another one may depend on it")

    @untraced
    def _look_at_unused(self) -> None:
        if (name := asked_in_vain(self._unbounded, self._used)) is not None:
            self._on_found(f"an output that is not used may have no finite derivative ({name})")


def _is_looked_at(output: Tensor | None) -> bool:
    """Whether its gradient is kept, or somebody has a hook on it."""
    if output is None:
        return False
    hooks = (output._backward_hooks or {}).values()
    return output.retains_grad or not all(map(_is_ours, hooks))


def _is_ours(hook: Any) -> bool:
    module = getattr(getattr(hook, "func", hook), "__module__", None)
    return str(module).partition(".")[0] == __name__.partition(".")[0]


def _makers(args: Sequence[Any]) -> list[Node]:
    """The compiled functions that inputs come from."""
    found = (made_by(arg)[0] for arg in args if isinstance(arg, Tensor))
    return [node for node in found if node is not None]


def _edge(value: Tensor) -> tuple[Any, int]:
    """Where the gradient of a tensor goes: to itself, or to a number of what has made it."""
    return (value, 0) if value.grad_fn is None else (value.grad_fn, value.output_nr)
