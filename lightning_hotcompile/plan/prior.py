"""What scopes have gained on other models, by the operations of their step and its time.

    python recipes/benchmark.py suite=scopes

measures the table and fits ``prior.json`` to it; the one in this folder is such a file. The time of a step
alone says nothing: for a case that the fit has not seen, a line through the times errs as much as the mean
of all cases does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

import torch

_LIBRARY = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "embedding"),
    *("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_scaled_dot_product", "_flash_attention"),
)
"""Beginnings of names: calls that compiled code makes as well, their backwards too."""

_NO_WORK = frozenset(
    {"detach", "empty", "empty_like", "_local_scalar_dense", "_unsafe_view", "lift_fresh"}
    | {"_record_function_enter_new", "_record_function_exit"}
)


@dataclass(frozen=True, kw_only=True)
class OpStatistics:
    """What a compiler can do something about in the forward and backward of a step."""

    fusible: int
    """Operations that are neither views nor calls of a library (matrix products, convolutions, ...)."""

    batch_norm: int
    """Elements of tensors that BatchNorm reads and makes: eager CPU kernels are slow at it."""

    others: int = 0
    """Operations that are not fusible: each makes a compile longer."""

    @classmethod
    def of(cls, ops: Mapping[str, int], elements: Mapping[str, int]) -> OpStatistics:
        """Count them.

        Args:
            ops: how often each operation ran, by names such as ``aten.mm.default``.
            elements: how many elements of tensors they read and made, by the same names.
        """
        fusible = sum(times for op, times in ops.items() if _is_fusible(op))
        return cls(
            fusible=fusible,
            others=sum(ops.values()) - fusible,
            batch_norm=sum(n for op, n in elements.items() if "batch_norm" in op),
        )


def _is_fusible(op: str) -> bool:
    name = op.split(".")[1] if "." in op else op
    return name not in _NO_WORK and not name.startswith(_LIBRARY) and not _is_view(op)


def _is_view(op: str) -> bool:
    found: object = torch.ops
    try:
        for part in op.split("."):
            found = getattr(found, part)
    except (AttributeError, RuntimeError):  # of a library that is not loaded in this process
        return False
    return bool(getattr(found, "is_view", False))


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What compiling a scope saves of an eager step, as a share of its time in ms.

    ``share + density * sqrt(fusible / time) + (batch_norm_ms * millions of elements - call_ms) / time``;
    the speed-up that follows is kept between the least and the most that was measured. All but the counts and
    ``rms`` are fitted.
    """

    share: float
    call_ms: float
    """What a call of compiled code costs: guards, and what autograd and Lightning do around it."""

    density: float
    """Share by the root of the fusible operations per ms: the more there are, the less one more saves."""

    batch_norm_ms: float
    """0 where cases that the fit has not seen are predicted better without it."""

    usual_fusible: float
    """Per ms of eager step, for a step of which the operations are not known."""

    usual_batch_norm: float
    """Millions of elements per ms, for the same."""

    typical: float
    """Geometric mean of the speed-ups that were measured: of a step of which nothing is known."""

    least: float
    most: float
    rms: float
    """Typical error of the logarithm of the speed-up, for a case that the fit has not seen."""

    cases: int

    def speedup(self, step_s: float | None, ops: OpStatistics | None = None) -> float:
        """Expected eager time / compiled time of a step that takes ``step_s`` seconds eagerly."""
        if not step_s:
            return self.typical
        ms = 1e3 * step_s
        fusible = self.usual_fusible * ms if ops is None else ops.fusible
        batch_norm = self.usual_batch_norm * ms if ops is None else 1e-6 * ops.batch_norm
        saved = self.share + self.density * math.sqrt(fusible / ms)
        saved += (self.batch_norm_ms * batch_norm - self.call_ms) / ms
        return max(self.least, 1 / max(1 - saved, 1 / self.most))


def _load() -> dict[str, Gain]:
    text = resources.files(__package__).joinpath("prior.json").read_text(encoding="utf-8")
    return {plan: Gain(**gain) for plan, gain in json.loads(text)["gains"].items()}


PRIOR = _load()
"""By the name of the scope in the suite: ``step``, ``step+optimizer``, ``regions+optimizer``, ..."""
