"""Losses of distributions whose shapes are broadcast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import (
    Distribution,
    LowRankMultivariateNormal,
    MultivariateNormal,
    kl_divergence,
)

from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded


class Posterior(Net):
    """One posterior for each row, and one prior for all."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        prior = MultivariateNormal(torch.zeros(2), torch.eye(2))
        posterior = self.posterior(logits[:, :2], logits[:, 2:, None].exp())
        return self.loss(batch) + kl_divergence(posterior, prior).mean()

    def posterior(self, mean: Tensor, scale: Tensor) -> Distribution:
        return MultivariateNormal(mean, scale_tril=torch.eye(2) * scale)


class LowRank(Posterior):
    def posterior(self, mean: Tensor, scale: Tensor) -> Distribution:
        return LowRankMultivariateNormal(mean, scale.expand(-1, 2, 1), torch.ones_like(mean))


@pytest.mark.parametrize("model_class", [Posterior, LowRank])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_divergence_of_normals_is_compiled_with_the_step(
    model_class: type[Net], dynamic: bool | None
) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope="step", compile_optimizer=False, dynamic=dynamic)
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    assert_proven(callback.report)
    assert not callback.report.graph_breaks
    assert not any("runs eagerly" in note for note in callback.report.notes)
