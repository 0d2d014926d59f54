"""Ways to train the same case: eager, compiled up front in the usual manners, and with the callback."""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hotcompile.bench.cases import Case
from lightning_hotcompile.callback import HotCompile
from lightning_hotcompile.plan.regions import find_regions
from lightning_hotcompile.swap.steplog import recorded_logs, stand_ins

Prepared = tuple[LightningModule, list[Callback]]


def eager(case: Case, options: dict[str, Any]) -> Prepared:
    """As the user wrote it."""
    return case.model(), []


def whole_model(case: Case, options: dict[str, Any]) -> Prepared:
    """``model.compile()``: what many try first; it compiles only what goes through ``self(x)``."""
    model = case.model()
    model.compile()
    return model, []


def blocks(case: Case, options: dict[str, Any]) -> Prepared:
    """``.compile()`` on each repeated block, or on the large children where nothing repeats.

    On a class of torch's own (``nn.Sequential``) it does nothing, as for everybody who does this.
    """
    model = case.model()
    compile_blocks(model)
    return model, []


def compile_blocks(model: LightningModule) -> None:
    """``.compile()`` on each of :func:`block_names`."""
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


def step(case: Case, options: dict[str, Any]) -> Prepared:
    """``training_step`` by ``torch.compile``, its log calls made afterwards."""
    model = case.model()
    compile_step(model)
    return model, []


def compile_step(model: LightningModule) -> None:
    """Replace ``training_step``.

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


class CompiledOptimizer(Callback):
    """Compiles the optimizer's step from the first one on, its learning rates as tensors."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace ``step`` on each optimizer."""
        compile_optimizers(trainer)


def compile_optimizers(trainer: Trainer) -> None:
    """Replace ``step`` on each optimizer."""
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


def step_and_optimizer(case: Case, options: dict[str, Any]) -> Prepared:
    """Both."""
    model, _ = step(case, options)
    return model, [CompiledOptimizer()]


class FusedOptimizers(Callback):
    """Torch's fused kernels update the weights, whoever computes the gradients."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From the first step on."""
        fuse_optimizers(trainer)


def eager_and_fused(case: Case, options: dict[str, Any]) -> Prepared:
    """Eager with ``fused=True`` on its optimizers, which needs no compiler."""
    return case.model(), [FusedOptimizers()]


def step_and_fused(case: Case, options: dict[str, Any]) -> Prepared:
    """The compiled step, with ``fused=True`` on the optimizers."""
    model, _ = step(case, options)
    return model, [FusedOptimizers()]


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

ARMS: dict[str, Callable[[Case, dict[str, Any]], Prepared]] = {
    EAGER: eager,
    "model": whole_model,
    "blocks": blocks,
    "step": step,
    "step+optimizer": step_and_optimizer,
    EAGER_FUSED: eager_and_fused,
    "step+fused": step_and_fused,
    HOTCOMPILE: hotcompile,
}
"""All arms, by name."""

USUAL = tuple(arm for arm in ARMS if not arm.endswith("+fused"))
"""Those of a suite that names none."""

TRAININGS = {**ARMS, PREPARING: preparing}
"""All that can be trained: the arms, and what is not measured."""


def _step_and_optimizers(trainer: Trainer) -> None:
    compile_step(trainer.lightning_module)
    compile_optimizers(trainer)


def _step_and_fused(trainer: Trainer) -> None:
    compile_step(trainer.lightning_module)
    fuse_optimizers(trainer)


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


IN_PLACE: dict[str, Callable[[Trainer], None]] = {
    EAGER: lambda trainer: None,
    "model": lambda trainer: trainer.lightning_module.compile(),
    "blocks": lambda trainer: compile_blocks(trainer.lightning_module),
    "step": lambda trainer: compile_step(trainer.lightning_module),
    "step+optimizer": _step_and_optimizers,
    "step+fused": _step_and_fused,
}
"""The same ways, put in place while a model trains."""
