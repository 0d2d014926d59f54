"""Fixtures that put stand-ins for packages with GPU kernels on the import path, for one test only."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FAKES = Path(__file__).parent / "fakes"


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """``transformer_engine.pytorch`` of ``tests/fakes``, in place of a real one that may be loaded."""
    real = _taken_out_of_sys_modules()
    monkeypatch.syspath_prepend(FAKES)
    yield importlib.import_module("transformer_engine.pytorch")
    _taken_out_of_sys_modules()
    sys.modules.update(real)


@pytest.fixture
def recipes(te: ModuleType) -> ModuleType:
    """``transformer_engine.common.recipe`` that belongs to ``te``."""
    return importlib.import_module("transformer_engine.common.recipe")


@pytest.fixture
def no_te(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TransformerEngine is neither loaded nor importable: an attempt to import it fails the test."""
    real = _taken_out_of_sys_modules()
    monkeypatch.setattr(sys, "meta_path", [_ImportFails(), *sys.meta_path])
    yield
    sys.modules.update(real)


class _ImportFails:
    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "transformer_engine":
            pytest.fail(f"{name} was imported")


def _taken_out_of_sys_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]
    return {name: sys.modules.pop(name) for name in names}
