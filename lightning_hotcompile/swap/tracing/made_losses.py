"""An ``nn.CrossEntropyLoss`` that is made in the step is a module like any other.

Dynamo has a function in its place. Where a graph ended while there was one, all of the step was left to
eager, and so it was where anything else was done with it than to call it.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo import polyfills
from torch._dynamo.create_parameter_op import do_not_convert_to_tracable_parameter
from torch._dynamo.variables import UserDefinedClassVariable
from torch._dynamo.variables.base import VariableTracker

from lightning_hotcompile.swap.tracing.overrides import Override


def overrides() -> list[Override]:
    """The methods of Dynamo's that this file overrides."""

    def made(prior: Any, kind: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not kind.source:
            return prior(kind, tx, args, kwargs)
        makes = VariableTracker.build(tx, polyfills.instantiate_user_defined_class_object)
        with do_not_convert_to_tracable_parameter():
            return tx.inline_user_function_return(makes, [kind, *args], kwargs)

    return [Override(UserDefinedClassVariable, "_call_cross_entropy_loss", made)]
