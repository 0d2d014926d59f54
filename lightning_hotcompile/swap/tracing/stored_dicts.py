"""A dict that a step changes, and then puts into an attribute, is there with all that it holds.

To write what is new in a dict, Dynamo makes a dict of that alone. Before torch 2.13 it took this one, which
lay on top of the stack or had a name by then, for the dict itself where that is put into an attribute.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.codegen import PyCodegen

from lightning_hotcompile.swap.tracing.overrides import Override


def overrides() -> list[Override]:
    """What Dynamo does otherwise: what is made anew is not taken for what it is made of."""

    def make(prior: Any, codegen: Any, value: Any, allow_cache: bool = True) -> None:
        prior(codegen, value, allow_cache)
        if not allow_cache:
            codegen.clear_tos()
            if value.source is not None:
                codegen.tempvars.pop(value, None)

    return [Override(PyCodegen, "__call__", make)]
