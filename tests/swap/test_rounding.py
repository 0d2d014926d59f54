"""Gradients that go to what is equal to the largest element, in 16 bits."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.runtime import compile_tasks
from torch.nn import functional as F
from torch.utils import cpp_extension
from torch.utils.checkpoint import checkpoint

from lightning_hotcompile.swap.dynamo import TORCH
from lightning_hotcompile.swap.inductor import rounding
from lightning_hotcompile.swap.inductor.compilers import resolve_backend
from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded
from tests.swap.test_conv_layout import captured

AS_IN_EAGER = {rounding.NAME: True}

pytestmark = pytest.mark.skipif(
    TORCH < (2, 13), reason="the option does not help there: such graphs stay eager"
)


def options(function: Callable[..., Tensor], *inputs: Tensor, **given: Any) -> dict[str, Any]:
    return rounding.options(*captured(function, *inputs), given)


def halved(x: Tensor) -> Tensor:
    return x.bfloat16().amax(1).float()


def in_a_checkpoint(x: Tensor) -> Tensor:
    return checkpoint(lambda y: y.relu().amax(1), x, use_reentrant=False)  # type: ignore[no-any-return]


FLOAT, HALF = torch.ones(4, 5), torch.ones(4, 5, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        (lambda x: x.amax(1), HALF, AS_IN_EAGER),
        (lambda x: torch.amin(x, dim=0), HALF, AS_IN_EAGER),
        (lambda x: x.max(), HALF, AS_IN_EAGER),
        (torch.min, HALF, AS_IN_EAGER),
        (lambda x: torch.linalg.vector_norm(x, ord=float("inf")), HALF.half(), AS_IN_EAGER),
        (lambda x: x.norm(p=float("inf")), HALF, AS_IN_EAGER),
        (halved, FLOAT, AS_IN_EAGER),
        (in_a_checkpoint, HALF, AS_IN_EAGER),
        (lambda x: x.amax(1), FLOAT, {}),
        (lambda x: x.max(dim=1).values, HALF, {}),
        (lambda x: torch.max(x, x * 2), HALF, {}),
        (lambda x: x.relu().sum(), HALF, {}),
        (lambda x: x.norm(), HALF, {}),
        (lambda x: torch.linalg.vector_norm(x, ord=1.0), HALF, {}),
        (lambda x: torch.norm(x, "fro"), HALF, {}),
    ],
)
def test_it_is_for_such_gradients_in_16_bits(
    function: Callable[..., Tensor], x: Tensor, expected: dict[str, Any]
) -> None:
    assert options(function, x) == expected


def test_under_autocast_a_product_may_be_of_16_bits() -> None:
    assert options(lambda x: (x @ x.T).amax(1), FLOAT) == {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert options(lambda x: (x @ x.T).amax(1), FLOAT) == AS_IN_EAGER


def test_what_a_user_chose_stays() -> None:
    assert options(lambda x: x.amax(1), HALF, emulate_precision_casts=False) == {}


OF_LARGEST: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: (x + x * 0.37).amax(1),
    "gelu": lambda x: F.gelu(x).amin(1),
    "of all": lambda x: x.sin().max()[None],
    "two dims": lambda x: F.gelu(x.view(8, 8, 37)).amax(dim=(1, 2)),
    "norm": lambda x: F.layer_norm(x, (37,)).amax(0),
}


def gradients(names: list[str], dtype: torch.dtype, **given: Any) -> list[list[Tensor]]:
    """In eager and compiled: those of each function, all in one graph, for an input of its own."""

    def step(*inputs: Tensor) -> list[Tensor]:
        return [OF_LARGEST[name](x).sum() for name, x in zip(names, inputs, strict=True)]

    torch._dynamo.reset()
    found = []
    x = torch.randn(64, 37, generator=torch.Generator().manual_seed(0)).to(dtype)
    for run in (step, torch.compile(step, backend=resolve_backend("inductor", None, given))):
        inputs = [x.clone().requires_grad_() for _ in names]
        found.append([*torch.autograd.grad(run(*inputs), inputs)])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "dtype"),
    [*(([name], torch.bfloat16) for name in OF_LARGEST), ([*OF_LARGEST], torch.float16)],
    ids=[*OF_LARGEST, "all in float16"],
)
def test_gradients_are_those_of_eager(names: list[str], dtype: torch.dtype) -> None:
    eager, ours = gradients(names, dtype)
    for theirs, found in zip(eager, ours, strict=True):
        torch.testing.assert_close(found, theirs, rtol=2e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.skipif(TORCH != (2, 13), reason="where it was seen")
def test_inductor_by_itself_has_none() -> None:
    _, (theirs,) = gradients(["sum"], torch.bfloat16, emulate_precision_casts=False)
    assert theirs.isnan().any()


class Pools(Net):
    """The largest value of each channel after an addition, as attention over channels takes it."""

    def __init__(self) -> None:
        super().__init__(n_block=0)
        self.inp = nn.Linear(8, 64)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        h = self.inp(x).view(len(x), 8, 8)
        return self.head((h + 0.37 * h.tanh()).amax(1))


@pytest.mark.slow
def test_a_training_in_mixed_precision_is_compiled() -> None:
    plain, model = seeded(Pools), seeded(Pools)
    callback = hot(backend="inductor", scope="step", compile_optimizer=False)
    fit(plain, precision="bf16-mixed")
    fit(model, [callback], precision="bf16-mixed")
    (region,) = callback.report.regions
    assert region.proven, region
    assert_same(plain, model, tolerance=1e-2)


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with Triton, and without CUDA's toolkit."""
    triton: Any = types.ModuleType("triton")
    triton.knobs = types.SimpleNamespace(nvidia=types.SimpleNamespace(libdevice_path=None))
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.delenv("TRITON_LIBDEVICE_PATH", raising=False)


@pytest.mark.usefixtures("no_toolkit")
@pytest.mark.filterwarnings("error")
def test_where_it_is_asked_for_nothing_is_said_of_a_toolkit_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The user has not asked for it. Where warnings are errors nothing could be compiled."""
    asked: list[bool] = []

    def compile_graph(wrapper: Any, graph: torch.fx.GraphModule, _: Any) -> Any:
        asked.append(bool(wrapper.config.get(rounding.NAME)))
        compile_tasks._set_triton_libdevice_path_impl()
        return graph.forward

    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", compile_graph)
    compiler = resolve_backend("inductor", None, None)
    compiler(*captured(lambda x: x.amax(1), HALF))
    assert asked == [True]
    with pytest.raises(UserWarning, match="using Triton's bundled"):
        compiler(*captured(lambda x: x.amax(1), FLOAT))
    with pytest.raises(UserWarning, match="using Triton's bundled"):
        resolve_backend("inductor", None, AS_IN_EAGER)(*captured(lambda x: x.amax(1), HALF))
