"""An optimizer in words, and one built from them that looks the same."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import Optimizer

from lightning_hotcompile.plan.optimizers import COMPILABLE
from lightning_hotcompile.plan.scopes import Region
from lightning_hotcompile.swap.gate import Gate, Lane
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.optimizers.optimizer import SwappedOptimizer
from lightning_hotcompile.swap.prewarm import optimizerfile
from lightning_hotcompile.swap.prewarm.compile_state import CompileState
from lightning_hotcompile.swap.prewarm.described import describe, rebuild
from lightning_hotcompile.swap.prewarm.optimizerfile import compile_optimizer, pack_optimizer
from lightning_hotcompile.swap.prewarm.symbols import NotPortable


def net() -> nn.Sequential:
    """Three layers; the last one is not used, so that it has no gradient."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(3, 3))


def stepped(optimizer: Optimizer, model: nn.Sequential) -> Optimizer:
    """An optimizer after its first step, with gradients and state."""
    model[1](model[0](torch.ones(5, 4))).square().sum().backward()
    optimizer.step()
    return optimizer


def sgd(**options: Any) -> Optimizer:
    model = net()
    return stepped(torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options}), model)


def look(value: Any) -> Any:
    """What is to be the same about a value."""
    if not isinstance(value, Tensor):
        return type(value), value
    scalar = value.item() if value.dim() == 0 else None
    kind = (type(value), value.dtype, value.device, value.requires_grad)
    return (*kind, tuple(value.shape), value.stride(), scalar)


def looks(optimizer: Optimizer) -> Any:
    """What is to be the same about an optimizer, the order of its dicts included."""
    index = {p: i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    return (
        type(optimizer),
        [[(look(p), look(p.grad)) for p in g["params"]] for g in optimizer.param_groups],
        [[(k, k != "params" and look(v)) for k, v in g.items()] for g in optimizer.param_groups],
        [(index[p], [(k, look(v)) for k, v in s.items()]) for p, s in optimizer.state.items()],
    )


@pytest.mark.parametrize("name", sorted(COMPILABLE))
def test_every_optimizer_comes_back_as_it_was(name: str) -> None:
    model = net()
    optimizer = stepped(getattr(torch.optim, name)(model.parameters()), model)
    assert looks(rebuild(describe(optimizer))) == looks(optimizer)


def test_groups_schedules_and_strides_come_back() -> None:
    model = net()
    first, last, second = model[0], model[2], model[1]
    weight = next(first.parameters())
    weight.data = weight.data.t().contiguous().t()
    groups: list[dict[str, Any]] = [
        {"name": "first", "betas": (0.8, 0.95), "params": first.parameters()},
        {"params": [*last.parameters(), *second.parameters()], "lr": torch.tensor(0.1), "foreach": False},
    ]
    adamw = torch.optim.AdamW(groups, amsgrad=True)
    torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 0.5)
    optimizer = stepped(adamw, model)
    built = rebuild(describe(optimizer))
    assert looks(built) == looks(optimizer)
    of_first, of_second = built.param_groups
    strides, grad = (
        of_first["params"][0].stride(),
        of_second["params"][0].grad,
    )  # no memory: not to be printed
    assert strides == (1, 8)
    assert grad is None
    assert of_first["initial_lr"] == 1e-3
    assert isinstance(of_second["initial_lr"], Tensor)


def test_numbers_that_are_not_finite_come_back() -> None:
    optimizer = sgd()
    optimizer.param_groups[0]["limit"] = math.inf
    assert rebuild(describe(optimizer)).param_groups[0]["limit"] == math.inf


def test_no_data_is_described_and_none_is_built() -> None:
    model = nn.Sequential(nn.Linear(300, 300))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(5, 300)).sum().backward()
    optimizer.step()
    words = describe(optimizer)
    assert len(words) < 10_000
    built = rebuild(words)
    parameters = built.param_groups[0]["params"]
    shape = parameters[0].shape  # what has no memory must not be printed
    assert shape == (300, 300)
    tensors = [*parameters, *(p.grad for p in parameters), *(s["exp_avg"] for s in built.state.values())]
    assert {t.untyped_storage().nbytes() for t in tensors} == {0}


def with_flat_gradients(optimizer: Optimizer) -> None:
    first, second = optimizer.param_groups[0]["params"][:2]
    flat = torch.zeros(first.numel() + second.numel())
    first.grad = flat[: first.numel()].view_as(first)
    second.grad = flat[first.numel() :].view_as(second)


def changed(name: str, value: Any) -> Callable[[Optimizer], None]:
    return lambda optimizer: optimizer.param_groups[0].__setitem__(name, value)


def with_foreign_state(optimizer: Optimizer) -> None:
    optimizer.state[torch.ones(2)] = {}


def with_a_gradient_that_has_a_graph(optimizer: Optimizer) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = parameter * 2


def with_a_sparse_gradient(optimizer: Optimizer) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = torch.zeros_like(parameter).detach().to_sparse()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed("momentum", torch.tensor(0.9)), "momentum is a Tensor"),
        (changed("weights", [torch.ones(1)]), "weights is a list"),
        (changed("decay", math.sqrt), "decay is a builtin"),
        (changed("differentiable", True), "differentiable"),
        (changed("fused", True), "fused"),
        (lambda optimizer: optimizer.zero_grad(), "no gradient"),
        (with_flat_gradients, "share memory"),
        (with_foreign_state, "none of its parameters"),
        (with_a_gradient_that_has_a_graph, "result of a computation"),
        (with_a_sparse_gradient, "sparse"),
    ],
)
def test_what_is_unusual_is_left_to_the_flip(change: Callable[[Optimizer], None], reason: str) -> None:
    optimizer = sgd()
    change(optimizer)
    with pytest.raises(NotPortable, match=reason):
        describe(optimizer)


def test_classes_of_others_are_left_to_the_flip() -> None:
    class SGD(torch.optim.SGD):
        pass

    model = net()
    with pytest.raises(NotPortable, match="SGD is not one of"):
        describe(stepped(SGD(model.parameters(), lr=0.1), model))
    with pytest.raises(NotPortable, match="Adafactor is not one of"):
        describe(stepped(torch.optim.Adafactor(net().parameters()), net()))


def said(**changes: Any) -> str:
    return json.dumps({**json.loads(describe(sgd())), **changes})


@pytest.mark.parametrize(
    "words",
    [
        "",
        "[]",
        said(**{"class": "Optimizer"}),
        said(**{"class": "lr_scheduler"}),
        said(parameters=[]),
        said(groups=None),
        said(groups=[{"params": [99]}]),
        said(state=[[0, {"momentum_buffer": {"module": "os"}}]]),
        describe(sgd()).replace('"float32"', '"load"'),
        describe(sgd()).replace('"float32"', '"nothing"'),
        describe(sgd()).replace('"cpu"', '"moon"'),
    ],
)
def test_other_words_are_refused(words: str) -> None:
    with pytest.raises(NotPortable):
        rebuild(words)


def swapped(optimizer: Optimizer, gate: Gate | None = None, backend: Any = "eager") -> SwappedOptimizer:
    region = Region(name="optimizer 0", kind="optimizer", members=("0",), class_name="SGD")
    witness = Witness(backend, parity="off")
    return SwappedOptimizer(region, gate or Gate(), witness, optimizer=optimizer, dynamic=None)


def graphs_of_a_step(optimizer: Optimizer) -> list[GraphModule]:
    """What the flip would hand to the backend."""
    found: list[GraphModule] = []

    def backend(graph_module: GraphModule, _: Any) -> Any:
        found.append(graph_module)
        return graph_module.forward

    gate = Gate(suppress_errors=False)
    there = swapped(optimizer, gate, backend)
    there.put(nn.Module())
    gate.open(Lane.COMPILE)
    optimizer.step()
    gate.close()
    there.take_out()
    return found


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_the_captured_graph_is_that_of_the_flip(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not to be set in this process: it is for a process of its own.
    monkeypatch.setattr(CompileState, "applied", lambda self: contextlib.nullcontext())
    found: list[GraphModule] = []

    def resolved(*_: Any, **__: Any) -> Any:
        return lambda module, _: found.append(module)

    monkeypatch.setattr(optimizerfile, "resolve_backend", resolved)
    model = net()
    optimizer = stepped(getattr(torch.optim, name)(model.parameters(), lr=0.1), model)
    compile_optimizer(pack_optimizer(swapped(optimizer)))
    assert len(found) == 1
    assert [g.code for g in found] == [g.code for g in graphs_of_a_step(optimizer)]


@pytest.mark.parametrize("outside", [False, True])
def test_the_compilers_settings_are_those_of_the_flip(outside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a part of the key, those too that an optimizer has no use for."""
    found: list[Any] = []

    def backend(graph_module: GraphModule, _: Any) -> Any:
        found.append(functorch_config.save_config())
        return graph_module.forward

    def with_outside(gate: Gate | None = None) -> SwappedOptimizer:
        witness = Witness(backend, parity="off", backward_outside=outside)
        region = Region(name="optimizer 0", kind="optimizer", members=("0",), class_name="SGD")
        return SwappedOptimizer(region, gate or Gate(), witness, optimizer=optimizer, dynamic=None)

    monkeypatch.setattr(CompileState, "applied", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(optimizerfile, "resolve_backend", lambda *_, **__: backend)
    optimizer, gate = sgd(), Gate(suppress_errors=False)
    compile_optimizer(pack_optimizer(with_outside()))
    there = with_outside(gate)
    there.put(nn.Module())
    gate.open(Lane.COMPILE)
    optimizer.step()
    gate.close()
    there.take_out()
    assert len(found) == 2
    assert found[0] == found[1]


def test_what_has_no_memory_can_be_shown_while_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    built, shown = list[Optimizer](), list[str]()

    def rebuilt(words: str) -> Optimizer:
        built.append(rebuild(words))
        return built[0]

    def backend(*_: Any) -> None:  # torch 2.11 does the same for the message of a guard
        shown.extend(repr(parameter) for parameter in built[0].param_groups[0]["params"])

    monkeypatch.setattr(CompileState, "applied", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(optimizerfile, "rebuild", rebuilt)
    monkeypatch.setattr(optimizerfile, "resolve_backend", lambda *_, **__: backend)
    before = torch.Tensor.__repr__
    compile_optimizer(pack_optimizer(swapped(sgd())))
    assert shown
    assert all("Parameter" in text for text in shown)
    assert torch.Tensor.__repr__ is before


def test_an_option_that_cannot_be_pickled_is_a_reason() -> None:
    with pytest.raises(NotPortable, match="options cannot be serialised"):
        pack_optimizer(swapped(sgd()), options={"post_grad_custom_pre_pass": lambda graph: None})
