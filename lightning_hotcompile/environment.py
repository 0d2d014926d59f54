"""Switching the callback on or off without touching code.

Lightning imports this for each Trainer wherever the package is installed, so it is light, and what torch's
private names are needed for is imported only where a variable asks for it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lightning_hotcompile.capture.order import EXPLAIN_VARIABLE, VARIABLE, WORTH_VARIABLE
from lightning_hotcompile.errors import warn
from lightning_hotcompile.switch import switch

if TYPE_CHECKING:
    from lightning.pytorch import Callback

_ORDERS = (VARIABLE, EXPLAIN_VARIABLE, WORTH_VARIABLE)


def callbacks_from_environment() -> list[Callback]:
    """The callbacks that environment variables ask for; Lightning calls this for each Trainer.

    There are none, and a warning, where the package cannot be imported with this torch.

    Raises:
        ConfigError: a variable has a value that is not allowed.
    """
    if switch() in (None, "off") and not any(map(os.environ.get, _ORDERS)):
        return []
    try:
        from lightning_hotcompile.asked_for import callbacks_asked_for
    except Exception as error:  # noqa: BLE001  # a torch without a name that is looked for here
        warn(f"HotCompile cannot be used here: {type(error).__name__}: {error}. Training goes on without it.")
        return []
    return callbacks_asked_for()
