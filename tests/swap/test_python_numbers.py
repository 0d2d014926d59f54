"""Python numbers that change from step to step: compiled code goes with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.tracing.moving_numbers import MOVES
from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded

FUNCTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "clamp": lambda x, s: x.clamp(max=s),
    "clamp both ways": lambda x, s: x.clamp(-s, s) * s,
    "masked_fill": lambda x, s: x.masked_fill(x > s, s) * x,
    "full_like": lambda x, s: torch.full_like(x, s) * x + x.clamp(max=s),
    "product": lambda x, s: (x * s).sin() * s + s,
}


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_forward_and_backward_are_those_of_eager(
    function: Callable[[Tensor, float], Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With caches that are empty, and again with what is in them then."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        torch._dynamo.reset()
        compare(function)


def compare(function: Callable[[Tensor, float], Tensor]) -> None:
    witness = Witness("inductor")
    compiled = CompiledFunction(function, witness.backend_for("region"), dynamic=None, fullgraph=False)
    for number in (0.1, 0.35, 0.75):  # the second is compiled for any number, the third runs that
        results: list[tuple[Tensor, Tensor | None]] = []
        for call in (function, compiled.compile):
            x = torch.linspace(-1, 1, 12, requires_grad=True)
            with compiling_allowed(suppress_errors=True):
                out = call(x, number)
            out.sum().backward()
            results.append((out.detach(), x.grad))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    assert witness.watch.total_runs == 3


class Anneals(Net):
    """A rate that is lowered from step to step."""

    rate = 0.5

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss((nn.functional.dropout(x, self.rate), y))

    def on_train_batch_end(self, *_: Any) -> None:
        self.rate *= 0.9


@pytest.mark.slow
def test_a_training_with_a_number_that_is_annealed_is_as_without() -> None:
    models: list[pl.LightningModule] = []
    callback = hot(backend="inductor", scope="step", store=None, on_error="eager")
    for callbacks in ([], [callback]):
        models.append(seeded(Anneals))
        fit(models[-1], callbacks, max_steps=30, max_epochs=-1)
    (step,) = [region for region in callback.report.regions if region.kind == "step"]
    assert 1 < step.runs <= step.graphs <= 4, "a dropout needs a plain number: soon given up"
    assert step.note == f"{MOVES}: module.rate"
    assert_same(*models)
