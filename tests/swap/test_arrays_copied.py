"""Tensors that a step makes of numpy arrays."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded


class Masked(Net):
    """As transformers' Wav2Vec2 makes its mask."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = np.arange(len(batch[0])) % 2 == 0
        made = torch.tensor(mask, dtype=torch.bool)
        assert made.dtype == torch.bool
        made[0] = False  # the array is as it was
        assert mask[0]
        return self.loss((torch.where(made[:, None], batch[0], 0.5 * batch[0]), batch[1]))


class Turned(Net):
    """What is made lies in memory as the array does, and has the numbers' own type."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        made = torch.tensor(np.arange(8.0).reshape(2, 4).T)
        assert made.stride() == (1, 4)
        assert made.dtype == torch.float64
        return self.loss(batch) * made.sum().float()


@pytest.mark.parametrize("model_class", [Masked, Turned])
@pytest.mark.parametrize("are_errors", [False, True])
def test_a_copy_of_an_array_is_made_without_a_word(
    model_class: type[Net], are_errors: bool, recwarn: pytest.WarningsRecorder
) -> None:
    plain, model, callback = (
        seeded(model_class),
        seeded(model_class),
        hot(scope="step", compile_optimizer=False),
    )
    fit(plain)
    if are_errors:
        warnings.filterwarnings("error", message="To copy construct")
    fit(model, [callback])
    assert_same(plain, model)
    assert_proven(callback.report)
    assert not any("runs eagerly" in note for note in callback.report.notes)
    assert not [each for each in recwarn if "copy construct" in str(each.message)]
