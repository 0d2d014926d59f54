"""Compiled code that is wrong is found on its first real inputs and not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hotcompile.errors import HotCompileWarning, ParityError
from lightning_hotcompile.swap.parity import clone_inputs, compare
from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded, weights


def linear(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return (F.gelu(x @ w),)


def inputs() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 8, generator=generator), torch.randn(8, 8, generator=generator)
    return [x, w.requires_grad_()]


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.05


class TestCompare:
    def test_the_same_code_agrees(self) -> None:
        parity = compare(linear, linear, inputs())
        assert parity.agrees
        assert parity.error == 0
        assert not parity.stochastic

    def test_rounding_is_no_difference(self) -> None:
        parity = compare(linear, lambda x, w: ((F.gelu(x @ w) * (1 + 1e-6)),), inputs())
        assert parity.agrees
        assert 0 < parity.error < 1e-4

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda x, w: (F.gelu(x @ w) * 1.05,),
            lambda x, w: (WrongGradient.apply(F.gelu(x @ w)),),
            lambda x, w: (F.gelu(x @ w) / 0,),
            lambda x, w: (F.gelu(x @ w).detach(),),
            lambda x, w: (F.gelu(x @ w)[:2],),
            lambda x, w: (F.gelu(x @ w), x),
            lambda x, w: 1 / 0,
        ],
        ids=["forward", "gradient only", "nan", "no gradient", "shape", "one more output", "raises"],
    )
    def test_wrong_code_is_found(self, wrong: Callable[..., Any]) -> None:
        parity = compare(linear, wrong, inputs())
        assert parity.failed
        assert parity.reason

    def test_a_mutated_input_counts(self) -> None:
        def adds(x: Tensor, w: Tensor) -> tuple[Tensor]:
            x.add_(1)
            return (x @ w,)

        def adds_more(x: Tensor, w: Tensor) -> tuple[Tensor]:
            result = (x + 1) @ w
            x.add_(1.5)
            return (result,)

        given = inputs()
        before = given[0].clone()
        assert compare(adds, adds, given).agrees
        assert compare(adds, adds_more, given).failed
        assert torch.equal(given[0], before), "the real inputs stay as they are"

    def test_random_code_is_held_against_its_own_noise(self) -> None:
        def dropped(x: Tensor, w: Tensor) -> tuple[Tensor]:
            return (F.dropout(x @ w, 0.5),)

        def other_stream(x: Tensor, w: Tensor) -> tuple[Tensor]:
            torch.rand(3)
            return (F.dropout(x @ w, 0.5),)

        parity = compare(dropped, other_stream, inputs())
        assert parity.agrees
        assert parity.stochastic
        assert compare(dropped, lambda x, w: (F.dropout(x @ w, 0.5) * 20,), inputs()).failed

    def test_random_state_and_gradients_are_as_before(self) -> None:
        given = inputs()
        torch.manual_seed(3)
        state = torch.get_rng_state()
        compare(linear, linear, given)
        assert torch.equal(torch.get_rng_state(), state)
        assert given[1].grad is None

    def test_half_precision_has_its_own_tolerance(self) -> None:
        x, w = (t.detach().bfloat16() for t in inputs())
        parity = compare(
            linear, lambda x, w: (F.gelu(x.float() @ w.float()).bfloat16(),), [x, w.requires_grad_()]
        )
        assert parity.agrees

    def test_what_cannot_be_cloned_is_not_compared_and_says_so(self) -> None:
        parity = compare(lambda x: (x,), lambda x: (x,), [torch.eye(3).to_sparse()])
        assert parity.agrees is None
        assert "sparse" in parity.reason

    def test_out_of_memory_is_not_a_failure(self) -> None:
        def out_of_memory(*_: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        parity = compare(linear, out_of_memory, inputs())
        assert parity.agrees is None
        assert "memory" in parity.reason

    def test_clones_share_memory_as_the_originals_do(self) -> None:
        base = torch.arange(6.0)
        a, b, c = clone_inputs([base, base[2:4], torch.ones(2)])
        a[2] = 9
        assert b[0] == 9
        assert base[2] == 2
        assert c.tolist() == [1, 1]


def scales(factor: float, *, gradient_only: bool = False) -> Callable[..., Any]:
    """A backend whose compiled code is wrong in floats."""

    def backend(graph: Any, example_inputs: Any, **_: Any) -> Any:
        def run(*args: Any) -> Any:
            return tuple(change(t) for t in graph(*args))

        def change(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            return WrongGradient.apply(value) if gradient_only else value * factor

        return run

    return backend


class TestInTraining:
    @pytest.mark.parametrize("scope", ["step", "regions"])
    @pytest.mark.parametrize(
        "backend", [scales(1.05), scales(1.0, gradient_only=True)], ids=["forward", "gradient"]
    )
    def test_wrong_code_is_never_used(self, scope: str, backend: Any) -> None:
        plain, model = seeded(Net), seeded(Net)
        callback = hot(scope=scope, backend=backend, on_error="eager", compile_optimizer=False)
        fit(plain)
        fit(model, [callback])
        assert callback.report.phase == "reverted"
        assert "not right" in callback.report.reason
        assert "NOT right" in callback.report.parity
        assert any(e["kind"] == "parity_checked" and e["agrees"] is False for e in callback.report.events)
        assert_same(plain, model, tolerance=1e-6)

    def test_right_code_says_so(self) -> None:
        callback = hot()
        fit(seeded(Net), [callback])
        report = callback.report
        assert report.parity.startswith("2 of 2 graphs agree with eager")
        assert report.parity_error is not None
        assert report.parity_error < 1e-5

    def test_off_warn_and_raise(self) -> None:
        callback = hot(backend=scales(1.05), parity="off", compile_optimizer=False)
        fit(seeded(Net), [callback])
        assert callback.report.phase == "steady"
        assert "parity='off'" in callback.report.parity
        with pytest.warns(HotCompileWarning, match="not right"):
            fit(seeded(Net), [hot(backend=scales(1.05), parity="warn", compile_optimizer=False)])
        with pytest.raises(ParityError, match="not right"):
            fit(seeded(Net), [hot(backend=scales(1.05), parity="raise", compile_optimizer=False)])

    def test_dropout_trains_and_is_checked_against_noise(self) -> None:
        callback = hot(scope="step")
        fit(seeded(Net, dropout=0.3), [callback])
        assert callback.report.phase == "steady"
        assert "random" in callback.report.parity

    def test_batch_norm_statistics_are_updated_once_a_step(self) -> None:
        class Normed(Net):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.BatchNorm1d(8)

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(self.norm(x))

        plain, model, callback = seeded(Normed), seeded(Normed), hot(scope="step", compile_optimizer=False)
        trainer = fit(plain)
        fit(model, [callback])
        assert callback.report.phase == "steady"
        assert weights(model)["norm.num_batches_tracked"] == trainer.global_step
        assert_same(plain, model)

    @pytest.mark.parametrize("kind", ["AdamW", "SGD"])
    def test_the_check_of_the_optimizer_takes_no_step(self, kind: str) -> None:
        class Plain(Net):
            def configure_optimizers(self) -> Any:
                return getattr(torch.optim, kind)(self.parameters(), lr=1e-2)

        plain, model, callback = seeded(Plain), seeded(Plain), hot(scope="step")
        fit(plain, max_epochs=1)
        trainer = fit(model, [callback], max_epochs=1)
        assert any(r.kind == "optimizer" and r.proven for r in callback.report.regions)
        assert_same(plain, model, tolerance=1e-5)
        steps = [float(s["step"]) for s in trainer.optimizers[0].state.values() if "step" in s]
        assert set(steps) <= {float(trainer.global_step)}
