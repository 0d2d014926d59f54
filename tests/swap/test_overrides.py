"""What Dynamo does otherwise while it traces for us, also where it puts a backend of its own around ours."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from lightning_hotcompile.swap.graphs.witness import Witness


@pytest.fixture
def _group() -> Iterator[None]:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this build of torch has no gloo")
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=45)
    )
    yield
    dist.destroy_process_group()


class Draws(nn.Module):
    """Scales by a number of a generator that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, bias=False)
        self.rng = random.Random(5)

    def scaled(self, x: Tensor) -> Tensor:
        """Another factor in each call."""
        return self.layer(x).sum() * self.rng.random()

    def forward(self, x: Tensor) -> Tensor:
        """The same."""
        return self.scaled(x)


@pytest.mark.usefixtures("_group")
def test_they_hold_in_the_forward_of_ddp() -> None:
    # There Dynamo traces for a backend of its own that splits graphs, with ours inside of it.
    plain, model = Draws(), Draws()
    model.load_state_dict(plain.state_dict())
    backend = Witness("aot_eager").backend_for("one")
    model.scaled = CompiledFunction(model.scaled, backend, dynamic=None, fullgraph=False)  # type: ignore[method-assign]
    wrapped, x = DistributedDataParallel(model), torch.ones(2, 3)
    for _ in range(4):
        with compiling_allowed(suppress_errors=False):
            torch.testing.assert_close(wrapped(x), plain(x))
