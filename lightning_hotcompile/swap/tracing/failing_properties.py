"""A module is found behind a property of its name that raises ``AttributeError``.

Python then asks ``__getattr__``. So a model works that sets ``self.head = Linear(...)`` below a property
``head`` that reads ``self._head``, which is not there (pytorch-tabular's). Dynamo took the error for the
step's own, and left each function around it to eager.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._dynamo.exc import ObservedAttributeError, handle_observed_exception
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

from lightning_hotcompile.swap.tracing.overrides import GET_ATTRIBUTE, Override


def overrides() -> list[Override]:
    """What Dynamo does otherwise."""

    def got(prior: Any, module: Any, tx: Any, name: str) -> Any:
        if not _is_behind_a_property(module.value, name):
            return prior(module, tx, name)
        try:
            return prior(module, tx, name)
        except ObservedAttributeError:
            handle_observed_exception(tx)
            return module.manually_trace_nn_module_getattr(tx, name)

    return [Override(UnspecializedNNModuleVariable, GET_ATTRIBUTE, got)]


def _is_behind_a_property(module: nn.Module, name: str) -> bool:
    """Whether the module has a module of this name, and its class a property."""
    is_torchs = type(module).__getattr__ is nn.Module.__getattr__
    return is_torchs and name in module._modules and isinstance(getattr(type(module), name, None), property)
