"""A module of torch's that warns as it is imported, which compiling does sooner or later."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings

_WARNS = "torch.utils.mkldnn"
"""Fourteen times that ``torch.jit.script_method`` is deprecated, which is no concern of the user's. Where
warnings are errors (``python -W error``, a test suite's settings) Inductor could not be imported for it."""


@functools.cache
def import_in_silence() -> None:
    """Import it now, unless it is or does not exist any longer; takes some milliseconds once."""
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        importlib.import_module(_WARNS)
