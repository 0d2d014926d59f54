"""torch.compile for PyTorch Lightning: once the step is hot, proven, and only where it pays."""

from lightning_hotcompile.callback import HotCompile
from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.errors import HotCompileError
from lightning_hotcompile.plan.planner import CompilePlan, plan_compile
from lightning_hotcompile.receipt.report import Report
from lightning_hotcompile.watch.detector import StepDetector
from lightning_hotcompile.watch.signature import StepSignature

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
