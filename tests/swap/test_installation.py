"""A whole plan in a model: what is put in place again, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hotcompile import plan_compile
from lightning_hotcompile.swap.gate import Lane
from lightning_hotcompile.swap.installation import Installation
from lightning_hotcompile.swap.shared import Shared
from tests.hot import hot
from tests.models import Net, fit, loader, seeded


class HasTail(Net):
    """One more region beside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.tail(x))


def refuses_gelu(graph: Any, inputs: Any, **_: Any) -> Any:
    """A backend that compiles the model but for its blocks."""
    if any("gelu" in str(node.target) for node in graph.graph.nodes):
        raise RuntimeError("no gelu today")
    return graph.forward


def test_what_failed_is_not_put_in_place_again() -> None:
    model, batch = seeded(HasTail), next(iter(loader()))
    config = hot(backend=refuses_gelu, on_error="eager").config
    installation = Installation(plan_compile(model, scope="regions"), model, config, [])
    told = []
    for _ in range(3):
        installation.put()
        installation.gate.open(Lane.COMPILE)
        model.training_step(batch, 0)
        installation.gate.close()
        told.append([name for name, _ in installation.drop_failed()])
        installation.take_out()
    failed = [proof.region.name for proof in installation.proofs() if proof.error is not None]
    assert 0 < len(failed) < len(installation.proofs())
    assert told == [failed, [], []]


def test_a_validation_that_begins_anew_does_not_tell_of_a_failure_again() -> None:
    stages = ("train", "validate")
    callback = hot(backend=refuses_gelu, on_error="eager", scope="regions", stages=stages)
    fit(seeded(HasTail), [callback], val=loader(), max_epochs=4)
    for stage in stages:
        events = callback.reports[stage].events
        assert [e["region"] for e in events if e["kind"] == "fallback"] == ["blocks.*"]


@pytest.mark.parametrize("shares", [True, False])
def test_settings_are_those_of_the_beginning_for_all_that_share_them(shares: bool) -> None:
    """A child process's installation and that of a second plan are made when training is under way."""
    model = seeded(Net)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = plan_compile(model, scope="step", optimizers=[optimizer], compile_optimizer=True)
    shared = Shared([optimizer]) if shares else None
    optimizer.param_groups[0]["betas"] = (0.8, 0.99)
    installation = Installation(plan, model, hot().config, [optimizer], shared)
    installation.put()
    (swapped,) = installation.optimizers
    installation.take_out()
    told = "its betas changed since training began (a schedule?)" if shares else None
    assert swapped.error == told
