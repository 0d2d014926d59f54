"""Numbers of Inductor's kernels for a GPU that are known to be delicate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hotcompile.swap.dynamo import TORCH
from lightning_hotcompile.swap.inductor.compilers import resolve_backend
from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, loader, seeded
from tests.swap.test_float8 import KINDS, Rounds
from tests.swap.test_rounding import OF_LARGEST

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


def gradients(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(run(x).sum(), x)
    return found


@pytest.mark.skipif(TORCH < (2, 13), reason="the option does not help there: such graphs stay eager")
@pytest.mark.filterwarnings("error:.*bundled")
@pytest.mark.parametrize("name", OF_LARGEST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_the_largest_element_in_16_bits(name: str, dtype: torch.dtype) -> None:
    """Without a word on a toolkit that is not installed, which torch has where it rounds so."""
    function = OF_LARGEST[name]
    x = torch.randn(64, 37, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    compiled = torch.compile(function, backend=resolve_backend("inductor", None, {}))
    expected, found = gradients(function, x), gradients(compiled, x)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2)


@pytest.fixture
def tensor_float() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


class Wide(Net):
    """Its products are large enough for tensor cores."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(width=256, dropout=dropout)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


@pytest.mark.usefixtures("tensor_float")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_products_in_tensor_float_are_no_reason_to_be_eager(dropout: float) -> None:
    plain, model = seeded(Wide, dropout), seeded(Wide, dropout)
    callback = hot(backend="inductor", scope="step", compile_optimizer=False)
    fit(plain, accelerator="gpu")
    fit(model, [callback], accelerator="gpu")
    assert_proven(callback.report)
    assert_same(plain, model, tolerance=2e-2)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "bf16-mixed"])
@pytest.mark.parametrize("compile_optimizer", [False, True])
def test_weights_in_16_bits(precision: Any, compile_optimizer: bool) -> None:
    class Floats(Net):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return F.cross_entropy(self(x.to(self.head.weight.dtype)).float(), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    plain, model = seeded(Floats), seeded(Floats)
    callback = hot(backend="inductor", scope="step", compile_optimizer=compile_optimizer, on_error="eager")
    fit(plain, accelerator="gpu", precision=precision)
    fit(model, [callback], accelerator="gpu", precision=precision)
    assert "NOT right" not in callback.report.parity, callback.report.parity
    assert callback.report.phase == "steady", callback.report.reason
    assert_same(plain, model, tolerance=5e-2)


class OnBoth(Net):
    """A table that stays in main memory, whose rows are copied to the GPU in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        table = torch.arange(8, dtype=torch.float32)  # on the CPU, as is usual by an oversight
        return F.cross_entropy(self(x * self.scale + 0.01 * table.to(x.device, non_blocking=True)), y)


@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_step_on_two_devices(pin_memory: bool) -> None:
    plain, model = seeded(OnBoth), seeded(OnBoth)
    callback = hot(backend="inductor", scope="step", compile_optimizer=False)
    data = loader()
    data = torch.utils.data.DataLoader(data.dataset, 8, pin_memory=pin_memory)
    fit(plain, train=data, accelerator="gpu")
    fit(model, [callback], train=data, accelerator="gpu")
    assert_proven(callback.report)
    assert_same(plain, model, tolerance=1e-3)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_activations_that_are_kept_in_8_bits(kind: torch.dtype) -> None:
    trained = type("Rounds", (Rounds,), {"kind": kind})
    plain, model = seeded(trained), seeded(trained)
    callback = hot(backend="inductor", scope="step", compile_optimizer=False)
    fit(plain, accelerator="gpu")
    fit(model, [callback], accelerator="gpu")
    assert "NOT right" not in callback.report.parity, callback.report.parity
    assert_proven(callback.report)
    assert_same(plain, model, tolerance=5e-2)
