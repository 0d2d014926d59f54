"""TransformerEngine's layers as islands, end to end.

Each test runs with the stand-in on a CPU and, where there is a GPU with FP8, with the real one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hotcompile import HotCompile
from lightning_hotcompile.plan.islands import find_islands, fp8_state
from lightning_hotcompile.swap.islands import IslandGuard
from tests.gpu.conftest import Engine

D, LENGTH, BATCH, DEPTH = 64, 16, 4, 3
STEPS = 40


@dataclass
class Probe:
    """What was seen while a model trained."""

    bodies: list[tuple[str, bool]] = field(default_factory=list)
    """Class and "was Dynamo tracing?" of each forward of a TransformerEngine layer."""

    fp8_states: set[Any] = field(default_factory=set)
    history: list[list[Tensor]] = field(default_factory=list)
    """After each step the loss, and the amax history and scales of all layers."""


def probed(layer: type[nn.Module], probe: Probe) -> type[nn.Module]:
    """A subclass in another module, as FSDP2 makes them, that tells when its body is traced."""

    @torch.compiler.assume_constant_result  # runs while Dynamo traces, without a guard or a break
    def note(tracing: bool) -> None:
        probe.bodies.append((layer.__name__, tracing))

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        note(torch.compiler.is_compiling())
        return layer.forward(self, *args, **kwargs)

    return type(f"Probed{layer.__name__}", (layer,), {"forward": forward, "__module__": __name__})


class Block(nn.Module):
    def __init__(self, norm: nn.Module, qkv: nn.Module, proj: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj, self.rotary = norm, qkv, proj, rotary

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        angles = self.rotary(x.shape[1])[:, 0, 0]
        y = self.proj(torch.sigmoid(q * angles.cos()) * (k * angles.sin()) + v)
        return x + F.gelu(y)


class Net(LightningModule):
    def __init__(self, engine: Engine, probe: Probe) -> None:
        super().__init__()
        te, device = engine.te, engine.device
        self.opens_fp8 = True
        self.engine, self.probe, self.recipe = (engine,), probe, engine.delayed_scaling()
        norm, qkv, proj = (probed(c, probe) for c in (te.LayerNorm, te.LayerNormLinear, te.Linear))
        self.embed = nn.Linear(D, D, device=device)
        self.blocks = nn.Sequential(
            *[
                Block(
                    norm(D, device=device),
                    qkv(D, 3 * D, device=device),
                    proj(D, D, device=device),
                    te.RotaryPositionEmbedding(D),
                )
                for _ in range(DEPTH)
            ]
        )

    def fp8(self) -> AbstractContextManager[Any]:
        return self.engine[0].te.autocast(enabled=True, recipe=self.recipe)

    def forward(self, x: Tensor) -> Tensor:
        with self.fp8() if self.opens_fp8 else nullcontext():
            self.probe.fp8_states.add(fp8_state())
            return self.blocks(self.embed(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self(batch) - batch.roll(1, -1)).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.probe.history.append([outputs["loss"].detach().cpu(), *self.scales()])

    def scales(self) -> list[Tensor]:
        metas = [m.fp8_meta for m in self.modules() if hasattr(m, "fp8_meta")]
        states = [meta[key] for meta in metas for key in ("scaling_fwd", "scaling_bwd")]
        return [t.detach().cpu().clone() for state in states for t in (state.amax_history, state.scale)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class FP8Precision(Precision):
    """Opens the FP8 context around each step, as Lightning's own TransformerEngine plugin does."""

    def __init__(self, net: Net) -> None:
        net.opens_fp8 = False
        self._net = net

    def forward_context(self) -> AbstractContextManager[Any]:
        return self._net.fp8()


class CountingBackend:
    def __init__(self, name: str = "aot_eager") -> None:
        self.name = name
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return lookup_backend(self.name)(graph, inputs)

    def holds(self, operation: str) -> bool:
        return any(operation in target for graph in self.graphs for target in graph)


def make_net(engine: Engine) -> Net:
    engine.reset()
    seed_everything(0, verbose=False)
    return Net(engine, Probe())


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, LENGTH, D, generator=generator) * (1 + step % 5) for step in range(STEPS)]


def fit(net: Net, *callbacks: Any, plugins: Sequence[Any] = ()) -> Probe:
    trainer = Trainer(
        max_steps=STEPS,
        accelerator="gpu" if net.engine[0].device == "cuda" else "cpu",
        devices=1,
        callbacks=list(callbacks),
        plugins=list(plugins),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(batches(), batch_size=None))
    return net.probe


def hot_compile(backend: Callable[..., Any]) -> HotCompile:
    return HotCompile(
        threshold=2,
        scope="regions",
        cost_gate=False,
        min_speedup=0.0,
        compile_optimizer=False,
        backend=backend,
        on_error="raise",
    )


class TestTraining:
    @pytest.mark.parametrize(
        ("backend_name", "tolerance"),
        [
            pytest.param("aot_eager", 0.02, id="aot_eager"),
            # Fused code rounds otherwise, and a value at the edge of an FP8 step moves by that step. Batches
            # differ in size by up to five times, so an update too many or too few is far outside of this.
            pytest.param("inductor", 0.25, id="inductor", marks=pytest.mark.slow),
        ],
    )
    def test_scales_develop_as_in_eager_training(
        self, engine: Engine, backend_name: str, tolerance: float
    ) -> None:
        if engine.device == "cpu" and backend_name == "aot_eager":
            tolerance = 0.0  # the very same kernels; on a GPU they need not be deterministic
        eager = fit(make_net(engine))
        net, backend = make_net(engine), CountingBackend(backend_name)
        keys, hot = list(net.state_dict()), hot_compile(backend)
        compiled = fit(net, hot)

        told = hot.report.to_dict()
        assert told["phase"] == "steady", told["reason"]
        assert [region["proven"] for region in told["regions"]] == [True]
        assert len(told["regions"][0]["members"]) == DEPTH
        assert {tracing for _, tracing in compiled.bodies} == {False}
        assert len(compiled.history) == STEPS
        for step, (seen, wanted) in enumerate(zip(compiled.history, eager.history, strict=True)):
            for one, other in zip(seen, wanted, strict=True):
                torch.testing.assert_close(
                    one, other, rtol=tolerance, atol=0, msg=lambda m, s=step: f"step {s}: {m}"
                )
        assert len({float(step[0]) for step in compiled.history}) > STEPS // 2
        assert backend.holds("cos"), "RoPE belongs to the compiled glue"
        assert backend.holds("gelu")
        assert not backend.holds("linear"), "the layers stay out of the graphs"
        assert list(net.state_dict()) == keys
        assert not any("forward" in vars(module) for module in net.modules())
        assert eager.fp8_states == compiled.fp8_states
        assert len(compiled.fp8_states) == 1

    def test_the_scales_are_as_without_where_the_trainer_opens_fp8(self, engine: Engine) -> None:
        """One FP8 context too many would move every amax history by one step."""
        eager, net = make_net(engine), make_net(engine)
        wanted = fit(eager, plugins=[FP8Precision(eager)]).history
        engine.reset()
        seen = fit(net, hot_compile(CountingBackend()), plugins=[FP8Precision(net)]).history
        rtol = 0.0 if engine.device == "cpu" else 0.02
        for step, (one, other) in enumerate(zip(seen, wanted, strict=True)):
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(a, b, rtol=rtol, atol=0, msg=lambda m, s=step: f"step {s}: {m}")

    def test_a_checkpoint_carries_the_scales(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        # TransformerEngine pickles these scales, and loads them only where that is allowed.
        monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
        net = make_net(engine)
        fit(net, hot_compile(CountingBackend()))
        loaded = make_net(engine)
        loaded.load_state_dict(net.state_dict())
        for one, other in zip(net.scales(), loaded.scales(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


class TestIslands:
    def test_what_is_found(self, engine: Engine) -> None:
        net = make_net(engine)
        expected = [f"blocks.{i}.{name}" for i in range(DEPTH) for name in ("norm", "qkv", "proj")]
        assert [island.name for island in find_islands(net)] == expected

    def test_identical_blocks_share_their_graphs(self, engine: Engine) -> None:
        net, backend = make_net(engine).to(engine.device), CountingBackend()
        IslandGuard(net, [island.name for island in find_islands(net)]).put()

        def region(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        compiled = torch.compile(region, backend=backend)
        for block in net.blocks:
            block._compiled_call_impl = functools.partial(compiled, block)
        for batch in batches()[:3]:
            net(batch.to(engine.device)).square().mean().backward()
        assert {tracing for _, tracing in net.probe.bodies} == {False}
        assert len(backend.graphs) == 2

    def test_a_deepcopy_runs_its_own_weights(self, engine: Engine) -> None:
        layer = engine.te.Linear(D, D, device=engine.device)
        model = nn.Sequential(layer)
        guard = IslandGuard(model, ["0"])
        guard.put()
        clone, x = copy.deepcopy(model), torch.randn(LENGTH, D, device=engine.device)
        torch.testing.assert_close(clone(x), model(x))
        nn.init.zeros_(clone[0].weight)
        assert not torch.allclose(clone(x), model(x))
        keys = list(model.state_dict())
        guard.take_out()
        assert list(model.state_dict()) == keys
        assert "forward" not in vars(layer)

    def test_fp8_state_tells_recipes_apart(self, engine: Engine) -> None:
        def state(recipe: Any) -> Any:
            with engine.te.autocast(enabled=True, recipe=recipe):
                return fp8_state()

        other = engine.delayed_scaling()
        other.amax_compute_algo = "most_recent"
        states = [state(engine.delayed_scaling()), state(other), state(engine.recipes.Float8CurrentScaling())]
        assert len({*states, fp8_state()}) == 4
        assert state(engine.delayed_scaling()) == states[0]
        assert None not in states
