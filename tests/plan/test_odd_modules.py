"""Modules that work, but do not answer as torch's own do: they are planned like any other."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

from lightning_hotcompile.plan.obstacles import differentiates_twice
from lightning_hotcompile.plan.regions import find_regions, structure_of, why_not_compiled


class OwnLinear(nn.Linear):
    """Sets what its forward needs, and not what ``extra_repr`` of its base reads."""

    def __init__(self, n: int) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.randn(n, n) / n)
        self.register_parameter("bias", None)


class ReadsSettings(nn.Module):
    """Looks every unknown attribute up in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = {"width": 8}
        self.inner = nn.Linear(8, 64)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self.settings[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class AnswersAll(ReadsSettings):
    """Has every attribute that is asked for."""

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            return 8


class Anything:
    """A call that has each attribute, a further one of its kind."""

    def __getattr__(self, name: str) -> Anything:
        return Anything()

    def __call__(self) -> None:
        return None


class Refuses(Anything):
    def __getattr__(self, name: str) -> Anything:
        raise KeyError(name)


def pair() -> nn.Module:
    return nn.Sequential(OwnLinear(8), nn.ReLU())


class TestRegions:
    @pytest.mark.parametrize("block", [pair, ReadsSettings, AnswersAll])
    def test_equal_blocks_of_them_are_one_group(self, block: Callable[[], nn.Module]) -> None:
        blocks, left = find_regions(nn.ModuleDict({"a": block(), "b": block()}))
        assert [b.name for b in blocks] == ["a", "b"]
        assert blocks[0].structure == blocks[1].structure
        assert left == ()

    def test_one_without_settings_is_told_by_its_shapes(self) -> None:
        assert structure_of(OwnLinear(8)) == structure_of(OwnLinear(8)) != structure_of(OwnLinear(4))

    def test_what_the_user_has_compiled_is_known_all_the_same(self) -> None:
        compiled = torch.compile(pair())
        assert isinstance(compiled, nn.Module)
        assert why_not_compiled(compiled) == "is compiled already by the user"


def square(x: Tensor) -> Tensor:
    return x * x


def slope(x: Tensor) -> Tensor:
    return torch.autograd.grad(square(x).sum(), x, create_graph=True)[0]


class TestObstacles:
    def test_a_class_and_functions_of_no_module(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Slope(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return square(x) + slope(x)

        for each in (Slope, square, slope):
            monkeypatch.setattr(each, "__module__", None)
        assert isinstance(slope, types.FunctionType)
        assert differentiates_twice(Slope()) == "Slope.forward"

    @pytest.mark.parametrize("kind", [Anything, Refuses])
    def test_a_class_attribute_that_claims_to_wrap_another(self, kind: type) -> None:
        class Odd(nn.Module):
            call = kind()

        class Twice(Odd):
            def forward(self, x: Tensor) -> Tensor:
                return slope(x)

        assert differentiates_twice(Odd()) is None
        assert differentiates_twice(Twice()) == "Twice.forward"


def penalty(x: Tensor) -> Tensor:
    return slope(x)


class Settings(L.LightningModule):
    """As pytorch-forecasting's base class: a penalty that its hyperparameters ask for, or do not."""

    def __init__(self, constraints: Any = (), weight: float = 0.0, kind: str | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.weight = weight
        self.seen = 0


class AskedAlways(Settings):
    def slope(self, x: Tensor) -> Tensor:
        return torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]


class AskedByLength(Settings):
    def slope(self, x: Tensor) -> Tensor:
        if self.training and len(self.hparams.constraints) > 0:
            for _ in range(2):
                x = torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]
        return x


class AskedByWeight(Settings):
    def slope(self, x: Tensor) -> Tensor:
        # A comment
        return torch.autograd.grad(x.sum(), x, create_graph=True)[0] if self.hparams.weight != 0 else x


class AskedByName(Settings):
    def slope(self, x: Tensor) -> Tensor:
        if not (self.hparams.kind is None or self.hparams.kind in ("none",)):
            for x in x.split(2):  # noqa: B020
                x = torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]
        return x


class AskedByAttribute(Settings):
    def slope(self, x: Tensor) -> Tensor:
        if self.weight > 0:
            x = torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]
        return x


class SetByAMethod(AskedByWeight):
    def on_train_epoch_start(self) -> None:
        self.hparams.weight = 10.0


class SetByItem(AskedByWeight):
    def on_train_epoch_start(self) -> None:
        self.hparams["weight"] = 10.0


class AskedLater(Settings):
    def slope(self, x: Tensor) -> Tensor:
        if len(self.hparams.constraints) > 0 or self.seen > 10:
            x = torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]
        return x


class AskedElsewhereToo(Settings):
    def slope(self, x: Tensor) -> Tensor:
        if len(self.hparams.constraints) > 0:
            return torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]
        return penalty(x)


class AskedByDict(Settings):
    def slope(self, x: Tensor) -> Tensor:
        if len(self.hparams.constraints) > 0:
            return torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]
        settings = {"create_graph": True, "allow_unused": True}
        return torch.autograd.grad(x.square().sum(), x, **settings)[0]


class AskedOtherwise(Settings):
    def slope(self, x: Tensor) -> Tensor:
        if len(self.hparams.constraints) > 0:
            return x
        if x.ndim:
            x = torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]
        return x


class AskedOfNobody(Settings):
    def slope(self, x: Tensor) -> Tensor:
        return torch.autograd.grad(x.square().sum(), x, retain_graph=True, create_graph=False)[0]


class HandsOn(Settings):
    """As ``TensorDictParams.backward``, which the losses of torchrl have."""

    def slope(self, x: Tensor, create_graph: bool = False) -> Tensor:
        return torch.autograd.grad(x.square().sum(), x, create_graph=create_graph)[0]


class HandsOnMore(Settings):
    def slope(self, x: Tensor, create_graph: bool = False) -> Tensor:
        create_graph = create_graph or self.seen > 10
        return torch.autograd.grad(x.square().sum(), x, create_graph=create_graph)[0]


class HandsOnByItself(Settings):
    def slope(self, x: Tensor, create_graph: bool = True) -> Tensor:
        return torch.autograd.grad(x.square().sum(), x, create_graph=create_graph)[0]


class IsAsked(HandsOn):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.slope(batch, create_graph=True).sum()


class TestHyperparameters:
    @pytest.mark.parametrize(
        ("model_class", "asks"),
        [
            (AskedByLength, {"constraints": ["a"]}),
            (AskedByWeight, {"weight": 0.5}),
            (AskedByName, {"kind": "slope"}),
        ],
    )
    def test_what_they_switch_off_does_not_count(
        self, model_class: type[Settings], asks: dict[str, Any]
    ) -> None:
        assert differentiates_twice(model_class()) is None
        assert differentiates_twice(model_class(**asks)) == f"{model_class.__name__}.slope"
        either = nn.ModuleList([model_class(), model_class(**asks)])
        assert differentiates_twice(either) == f"{model_class.__name__}.slope"

    @pytest.mark.parametrize(
        "model_class",
        [
            AskedAlways,
            AskedByAttribute,
            AskedLater,
            AskedElsewhereToo,
            AskedByDict,
            AskedOtherwise,
            HandsOnMore,
            HandsOnByItself,
        ],
    )
    def test_all_else_may_run_later(self, model_class: type[Settings]) -> None:
        assert differentiates_twice(model_class()) == f"{model_class.__name__}.slope"

    @pytest.mark.parametrize("model_class", [SetByAMethod, SetByItem])
    def test_one_that_a_method_sets_may_change(self, model_class: type[Settings]) -> None:
        assert differentiates_twice(model_class()) == f"{model_class.__name__}.slope"

    def test_a_setting_that_is_no_plain_value_may_change(self) -> None:
        assert differentiates_twice(AskedByLength(constraints=Changing())) == "AskedByLength.slope"

    @pytest.mark.parametrize("model_class", [AskedOfNobody, HandsOn])
    def test_what_is_off_does_not_count(self, model_class: type[Settings]) -> None:
        assert differentiates_twice(model_class()) is None

    def test_whoever_names_it_asks(self) -> None:
        assert differentiates_twice(IsAsked()) == "IsAsked.training_step"


class Changing(list[Any]):
    """A list of the user's own, of any length."""

    def __len__(self) -> int:
        return 0


class Potential(nn.Module):
    """As ``TorchMD_Net`` and ``ViSNet``: energies, and forces where the switch is on."""

    def __init__(self, derivative: bool) -> None:
        super().__init__()
        self.derivative = derivative
        self.is_open = False

    def forward(self, x: Tensor) -> Tensor:
        energy = x.square().sum()
        if self.derivative:
            return -torch.autograd.grad(energy, x, create_graph=self.training)[0]
        return energy


class OpensByItself(Potential):
    def open(self) -> None:
        setattr(self, "derivative", True)  # noqa: B010


class Trains(nn.Module):
    def __init__(self, model: Potential) -> None:
        super().__init__()
        self.model = model


class Schedules(Trains):
    def on_train_epoch_start(self) -> None:
        self.model.derivative = True


class Opens(L.Callback):
    """The forces come into the loss once the energies are learned."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.model.derivative = trainer.current_epoch > 1


class TestSwitches:
    def test_what_is_behind_one_that_is_off_does_not_count(self) -> None:
        assert differentiates_twice(Trains(Potential(derivative=False))) is None
        assert differentiates_twice(Trains(Potential(derivative=True))) == "Potential.forward"

    @pytest.mark.parametrize("value", [0, None, 0.0])
    def test_a_number_or_nothing_is_no_switch(self, value: Any) -> None:
        assert differentiates_twice(Potential(derivative=value)) == "Potential.forward"

    def test_one_that_a_module_may_turn_on_counts(self) -> None:
        assert differentiates_twice(OpensByItself(derivative=False)) == "OpensByItself.forward"
        assert differentiates_twice(Schedules(Potential(derivative=False))) == "Potential.forward"

    def test_one_that_a_callback_may_turn_on_counts(self) -> None:
        model = Trains(Potential(derivative=False))
        assert differentiates_twice(model, beside=[L.Callback(), Opens()]) == "Potential.forward"
        assert differentiates_twice(model, beside=[L.Callback()]) is None
