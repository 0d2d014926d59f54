"""Islands stay eager inside of compiled code, and leave no trace."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import types
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional as F

from lightning_hotcompile.errors import TargetError
from lightning_hotcompile.plan.islands import find_islands
from lightning_hotcompile.swap.islands import IslandGuard

D = 16


class CountingBackend:
    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return lookup_backend("aot_eager")(graph, inputs)


def compile_in_place(modules: Any, backend: CountingBackend) -> None:
    """One region function for all modules: a group, in the words of the planner."""

    def region(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    compiled = torch.compile(region, backend=backend)
    for module in modules:
        module._compiled_call_impl = functools.partial(compiled, module)


def guard_of(module: nn.Module, **options: Any) -> IslandGuard:
    return IslandGuard(module, [island.name for island in find_islands(module, **options)])


class TEBlock(nn.Module):
    def __init__(self, te: ModuleType, rotary: nn.Module) -> None:
        super().__init__()
        self.norm = te.LayerNorm(D)
        self.qkv = te.LayerNormLinear(D, 3 * D)
        self.proj = te.Linear(D, D)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        angles = self.rotary(x.shape[1])[:, 0, 0]
        y = self.proj(torch.sigmoid(q * angles.cos()) * (k * angles.sin()) + v)
        return x + F.gelu(y)


class TENet(nn.Module):
    def __init__(self, te: ModuleType, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(D, D)
        self.blocks = nn.Sequential(*[TEBlock(te, te.RotaryPositionEmbedding(D)) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.embed(x))


def scales(net: nn.Module) -> list[Tensor]:
    """The amax history and the scales of both directions, of all layers that have them."""
    metas = [m.fp8_meta for m in net.modules() if hasattr(m, "fp8_meta")]
    states = [meta[key] for meta in metas for key in ("scaling_fwd", "scaling_bwd")]
    return [t.clone() for state in states for t in (state.amax_history, state.scale)]


def train(te: ModuleType, net: nn.Module, recipe: Any, steps: int = 6) -> list[list[Tensor]]:
    """After each step: the loss, and the FP8 state."""
    te.FP8GlobalStateManager.reset()
    te.body_calls.clear()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1)
    history = []
    for step in range(steps):
        x = torch.randn(2, 8, D, generator=generator) * (step + 1)
        with te.autocast(recipe=recipe):
            loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append([loss.detach(), *scales(net)])
    return history


def all_equal(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    pairs = [pair for steps in zip(a, b, strict=True) for pair in zip(*steps, strict=True)]
    return all(torch.equal(s, t) for s, t in pairs)


class TestTransformerEngine:
    @pytest.mark.parametrize("recipe_name", ["DelayedScaling", "Float8CurrentScaling"])
    def test_compiled_blocks_train_as_eager_ones(
        self, te: ModuleType, recipes: ModuleType, recipe_name: str
    ) -> None:
        recipe = getattr(recipes, recipe_name)()
        if recipe_name == "DelayedScaling":
            recipe.amax_history_len = 3
        eager = train(te, TENet(te), recipe)
        net, backend = TENet(te), CountingBackend()
        guard_of(net).put()
        compile_in_place(net.blocks, backend)
        compiled = train(te, net, recipe)
        assert all_equal(compiled, eager)
        assert len({float(step[0]) for step in compiled}) == len(compiled), "the state has to move"
        assert {seen for _, seen in te.body_calls} == {False}
        assert len(te.body_calls) == 6 * 4 * 3
        # Four blocks share what is between qkv and proj, and what comes after proj: two graphs in all.
        assert len(backend.graphs) == 2
        assert any("cos" in target for target in backend.graphs[0]), "RoPE belongs to the compiled glue"
        assert any("gelu" in target for target in backend.graphs[1])

    def test_without_islands_dynamo_gets_inside(self, te: ModuleType, recipes: ModuleType) -> None:
        """What the guard is for: the layers are traced, and into many more graphs."""
        net, backend = TENet(te), CountingBackend()
        compile_in_place(net.blocks, backend)
        train(te, net, recipes.DelayedScaling(amax_history_len=3), steps=1)
        assert ("Linear", True) in te.body_calls
        assert ("LayerNorm", True) in te.body_calls
        assert len(backend.graphs) > 2

    def test_put_after_a_compile_still_takes_effect(self, te: ModuleType, recipes: ModuleType) -> None:
        net = TENet(te)
        compile_in_place(net.blocks, CountingBackend())
        recipe = recipes.Float8CurrentScaling()
        train(te, net, recipe, steps=1)
        guard_of(net).put()
        train(te, net, recipe, steps=2)
        assert {seen for _, seen in te.body_calls} == {False}

    def test_a_whole_layer_is_one_island(self, te: ModuleType, recipes: ModuleType) -> None:
        class Wrapped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = te.TransformerLayer(D, 2 * D, 2)

            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(self.layer(x)) * 2

        net, backend = nn.Sequential(Wrapped()), CountingBackend()
        guard_of(net).put()
        compile_in_place(net, backend)
        train(te, net, recipes.DelayedScaling())
        assert {seen for _, seen in te.body_calls} == {False}
        assert len(backend.graphs) == 1

    def test_a_class_made_on_the_fly(self, te: ModuleType, recipes: ModuleType) -> None:
        net, backend = TENet(te), CountingBackend()
        for module in list(net.modules()):
            if type(module) is te.Linear:
                module.__class__ = type("FSDPLinear", (te.Linear,), {"__module__": "torch.distributed.fsdp"})
        guard_of(net).put()
        compile_in_place(net.blocks, backend)
        train(te, net, recipes.DelayedScaling(), steps=2)
        assert {seen for _, seen in te.body_calls} == {False}
        assert {name for name, _ in te.body_calls} == {"LayerNorm", "LayerNormLinear", "FSDPLinear"}

    def test_compile_anyway_is_traced(self, te: ModuleType, recipes: ModuleType) -> None:
        net, backend = TENet(te), CountingBackend()
        guard_of(net, compile_anyway=["LayerNorm"]).put()
        compile_in_place(net.blocks, backend)
        train(te, net, recipes.DelayedScaling(), steps=2)
        assert ("LayerNorm", True) in te.body_calls
        assert ("Linear", True) not in te.body_calls
        assert ("LayerNormLinear", True) not in te.body_calls

    def test_an_autocast_inside_of_a_region_makes_it_silently_eager(
        self, te: ModuleType, recipes: ModuleType
    ) -> None:
        """Why the module that opens the FP8 context stays outside of what is compiled."""
        recipe = recipes.DelayedScaling()

        class Owner(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.proj = te.Linear(D, D)

            def forward(self, x: Tensor) -> Tensor:
                with te.autocast(recipe=recipe):
                    return torch.tanh(self.proj(torch.sin(x)))

        net, backend = nn.Sequential(Owner()), CountingBackend()
        guard_of(net).put()
        compile_in_place(net, backend)
        net(torch.randn(2, 8, D)).sum().backward()
        assert not any("tanh" in target for graph in backend.graphs for target in graph)
        assert te.body_calls == [("Linear", False)]

    def test_extra_state_goes_through_a_checkpoint(self, te: ModuleType, recipes: ModuleType) -> None:
        recipe = recipes.DelayedScaling(amax_history_len=3)
        net = TENet(te)
        keys = list(net.state_dict())
        guard_of(net).put()
        compile_in_place(net.blocks, CountingBackend())
        assert list(net.state_dict()) == keys
        train(te, net, recipe, steps=3)
        loaded = TENet(te)
        loaded.load_state_dict(net.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(scales(net), scales(loaded), strict=True))
        assert list(loaded.state_dict()) == keys


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.traced: list[bool] = []

    def forward(self, x: Tensor, *, plus: float = 0.0) -> Tensor:
        self.traced.append(torch.compiler.is_compiling())
        return x * self.weight + plus


class Host(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.island = Affine()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.island(x.sin(), plus=1.0))


def careless(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Decorated(Affine):
    forward = careless(Affine.forward)


def doubled(module: Affine, x: Tensor, *, plus: float = 0.0) -> Tensor:
    return 2 * type(module).forward(module, x, plus=plus)


def set_partial(module: Affine) -> Any:
    module.forward = functools.partial(doubled, module)  # as accelerate does
    return module.forward


def set_method(module: Affine) -> Any:
    module.forward = types.MethodType(doubled, module)
    return module.forward


def set_closure(module: Affine) -> Any:
    module.forward = lambda x, *, plus=0.0: doubled(module, x, plus=plus)
    return module.forward


EARLIER = [set_partial, set_method, set_closure]


class TestPutAndTakeOut:
    def test_the_island_is_eager_and_its_surroundings_are_compiled(self) -> None:
        host, backend = Host(), CountingBackend()
        IslandGuard(host, ["island"]).put()
        compile_in_place([host], backend)
        x = torch.randn(3)
        assert torch.equal(host(x), torch.tanh(x.sin() + 1))
        assert host.island.traced == [False]
        assert len(backend.graphs) == 2

    def test_nothing_is_left_behind(self) -> None:
        host = Host()
        before = dict(vars(host.island))
        guard = IslandGuard(host, ["island"])
        assert vars(host.island) == before
        guard.put()
        assert "forward" in vars(host.island)
        guard.take_out()
        assert vars(host.island) == before

    def test_idempotent(self) -> None:
        host = Host()
        guard = IslandGuard(host, ["island", "island"])
        guard.take_out()
        guard.put()
        ours = host.island.forward
        guard.put()
        assert host.island.forward == ours
        guard.take_out()
        guard.take_out()
        assert "forward" not in vars(host.island)
        guard.put()
        assert "forward" in vars(host.island)

    def test_traced_again_after_it_was_taken_out(self) -> None:
        host, backend = Host(), CountingBackend()
        guard = IslandGuard(host, ["island"])
        guard.put()
        compile_in_place([host], backend)
        host(torch.randn(3))
        guard.take_out()
        host(torch.randn(3))
        assert host.island.traced == [False, True]

    @pytest.mark.parametrize("earlier", EARLIER)
    def test_an_earlier_forward_of_the_instance_runs_eager_and_comes_back(
        self, earlier: Callable[[Affine], Any]
    ) -> None:
        host, backend, x = Host(), CountingBackend(), torch.randn(3)
        before = earlier(host.island)
        guard = IslandGuard(host, ["island"])
        guard.put()
        compile_in_place([host], backend)
        assert torch.equal(host(x), torch.tanh(2 * (x.sin() + 1)))
        assert host.island.traced == [False]
        assert len(backend.graphs) == 2
        guard.take_out()
        assert vars(host.island)["forward"] is before

    def test_two_guards_undo_in_reverse_order(self) -> None:
        host = Host()
        outer, inner = IslandGuard(host, ["island"]), IslandGuard(host.island, [""])
        outer.put()
        inner.put()
        assert torch.equal(host(torch.zeros(3)), torch.tanh(torch.ones(3)))
        inner.take_out()
        outer.take_out()
        assert "forward" not in vars(host.island)

    def test_what_another_tool_put_over_it_stays(self) -> None:
        host = Host()
        guard = IslandGuard(host, ["island"])
        guard.put()
        theirs = functools.partial(host.island.forward)
        host.island.forward = theirs
        guard.take_out()
        assert vars(host.island)["forward"] is theirs

    def test_a_missing_name_changes_nothing(self) -> None:
        host = Host()
        guard = IslandGuard(host, ["island", "islnd"])
        with pytest.raises(
            TargetError, match="island 'islnd' is not a module of Host; did you mean 'island'"
        ):
            guard.put()
        assert "forward" not in vars(host.island)

    def test_a_module_replaced_before_put_is_found(self) -> None:
        host = Host()
        guard = IslandGuard(host, ["island"])
        host.island = Affine()
        guard.put()
        assert "forward" in vars(host.island)


class TestCopies:
    @pytest.mark.parametrize("earlier", [None, set_partial, set_method])
    def test_a_deepcopy_runs_its_own_weights(self, earlier: Callable[[Affine], Any] | None) -> None:
        host = Host()
        if earlier is not None:
            earlier(host.island)
        plain = copy.deepcopy(host)
        IslandGuard(host, ["island"]).put()
        clone = copy.deepcopy(host)
        for other in (plain, clone):
            nn.init.constant_(other.island.weight, 5.0)
        x = torch.randn(3)
        assert torch.equal(clone(x), plain(x))
        assert not torch.equal(clone(x), host(x))

    @pytest.mark.parametrize("island", [Affine, Decorated])
    @pytest.mark.parametrize("earlier", [None, set_partial])
    def test_a_pickle_loads_without_this_package(
        self, island: type[Affine], earlier: Callable[[Affine], Any] | None
    ) -> None:
        host = Host()
        host.island = island()
        if earlier is not None:
            earlier(host.island)
        IslandGuard(host, ["island"]).put()
        stored = pickle.dumps(host)
        assert b"lightning_hotcompile" not in stored
        loaded = pickle.loads(stored)
        x = torch.randn(3)
        assert torch.equal(loaded(x), host(x))
        nn.init.constant_(loaded.island.weight, 5.0)
        assert not torch.equal(loaded(x), host(x))

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_they_have_the_attributes_that_the_module_had(
        self, copied: Callable[[nn.Module], nn.Module]
    ) -> None:
        host = Host()
        before = set(vars(host.island))
        guard = IslandGuard(host, ["island"])
        guard.put()
        assert set(vars(copied(host.island))) == before
        guard.take_out()
        assert set(vars(host.island)) == before

    def test_keys_and_torch_save(self) -> None:
        host = Host()
        keys = list(host.state_dict())
        IslandGuard(host, ["island"]).put()
        assert list(host.state_dict()) == keys
        stored = io.BytesIO()
        torch.save(host, stored)
        stored.seek(0)
        assert torch.load(stored, weights_only=False).island.weight == host.island.weight

    def test_transformer_engine_layers(self, te: ModuleType, recipes: ModuleType) -> None:
        net = TENet(te, depth=1)
        guard_of(net).put()
        train(te, net, recipes.DelayedScaling(amax_history_len=2), steps=2)
        x = torch.randn(2, 8, D)
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert torch.equal(other(x), net(x))
            nn.init.zeros_(other.blocks[0].proj.weight)
            assert not torch.equal(other(x), net(x))


class Measured(nn.Module):
    def __init__(self, metric: nn.Module) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.metric = metric

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.net(x).tanh()
        self.metric.update(logits, target)
        return logits.exp().sum()


def accuracy() -> nn.Module:
    return torchmetrics.classification.MulticlassAccuracy(num_classes=3, average="micro")


METRICS = {
    "metric": accuracy,
    "collection": lambda: torchmetrics.MetricCollection({"a": accuracy(), "b": accuracy()}),
}


@pytest.mark.parametrize("make", METRICS.values(), ids=METRICS)
class TestMetrics:
    def test_updates_are_eager_and_count_once(self, make: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        model, backend = Measured(make()), CountingBackend()
        plain = copy.deepcopy(model)
        guard_of(model).put()
        compile_in_place([model], backend)
        for _ in range(3):
            x, target = torch.randn(8, 4), torch.randint(3, (8,))
            assert torch.equal(model(x, target), plain(x, target))
        assert model.metric.compute() == plain.metric.compute()
        assert len(backend.graphs) == 2
        targets = [target for graph in backend.graphs for target in graph]
        assert any("tanh" in t for t in targets)
        assert not any("argmax" in t for t in targets), "the metric is not in the graphs"

    def test_reset_compute_and_call_inside_of_compiled_code(self, make: Callable[[], nn.Module]) -> None:
        metric, backend = make(), CountingBackend()
        host = nn.ModuleDict({"metric": metric})
        guard_of(host).put()

        def step(x: Tensor, target: Tensor) -> tuple[Tensor, Any]:
            y = x.sin()
            metric.reset()
            metric(y, target)
            return y.cos(), metric.compute()

        x, target = torch.eye(3), torch.tensor([0, 1, 0])
        _, value = torch.compile(step, backend=backend)(x, target)
        values = value.values() if isinstance(value, dict) else [value]
        assert [float(v) for v in values] == pytest.approx([2 / 3] * len(values))
        assert not any("argmax" in t for graph in backend.graphs for t in graph)

    def test_a_pickle_is_that_of_the_metric_as_it_was(self, make: Callable[[], nn.Module]) -> None:
        model = Measured(make())
        before = pickle.dumps(model.metric)
        guard_of(model).put()
        assert pickle.dumps(model.metric) == before, "who loads it may allow few names only"

    def test_copies_and_state_survive(self, make: Callable[[], nn.Module]) -> None:
        model = Measured(make())
        before = {id(m): dict(vars(m)) for m in model.metric.modules()}
        guard = guard_of(model)
        guard.put()
        model(torch.randn(8, 4), torch.randint(3, (8,)))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert other.metric.compute() == model.metric.compute()
            other.metric.reset()
            assert {m.update_count for m in _single(other.metric)} == {0}
            assert {m.update_count for m in _single(model.metric)} == {1}
            other(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
            assert {m.update_count for m in _single(other.metric)} == {1}
        guard.take_out()
        for metric in model.metric.modules():
            for name in ("forward", "update", "compute", "reset"):
                assert vars(metric).get(name) is before[id(metric)].get(name)


def _single(metric: Any) -> list[Any]:
    return list(metric.values()) if isinstance(metric, torchmetrics.MetricCollection) else [metric]
