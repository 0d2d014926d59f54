"""What a schedule moves, told from the settings that there were when training began."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hotcompile.swap.optimizers.first_settings import FirstSettings


def adamw(**options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([nn.Parameter(torch.ones(2))], **options)


def test_settings_that_have_another_value_now_are_named() -> None:
    optimizer = adamw(weight_decay=0.1)
    first = FirstSettings([optimizer])
    assert first.moved(optimizer) == []
    optimizer.param_groups[0].update(betas=(0.8, 0.99), weight_decay=0.2, eps=1e-8)
    assert first.moved(optimizer) == ["betas", "weight_decay"]
    optimizer.param_groups[0].update(betas=(0.9, 0.999), weight_decay=0.1)
    assert first.moved(optimizer) == []


def test_neither_the_learning_rate_nor_what_the_user_keeps_there_is_one() -> None:
    optimizer = adamw()
    optimizer.param_groups[0]["note"] = 1
    first = FirstSettings([optimizer])
    optimizer.param_groups[0].update(lr=0.5, note=2)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.5})
    assert first.moved(optimizer) == []


def test_what_was_kept_first_counts() -> None:
    optimizer = adamw()
    first = FirstSettings([optimizer])
    optimizer.param_groups[0]["weight_decay"] = 0.5
    first.keep(optimizer)
    assert first.moved(optimizer) == ["weight_decay"]


def test_one_that_comes_later_has_those_that_it_comes_with() -> None:
    first, optimizer = FirstSettings(), adamw(weight_decay=0.5)
    assert first.moved(optimizer) == []
    first.keep(optimizer)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    assert first.moved(optimizer) == ["weight_decay"]


@pytest.mark.parametrize("other", [object(), torch.optim.LBFGS([nn.Parameter(torch.ones(2))])])
def test_others_are_left_alone(other: Any) -> None:
    FirstSettings([other])


def test_no_optimizer_is_kept_alive() -> None:
    optimizer: Optimizer | None = adamw()
    assert optimizer is not None
    there, first = weakref.ref(optimizer), FirstSettings([optimizer])
    optimizer = None
    gc.collect()
    assert there() is None
    assert first is not None
