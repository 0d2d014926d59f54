"""Ways to train the same case: eager, compiled up front in the usual manners, and with the callback."""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hotcompile.bench.cases import Case
from lightning_hotcompile.callback import HotCompile
from lightning_hotcompile.plan.regions import find_regions
from lightning_hotcompile.swap.steplog import recorded_logs, stand_ins

Prepared = tuple[LightningModule, list[Callback]]


class AtStart(Callback):
    """Changes a Trainer when training starts."""

    def __init__(self, change: Callable[[Trainer], None]) -> None:
        self._change = change

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before the first step."""
        self._change(trainer)


@dataclass(frozen=True, kw_only=True)
class ByHand:
    """A way to train without the callback: what is changed of the model as the user wrote it."""

    model: Callable[[LightningModule], None] | None = None
    optimizers: Callable[[Trainer], None] | None = None
    """Changes the Trainer's optimizers, which are there once training starts."""

    def prepared(self, case: Case, options: dict[str, Any]) -> Prepared:
        """The case in this way, from its first step on."""
        model = case.model()
        if self.model is not None:
            self.model(model)
        return model, [] if self.optimizers is None else [AtStart(self.optimizers)]

    def put(self, trainer: Trainer) -> None:
        """The same, put in place while a model trains."""
        if self.model is not None:
            self.model(trainer.lightning_module)
        if self.optimizers is not None:
            self.optimizers(trainer)


def compile_blocks(model: LightningModule) -> None:
    """``.compile()`` on each of :func:`block_names`.

    On a class of torch's own (``nn.Sequential``) it does nothing, as for everybody who does this.
    """
    for name in block_names(model):
        model.get_submodule(name).compile()


def block_names(model: LightningModule) -> list[str]:
    """The topmost modules of a class of the user's own that occurs more than once; else the regions."""
    own = {
        name: type(module)
        for name, module in model.named_modules()
        if name and list(module.children()) and not type(module).__module__.startswith("torch.")
    }
    times, found = Counter(own.values()), list[str]()
    for name, kind in own.items():
        if times[kind] > 1 and not any(name.startswith(f"{above}.") for above in found):
            found.append(name)
    regions, _ = find_regions(model)
    return found or [b.name for b in regions if b.repeated] or [b.name for b in regions]


def compile_step(model: LightningModule) -> None:
    """``training_step`` by ``torch.compile``, its log calls made afterwards.

    Raises:
        NotImplementedError: the model steps its optimizers by hand.
    """
    if not model.automatic_optimization:
        raise NotImplementedError("manual optimization: training_step holds the optimizers' steps")
    original, methods = type(model).training_step, stand_ins(model)
    # The number of the batch stays 0: no case uses it, and each new number could mean a recompile.
    body = torch.compile(lambda module, batch: original(module, batch, 0))

    @functools.wraps(original)
    def training_step(module: LightningModule, batch: Any, batch_idx: int) -> Any:
        with recorded_logs(module, methods):
            return body(module, batch)

    model.training_step = types.MethodType(training_step, model)  # type: ignore[method-assign]


def compile_optimizers(trainer: Trainer) -> None:
    """Compile the ``step`` of each optimizer, with learning rates as tensors."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]))  # a new float would mean a recompile
        _compile_optimizer(optimizer)


def _compile_optimizer(optimizer: torch.optim.Optimizer) -> None:
    body = torch.compile(optimizer.step)

    def optimizer_step(closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        body()
        return loss

    optimizer.step = optimizer_step  # type: ignore[method-assign]


def fuse_optimizers(trainer: Trainer) -> None:
    """Torch's fused kernels from now on, as ``fused=True`` asks for.

    Raises:
        NotImplementedError: an optimizer has none.
    """
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    if any("fused" not in group for group in groups):
        raise NotImplementedError("an optimizer has no fused kernel")
    for group in groups:
        group["fused"], group["foreach"] = True, False


def hotcompile(case: Case, options: dict[str, Any]) -> Prepared:
    """The callback."""
    return case.model(), [HotCompile(**options)]


def preparing(case: Case, options: dict[str, Any]) -> Prepared:
    """The callback, compiling whatever it costs, as the other arms do; what it finds is kept for later."""
    return case.model(), [HotCompile(**{**options, "cost_gate": False, "prewarm": False})]


EAGER, EAGER_FUSED = "eager", "eager+fused"
HOTCOMPILE, PREPARING = "hotcompile", "preparing"

UNCOMPILED = (EAGER, EAGER_FUSED)
"""Arms that compile nothing: what the compiler's cache holds makes no difference to them."""

BY_HAND = {
    EAGER: ByHand(),
    # What many try first; it compiles only what goes through ``self(x)``.
    "model": ByHand(model=lambda model: model.compile()),
    "blocks": ByHand(model=compile_blocks),
    "step": ByHand(model=compile_step),
    "step+optimizer": ByHand(model=compile_step, optimizers=compile_optimizers),
    EAGER_FUSED: ByHand(optimizers=fuse_optimizers),
    "step+fused": ByHand(model=compile_step, optimizers=fuse_optimizers),
}
"""All ways without the callback, by name."""

IN_PLACE = {name: way.put for name, way in BY_HAND.items() if name != EAGER_FUSED}
"""Those that the callback's steps are timed against in one process."""

ARMS = {**{name: way.prepared for name, way in BY_HAND.items()}, HOTCOMPILE: hotcompile}
"""All arms, by name."""

USUAL = tuple(arm for arm in ARMS if not arm.endswith("+fused"))
"""Those of a suite that names none."""

TRAININGS = {**ARMS, PREPARING: preparing}
"""All that can be trained: the arms, and what is not measured."""
