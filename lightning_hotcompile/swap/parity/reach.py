"""Which outputs of a graph depend on which of its inputs, as autograd has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.autograd.graph import Node

Reach = Mapping[int, frozenset[int]]
"""For positions of inputs the places, among the tensors of the outputs, of those that depend on them."""

_COMPILED = "CompiledFunctionBackward"
_MOST_VIEWS = 4
"""Between an output and the function that made it: AOTAutograd makes views of outputs anew."""


def reach_of(outputs: Sequence[Tensor], leaves: Mapping[int, Tensor]) -> tuple[Reach, tuple[int, ...]]:
    """The inputs on which some outputs with a gradient depend, and others do not; and those with no backward.

    The latter are inputs that no backward comes to, where there is one that comes to others.

    Args:
        outputs: of a run of a graph in eager mode, before any backward.
        leaves: what the gradients of its inputs go to, by their positions.
    """
    found = {place: _leaves_of(out.grad_fn) for place, out in enumerate(outputs) if out.grad_fn is not None}
    reach = {i: frozenset(p for p, of in found.items() if id(leaf) in of) for i, leaf in leaves.items()}
    uneven = {i: places for i, places in reach.items() if 0 < len(places) < len(found)}
    given, is_any = {id(output) for output in outputs}, any(reach.values())
    apart = (i for i, places in reach.items() if is_any and not places and id(leaves[i]) not in given)
    return uneven, tuple(apart)


def _leaves_of(node: Node) -> set[int]:
    """Identities of the leaves that a backward from here comes to."""
    seen, todo, leaves = {node}, [node], set[int]()
    while todo:
        each = todo.pop()
        if (leaf := getattr(each, "variable", None)) is not None:
            leaves.add(id(leaf))
        for following, _ in each.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return leaves


def made_by(output: Tensor) -> tuple[Node | None, int]:
    """The compiled function that an output comes from, be it as a view, and its number there."""
    node, number = output.grad_fn, output.output_nr
    for _ in range(_MOST_VIEWS):
        if node is None or node.name() == _COMPILED:
            break
        node, number = node.next_functions[0] if node.next_functions else (None, 0)
    return (node, number) if node is not None and node.name() == _COMPILED else (None, 0)
