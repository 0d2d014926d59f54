"""``x[:, n:].fill_diagonal_(0)`` is compiled; AOTAutograd alone cannot write by strides to a view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.hot import STEP, assert_compiled_as_eager, assert_proven, hot
from tests.models import Small, fit, seeded


class Filled(Small):
    """The loss goes by how near examples are to each other, and not to themselves."""

    def fill(self, near: Tensor) -> Tensor:
        mask = torch.ones_like(near, dtype=torch.bool)
        mask[:, 0:].fill_diagonal_(0)
        return near * mask

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = F.normalize(self.inp(batch[0]), dim=-1)
        return self.loss(batch) + self.fill(z @ z.T).logsumexp(1).mean()


class Shifted(Filled):
    """Past the first columns."""

    def fill(self, near: Tensor) -> Tensor:
        near = torch.cat((near, near.detach()), 1)
        near[:, len(near) :].fill_diagonal_(fill_value=-1e9)
        return near


class Transposed(Filled):
    def fill(self, near: Tensor) -> Tensor:
        return near.t().fill_diagonal_(-1e9)


class Wide(Filled):
    """There are more columns than rows, and what is filled is used further."""

    def fill(self, near: Tensor) -> Tensor:
        return 2 * near[:3].fill_diagonal_(0.5)


class Tall(Filled):
    """A whole tensor with ``wrap``, which torch's method fills."""

    def fill(self, near: Tensor) -> Tensor:
        return near + torch.zeros(len(near), 1).fill_diagonal_(1.0, wrap=True)


class Cube(Filled):
    """Of three dimensions."""

    def fill(self, near: Tensor) -> Tensor:
        return near * torch.ones(8, 8, 8).fill_diagonal_(2.0).sum(0)


@pytest.mark.parametrize("model_class", [Filled, Shifted, Transposed, Wide, Tall, Cube])
def test_a_diagonal_that_is_filled_is_compiled(model_class: type[Filled]) -> None:
    assert_compiled_as_eager(model_class)


class Given(Filled):
    """By a number that is read from a tensor."""

    def fill(self, near: Tensor) -> Tensor:
        return near[:, 1:].fill_diagonal_(near.detach().amax().item())


class Leaf(Filled):
    """Torch refuses to fill what has a gradient of its own."""

    def fill(self, near: Tensor) -> Tensor:
        return torch.zeros_like(near).requires_grad_().fill_diagonal_(1.0)


def error_of(train: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        train()
    return str(caught.value)


def test_an_error_is_that_of_torch() -> None:
    plain = error_of(lambda: fit(seeded(Leaf)))
    assert plain == error_of(lambda: fit(seeded(Leaf), [hot(threshold=0, on_error="eager", **STEP)]))


def test_a_number_of_a_tensor_fills_as_in_eager() -> None:
    plain, model = seeded(Given), seeded(Given)
    callback = hot(on_error="eager", **STEP)
    fit(plain)
    fit(model, [callback])
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_it_is_one_graph() -> None:
    callback = hot(fullgraph=True, **STEP)
    fit(seeded(Shifted), [callback])
    assert_proven(callback.report)
