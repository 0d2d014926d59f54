"""Batches of tensors that are more than tensors: as of image libraries that keep where an image is from."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded
from tests.test_shapes import Counting


class Labelled(Tensor):
    """As images of libraries are that keep more than numbers with a tensor."""


class TakesLabelled(Net):
    """Its batches are what ``kind`` makes of them, or the step makes them plain."""

    makes_plain = False

    def __init__(self) -> None:
        super().__init__()
        self.kinds = list[str]()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [each.as_subclass(Labelled) for each in batch]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = (each.as_subclass(Tensor) for each in batch) if self.makes_plain else batch
        loss = F.cross_entropy(self(x), y)
        self.kinds.append(type(loss).__name__)
        return loss


class TakesLabelledMakesPlain(TakesLabelled):
    makes_plain = True


@pytest.mark.parametrize("options", [{}, {"threshold": 0}, {"scope": "step"}], ids=str)
@pytest.mark.parametrize("case", [TakesLabelled, TakesLabelledMakesPlain])
def test_batches_of_a_subclass_of_tensor_are_declined_before_anything_is_compiled(
    case: type[TakesLabelled], options: dict[str, Any]
) -> None:
    """Compiled code has no answer to its operations: it would raise in its first run, after the wait."""
    backend = Counting()
    callback = hot(backend=backend, **options)
    plain, model = seeded(case), seeded(case)
    fit(plain, max_epochs=1)
    fit(model, [callback], max_epochs=1)
    assert_same(plain, model, tolerance=0)
    assert model.kinds == plain.kinds
    assert callback.report.phase == "declined"
    assert "batch.0 is of type Labelled" in callback.report.reason
    assert backend.graphs == 0


def test_blocks_are_compiled_where_the_step_makes_such_tensors_plain() -> None:
    backend = Counting()
    callback = hot(backend=backend, scope="regions")
    fit(seeded(TakesLabelledMakesPlain), [callback], max_epochs=1)
    assert callback.report.phase in ("settling", "steady")
    assert backend.graphs > 0
