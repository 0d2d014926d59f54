"""``if self.initted: return``: a flag in a buffer is a part of the code, as one in an attribute is.

Codebooks, activation norms and quantizers keep in a buffer whether they have seen their first batch. To
Dynamo that depends on data: there the graph ended, and where that was in a loop all of the function was left
to eager. So the branch is traced that the step takes, and a guard looks before each step whether that is so.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, TensorVariable

from lightning_hotcompile.swap.tracing.overrides import Override, add_guard

_ASKS = re.compile("POP_JUMP_.*IF_(TRUE|FALSE)|UNARY_NOT")
"""Instructions that ask for the truth of a value, and leave nothing of it on the stack."""

_FLAGS = (torch.bool, torch.uint8)
"""Of which the number is asked for as well. Others count: a position in a queue, the steps until now."""


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def next_instruction(prior: Any, tx: Any, instruction: Any) -> Any:
        prior(tx, instruction)
        if tx.stack and _ASKS.fullmatch(instruction.opname):
            known = _known(tx, tx.stack[-1], bool)
            tx.stack[-1] = tx.stack[-1] if known is None else known

    def call(prior: Any, variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        known = None
        if name == "item" and not args and not kwargs and variable.dtype in _FLAGS:
            known = _known(tx, variable, Tensor.item)
        return prior(variable, tx, name, args, kwargs) if known is None else known

    return [
        Override(InstructionTranslatorBase, "update_block_stack", next_instruction),
        Override(TensorVariable, "call_method", call),
    ]


def _known(tx: Any, variable: Any, ask: Callable[[Tensor], Any]) -> Any:
    """What is asked of a flag, as a constant with a guard; ``None`` of anything else."""
    variable = variable.realize()
    own = tx.output.current_tracer is tx.output.root_tracer  # of no checkpoint, which may have changed it
    flag = _flag(variable) if own and type(variable) is TensorVariable else None
    if flag is None:
        return None
    seen = ask(flag)

    def is_as_seen(value: Any) -> bool:
        return isinstance(value, Tensor) and value.numel() == 1 and bool(ask(value) == seen)

    add_guard(variable.source, is_as_seen, f"the flag {variable.source.name} is {seen}")
    return ConstantVariable.create(seen)


def _flag(variable: Any) -> Tensor | None:
    """A buffer with one number, in memory of its own, that nothing in the graph has used or changed yet."""
    node = variable.as_proxy().node
    if node.users or not _is_buffer(variable.source):
        return None
    inputs = [given.example for each in node.graph.find_nodes(op="placeholder") if (given := _given(each))]
    flag = None if (given := _given(node)) is None else given.example
    if type(flag) is not Tensor or flag.numel() != 1 or flag.layout is not torch.strided:
        return None
    is_shared = sum(_memory_of(each) == _memory_of(flag) for each in inputs) > 1
    return None if is_shared or flag.device.type == "meta" else flag


def _given(node: Any) -> Any:
    return node.meta.get("grapharg")


def _memory_of(value: Any) -> int | None:
    is_plain = isinstance(value, Tensor) and value.layout is torch.strided
    return value.untyped_storage().data_ptr() if is_plain else None


def _is_buffer(source: Any) -> bool:
    base = getattr(source, "base", None)
    return isinstance(base, AttrSource) and base.member == "_buffers"
