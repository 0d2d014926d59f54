"""The engine under test: the stand-in on a CPU, and the real TransformerEngine where it can run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch


@dataclass(frozen=True, kw_only=True)
class Engine:
    """TransformerEngine, or what stands in for it, and where its layers live."""

    te: ModuleType
    recipes: ModuleType
    device: str

    def delayed_scaling(self) -> Any:
        return self.recipes.DelayedScaling(amax_history_len=4)

    def reset(self) -> None:
        """Forget the scales of all earlier models."""
        importlib.import_module(f"{self.te.__name__}.quantization").FP8GlobalStateManager.reset()


@pytest.fixture(autouse=True)
def waits_are_no_errors() -> Iterator[None]:
    """A test that makes them errors, and fails, would fail all after it."""
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    torch._dynamo.reset()
    if request.param == "real":
        found = _real_engine()
    else:
        te, recipes = request.getfixturevalue("te"), request.getfixturevalue("recipes")
        found = Engine(te=te, recipes=recipes, device="cpu")
    found.reset()
    yield found
    found.reset()
    torch._dynamo.reset()


def _real_engine() -> Engine:
    if not torch.cuda.is_available():
        pytest.skip("the real TransformerEngine needs a CUDA device, and there is none")
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        pytest.skip(f"FP8 needs compute capability 8.9 or later, this device has {capability}")
    try:
        te = importlib.import_module("transformer_engine.pytorch")
        recipes = importlib.import_module("transformer_engine.common.recipe")
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"TransformerEngine cannot be imported ({str(error).splitlines()[:1]})")
    if not hasattr(te, "autocast"):
        pytest.skip("TransformerEngine is too old for these tests: it has no te.autocast")
    return Engine(te=te, recipes=recipes, device="cuda")
