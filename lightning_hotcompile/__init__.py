"""torch.compile for PyTorch Lightning: once the step is hot, proven, and only where it pays."""

import importlib as _importlib
import typing as _typing

from lightning_hotcompile.version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from lightning_hotcompile.callback import HotCompile
    from lightning_hotcompile.config import HotCompileConfig
    from lightning_hotcompile.errors import HotCompileError
    from lightning_hotcompile.plan.planner import CompilePlan, plan_compile
    from lightning_hotcompile.receipt.report import Report
    from lightning_hotcompile.watch.detector import StepDetector
    from lightning_hotcompile.watch.signature import StepSignature
else:
    # Each is imported when it is first asked for: the help of the command `hotcompile` and its answer
    # to a wrong option would wait for torch otherwise.
    _HOMES = {
        "CompilePlan": "plan.planner",
        "HotCompile": "callback",
        "HotCompileConfig": "config",
        "HotCompileError": "errors",
        "Report": "receipt.report",
        "StepDetector": "watch.detector",
        "StepSignature": "watch.signature",
        "plan_compile": "plan.planner",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            home = _importlib.import_module(f"{__name__}.{_HOMES[name]}")
        except (ImportError, AttributeError, KeyError) as error:
            # `from lightning_hotcompile import HotCompile` would hide an AttributeError, and its cause.
            if isinstance(error, ImportError) and not (error.name or "").startswith("torch."):
                raise
            torch_version = _importlib.import_module("torch").__version__
            raise ImportError(
                f"lightning_hotcompile {__version__} does not know torch {torch_version} "
                f"({type(error).__name__}: {error}): a newer version of lightning_hotcompile may, "
                "or install torch 2.13.",
                name=getattr(error, "name", None),
            ) from error
        found = getattr(home, name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})


__all__ = [
    "CompilePlan",
    "HotCompile",
    "HotCompileConfig",
    "HotCompileError",
    "Report",
    "StepDetector",
    "StepSignature",
    "plan_compile",
]
