"""Functions of TorchScript in a step: compiled code computes what they do, not what their Python says."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hotcompile.swap.tracing.scripted_functions import is_as_written
from tests.hot import Counting, assert_proven, assert_same, hot
from tests.models import Net, fit, seeded


def shift(x: Tensor) -> Tensor:
    return x + 0.1


@torch.jit.script
def shifted(x: Tensor) -> Tensor:
    return shift(x)


@torch.jit.script
def scaled(x: Tensor, by: float = 0.5) -> Tensor:
    for _ in range(2):
        if x.dim() > 1:
            x = F.gelu(x * by)
    return x


@torch.jit.script
def both(x: Tensor) -> Tensor:
    return shift(scaled(x))


def shift(x: Tensor) -> Tensor:  # type: ignore[no-redef]  # noqa: F811
    return x.unsqueeze(1) * 3.0


TABLE = {"by": 0.5}


def _by_table(x: Tensor) -> Tensor:
    return x * TABLE["by"]


traced = torch.jit.trace(_by_table, torch.ones(2, 8))
TABLE["by"] = 3.0

HELPERS = types.SimpleNamespace(shifted=shifted)
FUNCTIONS = {"scripted": shifted, "calls": both, "traced": traced, "as written": scaled}


class Calls(Net):
    """Calls one of them on its way, found in one of several places."""

    held = shifted

    def __init__(self, function: Any, way: str = "attribute") -> None:
        super().__init__()
        self.way, self.function = way, function

    def moved(self, x: Tensor) -> Tensor:
        if self.way == "global":
            return shifted(x)
        if self.way == "namespace":
            return HELPERS.shifted(x)
        return self.held(x) if self.way == "class" else self.function(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(self.moved(batch[0])), batch[1])
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize(
    ("name", "breaks"), [("scripted", 1), ("calls", 1), ("traced", 1), ("as written", 0)]
)
def test_what_torchscript_computes_is_computed(name, breaks):
    def model():
        return seeded(lambda: Calls(FUNCTIONS[name]))

    plain, watched, callback = model(), model(), hot(scope="step", compile_optimizer=False)
    fit(plain)
    fit(watched, [callback])
    assert_same(plain, watched)
    assert callback.report.graph_breaks == breaks
    assert_proven(callback.report)


@pytest.mark.parametrize("way", ["global", "namespace", "class"])
@pytest.mark.parametrize("scope", ["step", "regions"])
def test_wherever_it_is_found(way, scope):
    def model():
        return seeded(lambda: Calls(None, way))

    plain, watched, callback = model(), model(), hot(scope=scope, compile_optimizer=False)
    fit(plain)
    fit(watched, [callback])
    assert_same(plain, watched)
    assert_proven(callback.report)


def test_the_receipt_says_what_ended_the_graph():
    callback = hot(scope="step", compile_optimizer=False)
    fit(seeded(lambda: Calls(shifted)), [callback])
    assert "function of TorchScript" in str(callback.report.to_dict())


def test_what_the_user_compiles_is_as_without_the_callback():
    backend = Counting()
    out = torch.compile(lambda x: scaled(x) + 1, backend=backend)(torch.ones(2, 2))
    torch.testing.assert_close(out, scaled(torch.ones(2, 2)) + 1)
    assert backend.graphs == 1


def test_what_is_as_written():
    assert is_as_written(scaled)
    assert not is_as_written(shifted)
    assert not is_as_written(both)
    assert not is_as_written(traced)
