"""Somebody looks into a step in a way that compiled code knows nothing of: it runs eagerly then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules import module as of_all_modules

from lightning_hotcompile.swap.onlookers import HOOKS_ON_ALL_MODULES
from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded

SCOPES = ["step", "regions"]


def halved(module: nn.Module, _: Any, output: Any) -> Any:
    return 0.5 * output if isinstance(module, nn.Linear) else None


def halved_before(module: nn.Module, inputs: Any) -> Any:
    return (0.5 * inputs[0],) if isinstance(module, nn.Linear) else None


def halved_backwards(module: nn.Module, gradients: Any, _: Any) -> Any:
    return tuple(None if g is None else 0.5 * g for g in gradients) if isinstance(module, nn.Linear) else None


class Registers(pl.Callback):
    """A hook on all modules for the epochs from ``first`` to ``last``."""

    def __init__(self, register: str, hook: Callable[..., Any], first: int, last: int) -> None:
        self.register, self.hook, self.first, self.last = register, hook, first, last
        self.handle: Any = None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == self.first:
            self.handle = getattr(of_all_modules, self.register)(self.hook)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == self.last:
            self.handle.remove()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.handle.remove()


BEFORE, AFTER = (0, 0), (2, 2)  # the flip


@pytest.mark.parametrize(
    ("register", "hook", "epochs", "scope"),
    [
        ("register_module_forward_hook", halved, BEFORE, SCOPES[0]),
        ("register_module_forward_hook", halved, AFTER, SCOPES[1]),
        ("register_module_forward_pre_hook", halved_before, AFTER, SCOPES[0]),
        ("register_module_forward_pre_hook", halved_before, BEFORE, SCOPES[1]),
        ("register_module_full_backward_hook", halved_backwards, BEFORE, SCOPES[0]),
        ("register_module_full_backward_hook", halved_backwards, AFTER, SCOPES[0]),
        ("register_module_full_backward_hook", halved_backwards, AFTER, SCOPES[1]),
    ],
)
def test_a_hook_on_all_modules_is_called(
    register: str, hook: Callable[..., Any], epochs: tuple[int, int], scope: str
) -> None:
    """Also one that is there for an epoch only, before or after the flip."""
    plain, model = seeded(Net), seeded(Net)
    callback = hot(scope=scope)
    fit(plain, [Registers(register, hook, *epochs)], max_epochs=4)
    fit(model, [Registers(register, hook, *epochs), callback], max_epochs=4)
    assert_same(plain, model)
    runs = sum(region.runs for region in callback.report.regions)
    assert runs > 0


def test_what_keeps_compiled_code_out_is_told() -> None:
    callback = hot(scope="regions")
    fit(seeded(Net), [Registers("register_module_forward_hook", halved, 0, 9), callback], max_epochs=2)
    assert callback.report.phase == "observing"
    assert HOOKS_ON_ALL_MODULES in callback.report.decision


class Looked(Net):
    """In some steps a part of it is looked at."""

    look: Callable[[nn.Module, Tensor], Any]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.global_step % 6 == 5:
            self.looked = type(self).look(self.blocks[0], self.inp(x).detach())
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss


def by_jit(part: nn.Module, x: Tensor) -> Any:
    return sum(1 for _ in torch.jit.trace(part, x, check_trace=False).graph.nodes())  # type: ignore[no-untyped-call]


def by_make_fx(part: nn.Module, x: Tensor) -> Any:
    return len(make_fx(lambda a: part(a))(x).graph.nodes)


def symbolically(part: nn.Module, x: Tensor) -> Any:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = part

        def forward(self, a: Tensor) -> Any:
            return self.part(a)

    return len(torch.fx.symbolic_trace(Around()).graph.nodes)


def by_tangents(part: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(part(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        assert tangent is not None
        return round(float(tangent.detach().sum()), 3)


@pytest.mark.parametrize("look", [by_jit, by_make_fx, symbolically, by_tangents])
def test_a_part_can_be_traced_in_the_step(look: Callable[[nn.Module, Tensor], Any]) -> None:
    looks = type("Looks", (Looked,), {"look": look})
    plain, model = seeded(looks), seeded(looks)
    callback = hot(scope="regions")
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    assert plain.looked == model.looked
    assert callback.report.phase == "steady"
    assert_proven(callback.report)
