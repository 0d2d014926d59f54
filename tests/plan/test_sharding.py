"""What is planned for a model that FSDP2 has sharded; the real thing is in tests/distributed."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_hotcompile.errors import PlanError
from lightning_hotcompile.plan.planner import plan_compile
from lightning_hotcompile.plan.sharding import holds_sharded, is_sharded
from tests.models import Net, seeded


def pretend(module: nn.Module) -> None:
    """What ``fully_shard`` does to the class; it wants a process group for the rest."""
    module.__class__ = type(f"FSDP{type(module).__name__}", (FSDPModule, type(module)), {})


def sharded(*blocks: int, root: bool = True) -> Any:
    model = seeded(Net)
    for i in blocks:
        pretend(model.blocks[i])
    if root:
        pretend(model)
    return model


def test_it_is_told_by_the_class() -> None:
    model = sharded(0)
    assert is_sharded(model)
    assert is_sharded(model.blocks[0])
    assert not is_sharded(model.blocks[1])
    assert not holds_sharded(model.blocks[1])
    assert holds_sharded(sharded(2, root=False))


def test_sharded_blocks_are_a_group_and_nothing_else_is_compiled() -> None:
    plan = plan_compile(sharded(0, 1, 2), optimizers=(), compile_optimizer=True)
    assert plan.scope == "regions"
    assert "FSDP2" in plan.reason
    assert [r.members for r in plan.regions] == [("blocks.0", "blocks.1", "blocks.2")]


def test_blocks_that_are_sharded_with_the_root_stay_eager_with_the_reason() -> None:
    plan = plan_compile(sharded())
    assert plan.is_empty
    assert any("come and go with another module" in left.reason for left in plan.left_eager)


def test_the_whole_step_is_refused() -> None:
    with pytest.raises(PlanError, match="FSDP2 gathers parameters in hooks"):
        plan_compile(sharded(0, 1, 2), scope="step")
