"""Lightning comes as two packages with the same code: ``lightning.pytorch`` and ``pytorch_lightning``.

A script uses the classes of one of them, and this package works with either.
"""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import lightning.pytorch
from lightning.pytorch import LightningModule
from lightning_utilities.core import rank_zero

_SPOKEN_FOR = ("log", "rank_zero_deprecation_category")
"""What each package sets in the library of both as it is imported: its logger, and its class of warnings."""


def _the_other_one() -> ModuleType | None:
    """The package that the script may not use; what the one that it uses logs and warns stays as it is.

    A script that has imported both, ``lightning.pytorch`` after the other, cannot be told from one that has
    imported ``pytorch_lightning`` only.
    """
    first = next(name for name in list(sys.modules) if name in ("lightning.pytorch", "pytorch_lightning"))
    before = {name: vars(rank_zero)[name] for name in _SPOKEN_FOR if name in vars(rank_zero)}
    try:
        other = importlib.import_module("pytorch_lightning")
    except Exception:  # noqa: BLE001  # not installed, or too old for this torch: nobody can use it
        other = None
    if first == "pytorch_lightning":  # the script's own: lightning.pytorch was imported for us
        before["log"] = logging.getLogger("pytorch_lightning.utilities.rank_zero")
        own = importlib.import_module("lightning_fabric.utilities.rank_zero")
        before["rank_zero_deprecation_category"] = own.LightningDeprecationWarning
    vars(rank_zero).update(before)
    return other


_OTHER = _the_other_one()


def _of_both(path: str) -> tuple[type[Any], ...]:
    """A class of each package, by its path inside of it; only one where the other has none."""
    found: list[type[Any]] = []
    for package in (lightning.pytorch, _OTHER):
        each: Any = package
        for name in path.split("."):
            each = getattr(each, name, None)
        if isinstance(each, type) and not any(issubclass(other, each) for other in found):
            found = [other for other in found if not issubclass(each, other)]  # one package stands for both
            found.append(each)
    return tuple(found)


LIGHTNING_MODULES = _of_both("LightningModule")
CHECKPOINTS = _of_both("callbacks.Checkpoint")
TIMERS = _of_both("callbacks.Timer")
ACCUMULATION_SCHEDULERS = _of_both("callbacks.GradientAccumulationScheduler")

if TYPE_CHECKING:
    from lightning.pytorch import Callback as Callback
else:
    Callback = type("Callback", _of_both("Callback"), {"__module__": __name__})
    Callback.__doc__ = "A callback in the eyes of both packages: their command lines look at the class."


def lightning_base(module: LightningModule) -> type[LightningModule]:
    """The class ``LightningModule`` that a module is derived from.

    Raises:
        TypeError: from neither.
    """
    for kind in type(module).__mro__:
        if kind in LIGHTNING_MODULES:
            return kind
    raise TypeError(f"{type(module).__name__} is no LightningModule: derive it from one.")
