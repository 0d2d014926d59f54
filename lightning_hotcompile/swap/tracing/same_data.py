"""``self.weight.data *= self.mask``: data that are set to what they are already.

Python multiplies in place, and then sets the attribute to the result, which is the same memory. Dynamo puts a
``set_`` there, and AOTAutograd takes none for what the graph has written to: it raises, and the frame is left
to eager. Masked convolutions (PixelCNN) and masked linear layers are written so.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._dynamo.variables import TensorVariable, builtin

from lightning_hotcompile.swap.tracing.overrides import Override

_SETS = getattr(builtin, "SetAttrBuiltinVariable", None)
"""From torch 2.13 on there is one. Before that Dynamo keeps what sets an attribute from its first call on."""


def overrides() -> list[Override]:
    """What Dynamo does otherwise: it sets nothing."""

    def set_attribute(prior: Any, calls: Any, tx: Any, owner: Any, name: Any, value: Any) -> Any:
        return value if _is_in_vain(owner, name, value) else prior(calls, tx, owner, name, value)

    def call(prior: Any, function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        sets = function.fn is setattr and len(args) == 3 and not kwargs
        return args[2] if sets and _is_in_vain(*args) else prior(function, tx, args, kwargs)

    if _SETS is None:
        return [Override(builtin.BuiltinVariable, "call_function", call)]
    return [Override(_SETS, "_call_setattr", set_attribute)]


def _is_in_vain(owner: Any, name: Any, value: Any) -> bool:
    is_data = name.is_python_constant() and name.as_python_constant() == "data"
    return is_data and _is_same(owner, value)


def _is_same(owner: Any, value: Any) -> bool:
    """Whether both are the same elements of the same memory, of a tensor that the graph is given."""
    variables = owner.realize(), value.realize()
    if any(type(variable) is not TensorVariable for variable in variables) or variables[0].source is None:
        return False
    a, b = (variable.as_proxy().node.meta["example_value"] for variable in variables)
    return a.dtype is b.dtype and a.device == b.device and _place_of(a) == _place_of(b)


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
