"""Every option of the callback, documented in place and checked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from lightning_hotcompile.errors import ConfigError, near_names

STAGES = ("train", "validate", "test", "predict")
SCOPES = ("auto", "step", "regions", "module", "pattern")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
CUDA_GRAPHS = "triton.cudagraphs"
"""Inductor's option."""

CUDA_GRAPHS_BACKEND = "cudagraphs"
"""Dynamo's backend that has nothing else."""


def uses_cuda_graphs(mode: str | None, options: Mapping[str, Any] | None) -> bool:
    """Whether the callback's compiled code records CUDA graphs: if these ask for it, and else never."""
    return mode in CUDA_GRAPH_MODES or bool((options or {}).get(CUDA_GRAPHS))


def _refuse(name: str, value: object, allowed: str) -> None:
    raise ConfigError(f"{name}={value!r} is not allowed: {allowed}.")


def _one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    if not any(value is item or (type(value) is type(item) and value == item) for item in allowed):
        hint = near_names(value, [a for a in allowed if isinstance(a, str)]) if isinstance(value, str) else ""
        _refuse(name, value, f"use one of {', '.join(map(repr, allowed))}{hint}")


def _names(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        _refuse(name, value, f"give a list of names, for example {name}=['net.blocks.*']")
    assert isinstance(value, Sequence)
    for item in value:
        if not isinstance(item, str) or not item.strip():
            _refuse(name, value, f"each entry is a non-empty string, but {item!r} is not")
    return tuple(value)


def whole_number(name: str, value: int, least: int) -> int:
    """The value of an option that is a whole number.

    Raises:
        ConfigError: it is none, or less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        _refuse(name, value, f"give a whole number of {least} or more")
    return value


@dataclass(frozen=True, kw_only=True)
class HotCompileConfig:
    """The options of :class:`~lightning_hotcompile.HotCompile`, checked at construction.

    All values are plain types, so that they can come from YAML, Hydra or LightningCLI.

    Raises:
        ConfigError: a value is not allowed, or two options contradict each other.
    """

    threshold: int = 10
    """Identical steps before a step signature is hot; 0 compiles before the first step."""

    scope: str = "auto"
    """What is compiled: ``auto``, ``step``, ``regions``, ``module`` or ``pattern``."""

    targets: Sequence[str] = ()
    """Globs over module names (``net.blocks.*``), or functions as ``package.module:function``."""

    keep_eager: Sequence[str] = ()
    """Globs over module names or class names that stay eager in every scope."""

    compile_anyway: Sequence[str] = ()
    """Globs over module names or class names that are compiled though they would be kept eager."""

    backend: str | Callable[..., Any] = "inductor"
    """Name of a Dynamo backend, or the backend itself."""

    mode: str | None = None
    """Inductor's mode: ``default``, ``reduce-overhead``, ``max-autotune``, ``max-autotune-no-cudagraphs``."""

    dynamic: bool | str | None = "auto"
    """Dynamic shapes: ``True``, ``False``, or ``"auto"``/``None``: batches that vary in a dimension are one
    family, compiled once, and Dynamo's own rule decides about the rest."""

    fullgraph: bool = False
    """Refuse graph breaks: a region that has one goes back to eager."""

    options: Mapping[str, Any] | None = field(default=None, hash=False)
    """Inductor's options, passed through; not together with ``mode``."""

    cost_gate: bool = True
    """Compile only if the forecast says that it pays; ``False`` compiles whenever a step is hot."""

    min_speedup: float = 1.02
    """Measured speed-up (eager time / compiled time) below which the flip is taken back."""

    parity: str = "auto"
    """If compiled code differs from eager: ``auto`` runs eagerly, ``warn``, ``raise``; ``off`` = no check."""

    random: str = "eager"
    """Random numbers of compiled code: ``eager`` draws those of a run without the callback, ``backend``
    leaves them to Inductor (other numbers; on a GPU sometimes faster)."""

    stages: Sequence[str] = ("train",)
    """In which stages steps are watched and compiled: ``train``, ``validate``, ``test``, ``predict``."""

    compile_optimizer: bool | str = "auto"
    """Compile the optimizer's step too; ``"auto"`` decides by scope and optimizer."""

    fused_optimizer: bool = True
    """On a CPU, where Adam, AdamW, Adagrad or SGD run torch's loop over tensors since nobody has chosen
    otherwise: try torch's own fused kernel, which needs no compiler, in place of compiling the optimizer's
    step. Not where ``compile_optimizer`` is ``True`` or ``False``."""

    max_flips: int = 3
    """How often a signature may be compiled, the attempts after it was taken back included."""

    max_signatures: int = 4
    """How many step signatures may be compiled in one run."""

    compile_timeout: float | None = 600.0
    """Seconds that compiling one piece of code may take, tracing included; then it is ended at the next place
    where torch can be interrupted, and its region stays eager. ``None`` = no limit. On several ranks at most
    half of the process group's timeout."""

    prewarm: bool | str = "auto"
    """Let a child process fill the compiler's cache while training goes on; ``"auto"`` = if there is a
    second core or an accelerator, and 2 GiB of free memory. With Inductor on a POSIX system only. Where
    training uses all cores, it gives up one meanwhile. None is started where an earlier run has left its
    compiled code, and with ``"auto"`` none where the forecast finds that it would be done too late, or that
    compiling in the step would save 1% of what is left of the run."""

    keep_freed_memory: bool = True
    """On a CPU with glibc, where steps give memory back to the system and take it again: let the process keep
    freed blocks of less than 32 MiB."""

    store: str | Path | None = "auto"
    """Folder for what later runs can use: verdicts and compiled code. ``"auto"`` = the user's cache
    folder, ``None`` = no memory between runs."""

    on_error: str = "eager"
    """After an error of the compiler or of this callback: ``eager`` goes on, ``raise`` raises."""

    log_prefix: str | None = "hotcompile"
    """Prefix of the scalars in the Trainer's loggers; ``None`` writes nothing to them."""

    verbose: bool = False
    """Print the plan and each event as they happen, and the whole receipt at the end."""

    event_log: str | Path | None = None
    """File to which each event is appended as one JSON line."""

    def __post_init__(self) -> None:
        for name in ("targets", "keep_eager", "compile_anyway"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        whole_number("threshold", self.threshold, least=0)
        whole_number("max_flips", self.max_flips, least=1)
        whole_number("max_signatures", self.max_signatures, least=1)
        _one_of("scope", self.scope, SCOPES)
        _one_of("mode", self.mode, (None, *MODES))
        _one_of("dynamic", self.dynamic, ("auto", True, False, None))
        _one_of("compile_optimizer", self.compile_optimizer, ("auto", True, False))
        _one_of("prewarm", self.prewarm, ("auto", True, False))
        _one_of("random", self.random, ("eager", "backend"))
        _one_of("parity", self.parity, ("auto", "off", "warn", "raise"))
        _one_of("on_error", self.on_error, ("eager", "raise"))
        for name in ("fullgraph", "cost_gate", "fused_optimizer", "keep_freed_memory", "verbose"):
            _one_of(name, getattr(self, name), (True, False))
        object.__setattr__(self, "stages", _names("stages", self.stages))
        if not self.stages or not set(self.stages) <= set(STAGES):
            _refuse("stages", self.stages, f"name one or more of {', '.join(map(repr, STAGES))}")
        for name in ("store", "event_log"):
            if isinstance(path := getattr(self, name), PathLike):
                object.__setattr__(self, name, fspath(path))
        self._check_backend()
        self._check_numbers_and_names()
        self._check_together()

    def _check_backend(self) -> None:
        if isinstance(self.backend, str):
            if not self.backend:
                _refuse("backend", self.backend, "name a Dynamo backend, for example 'inductor'")
        elif not callable(self.backend):
            _refuse("backend", self.backend, "give the name of a Dynamo backend or a callable")

    def _check_numbers_and_names(self) -> None:
        if isinstance(self.min_speedup, bool) or not isinstance(self.min_speedup, (int, float)):
            _refuse("min_speedup", self.min_speedup, "give a number, for example 1.02")
        if not 0 <= self.min_speedup < 100:
            _refuse("min_speedup", self.min_speedup, "give a ratio from 0 to below 100, for example 1.02")
        if self.compile_timeout is not None and (
            isinstance(self.compile_timeout, bool)
            or not isinstance(self.compile_timeout, (int, float))
            or not 0 < self.compile_timeout < float("inf")
        ):
            _refuse("compile_timeout", self.compile_timeout, "give seconds above 0, for example 600, or None")
        prefix = self.log_prefix
        if prefix is not None and not (isinstance(prefix, str) and prefix.strip("/")):
            _refuse("log_prefix", prefix, "give a non-empty name, for example 'hotcompile', or None")
        if self.store is not None and not (isinstance(self.store, str) and self.store):
            _refuse("store", self.store, "give 'auto', the path of a folder, or None")
        if self.event_log is not None and not (isinstance(self.event_log, str) and self.event_log):
            _refuse("event_log", self.event_log, "give the path of a file, or None")
        if self.options is not None and not isinstance(self.options, Mapping):
            _refuse("options", self.options, "give a mapping of Inductor options, or None")

    def _check_together(self) -> None:
        if self.mode is not None and self.options is not None:
            raise ConfigError(
                f"mode={self.mode!r} and options={dict(self.options)!r} contradict each other: "
                "torch.compile takes one of them; put the mode's settings into options."
            )
        if self.scope == "pattern" and not self.targets:
            raise ConfigError(
                "scope='pattern' needs targets: give globs over module names, for example "
                "targets=['net.blocks.*'], or functions as 'package.module:function'."
            )
        if self.scope in ("step", "regions") and self.targets:
            raise ConfigError(
                f"targets={list(self.targets)!r} have no meaning with scope={self.scope!r}: "
                "use scope='pattern', or remove targets."
            )

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether the chosen mode or backend records CUDA graphs."""
        return self.backend == CUDA_GRAPHS_BACKEND or uses_cuda_graphs(self.mode, self.options)

    @property
    def is_repeatable(self) -> bool:
        """Whether nothing is decided by the clock, so that equal trainings stay equal to the last bit."""
        kept = self.min_speedup == 0 and not self.cost_gate
        tries_kernels = self.fused_optimizer and self.compile_optimizer == "auto"
        return kept and self.prewarm is False and not tries_kernels and not self.times_kernels

    @property
    def times_kernels(self) -> bool:
        """Whether Inductor is asked to choose among kernels by their times."""
        tuned = [value for name, value in (self.options or {}).items() if name.startswith("max_autotune")]
        return "max-autotune" in (self.mode or "") or any(tuned)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all options, in order."""
        return tuple(f.name for f in dataclasses.fields(cls))
