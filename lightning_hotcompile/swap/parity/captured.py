"""The captured graph: a copy that no backend can change, and the tensors that it holds."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from lightning_hotcompile.swap.process.thread_state import put_back_after_errors

_HELD = "held"
"""Which inputs of a checkpoint's body are parameters, in the copy that runs as the user's code."""

_CONTEXT_FN = "_checkpoint_context_fn"
"""Where Dynamo keeps, on the body of a checkpoint, what selects the activations that are kept."""


def graphs_in(graph_module: GraphModule) -> Iterator[GraphModule]:
    """The graph, and those that it calls: bodies of checkpoints and other subgraphs."""
    return (module for module in graph_module.modules() if isinstance(module, GraphModule))


def nodes_in(graph_module: GraphModule) -> Iterator[Node]:
    """The nodes of all of them."""
    return (node for graph in graphs_in(graph_module) for node in graph.graph.nodes)


def operation_of(node: Node) -> str:
    """What a node calls, by its own name; empty where that has none."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def copy_of(graph_module: GraphModule, change: Callable[[Node], None] = lambda node: None) -> GraphModule:
    """The same graph, bodies of checkpoints and other subgraphs included, with the same tensors.

    A backend may rewrite the graph that it is given: what it computes is then held against this copy.

    Args:
        graph_module: the graph.
        change: called with each node of the copy, for example to replace its target.
    """
    copied = GraphModule(graph_module, copy.deepcopy(graph_module.graph), type(graph_module).__name__)
    copied.meta.update(graph_module.meta)
    for name, child in list(copied.named_children()):
        if isinstance(child, GraphModule):
            setattr(copied, name, copy_of(child, change))
    for node in copied.graph.nodes:
        change(node)
    copied.recompile()
    return copied


def eager_forward(graph_module: GraphModule) -> Callable[..., Any]:
    """What runs a captured graph as the code would run that it was captured from.

    Torch's operator for a checkpoint is made to be traced: it leaves it to the compiler that the forward
    which is repeated draws the same random numbers. Run as it is, dropout would have another mask there.
    Where it is left by an error (also by one that ends the repeated forward of a checkpoint around it), the
    thread is as before: a ``with`` of the user's is two operations of the graph.
    """
    nodes = list(nodes_in(graph_module))
    found: Callable[..., Any] = graph_module.forward
    if any(map(is_checkpoint, nodes)):
        found = copy_of(graph_module, _keep_random_numbers).forward
    return put_back_after_errors()(found) if any(map(_changes_the_thread, nodes)) else found


def _changes_the_thread(node: Node) -> bool:
    """Whether it enters autocast, a grad mode or a transform: an error of a later node would not leave it."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name.startswith(("_enter", "_set_", "_saved_tensors_hooks")) or name.endswith("_increment_nesting")


def is_checkpoint(node: Node) -> bool:
    """Whether it runs a body whose activations are computed anew in the backward."""
    return node.target is torch.ops.higher_order.tag_activation_checkpoint


def _keep_random_numbers(node: Node) -> None:
    if is_checkpoint(node):
        node.target = _checkpointed
        values = [arg.meta.get("example_value") if isinstance(arg, Node) else None for arg in node.args[1:]]
        held = tuple(i for i, value in enumerate(values) if isinstance(value, torch.nn.Parameter))
        node.kwargs = {**node.kwargs, _HELD: held}


def _checkpointed(body: GraphModule, *args: Any, **kwargs: Any) -> Any:
    """A checkpoint as the user's call of it ran.

    What needs no gradient is not handed over to be saved: buffers are inputs of the body, which may change
    them, and in the user's code nobody has saved them. A reentrant one asks for no gradients if no input of
    it needs one; parameters are inputs in the graph only.
    """
    held = kwargs.pop(_HELD)
    places = [i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.requires_grad]
    left_out = bool(kwargs.get("use_reentrant")) and set(places) <= set(held)
    names = {*inspect.signature(checkpoint).parameters, "preserve_rng_state"}
    settings = {name: value for name, value in kwargs.items() if name in names}
    if _CONTEXT_FN in body.meta:
        settings["context_fn"] = body.meta[_CONTEXT_FN]
    settings["use_reentrant"] = False  # it was traced as one that is not
    as_left = put_back_after_errors()(body.forward)  # it may end between the two operations of a ``with``
    others = {name: value for name, value in kwargs.items() if name not in names}

    def run(*differentiable: Tensor) -> Any:
        given = dict(zip(places, differentiable, strict=True))
        return as_left(*(given.get(i, arg) for i, arg in enumerate(args)), **others)

    if left_out:
        with torch.no_grad():
            return run(*(args[i] for i in places))
    return checkpoint(run, *(args[i] for i in places), **settings)


def tensors_of(graph_module: GraphModule) -> list[Tensor]:
    """Tensors that the graph holds by itself: Dynamo puts an optimizer's parameters and state there."""
    held = [*graph_module.parameters(), *graph_module.buffers()]
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = functools.reduce(getattr, str(node.target).split("."), graph_module)
        if isinstance(value, Tensor):
            held.append(value)
    return list({id(t): t for t in held}.values())


def count_ops(graph_module: GraphModule) -> int:
    """How many operations a graph has."""
    return sum(n.op in ("call_function", "call_method", "call_module") for n in graph_module.graph.nodes)
