"""Every workload: the same weights each time, small enough to run, and arms that share them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from lightning_hotcompile.bench.measure import measure
from lightning_hotcompile.bench.measurement import Request
from lightning_hotcompile.bench.workloads.catalogue import WORKLOADS, build
from lightning_hotcompile.bench.workloads.surgical import STAND_IN, blocks_around_islands
from lightning_hotcompile.bench.workloads.transformer import SIZES
from lightning_hotcompile.bench.workloads.workload import twin
from lightning_hotcompile.errors import ConfigError

SMALL: Mapping[str, Mapping[str, Any]] = {
    "matmul_chain": {"width": 8, "length": 2},
    "mlp": {"batch_size": 4, "hidden": 8},
    "attention_block": {"batch_size": 2, "seq_len": 4, "width": 8},
    "mixed": {"batch_size": 4, "width": 8},
    "matmul_relu": {"batch_size": 4, "width": 8},
    "elementwise": {"batch_size": 4, "width": 8, "length": 2},
    "reduction": {"batch_size": 4, "width": 8},
    "simple": {"batch_size": 4, "width": 8},
    "attention": {"batch_size": 2, "seq_len": 8, "d_model": 4},
    "transformer": {"model_size": "tiny", "context_length": 4, "batch_size": 2, "vocab_size": 16},
    "rope": {"batch_size": 1, "seq_len": 4, "heads": 2, "head_dim": 4, "dtype": "bf16", "training": True},
    "surgical": {"batch_size": 1, "seq_len": 4, "hidden": 8, "heads": 2, "layers": 2, "ffn": 16},
}


def test_all_are_here() -> None:
    assert set(SMALL) == set(WORKLOADS)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_weights_and_inputs_are_the_same_each_time(name: str) -> None:
    first, second = (build(name, SMALL[name], "cpu") for _ in range(2))
    weights = second.module.state_dict()
    assert all(value.equal(weights[key]) for key, value in first.module.state_dict().items())
    assert all(a.equal(b) for a, b in zip(first.inputs, second.inputs, strict=True))
    assert first.training == (name != "rope" or SMALL[name]["training"])


@pytest.mark.parametrize("name", sorted(SMALL))
def test_every_arm_runs_compiled_and_agrees_with_eager(name: str) -> None:
    request = Request(workload=name, sizes=SMALL[name], warmup=2, rounds=6, backend="aot_eager")
    found = measure(request)
    assert {arm: (r.status, r.reason) for arm, r in found.arms.items()} == dict.fromkeys(
        found.arms, ("ok", "")
    )
    compiled = [r for r in found.arms.values() if r.compiled]
    assert compiled
    assert all(r.parity == "agrees" and r.runs_per_step >= 1 for r in compiled)


def test_a_twin_shares_weights_and_nothing_else() -> None:
    module = build("surgical", SMALL["surgical"], "cpu").module
    copy = twin(module)
    mine, its = dict(module.named_parameters()), dict(copy.named_parameters())
    assert all(its[name] is parameter for name, parameter in mine.items())
    assert all(a is not b for a, b in zip(module.modules(), copy.modules(), strict=True))


def test_islands_stay_eager_inside_of_compiled_blocks() -> None:
    work = build("surgical", SMALL["surgical"], "cpu")
    seen: list[str] = []

    def compiled(function: Any) -> Any:
        def backend(graph_module: torch.fx.GraphModule, inputs: Any) -> Any:
            seen.extend(str(node.target) for node in graph_module.graph.nodes)
            return graph_module.forward

        return torch.compile(function, backend=backend)

    out = blocks_around_islands(work.module, compiled)(*work.inputs)
    assert torch.allclose(out, work.module(*work.inputs), atol=1e-5)
    assert any("scaled_dot_product_attention" in target for target in seen)
    assert not any("linear" in target for target in seen)
    assert "forward" not in vars(work.module.blocks[0])  # type: ignore[index]


def test_a_stand_in_says_that_it_is_one() -> None:
    assert build("surgical", SMALL["surgical"], "cpu").note == STAND_IN


def test_the_sizes_of_the_transformers() -> None:
    assert SIZES["small"] == (768, 3072, 12, 12)
    assert SIZES["2.7B"] == (2560, 10240, 32, 32)
    with pytest.raises(ConfigError, match=r"model_size='smal' is unknown.*did you mean 'small'"):
        build("transformer", {"model_size": "smal", "context_length": 8}, "cpu")
