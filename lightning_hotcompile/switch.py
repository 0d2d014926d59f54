"""The variable HOTCOMPILE: ``auto``, ``force`` or ``off``."""

from __future__ import annotations

import os

from lightning_hotcompile.errors import ConfigError, near_names

SWITCH = "HOTCOMPILE"
_VALUES = ("auto", "force", "off")


def switch() -> str | None:
    """The value of ``HOTCOMPILE``: ``auto``, ``force``, ``off``, or ``None`` if unset or empty.

    Raises:
        ConfigError: it has another value.
    """
    value = os.environ.get(SWITCH, "").strip().lower()
    if not value:
        return None
    if value not in _VALUES:
        raise ConfigError(
            f"{SWITCH}={value!r} is not allowed: use auto, force or off{near_names(value, _VALUES)}."
        )
    return value
