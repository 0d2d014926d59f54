"""What is settled before the first step: whether this run can be compiled at all, and the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hotcompile.config import CUDA_GRAPHS_BACKEND, HotCompileConfig
from lightning_hotcompile.errors import ConfigError, HotCompileError, first_line
from lightning_hotcompile.plan.obstacles import differentiates_twice
from lightning_hotcompile.plan.planner import CompilePlan, other_scopes, plan_compile
from lightning_hotcompile.run import trainer_facts
from lightning_hotcompile.run.own_error import tell_of
from lightning_hotcompile.run.stages import STEP_METHOD, TRAIN
from lightning_hotcompile.swap.graphs.witness import check_backend
from lightning_hotcompile.swap.parity.clones import random_state_kept
from lightning_hotcompile.swap.ranks import Ranks
from lightning_hotcompile.swap.tracing.signal_handlers import comes_from_a_handler
from lightning_hotcompile.switch import switch

OPTIMIZERS_OF_RANKS = (
    "compile_optimizer=True is for one process: replicas that round differently would drift apart, and one "
    "rank may be eager where another is not"
)
"""What is told to who asks for it on several ranks."""

OPTIMIZERS_OF_CUDA_GRAPHS = (
    f"optimizers stay eager with backend={CUDA_GRAPHS_BACKEND!r}: gradients that a replayed backward has "
    "made are gone when the next graph is recorded"
)

Settled = tuple[CompilePlan | None, str | None]
"""The plan, and a reason to do nothing."""


def agree_on(
    settle: Callable[[], Settled], trainer: Trainer, config: HotCompileConfig, stage: str
) -> Settled:
    """What is settled on this rank, with a reason to do nothing that any rank may give.

    Models of others may raise anything when they are asked. That is a reason too, as an error of ours is
    in any step, unless ``on_error="raise"``.

    Raises:
        HotCompileError: the options are wrong for this model.
    """
    ranks = Ranks(config.threshold, alone=stage != TRAIN or trainer.world_size == 1)
    plan: CompilePlan | None = None
    try:
        plan, reason = settle()
    except Exception as error:  # the other ranks would wait for this one
        if isinstance(error, HotCompileError) or config.on_error == "raise" or comes_from_a_handler(error):
            ranks.agree_to_watch("none", first_line(error))
            raise
        reason = tell_of(error)
    return plan, ranks.agree_to_watch(plan.digest if plan else "none", reason)


def why_idle(trainer: Trainer, module: LightningModule) -> str | None:
    """Why nothing is watched in this run, or ``None``."""
    if switch() == "off":
        return "HOTCOMPILE=off"
    place = differentiates_twice(module, beside=trainer.callbacks)  # type: ignore[attr-defined]
    if place is not None:
        return f"{place} asks for create_graph: compiled code has no second derivative"
    return trainer_facts.why_not_supported(trainer, module)


def why_not_this_one(trainer: Trainer, callback: Callback) -> str | None:
    """Why this HotCompile leaves the work to another one of its Trainer, or to nobody; or ``None``."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    others = [c for c in callbacks if hasattr(c, "from_environment") and c is not callback]
    from_environment = _from_environment(callback)
    if from_environment and not all(map(_from_environment, others)):
        return "the Trainer has a HotCompile of its own"
    if callback not in callbacks:
        return "it is not in the Trainer's own list of callbacks"
    before = callbacks[: callbacks.index(callback)]
    # Of two from the environment the first came with a list of callbacks that another Trainer had before.
    if any(c in before and _from_environment(c) == from_environment for c in others):
        return "another HotCompile comes before this one in the Trainer's callbacks"
    return None


def why_not_this_stage(trainer: Trainer, config: HotCompileConfig, stage: str) -> str | None:
    """Why a stage beside training is not watched, or ``None``."""
    if stage == TRAIN:
        return None
    if trainer.world_size > 1:
        return f"{stage} is compiled in a single process only, this run has {trainer.world_size}"
    if stage == "predict" and config.uses_cuda_graphs:
        return "predictions are kept, but CUDA graphs overwrite their outputs at each replay"
    return None


def _from_environment(callback: Callback) -> bool:
    return bool(getattr(callback, "from_environment", False))


def plan_for(
    trainer: Trainer,
    module: LightningModule,
    config: HotCompileConfig,
    stage: str = TRAIN,
    *,
    fused: bool | None = None,
) -> CompilePlan:
    """The plan for a model under its Trainer.

    ``fused``: leave out optimizers with a fused kernel of torch's; ``None`` as the options say.

    Raises:
        TargetError: a target matches nothing.
        PlanError: the scope is not possible, or ``fullgraph`` meets islands.
        ConfigError: the backend is unknown, or CUDA graphs meet gradient accumulation.
    """
    check_backend(config.backend, config.mode, config.options)
    train = stage == TRAIN
    compile_optimizer, notes = _optimizers_wanted(trainer, config)
    if train:
        _refuse_graphs_that_accumulate(config, trainer_facts.accumulation(trainer))
        _refuse_graphs_of_steps_by_hand(config, module)
    with random_state_kept():  # a module may draw its weights where its description reads them, as Pyro's do
        plan = plan_compile(
            module,
            scope=config.scope,
            targets=config.targets,
            keep_eager=config.keep_eager,
            compile_anyway=config.compile_anyway,
            compile_optimizer=compile_optimizer,
            optimizers=trainer.optimizers if train else (),
            fused_optimizer=uses_fused_optimizers(trainer, config) if fused is None else fused,
            fullgraph=config.fullgraph,
            step=STEP_METHOD[stage],
        )
    return replace(plan, notes=(*plan.notes, *notes)) if train else plan


def _optimizers_wanted(trainer: Trainer, config: HotCompileConfig) -> tuple[bool | str, tuple[str, ...]]:
    """The option ``compile_optimizer``, or ``False`` where no optimizer can be compiled, with a note."""
    asked = config.compile_optimizer
    if trainer.world_size > 1:
        return False, (OPTIMIZERS_OF_RANKS,) if asked is True else ()
    if config.backend == CUDA_GRAPHS_BACKEND:
        return False, (OPTIMIZERS_OF_CUDA_GRAPHS,) if asked else ()
    return asked, ()


def other_plans(
    trainer: Trainer, module: LightningModule, config: HotCompileConfig, plan: CompilePlan
) -> list[CompilePlan]:
    """Plans that can be tried, the one by rule first, then the most promising ones; on one rank only.

    Other scopes have the optimizers compiled; then comes the present one with those for which torch has a
    fused kernel, and then other modes, of each plan.
    """
    if config.targets or trainer.world_size > 1:
        return [plan]
    whole = _with_optimizers(trainer, module, config, plan)
    if config.scope != "auto":
        return [plan, *whole]
    wanted = config.compile_optimizer if config.compile_optimizer != "auto" else True
    fused = uses_fused_optimizers(trainer, config)
    options = [replace(config, scope=scope, compile_optimizer=wanted) for scope in other_scopes(module, plan)]
    found = [plan_for(trainer, module, each, fused=fused) for each in options]
    scopes = [other for other in found if not other.is_empty]
    modes = other_modes(config, trainer_facts.device_type(module))
    lean = plan.without_optimizers()
    plans = (plan, *scopes, *([lean] if lean is not None else ()))
    return [plan, *scopes, *whole, *(replace(each, mode=mode) for mode in modes for each in plans)]


def _with_optimizers(
    trainer: Trainer, module: LightningModule, config: HotCompileConfig, plan: CompilePlan
) -> list[CompilePlan]:
    """The plan with the optimizers that it leaves to torch's fused kernels, if there are any."""
    if not uses_fused_optimizers(trainer, config):
        return []
    whole = plan_for(trainer, module, config, fused=False)
    return [replace(whole, adds_optimizers=True)] if whole.is_more_than(plan) else []


def other_modes(config: HotCompileConfig, device_type: str) -> tuple[str, ...]:
    """Inductor's modes that can be tried beside its usual one; none if a mode or options were asked for.

    On a GPU only, where Inductor has several kernels to choose from. None with CUDA graphs: a replay
    overwrites what the one before has returned, and no trial can show that a loss or a gradient is not
    looked at later.
    """
    asked_for = config.mode is not None or config.options is not None or config.backend != "inductor"
    return () if asked_for or device_type != "cuda" else ("max-autotune-no-cudagraphs",)


def uses_fused_optimizers(trainer: Trainer, config: HotCompileConfig) -> bool:
    """Whether torch's fused kernels may be tried; not on several ranks, which have to round in one way."""
    return config.fused_optimizer and config.compile_optimizer == "auto" and trainer.world_size == 1


def _refuse_graphs_of_steps_by_hand(config: HotCompileConfig, module: LightningModule) -> None:
    on_gpu = trainer_facts.device_type(module) == "cuda"
    if on_gpu and config.uses_cuda_graphs and not module.automatic_optimization:
        raise ConfigError(
            f"{_given(config)} records CUDA graphs, whose outputs are overwritten by the next replay: with "
            "manual optimization nobody knows when gradients are used. Leave it away, or use "
            "mode='max-autotune-no-cudagraphs'."
        )


def _given(config: HotCompileConfig) -> str:
    if config.backend == CUDA_GRAPHS_BACKEND:
        return f"backend={config.backend!r}"
    return "options={'triton.cudagraphs': True}" if config.mode is None else f"mode={config.mode!r}"


def _refuse_graphs_that_accumulate(config: HotCompileConfig, accumulation: int) -> None:
    if not config.uses_cuda_graphs or accumulation == 1:
        return
    remedy = "Leave that option away" if config.mode is None else "Use mode='max-autotune-no-cudagraphs'"
    raise ConfigError(
        f"{_given(config)} records CUDA graphs, which overwrite their outputs at each replay: with "
        f"accumulate_grad_batches={accumulation} gradients would be lost. {remedy}, or "
        "accumulate_grad_batches=1."
    )
