"""The callbacks that environment variables ask for: HOTCOMPILE and HOTCOMPILE_*."""

from __future__ import annotations

import logging
import os

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hotcompile.callback import HotCompile
from lightning_hotcompile.capture.callback import Capture
from lightning_hotcompile.capture.explaining import Explain
from lightning_hotcompile.capture.order import ExplainOrder, Order, WorthOrder
from lightning_hotcompile.capture.verdict import AwaitVerdict
from lightning_hotcompile.config import SCOPES, HotCompileConfig
from lightning_hotcompile.errors import ConfigError, near_names
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.run.preflight import plan_for, why_idle
from lightning_hotcompile.run.stages import TRAIN, remaining_batches
from lightning_hotcompile.switch import switch

_SCOPES = tuple(scope for scope in SCOPES if scope != "pattern")
"""A pattern needs targets, which are a matter of code."""


def callbacks_asked_for() -> list[Callback]:
    """The callback if ``HOTCOMPILE`` is ``auto`` or ``force``, for one Trainer.

    ``force`` compiles without a forecast. ``HOTCOMPILE_THRESHOLD``, ``HOTCOMPILE_SCOPE``,
    ``HOTCOMPILE_KEEP_EAGER`` (names with commas between them) and ``HOTCOMPILE_EVENT_LOG`` set the
    options of the same name, ``HOTCOMPILE_DEBUG=1`` prints each event and shows debug messages. While
    ``python -m lightning_hotcompile.trace`` or ``hotcompile worth`` runs the script, there is one more
    callback, which captures or measures; under ``hotcompile explain`` there is only one, which explains, by
    scope and ``keep_eager`` of the environment where the script has no callback of its own.

    Raises:
        ConfigError: a variable has a value that is not allowed.
    """
    explain = ExplainOrder.from_environment(os.environ)
    if explain is not None:
        config = HotCompileConfig(scope=_scope(), keep_eager=_keep_eager())
        return [Explain(explain, HotCompile, config, _plan, _steps_left)]
    value = switch()
    order, worth = Order.from_environment(os.environ), WorthOrder.from_environment(os.environ)
    before: list[Callback] = [Capture(order, HotCompile)] if order is not None else []
    # Behind the callback, whose clock has stopped by then: ranks wait for each other there.
    after = [AwaitVerdict(worth, HotCompile, _steps_left)] if worth is not None else []
    if value not in ("auto", "force"):
        return [*before, *after]
    debug = os.environ.get("HOTCOMPILE_DEBUG", "") not in ("", "0")
    if debug:
        _show_debug_messages()
    callback = HotCompile(
        threshold=_threshold(),
        scope=_scope(),
        keep_eager=_keep_eager(),
        cost_gate=value == "auto",
        verbose=debug,
        event_log=os.environ.get("HOTCOMPILE_EVENT_LOG") or None,
    )
    callback.from_environment = True
    return [*before, callback, *after]


def _plan(
    trainer: Trainer, module: LightningModule, config: HotCompileConfig
) -> tuple[CompilePlan | None, str | None]:
    return plan_for(trainer, module, config), why_idle(trainer, module)


def _steps_left(trainer: Trainer) -> int | None:
    return remaining_batches(trainer, TRAIN, None)


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


def _scope() -> str:
    text = os.environ.get("HOTCOMPILE_SCOPE", "").strip() or "auto"
    if text not in _SCOPES:
        hint = near_names(text, _SCOPES)
        raise ConfigError(f"HOTCOMPILE_SCOPE={text!r} is not allowed: use {', '.join(_SCOPES)}{hint}.")
    return text


def _keep_eager() -> list[str]:
    names = os.environ.get("HOTCOMPILE_KEEP_EAGER", "").split(",")
    return [name.strip() for name in names if name.strip()]
