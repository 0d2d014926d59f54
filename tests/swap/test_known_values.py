"""Shapes that depend on values of tensors that a step makes itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded


class Counts(Net):
    """As an adaptive solver of torchdiffeq begins, if it is told of no times at which it has to stop."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        times = torch.cat([torch.tensor([]), torch.tensor([])])
        counts = times.unique(return_counts=True)[1]
        if (counts > 1).any():
            raise ValueError("a time is there twice")
        return self.loss(batch)


class Mask(Net):
    """Of a list of objects, of which this batch has none."""

    flags: tuple[bool, ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        chosen = batch[0][: len(self.flags)][torch.tensor(self.flags, dtype=torch.bool)]
        return self.loss(batch) + chosen.sum()


class MaskOfOne(Mask):
    flags = (True,)


class Places(Mask):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + batch[0][torch.tensor([1]).nonzero().squeeze(1)].mean()


@pytest.mark.parametrize("model_class", [Counts, Mask, MaskOfOne, Places])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_step_that_knows_what_a_shape_depends_on_is_compiled(model_class: type[Net], backend: str) -> None:
    callback = hot(scope="step", backend=backend, compile_optimizer=False)
    plain, model = seeded(model_class), seeded(model_class)
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    assert_proven(callback.report)
    assert callback.report.graph_breaks > 0  # where the shape is made


def test_whole_numbers_as_an_index_end_no_graph() -> None:
    class Rows(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) + batch[0][torch.tensor([1])].mean()

    callback = hot(scope="step", compile_optimizer=False)
    fit(seeded(Rows), [callback])
    assert_proven(callback.report)
    assert not callback.report.graph_breaks
