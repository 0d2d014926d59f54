"""What stays eager, and the FP8 state of a step."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from lightning_hotcompile.errors import TargetError
from lightning_hotcompile.plan.islands import Island, find_islands, fp8_state, is_metric
from tests.te_fixture import FAKES


def names(module: nn.Module, **options: Any) -> list[str]:
    return [island.name for island in find_islands(module, **options)]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.q(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.ff = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ff(self.attn(x))


class Net(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(4, 4)


def class_from(package: str, name: str, base: type) -> Any:
    return type(name, (base,), {"__module__": f"{package}.layers"})


class TestByPackage:
    def test_plain_model_has_none(self) -> None:
        assert find_islands(Net()) == ()

    def test_transformer_engine_layers_with_their_reason(self, te: ModuleType) -> None:
        model = nn.Sequential(te.Linear(4, 4), nn.ReLU(), te.LayerNormLinear(4, 4), te.LayerNorm(4))
        found = find_islands(model)
        assert [(i.name, i.class_name) for i in found] == [
            ("0", "Linear"),
            ("2", "LayerNormLinear"),
            ("3", "LayerNorm"),
        ]
        assert {i.reason for i in found} == {"TransformerEngine keeps its FP8 state outside of the graph"}
        assert not any(i.is_metric for i in found)

    def test_only_the_topmost(self, te: ModuleType) -> None:
        assert names(nn.Sequential(te.TransformerLayer(8, 16, 2), nn.Linear(8, 8))) == ["0"]

    def test_the_searched_module_itself(self, te: ModuleType) -> None:
        assert find_islands(te.TransformerLayer(8, 16, 2))[0].name == ""
        assert names(te.TransformerLayer(8, 16, 2)) == [""]

    def test_plain_tensor_code_of_transformer_engine_is_compiled(self, te: ModuleType) -> None:
        assert names(nn.Sequential(te.RotaryPositionEmbedding(8), te.DropPath(0.1), te.Linear(4, 4))) == ["2"]

    def test_a_class_made_on_the_fly_elsewhere(self, te: ModuleType) -> None:
        """FSDP2 gives a module a new class of its own module name."""
        model = nn.Sequential(te.Linear(4, 4), te.RotaryPositionEmbedding(8))
        for module in model:
            wrapped = class_from("torch.distributed.fsdp", "FSDPLinear", type(module))
            module.__class__ = wrapped
        assert names(model) == ["0"]

    @pytest.mark.parametrize(
        ("package", "is_island"),
        [
            ("msamp", True),
            ("torchmetrics", True),
            ("torchao", False),
            ("bitsandbytes", False),
            ("transformer_engine_tools", False),
        ],
    )
    def test_other_packages(self, package: str, is_island: bool) -> None:
        layer = class_from(package, "Layer", nn.Linear)(4, 4)
        assert names(nn.Sequential(layer)) == (["0"] if is_island else [])

    def test_metrics_and_collections(self) -> None:
        class Lit(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Linear(4, 4)
                self.mean = torchmetrics.MeanMetric()
                self.both = torchmetrics.MetricCollection(
                    [torchmetrics.SumMetric(), torchmetrics.MinMetric()]
                )

        model = Lit()
        found = find_islands(model)
        assert [i.name for i in found] == ["mean", "both"]
        assert all(i.is_metric for i in found)
        assert is_metric(model.mean)
        assert not is_metric(model.net)

    def test_a_shared_module_is_named_once(self, te: ModuleType) -> None:
        shared = te.Linear(4, 4)
        assert names(nn.Sequential(shared, nn.Sequential(shared))) == ["0"]

    def test_a_module_shared_with_an_island_stays_one_outside(self, te: ModuleType) -> None:
        layer = te.TransformerLayer(8, 16, 2)
        assert names(nn.Sequential(layer, nn.Sequential(layer.proj))) == ["0", "1.0"]


class TestKeepEager:
    def test_by_module_name(self) -> None:
        found = find_islands(Net(), keep_eager=["blocks.*"])
        assert [i.name for i in found] == ["blocks.0", "blocks.1"]
        assert {i.reason for i in found} == {"keep_eager='blocks.*'"}

    def test_by_class_name(self) -> None:
        assert names(Net(), keep_eager=["Att*"]) == ["blocks.0.attn", "blocks.1.attn"]

    def test_by_the_name_of_a_base_class(self) -> None:
        special = class_from("mine", "SpecialBlock", Block)
        assert names(nn.Sequential(special()), keep_eager=["Block"]) == ["0"]

    def test_the_base_of_all_modules_names_nothing(self) -> None:
        with pytest.raises(TargetError, match="keep_eager='Module'"):
            find_islands(Net(), keep_eager=["Module"])

    def test_a_container_that_is_never_called_hands_it_to_its_children(self) -> None:
        assert names(Net(), keep_eager=["blocks"]) == ["blocks.0", "blocks.1"]

    def test_a_star_means_what_the_module_holds(self) -> None:
        assert names(Net(), keep_eager=["*"]) == ["blocks.0", "blocks.1", "head"]

    def test_any_name_of_a_shared_module(self) -> None:
        net = Net()
        net.tail = net.head
        assert names(net, keep_eager=["tail"]) == ["head"]

    def test_named_modules_order_with_several_globs(self) -> None:
        assert names(Net(), keep_eager=["head", "blocks.1"]) == ["blocks.1", "head"]

    @pytest.mark.parametrize("option", ["keep_eager", "compile_anyway"])
    def test_no_match_is_refused_with_near_names(self, option: str) -> None:
        with pytest.raises(
            TargetError, match=rf"{option}='blocsk.0' matches no module.*did you mean 'blocks.0'"
        ):
            find_islands(Net(), **{option: ["blocsk.0"]})

    def test_near_class_names(self) -> None:
        with pytest.raises(TargetError, match="did you mean 'Attention'"):
            find_islands(Net(), keep_eager=["Atention"])


class TestCompileAnyway:
    def test_exempts_by_name_and_class(self, te: ModuleType) -> None:
        model = nn.Sequential(te.Linear(4, 4), te.LayerNorm(4), te.Linear(4, 4))
        assert names(model, compile_anyway=["0"]) == ["1", "2"]
        assert names(model, compile_anyway=["LayerNorm"]) == ["0", "2"]

    def test_children_are_judged_on_their_own(self, te: ModuleType) -> None:
        model = nn.Sequential(te.TransformerLayer(8, 16, 2))
        assert names(model, compile_anyway=["TransformerLayer"]) == ["0.qkv", "0.proj", "0.mlp"]
        assert names(model, compile_anyway=["0*"]) == []

    def test_a_glob_that_was_overruled_does_not_come_back_below(self) -> None:
        assert names(Net(3), keep_eager=["blocks.*"], compile_anyway=["blocks.1"]) == ["blocks.0", "blocks.2"]

    def test_another_glob_does(self) -> None:
        options = {"keep_eager": ["blocks.*", "*.attn"], "compile_anyway": ["blocks.1"]}
        assert names(Net(), **options) == ["blocks.0", "blocks.1.attn"]

    def test_a_carve_out_of_a_container(self) -> None:
        assert names(Net(), keep_eager=["blocks"], compile_anyway=["blocks.0"]) == ["blocks.1"]


class TestNeverImports:
    def test_find_islands_and_fp8_state(self, no_te: None) -> None:
        assert find_islands(Net()) == ()
        assert fp8_state() is None


class TestFP8State:
    def test_off(self, te: ModuleType) -> None:
        assert fp8_state() == (False, False, ("NoneType", None), None, ("bool", False))

    def test_on_and_off_again(self, te: ModuleType, recipes: ModuleType) -> None:
        before = fp8_state()
        with te.autocast(recipe=recipes.DelayedScaling()):
            inside = fp8_state()
        assert fp8_state() == before != inside
        assert hash(inside) == hash(inside)

    def test_stable_between_steps_although_a_flag_flips(self, te: ModuleType, recipes: ModuleType) -> None:
        layer, seen, flags = te.Linear(16, 16), [], []
        recipe = recipes.DelayedScaling()
        for _ in range(3):
            with te.autocast(recipe=recipe):
                for _ in range(2):
                    seen.append(fp8_state())
                    flags.append(te.FP8GlobalStateManager.get_autocast_state()[4])
                    layer(torch.randn(2, 16))
            repr(recipe)  # fills a cache in a private attribute
        assert flags == [True, False] * 3
        assert len(set(seen)) == 1

    def test_an_equal_recipe_gives_an_equal_state(self, te: ModuleType, recipes: ModuleType) -> None:
        assert self._state(te, recipes.DelayedScaling(margin=1)) == self._state(
            te, recipes.DelayedScaling(margin=1)
        )

    @pytest.mark.parametrize(
        ("field", "value"), [("margin", 2), ("amax_compute_algo", "most_recent"), ("reduce_amax", False)]
    )
    def test_each_field_counts_also_where_repr_omits_it(
        self, te: ModuleType, recipes: ModuleType, field: str, value: object
    ) -> None:
        recipe = recipes.DelayedScaling()
        before = self._state(te, recipe)
        setattr(recipe, field, value)
        assert self._state(te, recipe) != before

    def test_the_type_counts(self, te: ModuleType, recipes: ModuleType) -> None:
        assert self._state(te, recipes.Float8CurrentScaling()) != self._state(te, recipes.DelayedScaling())

    def test_functions_and_nested_values(self, te: ModuleType, recipes: ModuleType) -> None:
        states = {
            self._state(te, recipes.DelayedScaling(amax_compute_algo=lambda history: history[0])),
            self._state(te, recipes.DelayedScaling(amax_compute_algo=torch.amax)),
            self._state(te, recipes.Float8CurrentScaling(fp8_gemm_fprop=recipes.MMParams(True))),
            self._state(te, recipes.Float8CurrentScaling(fp8_gemm_fprop=recipes.MMParams(False))),
        }
        assert len(states) == 4

    def test_a_set_attribute_that_is_no_field(self, te: ModuleType, recipes: ModuleType) -> None:
        recipe = recipes.Float8CurrentScaling()
        before = self._state(te, recipe)
        recipe.layers = {"qkv": (torch.float8_e4m3fn, [1, 2.0]), "out": torch.Tensor}
        assert self._state(te, recipe) != before

    def test_process_group_by_name(self, te: ModuleType, recipes: ModuleType) -> None:
        def state(group: object) -> object:
            with te.autocast(recipe=recipes.DelayedScaling(), group=group):
                return fp8_state()

        assert state(SimpleNamespace(group_name="0")) == state(SimpleNamespace(group_name="0"))
        assert state(SimpleNamespace(group_name="0")) != state(SimpleNamespace(group_name="1"))

    def test_the_older_module_and_method_name(self, no_te: None, monkeypatch: pytest.MonkeyPatch) -> None:
        manager = SimpleNamespace(get_fp8_autocast_state=lambda: (True, False, None, None, True, False))
        module = SimpleNamespace(FP8GlobalStateManager=manager)
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.fp8", module)
        assert fp8_state() == (True, False, ("NoneType", None), None, ("bool", False))

    @pytest.mark.parametrize("state", [None, (), (True, False), "abc"])
    def test_an_unknown_interface_gives_none(
        self, te: ModuleType, monkeypatch: pytest.MonkeyPatch, state: object
    ) -> None:
        monkeypatch.setattr(te.FP8GlobalStateManager, "get_autocast_state", lambda: state)
        assert fp8_state() is None

    def test_the_same_text_in_every_process(self) -> None:
        script = (
            "import sys, transformer_engine.pytorch as te\n"
            "from transformer_engine.common.recipe import DelayedScaling\n"
            "from lightning_hotcompile.plan.islands import fp8_state\n"
            "with te.autocast(recipe=DelayedScaling(amax_compute_algo=lambda h: h)): print(fp8_state())\n"
        )
        texts = [self._run(script, seed) for seed in ("1", "2")]
        assert texts[0] == texts[1] != ""

    def _state(self, te: ModuleType, recipe: Any) -> Any:
        with te.autocast(recipe=recipe):
            return fp8_state()

    def _run(self, script: str, seed: str) -> str:
        environment = {"PYTHONPATH": str(FAKES), "PYTHONHASHSEED": seed, "PATH": ""}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout


def test_an_island_is_a_frozen_value() -> None:
    island = Island(name="a", class_name="B", reason="c")
    assert island == Island(name="a", class_name="B", reason="c")
    with pytest.raises(dataclasses.FrozenInstanceError):
        island.name = "b"  # type: ignore[misc]
