"""Hooks on saved tensors around compiled code."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from lightning_hotcompile.swap.process.saved_tensors import hooks_in_use, strides_kept
from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded


def as_contiguous(tensor: Tensor) -> Tensor:
    return tensor.contiguous()


def as_it_is(packed: Tensor) -> Tensor:
    return packed


def test_there_are_none_by_default() -> None:
    assert hooks_in_use() is None


def test_those_in_use_are_found() -> None:
    with saved_tensors_hooks(as_contiguous, as_it_is):
        assert hooks_in_use() == (as_contiguous, as_it_is)


@pytest.mark.parametrize("strides", [(1, 4), (12, 2), (6, 1), (0, 1), (1, 0)])
def test_what_is_unpacked_has_its_strides_and_values(strides: tuple[int, int]) -> None:
    saved = torch.arange(48.0).as_strided((4, 6), strides)
    with saved_tensors_hooks(as_contiguous, as_it_is), strides_kept((as_contiguous, as_it_is)):
        pack, unpack = hooks_in_use() or (as_it_is, as_it_is)
    back = unpack(pack(saved))
    assert back.equal(saved)
    assert back.stride() == strides


def test_what_lies_on_top_of_itself_comes_back_as_the_hooks_have_it() -> None:
    saved = torch.arange(9.0).unfold(0, 3, 1)
    with saved_tensors_hooks(as_contiguous, as_it_is), strides_kept((as_contiguous, as_it_is)):
        pack, unpack = hooks_in_use() or (as_it_is, as_it_is)
    assert unpack(pack(saved)).equal(saved)


class Attention(Net):
    """Saves queries, keys and values that are not contiguous, and keeps what it saves elsewhere."""

    def __init__(self) -> None:
        super().__init__(width=16, n_block=0)
        self.blocks = nn.ModuleList([Heads(16), Heads(16)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with save_on_cpu(pin_memory=True):
            return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)  # a bias of keys has no gradient but noise


class Heads(nn.Module):
    """Attention over the batch, two heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).view(1, len(x), 3, 2, -1).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scope", ["step", "regions"])
def test_a_training_that_keeps_its_activations_elsewhere_is_right(scope: str) -> None:
    models: list[pl.LightningModule] = []
    for callbacks in ([], [hot(backend="inductor", scope=scope, store=None, compile_optimizer=False)]):
        models.append(seeded(Attention))
        fit(models[-1], callbacks, max_steps=16, max_epochs=-1)
    report = callbacks[0].report
    assert any(region.proven for region in report.regions), report.to_text()
    assert_same(*models)
