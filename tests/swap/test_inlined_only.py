"""What the package puts into a step is traced with the step, and is no code to compile by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hotcompile.swap.tracing.inlined_only import inlined_only
from tests.hot import STEP, Counting, assert_same, hot
from tests.models import Small, fit, seeded

PARTS = 12


class LogsInALoop(Small):
    """The branch ends a graph within a loop, so Dynamo leaves the whole step to Python."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        total = out.square().mean()
        for part in range(PARTS):
            value = out[:, part % out.shape[1]].square().mean()
            if value.item() > 1e9:
                raise ValueError("it diverges")
            self.log(f"part{part}", value, on_step=False, on_epoch=True)
            self.log_dict({f"also{part}": value}, on_step=False, on_epoch=True)
            total = total + value
        return total


def test_a_log_in_a_step_that_runs_eagerly_is_not_compiled() -> None:
    plain, model = seeded(LogsInALoop), seeded(LogsInALoop)
    backend = Counting()
    expected = fit(plain)
    callback = hot(**STEP, backend=backend)
    trainer = fit(model, [callback])
    for name, value in expected.callback_metrics.items():
        torch.testing.assert_close(trainer.callback_metrics[name], value)
    assert_same(plain, model)
    assert "grows from step to step" not in callback.report.to_text()
    assert backend.graphs == 1, callback.report.to_text()  # the module's forward, which has no loop


def _noted(notes: list[Any], name: str, value: Tensor) -> None:
    notes.append((name, _doubled(value)))


def _doubled(value: Tensor) -> Tensor:
    return value * 2


def _noted_in_a_loop(x: Tensor, notes: list[Any]) -> Tensor:
    for number in range(3):
        if x.sum().item() > 1e9:
            raise ValueError("it diverges")
        _noted(notes, str(number), x)
    return x + 1


def _noted_once(x: Tensor, notes: list[Any]) -> Tensor:
    _noted(notes, "once", x)
    return x + 1


@pytest.fixture(autouse=True, scope="module")
def _mark() -> None:
    inlined_only(_noted)


@pytest.mark.parametrize("after_a_reset", [False, True])
def test_where_its_caller_runs_eagerly_so_does_it_with_what_it_calls(after_a_reset: bool) -> None:
    if after_a_reset:
        torch._dynamo.reset()
    backend, notes = Counting(), list[Any]()
    torch.compile(_noted_in_a_loop, backend=backend)(torch.ones(2), notes)
    assert [name for name, _ in notes] == ["0", "1", "2"]
    assert backend.graphs == 0


def test_in_code_that_is_compiled_it_is_a_part_of_the_graph() -> None:
    backend, notes = Counting(), list[Any]()
    torch.compile(_noted_once, backend=backend, fullgraph=True)(torch.ones(2), notes)
    assert backend.graphs == backend.runs == 1
    torch.testing.assert_close(notes[0][1], torch.full((2,), 2.0))
