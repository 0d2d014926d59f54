"""Scope, targets and islands become a plan: deterministic, hashable, readable."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from lightning_hotcompile.errors import ConfigError, HotCompileError, PlanError, TargetError
from lightning_hotcompile.plan.planner import MANY_BLOCKS, CompilePlan, choose_scope, plan_compile
from lightning_hotcompile.plan.scopes import resolve_function


def scale(x: Tensor) -> Tensor:
    return 2 * x


class Rope:
    def apply(self, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def frequencies(n: int) -> int:
        return n


HERE = __name__


class Block(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self, depth: int = 3, d: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(d, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Trained(nn.Module):
    """Has what a plan looks at in a LightningModule."""

    automatic_optimization = True

    def __init__(self, depth: int = 3, d: int = 8) -> None:
        super().__init__()
        self.net = Net(depth, d)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).mean()


class FetchesItself(Trained):
    def training_step(self, dataloader_iter: Iterator[Tensor]) -> Tensor:  # type: ignore[override]
        return self.net(next(dataloader_iter)).mean()


class Manual(Trained):
    automatic_optimization = False


TRAINER: Any = None


class ReadsMetrics(Trained):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).mean() * TRAINER.callback_metrics["weight"]


class ReadsInItsBase(ReadsMetrics):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 1


class Shares(Trained):
    """The usual shape, one method for all stages; what nobody calls in a step may read metrics."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.shared_step(batch)

    def shared_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).mean() * self.weight()

    def weight(self) -> float:
        return self.weight()

    def on_train_epoch_end(self) -> None:
        self.last = TRAINER.callback_metrics["loss"]


class ReadsInAMethod(Shares):
    def weight(self) -> float:
        return TRAINER.logged_metrics["weight"]


class ReadsInAStaticMethod(Shares):
    @staticmethod
    def weight() -> float:  # type: ignore[override]
        return TRAINER.logged_metrics["weight"]


class ReadsInAClassMethod(Shares):
    @classmethod
    def weight(cls) -> float:  # type: ignore[override]
        return TRAINER.logged_metrics["weight"]


class ReadsInAProperty(Shares):
    def weight(self) -> float:
        return self.seen

    @property
    def seen(self) -> float:
        return TRAINER.progress_bar_metrics["weight"]


def weight_of_trainer() -> float:
    return TRAINER.callback_metrics["weight"]


class ReadsInAFunction(Shares):
    def weight(self) -> float:
        return weight_of_trainer()


class ReadsInAClosure(Shares):
    def weight(self) -> float:
        return max(0.0, *(TRAINER.callback_metrics[name] for name in ("a", "b")))


class ReadsInOneOfItsOwn(Shares):
    def __init__(self) -> None:
        super().__init__()
        self.weight = weight_of_trainer  # type: ignore[method-assign]


READ_METRICS = [
    ReadsMetrics,
    ReadsInItsBase,
    ReadsInAMethod,
    ReadsInAStaticMethod,
    ReadsInAClassMethod,
    ReadsInAProperty,
    ReadsInAFunction,
    ReadsInAClosure,
    ReadsInOneOfItsOwn,
]


def members(plan: CompilePlan, *kinds: str) -> list[tuple[str, ...]]:
    return [r.members for r in (plan.of_kind(*kinds) if kinds else plan.regions)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


class TestStep:
    def test_what_the_callback_refuses_is_refused_here(self) -> None:
        with pytest.raises(ConfigError, match=r"scope='region' is not allowed.*'regions'"):
            plan_compile(Trained(), scope="region")
        with pytest.raises(ConfigError, match="targets='net' is not allowed"):
            plan_compile(Trained(), targets="net")
        with pytest.raises(ConfigError, match="have no meaning with scope='step'"):
            plan_compile(Trained(), scope="step", targets=["net"])

    def test_one_region_with_the_loss(self) -> None:
        model = Trained()
        plan = plan_compile(model, scope="step")
        (region,) = plan.regions
        assert (region.kind, region.name, region.class_name) == ("step", "training_step", "Trained")
        assert region.parameters == sum(p.numel() for p in model.parameters())
        assert plan.left_eager == ()

    @pytest.mark.parametrize(
        ("model", "obstacle"),
        [
            (Net(), "no training_step"),
            (Manual(), "manual optimization"),
            (FetchesItself(), "dataloader_iter"),
        ],
        ids=["plain", "manual", "dataloader_iter"],
    )
    def test_where_it_is_not_possible_it_is_refused_with_the_remedy(
        self, model: nn.Module, obstacle: str
    ) -> None:
        with pytest.raises(PlanError) as caught:
            plan_compile(model, scope="step")
        assert obstacle in str(caught.value)
        assert "scope='regions'" in str(caught.value)


class TestRegions:
    def test_one_group_for_equal_blocks(self) -> None:
        plan = plan_compile(Trained(), scope="regions")
        (region,) = plan.regions
        assert region.kind == "group"
        assert region.members == ("net.blocks.0", "net.blocks.1", "net.blocks.2")
        assert region.name == "net.blocks.*"
        assert region.class_name == "Block"
        assert {m.name for m in plan.left_eager} == {"net.embed", "net.head.0", "net.head.1"}

    def test_one_region_for_each_structure(self) -> None:
        model = Trained(depth=0)
        model.net.blocks.extend([Block(8), Block(16), Block(8), Block(16), Block(32)])
        plan = plan_compile(model, scope="regions")
        assert members(plan, "group") == [("net.blocks.0", "net.blocks.2"), ("net.blocks.1", "net.blocks.3")]
        assert members(plan, "module") == [("net.blocks.4",)]
        assert len({r.name for r in plan.regions}) == 3

    def test_a_group_under_different_parents_is_named_by_its_first(self) -> None:
        model = nn.Module()
        model.a, model.b = nn.ModuleList([Block()]), nn.ModuleList([Block()])
        assert plan_compile(model, scope="regions").regions[0].name == "a.0 +1"

    def test_tied_modules_are_one_region(self) -> None:
        model = Trained()
        model.again = nn.ModuleList([model.net.blocks[0]])
        plan = plan_compile(model, scope="regions")
        assert members(plan) == [("net.blocks.0", "net.blocks.1", "net.blocks.2")]

    def test_nothing_to_compile_is_an_empty_plan(self) -> None:
        plan = plan_compile(nn.Linear(2, 2), scope="regions")
        assert plan.is_empty
        assert "nothing" in str(plan)


class TestModule:
    def test_the_children_whole(self) -> None:
        plan = plan_compile(Trained(), scope="module")
        assert members(plan) == [("net",)]

    def test_containers_are_replaced_by_what_they_hold(self) -> None:
        model = nn.Module()
        model.layers = nn.ModuleDict({"a": Block(), "inner": nn.ModuleList([Block(), Block(16)])})
        plan = plan_compile(model, scope="module")
        assert members(plan) == [("layers.a", "layers.inner.0"), ("layers.inner.1",)]

    def test_a_tied_module_is_put_in_place_once(self) -> None:
        model = nn.Module()
        model.a = Block()
        model.c = nn.ModuleList([model.a])
        assert members(plan_compile(model, scope="module")) == [("a",)]

    def test_islands_and_what_the_user_compiled_are_left_out(self) -> None:
        model = Net()
        model.embed.compile(backend="eager")
        plan = plan_compile(model, scope="module", keep_eager=["head"])
        assert members(plan) == [("blocks.0", "blocks.1", "blocks.2")]
        assert [m.name for m in plan.left_eager] == ["embed"]
        assert [i.name for i in plan.islands] == ["head"]

    def test_named_modules(self) -> None:
        assert members(plan_compile(Net(), scope="module", targets=["head"])) == [("head",)]


class TestPattern:
    @pytest.mark.parametrize(
        ("targets", "expected"),
        [
            (["head"], [("head",)]),
            (["blocks.*"], [("blocks.0", "blocks.1", "blocks.2")]),
            (["blocks.[02]"], [("blocks.0", "blocks.2")]),
            (["blocks.0", "head"], [("blocks.0",), ("head",)]),
            (["head", "blocks.0"], [("blocks.0",), ("head",)]),
            (["blocks.1", "blocks.1"], [("blocks.1",)]),
            (["*"], [("embed",), ("blocks.0", "blocks.1", "blocks.2"), ("head",)]),
            (["blocks.0.up", "blocks.0"], [("blocks.0",)]),
            (["blocks"], [("blocks.0", "blocks.1", "blocks.2")]),
        ],
        ids=str,
    )
    def test_globs_take_the_topmost_modules(self, targets: list[str], expected: Any) -> None:
        assert members(plan_compile(Net(), scope="pattern", targets=targets)) == expected

    def test_globs_tell_upper_and_lower_case(self) -> None:
        with pytest.raises(TargetError):
            plan_compile(Net(), targets=["HEAD"])

    @pytest.mark.parametrize(("target", "near"), [("blcks", "'blocks'"), ("haed", "'head'")])
    def test_a_target_that_matches_nothing_lists_near_names(self, target: str, near: str) -> None:
        with pytest.raises(TargetError) as caught:
            plan_compile(Net(), targets=[target])
        message = str(caught.value)
        assert f"targets={target!r} matches no module of Net" in message
        assert near in message
        assert "Known names begin with: embed, blocks" in message
        assert isinstance(caught.value, HotCompileError)

    def test_each_target_has_to_match(self) -> None:
        with pytest.raises(TargetError, match="nothing_here"):
            plan_compile(Net(), targets=["head", "nothing_here"])

    def test_a_container_without_anything_to_call_is_refused(self) -> None:
        model = Net()
        model.tables = nn.ParameterList([nn.Parameter(torch.ones(2))])
        with pytest.raises(
            TargetError, match=r"targets='tables' matches only tables: nothing that can be called"
        ):
            plan_compile(model, targets=["tables"])

    def test_the_other_name_of_a_tied_module_is_known(self) -> None:
        model = Net()
        model.again = nn.ModuleList([model.head])
        assert members(plan_compile(model, targets=["again.0"])) == [("again.0",)]
        assert members(plan_compile(model, targets=["head", "again.0"])) == [("head",)]

    def test_islands_are_cut_out(self) -> None:
        plan = plan_compile(Net(), targets=["*"], keep_eager=["blocks.1", "head"])
        assert members(plan) == [("embed",), ("blocks.0", "blocks.2")]
        assert members(plan_compile(Net(), targets=["blocks.0.up"], keep_eager=["blocks.0"])) == []

    def test_what_the_user_compiled_is_left_with_its_reason(self) -> None:
        model = Net()
        model.head.compile(backend="eager")
        plan = plan_compile(model, targets=["head", "embed"])
        assert members(plan) == [("embed",)]
        assert plan.left_eager[0].reason == "is compiled already by the user"


class TestFunctions:
    def test_a_function_is_a_region(self) -> None:
        plan = plan_compile(Net(), targets=[f"{HERE}:scale", "head"])
        assert members(plan, "function") == [(f"{HERE}:scale",)]
        assert members(plan, "module") == [("head",)]

    def test_a_method_of_a_class(self) -> None:
        owner, name, function = resolve_function(f"{HERE}:Rope.apply")
        assert (owner, name, function) == (Rope, "apply", Rope.apply)

    @pytest.mark.parametrize(
        ("target", "words"),
        [
            ("no_such_package:f", "cannot import 'no_such_package'"),
            (":f", "cannot import ''"),
            (".relative:f", "cannot import '.relative'"),
            (f"{HERE}:scal", "did you mean 'scale'"),
            (f"{HERE}:Rope.aply", "did you mean 'apply'"),
            (f"{HERE}:", "no '' there"),
            (f"{HERE}:Rope", "is a type, not a plain function"),
            (f"{HERE}:HERE", "is a str, not a plain function"),
            (f"{HERE}:Rope.frequencies", "is a staticmethod, not a plain function"),
            ("math:sin", "is a builtin_function_or_method, not a plain function"),
        ],
    )
    def test_what_is_no_function_is_refused(self, target: str, words: str) -> None:
        with pytest.raises(TargetError) as caught:
            plan_compile(Net(), targets=[target])
        assert f"targets={target!r}" in str(caught.value)
        assert words in str(caught.value)

    def test_a_lazily_loaded_function_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lazy = types.ModuleType("lazy_module")
        lazy.__getattr__ = lambda name: {"scale": scale}[name]  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, "lazy_module", lazy)
        assert resolve_function("lazy_module:scale") == (lazy, "scale", scale)


class TestAuto:
    @pytest.mark.parametrize(
        ("model", "options", "scope", "reason"),
        [
            (Trained(), {}, "step", "the whole step as one graph"),
            (Net(), {}, "regions", "a plain module has no training_step"),
            (Manual(), {}, "regions", "manual optimization"),
            (FetchesItself(), {}, "regions", "dataloader_iter"),
            (Trained(depth=MANY_BLOCKS), {}, "regions", f"{MANY_BLOCKS} repeated blocks"),
            (Trained(depth=MANY_BLOCKS - 1), {}, "step", "the whole step"),
            (Trained(), {"targets": ["net.head"]}, "pattern", "targets were given"),
            (Trained(), {"keep_eager": ["net.head"]}, "regions", "1 modules stay eager"),
        ],
        ids=["step", "plain", "manual", "iter", "deep", "not so deep", "targets", "islands"],
    )
    def test_the_choice_has_its_reason(
        self, model: nn.Module, options: dict[str, Any], scope: str, reason: str
    ) -> None:
        plan = plan_compile(model, **options)
        assert plan.scope == scope
        assert reason in plan.reason
        assert choose_scope(model, plan.islands, options.get("targets", ()))[0] == scope

    def test_a_metric_does_not_rule_the_step_out(self) -> None:
        model = Trained()
        model.accuracy = torchmetrics.MeanMetric()
        assert plan_compile(model).scope == "step"
        assert plan_compile(model, fullgraph=True).scope == "step"

    def test_what_was_asked_for_is_the_reason(self) -> None:
        assert plan_compile(Net(), scope="regions").reason == "scope='regions' was asked for"

    @pytest.mark.parametrize("model_class", READ_METRICS)
    def test_a_step_that_reads_metrics_of_the_trainer_is_not_compiled_whole(
        self, model_class: type[Trained]
    ) -> None:
        plan = plan_compile(model_class())
        assert plan.scope == "regions"
        assert "training_step reads metrics of the Trainer" in plan.reason

    def test_what_the_step_does_not_call_may_read_them(self) -> None:
        assert plan_compile(Shares()).scope == "step"


class TestIslands:
    @pytest.mark.parametrize("scope", ["step", "regions", "module", "pattern", "auto"])
    def test_fullgraph_is_refused_with_their_names(self, scope: str) -> None:
        targets = ["net.blocks.*"] if scope == "pattern" else []
        with pytest.raises(PlanError) as caught:
            plan_compile(Trained(), scope=scope, targets=targets, keep_eager=["*.up"], fullgraph=True)
        message = str(caught.value)
        assert "fullgraph=True" in message
        assert "net.blocks.0.up (Linear)" in message
        assert "compile_anyway" in message

    def test_fullgraph_without_islands_is_fine(self) -> None:
        assert not plan_compile(Trained(), fullgraph=True).is_empty

    def test_they_are_cut_out_of_regions(self) -> None:
        plan = plan_compile(Trained(), scope="regions", keep_eager=["net.blocks.1"])
        assert members(plan) == [("net.blocks.0", "net.blocks.2")]

    def test_wrong_exceptions_are_refused(self) -> None:
        for option in ("keep_eager", "compile_anyway"):
            with pytest.raises(TargetError, match=option):
                plan_compile(Net(), **{option: ["heda"]})

    @pytest.mark.parametrize("scope", ["regions", "module", "pattern"])
    def test_a_root_that_is_an_island_has_nothing_to_compile(self, scope: str) -> None:
        kind = type("TELayer", (Net,), {"__module__": "transformer_engine.pytorch.module"})
        targets = ["blocks.*"] if scope == "pattern" else []
        plan = plan_compile(kind(), scope=scope, targets=targets)
        assert [i.name for i in plan.islands] == [""]
        assert plan.is_empty


class TestOptimizer:
    @pytest.mark.parametrize(
        ("scope", "wanted", "compiled"),
        [
            ("step", "auto", True),
            ("step", True, True),
            ("step", False, False),
            ("regions", "auto", False),
            ("regions", True, True),
            ("module", "auto", False),
            ("regions", False, False),
        ],
    )
    def test_by_scope_and_wish(self, scope: str, wanted: bool | str, compiled: bool) -> None:
        model = Trained()
        plan = plan_compile(model, scope=scope, compile_optimizer=wanted, optimizers=[adamw(model)])
        assert members(plan, "optimizer") == ([("0",)] if compiled else [])
        assert any("only if asked for" in note for note in plan.notes) == (wanted == "auto" and not compiled)

    def test_each_one_has_its_own_region_or_reason(self) -> None:
        model = Trained()
        own = type("Own", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
        plan = plan_compile(
            model, optimizers=[adamw(model), own, torch.optim.SGD(model.parameters(), lr=0.1)]
        )
        assert [(r.name, r.class_name, r.members) for r in plan.of_kind("optimizer")] == [
            ("optimizer 0", "AdamW", ("0",)),
            ("optimizer 2", "SGD", ("2",)),
        ]
        assert plan.notes == (
            "optimizer 1 (Own) stays eager: Own is not one of torch.optim's multi-tensor optimizers",
        )

    def test_without_anything_else_it_is_not_compiled_alone(self) -> None:
        model = nn.Linear(2, 2)
        plan = plan_compile(model, scope="regions", compile_optimizer=True, optimizers=[adamw(model)])
        assert plan.is_empty


class TestDigest:
    def test_it_is_the_same_for_the_same_plan(self) -> None:
        assert plan_compile(Trained()) == plan_compile(Trained())
        assert hash(plan_compile(Trained())) == hash(plan_compile(Trained()))
        assert plan_compile(Trained()).digest == plan_compile(Trained()).digest

    def test_it_differs_from_plan_to_plan(self) -> None:
        model = Trained()
        plans = [
            plan_compile(model),
            plan_compile(model, optimizers=[adamw(model)]),
            plan_compile(model, scope="regions"),
            plan_compile(model, scope="regions", keep_eager=["net.head"]),
            plan_compile(model, scope="module"),
            plan_compile(model, targets=["net.head"]),
            plan_compile(model, targets=[f"{HERE}:scale"]),
            plan_compile(Trained(depth=4)),
            plan_compile(Trained(d=16)),
        ]
        assert len({p.digest for p in plans}) == len(plans)
        assert all(len(p.digest) == 12 and int(p.digest, 16) >= 0 for p in plans)

    @pytest.mark.parametrize("scope", ["step", "regions", "module"])
    def test_models_of_the_same_class_and_size_differ(self, scope: str) -> None:
        one, two = Trained(), Trained()
        for block in two.net.blocks:
            block.act = nn.ReLU()
        assert plan_compile(one, scope=scope).digest != plan_compile(two, scope=scope).digest

    def test_values_and_flags_of_the_model_do_not_count(self) -> None:
        one, two = Trained(), Trained()
        two.eval().requires_grad_(False)
        assert plan_compile(one).digest == plan_compile(two).digest

    def test_it_is_the_same_in_every_process(self) -> None:
        code = f"import {HERE} as here; print(here.digests_of_all_scopes())"
        path = os.pathsep.join(p for p in sys.path if p)
        environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == digests_of_all_scopes()
        assert len(set(done.stdout.split())) == 4


def digests_of_all_scopes() -> str:
    targets = {"pattern": ["net.blocks.*", f"{HERE}:scale"]}
    plans = (
        plan_compile(Trained(), scope=scope, targets=targets.get(scope, ()), keep_eager=["net.embed"])
        for scope in ("step", "regions", "module", "pattern")
    )
    return " ".join(plan.digest for plan in plans)


class TestTree:
    def test_it_shows_what_is_compiled_and_what_stays_eager_and_why(self) -> None:
        plan = plan_compile(Trained(), scope="regions", keep_eager=["net.embed"])
        assert str(plan) == (
            f"plan {plan.digest}: scope regions (scope='regions' was asked for)\n"
            "├── compiled\n"
            "│   └── net.blocks.*: Block x3 as one group, 552 parameters each\n"
            "├── kept eager\n"
            "│   └── net.embed (Linear): keep_eager='net.embed'\n"
            "└── left eager\n"
            "    ├── net.head.0 (LayerNorm): too small: a single operation gains nothing by itself\n"
            "    └── net.head.1 (Linear): too small: a single operation gains nothing by itself"
        )

    def test_step_optimizer_function_and_module(self) -> None:
        model = Trained()
        text = str(plan_compile(model, optimizers=[adamw(model)]))
        assert "Trained.training_step as a whole, loss included" in text
        assert "optimizer 0: AdamW.step" in text
        text = str(plan_compile(model, targets=["net.head", f"{HERE}:scale"]))
        assert "net.head: Sequential, 34 parameters" in text
        assert f"{HERE}:scale: function" in text

    def test_notes_are_shown(self) -> None:
        model = Trained()
        text = str(plan_compile(model, scope="regions", optimizers=[adamw(model)]))
        assert "└── notes" in text
        assert "only if asked for" in text.replace("\n", " ")

    def test_long_lists_are_cut_and_counted(self) -> None:
        model = nn.ModuleList(nn.Linear(2, 2) for _ in range(20))
        assert "and 12 more" in str(plan_compile(model, scope="regions"))

    def test_names_with_markup_are_shown_as_they_are(self) -> None:
        model = nn.ModuleDict({"[red]a[/red]": Block(), ":smile:": Block()})
        assert "[red]a[/red] +1: Block x2" in str(plan_compile(model, scope="regions"))
