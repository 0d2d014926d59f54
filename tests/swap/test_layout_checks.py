"""Which compiled code looks at the layout of its tensors, and that it is right where it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.flop_counter import FlopCounterMode

from lightning_hotcompile.swap.inductor import layout_checks
from tests.functions import turned
from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded


@torch.library.custom_op("hotcompile_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """An operation of somebody's own."""
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def reasons(function: Callable[..., Any], *inputs: Any, **settings: Any) -> list[str | None]:
    """What is said about each graph that Dynamo captures."""
    found: list[str | None] = []

    def backend(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        found.append(layout_checks.why_needed(graph_module, example_inputs))
        return graph_module.forward

    torch.compile(function, backend=backend, **settings)(*inputs)
    return found


@pytest.fixture(autouse=True)
def _not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_SIZE_ASSERTS", raising=False)


class TestWhyNeeded:
    def test_not_where_all_operations_are_torchs_own(self) -> None:
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3), nn.GELU())
        assert reasons(lambda x: model(x).softmax(-1)[0] + 1, torch.ones(2, 1, 4, 4)) == [None]

    def test_where_sizes_vary(self) -> None:
        (reason,) = reasons(torch.sin, torch.ones(3, 4), dynamic=True)
        assert reason is not None
        assert "not all inputs are tensors of one size" in reason

    def test_where_an_operation_is_somebodys_own(self) -> None:
        (reason,) = reasons(lambda x: twice(x).sin(), torch.ones(3))
        assert reason is not None
        assert "hotcompile_tests" in reason

    def test_where_a_function_is_not_looked_into(self) -> None:
        def own(x: Tensor) -> Tensor:
            return x.t()

        torch.compiler.allow_in_graph(own)
        (reason,) = reasons(lambda x: own(x).sin(), torch.ones(3, 4))
        assert reason is not None
        assert "own" in reason

    def test_where_a_function_of_autograd_is_not_looked_into(self) -> None:
        class Own(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return twice(x)

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                return gradient

        torch._dynamo.allow_in_graph(Own)
        (reason,) = reasons(lambda x: Own.apply(x).sin(), torch.ones(3, 4))
        assert reason is not None

    def test_where_an_operation_is_known_to_return_other_layouts(self) -> None:
        (reason,) = reasons(lambda x: torch.linalg.eigh(x)[1], torch.eye(3))
        assert reason is not None
        assert "linalg" in reason

    @pytest.mark.parametrize("value", ["0", "1"])
    def test_where_the_user_has_a_say(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_SIZE_ASSERTS", value)
        (reason,) = reasons(torch.sin, torch.ones(3))
        assert reason == "TORCHINDUCTOR_SIZE_ASSERTS is set"


class TestChecked:
    """All layouts in one call, before anything runs."""

    def checked(self, held: tuple[Tensor, ...] = ()) -> tuple[Callable[..., Any], list[int]]:
        runs: list[int] = []

        def compiled(*inputs: Tensor) -> Tensor:
            runs.append(len(inputs))
            return inputs[0] + 1

        return layout_checks.checked(compiled, [torch.ones(4, 6), torch.ones(6)], held), runs

    def test_the_same_layouts_run(self) -> None:
        run, runs = self.checked()
        for _ in range(3):
            assert run(torch.zeros(4, 6), torch.zeros(6)).equal(torch.ones(4, 6))
        assert runs == [2, 2, 2]

    @pytest.mark.parametrize("first", [True, False], ids=["in the first run", "later"])
    @pytest.mark.parametrize(
        "other",
        [
            lambda: torch.zeros(6, 4).t(),
            lambda: torch.zeros(4, 12)[:, ::2],
            lambda: torch.zeros(4, 1).expand(4, 6),
            lambda: torch.zeros(6, 4),
            lambda: torch.zeros(4, 6, 1),
            lambda: torch.zeros(4, 6, dtype=torch.float16),
            lambda: torch.zeros(4, 6, device="meta"),
        ],
        ids=["turned", "strided", "expanded", "size", "dimensions", "dtype", "device"],
    )
    def test_another_layout_does_not(self, other: Callable[[], Tensor], first: bool) -> None:
        run, runs = self.checked()
        if not first:
            run(torch.zeros(4, 6), torch.zeros(6))
        with pytest.raises(layout_checks.LayoutChangedError, match=r"\(4, 6\), \(6, 1\)"):
            run(other(), torch.zeros(6))
        assert len(runs) == (not first)
        run(torch.zeros(4, 6), torch.zeros(6))

    def test_nor_does_that_of_a_tensor_which_the_graph_holds(self) -> None:
        held = torch.rand(3, 5)
        run, runs = self.checked((held,))
        run(torch.zeros(4, 6), torch.zeros(6))
        held.set_(turned(held))
        with pytest.raises(layout_checks.LayoutChangedError):
            run(torch.zeros(4, 6), torch.zeros(6))
        assert len(runs) == 1

    def test_the_stride_of_a_single_row_is_no_layout(self) -> None:
        runs: list[int] = []
        run = layout_checks.checked(lambda x, e: runs.append(1), [torch.ones(4, 1, 3, 3), torch.ones(0, 3)])
        for x, empty in ((torch.ones(4, 1, 3, 3), torch.ones(0, 3)), (other_single(), torch.ones(3, 0).t())):
            run(x, empty)
            run(x, empty)
        assert len(runs) == 4

    def test_a_mode_around_it_is_no_other_layout(self) -> None:
        run, runs = self.checked()
        for context in (torch.no_grad, torch.inference_mode, FlopCounterMode, torch.enable_grad):
            with context():
                run(torch.zeros(4, 6), torch.zeros(6))
        assert len(runs) == 4


def other_single() -> Tensor:
    """As convolutions with one input channel make gradients of their weights."""
    return torch.ones(36).as_strided((4, 1, 3, 3), (9, 1, 3, 1))


class Turning(Net):
    """Gradients and parameters of another layout in one late step."""

    def __init__(self) -> None:
        super().__init__(n_block=1)
        self.change = ""

    def configure_optimizers(self) -> Any:
        if self.change == "sparse":
            return torch.optim.SGD(self.parameters(), lr=1e-2)
        return super().configure_optimizers()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 60:
            for parameter in (p for p in self.parameters() if p.dim() == 2 and self.change):
                if self.change == "gradient":
                    parameter.grad = turned(parameter.grad)
                elif self.change == "sparse":
                    parameter.grad = parameter.grad.to_sparse()
                elif self.change == "parameter":
                    parameter.data = turned(parameter.data)
                else:
                    optimizer.state[parameter]["exp_avg"].set_(turned(optimizer.state[parameter]["exp_avg"]))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("change", ["gradient", "parameter", "state", "sparse"])
def test_an_optimizer_is_right_when_a_layout_changes(change: str) -> None:
    models: list[pl.LightningModule] = []
    for callbacks in (
        [],
        [hot(backend="inductor", scope="step", store=None, on_error="eager", compile_optimizer=True)],
    ):
        model = seeded(Turning)
        model.change = change
        fit(model, callbacks, max_steps=80, max_epochs=-1)
        models.append(model)
    assert "a tensor of sizes and strides" in callbacks[0].report.to_text()
    assert_same(*models)
