"""Where convolutions have large weights, compiled code lays nothing out channels last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hotcompile.swap.inductor import conv_layout
from lightning_hotcompile.swap.inductor.compilers import resolve_backend
from lightning_hotcompile.swap.prewarm import graphfile

AS_IN_EAGER = {conv_layout.NAME: False}


def captured(function: Callable[..., Tensor], *inputs: Tensor, dynamic: bool = False) -> tuple[Any, Any]:
    found: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        found.append((graph, examples))
        return graph.forward

    torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    (one,) = found
    return one  # type: ignore[no-any-return]


def options(function: Callable[..., Tensor], *inputs: Tensor, **given: Any) -> dict[str, Any]:
    return conv_layout.options(*captured(function, *inputs), given)


def net(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))


def image(size: int) -> Tensor:
    return torch.ones(2, 3, size, size)


WIDE = net(64)


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (net(64), [image(6)], AS_IN_EAGER),
        (net(8), [image(32)], {}),
        (lambda x, w: F.conv2d(input=x, weight=w), [image(4), torch.ones(64, 3, 3, 3)], AS_IN_EAGER),
        (lambda x, w: F.conv_transpose2d(x, w), [image(1)[:1], torch.ones(3, 64, 3, 3)], AS_IN_EAGER),
        (lambda x: checkpoint(WIDE, x, use_reentrant=False), [image(6)], {}),
        (nn.Linear(64, 64), [torch.ones(1, 64)], {}),
        (nn.Sequential(net(8), nn.GroupNorm(4, 8)), [image(32)], AS_IN_EAGER),
        (nn.Sequential(net(8), nn.BatchNorm2d(8)), [image(32)], {}),
        (nn.GroupNorm(4, 8), [torch.ones(2, 8, 32, 32)], {}),
    ],
    ids=[
        *("wide", "narrow", "by keyword", "transposed", "in a checkpoint", "none"),
        *("groups", "batches", "groups without a convolution"),
    ],
)
def test_the_larger_part_decides(
    function: Callable[..., Tensor], inputs: list[Tensor], expected: dict[str, Any]
) -> None:
    assert options(function, *inputs) == expected


def test_sizes_that_vary_are_left_to_inductor() -> None:
    model = net(64)
    assert conv_layout.options(*captured(model, image(6), dynamic=True), {}) == {}


def test_who_has_chosen_has_chosen() -> None:
    assert options(net(64), image(6), layout_optimization=True) == {}
    with inductor_config.patch(force_layout_optimization=True):
        assert options(net(64), image(6)) == {}
    with inductor_config.patch(layout_optimization=False):
        assert options(net(64), image(6)) == {}


def test_a_child_process_decides_as_the_training_does(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, examples = captured(net(64), image(6))
    found: list[dict[str, Any]] = []

    def compile_nothing(graph: Any, examples: Any) -> None:
        found.append(conv_layout.options(graph, examples, {}))

    monkeypatch.setattr(graphfile, "resolve_backend", lambda *_: compile_nothing)
    graphfile.compile_packed(graphfile.pack(graph, examples))
    assert found == [conv_layout.options(graph, examples, {})] == [AS_IN_EAGER]


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 8])
def test_the_backend_compiles_so(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.graph import GraphLowering

    seen: list[bool] = []
    decide = GraphLowering.decide_layout_opt

    def watched(*args: Any, **kwargs: Any) -> bool:
        seen.append(decide(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(GraphLowering, "decide_layout_opt", staticmethod(watched))
    model, x = net(width), image(6 if width == 64 else 32)
    with torch.compiler.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        compiled = torch.compile(model, backend=resolve_backend("inductor", None, None))
        out = compiled(x)
    out.sum().backward()
    torch.testing.assert_close(out, model(x), rtol=1e-4, atol=1e-5)
    assert any(seen) is (width == 8)
