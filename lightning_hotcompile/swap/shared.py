"""What all installations of one stage of a training share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_hotcompile.swap.compiled_function import CodeNames
from lightning_hotcompile.swap.optimizers.first_settings import FirstSettings


class Shared:
    """What they share; made when the stage begins.

    Args:
        optimizers: the Trainer's, as they are then.

    Attributes:
        names: for the code that is compiled.
        first_settings: of the optimizers, before any schedule has changed them.
    """

    def __init__(self, optimizers: Iterable[Any] = ()) -> None:
        self.names = CodeNames()
        self.first_settings = FirstSettings(optimizers)
