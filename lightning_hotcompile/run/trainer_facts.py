"""What the Trainer knows that a decision needs."""

from __future__ import annotations

import math

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch.nn.parallel import DistributedDataParallel

from lightning_hotcompile.either_lightning import ACCUMULATION_SCHEDULERS, TIMERS
from lightning_hotcompile.version import __version__

_STRATEGIES_THAT_OWN_THE_STEP = ("DeepSpeedStrategy", "XLAStrategy", "HPUStrategy")
_STRATEGIES_THAT_SHARD = ("FSDPStrategy", "ModelParallelStrategy")

_FIRST_BUCKET_BYTES = 2**20
"""Of DDP, at most: from there on a graph is cut."""


def remaining_batches(trainer: Trainer, batch_s: float | None) -> int | None:
    """Training batches that are left in this fit, ``None`` if nothing limits them.

    The smallest of what ``max_steps``, ``max_epochs`` and ``max_time`` (at ``batch_s`` seconds from one
    batch to the next) allow.
    """
    limits: list[float] = []
    each = _batches_per_step(trainer)
    if trainer.max_steps is not None and trainer.max_steps >= 0 and each is not None:
        limits.append((trainer.max_steps - trainer.global_step) * each)
    per_epoch = trainer.num_training_batches
    if trainer.max_epochs is not None and trainer.max_epochs >= 0 and math.isfinite(per_epoch):
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        limits.append((trainer.max_epochs - trainer.current_epoch) * per_epoch - done)
    seconds = _seconds_left(trainer)
    if seconds is not None and batch_s:
        limits.append(seconds / batch_s)
    return max(0, int(min(limits))) if limits else None


def _batches_per_step(trainer: Trainer) -> float | None:
    """Batches for each step that the Trainer counts; with manual optimization on average until now.

    Accumulation ends with the last batch of an epoch, so there may be fewer than it asks for.

    ``None`` where no step was counted yet: a GAN makes two in a batch, another model one in eight batches.
    """
    if trainer.lightning_module.automatic_optimization:
        each, per_epoch = trainer.accumulate_grad_batches, trainer.num_training_batches
        known = per_epoch > 0 and math.isfinite(per_epoch)
        return per_epoch / math.ceil(per_epoch / each) if known else each
    batches, steps = trainer.fit_loop.epoch_loop.batch_progress.total.completed, trainer.global_step
    return batches / steps if batches and steps else None


def _seconds_left(trainer: Trainer) -> float | None:
    for callback in _callbacks(trainer):
        if isinstance(callback, TIMERS):
            seconds = callback.time_remaining()
            return None if seconds is None else float(seconds)
    return None


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def why_not_supported(trainer: Trainer, module: LightningModule) -> str | None:
    """Why nothing can be compiled in this run, or ``None``."""
    strategy = type(trainer.strategy)
    names = {kind.__name__ for kind in strategy.__mro__}
    owner = next((name for name in _STRATEGIES_THAT_OWN_THE_STEP if name in names), None)
    if owner is not None:
        return f"{owner} runs the step in an engine of its own, which this callback does not change"
    sharding = next((name for name in _STRATEGIES_THAT_SHARD if name in names), None)
    if sharding is not None and not _shards_data_only(trainer.strategy):
        return f"{sharding} shards parameters and gathers them in hooks, which this version does not compile"
    if getattr(module, "_compiler_ctx", None) is not None:
        return "the LightningModule was compiled by the user already (torch.compile(model)): remove that"
    if module._compiled_call_impl is not None:
        return "the LightningModule was compiled by the user already (model.compile()): remove that"
    return None


def _shards_data_only(strategy: Strategy) -> bool:
    """FSDP2 by ``ModelParallelStrategy``, without tensor parallelism."""
    mesh = getattr(strategy, "device_mesh", None)
    return mesh is not None and mesh["tensor_parallel"].size() == 1


def device_type(module: LightningModule) -> str:
    """``cpu``, ``cuda`` or another: where the model is."""
    return str(module.device.type)


def versions() -> dict[str, str]:
    """Versions that a receipt has to name."""
    import platform

    import lightning
    import torch

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": str(lightning.__version__),
        "lightning_hotcompile": __version__,
    }


def accumulation(trainer: Trainer) -> int:
    """Batches per optimizer step: the most of any epoch, as a callback may change it on the way."""
    schedules: list[dict[int, int]] = [
        c.scheduling for c in _callbacks(trainer) if isinstance(c, ACCUMULATION_SCHEDULERS)
    ]
    return max([trainer.accumulate_grad_batches, *(n for s in schedules for n in s.values())])


def is_cut_into_buckets(trainer: Trainer) -> bool:
    """Whether DDP cuts what is compiled into pieces, so that gradients are reduced during the backward."""
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return False
    return sum(p.nbytes for p in model.parameters() if p.requires_grad) > _FIRST_BUCKET_BYTES
