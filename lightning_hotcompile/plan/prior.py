"""What scopes have gained on other models, by the operations of their step and its time.

    python recipes/benchmark.py suite=scopes

measures the table and fits ``prior.json`` to it; the one in this folder is such a file. What tells most is
the share of the step that light operations take. The time of a step alone says nothing: for a case that the
fit has not seen, a line through the times errs as much as the mean of all cases does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources

import torch

_LIBRARY = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "embedding"),
    *("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_scaled_dot_product", "_flash_attention"),
)
"""Beginnings of names: calls that compiled code makes as well, their backwards too."""

_LIGHT = frozenset(
    {"add", "sub", "rsub", "mul", "div", "neg", "abs", "sign", "reciprocal", "pow", "sqrt", "rsqrt", "square"}
    | {"clamp", "clamp_min", "clamp_max", "minimum", "maximum", "where", "masked_fill", "lerp", "addcmul"}
    | {"addcdiv", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"}
    | {"bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor", "isnan", "isinf", "floor", "ceil", "round"}
    | {"clone", "copy", "_to_copy", "cat", "stack", "repeat", "roll", "flip", "constant_pad_nd"}
    | {"tril", "triu"}
    | {"fill", "zero", "zeros", "ones", "full", "arange", "scalar_tensor", "zeros_like", "ones_like"}
    | {"full_like", "new_zeros", "new_ones", "new_full", "slice_backward", "select_backward"}
    | {"sum", "mean", "var", "var_mean", "std", "amax", "amin", "max", "min", "mse_loss", "mse_loss_backward"}
    | {"relu", "threshold_backward", "leaky_relu", "leaky_relu_backward", "hardtanh", "hardtanh_backward"}
    | {"native_dropout_backward"}
)
"""Names in ``aten``: arithmetic, comparisons, copies, sums.

Not what eager has one kernel for with much to do for each element (activations, normalisations, softmax,
random numbers, pooling): compiled code does as much. And nothing that is not known to be light.
"""

AROUND_S = 3e-6
"""Seconds around each operation that are saved with it: the dispatcher, autograd's node, Python.

With 2 to 4 us cases that the fit has not seen are predicted best, in two measurements of the table.
"""

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

    light_s: float | None = None
    """Seconds of fusible operations that do little for each element (arithmetic, copies, sums).

    With ``AROUND_S`` for each. Once they are fused nearly all of this time is saved. ``None`` if it was not
    measured.
    """

    all_s: float = 0.0
    """Seconds of all operations in the same step, which may have been a slow one."""

    def light_share(self, step_s: float) -> float | None:
        """Share of an eager step of ``step_s`` seconds that light operations take; ``None`` if not known."""
        return None if self.light_s is None else self.light_s / max(step_s, self.all_s)

    @classmethod
    def of(
        cls,
        ops: Mapping[str, int],
        elements: Mapping[str, int],
        seconds: Mapping[str, float] | None = None,
        forward: tuple[Mapping[str, int], Mapping[str, int]] = ({}, {}),
        also_light: frozenset[str] = frozenset(),
    ) -> OpStatistics:
        """Count them.

        Args:
            ops: how often each operation ran, by names such as ``aten.mm.default``.
            elements: how many elements of tensors they read and made, by the same names.
            seconds: that they took, by the same names; none if it was not measured.
            forward: how often each ran in the forward, and how often of that where Dynamo captures none. The
                backward is taken to have the same share of these.
            also_light: names, such as ``bernoulli``, of other operations whose time compiled code saves.
        """
        names = _LIGHT | also_light

        def is_light(op: str) -> bool:
            return op.startswith("aten.") and _name(op).removesuffix("_") in names

        light, captured = _captured(is_light, *forward), _captured(_is_fusible, *forward)
        fusible = sum(times for op, times in ops.items() if _is_fusible(op))
        others = sum(ops.values()) - fusible
        light_s, around_s = None, AROUND_S * sum(times for op, times in ops.items() if is_light(op))
        if seconds:
            light_s = light * (around_s + sum(took for op, took in seconds.items() if is_light(op)))
        return cls(
            fusible=round(captured * fusible),
            others=round(_captured(lambda op: not _is_fusible(op), *forward) * others),
            batch_norm=sum(n for op, n in elements.items() if "batch_norm" in op),
            light_s=light_s,
            all_s=sum(seconds.values()) + around_s if seconds else 0.0,
        )


def _captured(
    counts: Callable[[str], bool], everywhere: Mapping[str, int], outside: Mapping[str, int]
) -> float:
    """Share of the forward's operations of one sort that Dynamo captures."""
    n = sum(times for op, times in everywhere.items() if counts(op))
    return 1 - sum(times for op, times in outside.items() if counts(op)) / n if n else 1.0


def _name(op: str) -> str:
    return op.split(".")[1] if "." in op else op


def _is_fusible(op: str) -> bool:
    return _name(op) not in _NO_WORK and not _name(op).startswith(_LIBRARY) and not _is_view(op)


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

    ``share + light * light time / time + density * sqrt(fusible / time)
    + (batch_norm_ms * millions of elements - call_ms) / time``;
    the speed-up that follows is kept between the least and the most that was measured. All but the counts and
    ``rms`` are fitted; of ``light`` and ``density`` the one is 0 with which cases that the fit has not seen
    are predicted worse.
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

    light: float = 0.0
    """Share of the time of light operations that is saved."""

    usual_light: float = 0.0
    """Share of the eager step, for a step of which it is not known."""

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
        share = None if ops is None else ops.light_share(step_s)
        light = self.usual_light if share is None else share
        saved = self.share + self.light * light + self.density * math.sqrt(fusible / ms)
        saved += (self.batch_norm_ms * batch_norm - self.call_ms) / ms
        return max(self.least, 1 / max(1 - saved, 1 / self.most))


def _load() -> dict[str, Gain]:
    text = resources.files(__package__).joinpath("prior.json").read_text(encoding="utf-8")
    return {plan: Gain(**gain) for plan, gain in json.loads(text)["gains"].items()}


PRIOR = _load()
"""By the name of the scope in the suite: ``step``, ``step+optimizer``, ``regions+optimizer``, ..."""
