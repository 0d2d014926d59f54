"""Switching the callback on or off without touching code: the variables HOTCOMPILE and HOTCOMPILE_*."""

from __future__ import annotations

import logging
import os

from lightning.pytorch import Callback

from lightning_hotcompile.callback import HotCompile
from lightning_hotcompile.capture.callback import Capture
from lightning_hotcompile.capture.order import order_from
from lightning_hotcompile.errors import ConfigError
from lightning_hotcompile.switch import switch


def callbacks_from_environment() -> list[Callback]:
    """The callback if ``HOTCOMPILE`` is ``auto`` or ``force``; Lightning calls this for each Trainer.

    ``force`` compiles without a forecast. ``HOTCOMPILE_THRESHOLD`` and ``HOTCOMPILE_EVENT_LOG`` set the
    options of the same name, ``HOTCOMPILE_DEBUG=1`` prints each event and shows debug messages. While
    ``python -m lightning_hotcompile.trace`` runs the script, there is one more callback, which captures.

    Raises:
        ConfigError: a variable has a value that is not allowed.
    """
    value, order = switch(), order_from(os.environ)
    captures: list[Callback] = [Capture(order, HotCompile)] if order is not None else []
    if value not in ("auto", "force"):
        return captures
    debug = os.environ.get("HOTCOMPILE_DEBUG", "") not in ("", "0")
    if debug:
        _show_debug_messages()
    callback = HotCompile(
        threshold=_threshold(),
        cost_gate=value == "auto",
        verbose=debug,
        event_log=os.environ.get("HOTCOMPILE_EVENT_LOG") or None,
    )
    callback.from_environment = True
    return [*captures, callback]


def _show_debug_messages() -> None:
    logger = logging.getLogger("lightning_hotcompile")
    logger.setLevel(logging.DEBUG)
    if not logger.hasHandlers():  # Python's last resort shows warnings only
        logger.addHandler(logging.StreamHandler())


def _threshold() -> int:
    text = os.environ.get("HOTCOMPILE_THRESHOLD", "").strip() or "10"
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"HOTCOMPILE_THRESHOLD={text!r} is not allowed: give a whole number of 0 or more.")
    return int(text)
