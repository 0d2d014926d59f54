"""Strategies that shard parameters: what Lightning allows on a CPU, and what the callback says to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy

from tests.hot import assert_same, hot
from tests.models import Net, fit, make_trainer, seeded


@pytest.mark.parametrize("subclass", [False, True])
@pytest.mark.parametrize("name", ["FSDPStrategy", "ModelParallelStrategy"])
def test_training_goes_on_eagerly_with_a_reason(name: str, subclass: bool) -> None:
    kind: Any = type(name, (SingleDeviceStrategy,), {})  # the real ones want more than one process
    kind = type("Mine", (kind,), {}) if subclass else kind
    plain, model, callback = seeded(Net), seeded(Net), hot()
    fit(plain, max_epochs=1)
    trainer = fit(model, [callback], strategy=kind(device=torch.device("cpu")), max_epochs=1)
    assert trainer.global_step == 12
    assert callback.report.phase == "declined"
    assert callback.report.reason.startswith(f"{name} shards parameters")
    assert not {"training_step", "log"} & vars(model).keys()
    assert_same(plain, model, tolerance=0.0)


def test_lightning_itself_refuses_fsdp_on_a_cpu() -> None:
    # So FSDPStrategy can be tried on a GPU only; ModelParallelStrategy runs on the CPU too.
    with pytest.raises(ValueError, match="requires a GPU accelerator, but received `accelerator='cpu'`"):
        make_trainer(strategy=FSDPStrategy())


@pytest.mark.slow
@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this build of torch has no gloo",
)
def test_blocks_sharded_by_fsdp2_are_compiled_inside_of_their_hooks(
    in_turn: tuple[Path, str],
) -> None:
    folder, output = in_turn
    assert (folder / "sharded.json").exists(), output
    for found in json.loads((folder / "sharded.json").read_text(encoding="utf-8")):
        report = found["report"]
        assert report["phase"] == "steady", report["reason"]
        assert report["scope"] == "regions"
        assert "FSDP2 gathers parameters in hooks" in report["plan"]
        (region,) = report["regions"]
        assert region["kind"] == "group", "and no optimizer, whose parameters are DTensors"
        assert region["proven"]
        assert region["graphs"] == 1
        assert report["recompiles"] == 0
        assert found["gap"] <= 1e-6
