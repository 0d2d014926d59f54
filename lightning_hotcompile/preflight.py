"""What is settled before the first step: whether this run can be compiled at all, and the plan."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hotcompile import trainer_facts
from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.errors import ConfigError
from lightning_hotcompile.plan.planner import CompilePlan, plan_compile
from lightning_hotcompile.swap.witness import check_backend
from lightning_hotcompile.switch import is_switched_off


def why_idle(trainer: Trainer, module: LightningModule) -> str | None:
    """Why nothing is watched in this run, or ``None``."""
    return "HOTCOMPILE=off" if is_switched_off() else trainer_facts.why_not_supported(trainer, module)


def why_not_this_one(trainer: Trainer, callback: Callback) -> str | None:
    """Why another HotCompile of the same Trainer does the work, or ``None``."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    others = [c for c in callbacks if isinstance(c, type(callback)) and c is not callback]
    if _from_environment(callback):
        return "the Trainer has a HotCompile of its own" if others else None
    place = callbacks.index(callback)
    if any(not _from_environment(c) and callbacks.index(c) < place for c in others):
        return "another HotCompile comes before this one in the Trainer's callbacks"
    return None


def _from_environment(callback: Callback) -> bool:
    return bool(getattr(callback, "from_environment", False))


def plan_for(trainer: Trainer, module: LightningModule, config: HotCompileConfig) -> CompilePlan:
    """The plan for a model under its Trainer.

    Raises:
        TargetError: a target matches nothing.
        PlanError: the scope is not possible, or ``fullgraph`` meets islands.
        ConfigError: the backend is unknown, or CUDA graphs meet gradient accumulation.
    """
    check_backend(config.backend, config.mode, config.options)
    _refuse_graphs_that_accumulate(config, trainer_facts.accumulation(trainer))
    return plan_compile(
        module,
        scope=config.scope,
        targets=config.targets,
        keep_eager=config.keep_eager,
        compile_anyway=config.compile_anyway,
        compile_optimizer=_compile_optimizer(trainer, config),
        optimizers=trainer.optimizers,
        fullgraph=config.fullgraph,
    )


def _compile_optimizer(trainer: Trainer, config: HotCompileConfig) -> bool | str:
    """On several ranks only if asked for: nothing would make good what replicas round differently."""
    return (
        False if trainer.world_size > 1 and config.compile_optimizer == "auto" else config.compile_optimizer
    )


def _refuse_graphs_that_accumulate(config: HotCompileConfig, accumulation: int) -> None:
    if not config.uses_cuda_graphs or accumulation == 1:
        return
    if config.mode is None:
        given, remedy = "options={'triton.cudagraphs': True}", "Leave that option away"
    else:
        given, remedy = f"mode={config.mode!r}", "Use mode='max-autotune-no-cudagraphs'"
    raise ConfigError(
        f"{given} records CUDA graphs, which overwrite their outputs at each replay: with "
        f"accumulate_grad_batches={accumulation} gradients would be lost. {remedy}, or "
        "accumulate_grad_batches=1."
    )
