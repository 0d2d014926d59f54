"""Compiled code that is wrong is found on its first real inputs and not used."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hotcompile.errors import HotCompileWarning, ParityError
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.parity import difference, proportion
from lightning_hotcompile.swap.parity.clones import clone_inputs
from lightning_hotcompile.swap.parity.compare import compare
from lightning_hotcompile.swap.parity.verdict import Parity
from lightning_hotcompile.swap.process import free_memory
from tests.functions import WrongGradient
from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded, weights


def linear(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return (F.gelu(x @ w),)


def inputs() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 8, generator=generator), torch.randn(8, 8, generator=generator)
    return [x, w.requires_grad_()]


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

    @pytest.mark.parametrize("apart", [4e-3, 4e-2])
    @pytest.mark.parametrize("mixed", [True, False])
    def test_without_a_64_bit_run_results_of_autocast_are_held_to_its_dtype(
        self, mixed: bool, apart: float
    ) -> None:
        """An embedding in 32 bit pins its dtype; what comes after it is rounded to 8 bits of mantissa."""

        def pinned(x: Tensor, w: Tensor) -> tuple[Tensor]:
            assert x.dtype is torch.float32, "as addmm has it against two dtypes"
            return ((x.float() @ w).float(),)

        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            parity = compare(pinned, lambda x, w: (pinned(x, w)[0] * (1 + apart),), inputs())
        assert parity.agrees is (mixed and apart < 1e-2)

    def test_64_bit_results_of_autocast_are_held_to_64_bits(self) -> None:
        def wide(x: Tensor, w: Tensor) -> tuple[Tensor]:
            assert x.dtype is torch.float32
            return ((x.detach().double().sum(0)),)

        with torch.autocast("cpu", torch.bfloat16):
            parity = compare(wide, lambda x, w: (wide(x, w)[0] * (1 + 1e-4),), inputs())
        assert not parity.agrees

    @pytest.mark.parametrize(
        ("wrong", "reason"),
        [
            (lambda x, w: (F.gelu(x @ w) * 1.05,), "differs from eager by up to"),
            (lambda x, w: (WrongGradient.apply(F.gelu(x @ w)),), "differs from eager by up to"),
            (lambda x, w: (F.gelu(x @ w) / 0,), "differs from eager by up to inf"),
            (lambda x, w: (F.gelu(x @ w).detach(),), "of other shapes or types than eager, or more or fewer"),
            (lambda x, w: (F.gelu(x @ w)[:2],), "of other shapes or types than eager, or more or fewer"),
            (lambda x, w: (F.gelu(x @ w), x), "of other shapes or types than eager, or more or fewer"),
            (lambda x, w: 1 / 0, "compiled code raised ZeroDivisionError"),
        ],
        ids=["forward", "gradient only", "nan", "no gradient", "shape", "one more output", "raises"],
    )
    def test_wrong_code_is_found(self, wrong: Callable[..., Any], reason: str) -> None:
        parity = compare(linear, wrong, inputs())
        assert parity.failed
        assert reason in parity.reason

    def test_a_comparison_that_raises_counts_as_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: Any) -> float:
            raise LookupError("not foreseen")

        monkeypatch.setattr("lightning_hotcompile.swap.parity.compare.largest_difference", fails)
        parity = compare(linear, linear, inputs())
        assert parity.agrees is False
        assert parity.reason == "could not be compared: LookupError: not foreseen"

    @pytest.mark.parametrize("scale", [1e-2, 1e-4, 1e-6])
    def test_small_gradients_that_are_wrong_are_found(self, scale: float) -> None:
        """A loss in a whole step has gradients far below the tolerance for numbers."""

        def loss(x: Tensor, w: Tensor) -> tuple[Tensor]:
            return ((x @ w).square().mean() * scale,)

        assert compare(loss, loss, inputs()).agrees
        wrong = compare(loss, lambda x, w: (WrongGradient.apply(*loss(x, w)),), inputs())
        assert wrong.failed
        assert "of a tensor's size" in wrong.reason

    def test_small_outputs_that_are_wrong_are_found(self) -> None:
        def scaled(x: Tensor, w: Tensor) -> tuple[Tensor]:
            return (x @ w.detach() * 1e-5,)

        assert compare(scaled, scaled, inputs()).agrees
        assert compare(scaled, lambda x, w: (scaled(x, w)[0] * 2,), inputs()).failed

    @pytest.mark.parametrize("rate", [1e-2, 3e-4, 1e-6])
    @pytest.mark.parametrize("wrong", [-1.0, 0.0, 1.5])
    def test_a_wrong_update_is_found_however_small_it_is(self, rate: float, wrong: float) -> None:
        weight, gradient = torch.full((64,), 0.1), torch.linspace(-1e-2, 1e-2, 64)

        def update(factor: float) -> Callable[..., Any]:
            def run(gradient: Tensor) -> tuple[()]:
                weight.sub_(factor * rate * gradient.sign())
                return ()

            return run

        before, steps = weight.clone(), torch.tensor(0.0)

        def counted(factor: float) -> Callable[..., Any]:
            def run(gradient: Tensor) -> tuple[()]:
                steps.add_(1)  # as Adam's does: beside it every update is small
                return update(factor)(gradient)  # type: ignore[no-any-return]

            return run

        for made in (update, counted):
            held = [weight, steps]
            assert compare(made(1.0), made(1.0 + 1e-6), [gradient], held).agrees
            assert compare(made(1.0), made(wrong), [gradient], held).failed
        assert torch.equal(weight, before)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_an_update_that_leaves_a_few_weights_out_is_found(self, dtype: torch.dtype) -> None:
        """As code does that has whole vectors only: 15 of 10,000 are 4% of how far all have moved."""
        weight, gradient = torch.ones(10_000, dtype=dtype), torch.ones(10_000, dtype=dtype)

        def update(left_out: int) -> Callable[..., Any]:
            def run(gradient: Tensor) -> tuple[()]:
                n = len(weight) - left_out
                weight[:n] -= 3e-4 * gradient[:n]
                return ()

            return run

        assert compare(update(0), update(0), [gradient], [weight]).agrees
        assert compare(update(0), update(15), [gradient], [weight]).failed

    @pytest.mark.parametrize("wrong", [0.0, -1.0, 1.5])
    def test_gradients_far_below_the_largest_are_looked_at(self, wrong: float) -> None:
        """Behind a scale of 1e-6, as blocks begin with; Adam makes full steps of them all the same."""

        def scaled(factor: float) -> Callable[..., Any]:
            def run(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor]:
                inner = x @ v * 1e-6
                inner = inner * factor + (inner - inner * factor).detach()
                return ((x @ w + inner).square().sum(),)

            return run

        given = [*inputs(), torch.randn(8, 8, requires_grad=True)]
        assert compare(scaled(1.0), scaled(1.0), given).agrees
        assert compare(scaled(1.0), scaled(wrong), given).failed

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_where_all_gradients_are_rounding_nothing_is_wrong(self, dtype: torch.dtype) -> None:
        """Of data that are fitted: the loss is all but zero."""
        x = torch.randn(64, 8, dtype=dtype)
        w = torch.randn(8, 1, dtype=dtype)
        y = x @ w

        def loss(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor]:
            return ((x @ w - y).square().mean(),)

        def in_another_order(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor]:
            return (((x.flip(1) * w.flip(0).t()).sum(1, keepdim=True) - y).square().mean(),)

        parity = compare(loss, in_another_order, [x, w.requires_grad_(), y])
        assert parity.agrees, parity.reason

    def test_running_statistics_may_move_by_rounding_only(self) -> None:
        """Of what has mean zero the statistics are noise, and so is every difference in them."""
        x = torch.randn(64, 8, dtype=torch.float64)
        x = (x - x.mean(0)).float()

        def follow(order: int) -> Callable[..., Any]:
            def run(x: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor]:
                mean.lerp_(x.roll(order, 0).cumsum(0)[-1] / len(x), 0.1)
                var.lerp_(x.var(0), 0.1)
                return (x - mean,)

            return run

        given = [x, torch.zeros(8), torch.ones(8)]
        assert compare(follow(0), follow(31), given).agrees

    def test_a_gradient_that_should_be_zero_is_rounding(self) -> None:
        """A bias before a normalisation has no effect, so its gradient is what rounding has left."""
        x, w = inputs()
        bias = torch.zeros(8, requires_grad=True)

        def step(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor]:
            h = x @ w + bias
            return (((h - h.mean(0)) / (h.var(0) + 1e-5).sqrt()).square().sum(),)

        def in_another_order(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor]:
            h = (x.flip(1) @ w.flip(0) + bias).flip(0)
            return (((h - h.mean(0)) * (h.var(0) + 1e-5).rsqrt()).square().sum(),)

        parity = compare(step, in_another_order, [x, w, bias])
        assert parity.agrees, parity.reason

    @pytest.mark.parametrize(("share", "agrees"), [(2e-6, True), (1e-4, False)])
    def test_so_it_is_beside_large_ones(self, share: float, agrees: bool) -> None:
        """Of a loss that sums: what is left of the zero is more than the tolerance for numbers."""
        x, w = inputs()
        bias, goal = torch.zeros(8, requires_grad=True), torch.randn(len(x), 8)

        def step(x: Tensor, w: Tensor, bias: Tensor, goal: Tensor) -> tuple[Tensor]:
            h = x @ w + bias
            return (1e4 * ((h - h.mean(0)) / h.std(0) - goal).square().sum(),)

        (largest,) = torch.autograd.grad(step(x, w, bias, goal)[0], w)
        off = share * float(largest.norm()) / math.sqrt(bias.numel())

        def wrong(x: Tensor, w: Tensor, bias: Tensor, goal: Tensor) -> tuple[Tensor]:
            return (step(x, w, bias, goal)[0] + off * (bias - bias.detach()).sum(),)

        parity = compare(step, wrong, [x, w, bias, goal])
        assert parity.agrees is agrees, parity.reason

    @pytest.mark.parametrize(
        ("size", "off", "dtype", "agrees"),
        [
            (1e-6, 5e-6, torch.float32, True),
            (1e-6, 5e-5, torch.float32, False),
            (1e-4, 5e-6, torch.float32, False),
            (1e-6, 5e-6, torch.float64, False),
            (1e-6, 5e-6, torch.bfloat16, False),
            (1e-6, math.nan, torch.float32, False),
        ],
    )
    def test_a_gradient_that_is_not_zero_is_held_to_its_numbers(
        self, size: float, off: float, dtype: torch.dtype, agrees: bool
    ) -> None:
        """Beside one of 1e4; shares of that."""
        large, small = torch.full((4,), 5e3), torch.full((4,), size * 5e3)
        given = {"tensors": [], "inputs": []}
        eager = difference.Run(gradients=[large.to(dtype), small.to(dtype)], **given)
        other = difference.Run(gradients=[large.to(dtype), (small + off * 5e3).to(dtype)], **given)
        assert difference._each_agrees(eager, other, eager) is agrees

    @pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_an_infinity_hides_nothing(self, odd: float, dtype: torch.dtype) -> None:
        def masked(scale: float) -> Callable[..., Any]:
            def run(x: Tensor, w: Tensor) -> tuple[Tensor]:
                return ((x @ w * scale).masked_fill(torch.eye(4, 8, dtype=torch.bool), odd),)

            return run

        given = [t.detach().to(dtype) for t in inputs()]
        assert compare(masked(1), masked(1), given).agrees
        assert compare(masked(1), masked(2), given).failed

    def test_whole_numbers_are_compared_exactly(self) -> None:
        given = [torch.tensor([40_000])]  # within 1e-3 of which 40,030 is
        assert compare(lambda x: (x + 0,), lambda x: (x + 0,), given).agrees
        assert compare(lambda x: (x + 0,), lambda x: (x + 30,), given).failed

    @pytest.mark.parametrize("wrong", [torch.bool, torch.int32, torch.float64])
    def test_numbers_of_another_type_are_wrong(self, wrong: torch.dtype) -> None:
        """Inductor's ``any`` of a row of ``uint8`` is ``bool``, of which ``~`` is something else."""
        right = {torch.bool: torch.uint8, torch.int32: torch.int64, torch.float64: torch.float32}[wrong]
        given = [torch.tensor([0, 1, 1])]
        assert compare(lambda x: (x.to(right),), lambda x: (x.to(right),), given).agrees
        parity = compare(lambda x: (x.to(right),), lambda x: (x.to(wrong),), given)
        assert parity.failed
        assert "of other shapes or types than eager" in parity.reason

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

    @pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
    def test_an_input_that_is_no_leaf_may_be_changed_in_place(self, kind: torch.dtype) -> None:
        """Blocks that begin with ``ReLU(inplace=True)``; the copies were leaves, where that raises."""

        def block(x: Tensor, w: Tensor) -> tuple[Tensor]:
            return (x.relu_() @ w,)

        x, w = (t.to(kind).detach() for t in inputs())
        before, x, w = x.clone(), x.requires_grad_(), w.requires_grad_()
        given = [x * 1, w]
        assert compare(block, block, given).agrees
        assert torch.equal(given[0], before)
        wrong = compare(block, lambda x, w: (x.detach().relu_() @ w,), given)
        assert wrong.failed
        assert x.grad is None

    def test_rounding_after_a_change_in_place_is_no_difference(self) -> None:
        """The 64-bit run changes its inputs in place too."""
        x, w = inputs()
        given = [(x * 1e4).requires_grad_() * 1, w]

        def block(x: Tensor, w: Tensor) -> tuple[Tensor]:
            return (x.relu_() @ w,)

        def otherwise(x: Tensor, w: Tensor) -> tuple[Tensor]:
            return ((x.relu_() * 3) @ (w / 3),)

        assert compare(block, otherwise, given).agrees

    def test_what_wants_a_gradient_may_be_written_into_what_wants_none(self) -> None:
        """Eager was asked for the gradient of the input as it had become; compiled code has none."""
        x, w = inputs()

        def write(into: Tensor, w: Tensor) -> tuple[Tensor]:
            into[:2] = w[:2]
            return (into.relu(),)

        def as_compiled(into: Tensor, w: Tensor) -> tuple[Tensor]:
            with torch.no_grad():
                into[:2] = w[:2]
            return (torch.cat([w[:2], into[2:]]).relu(),)

        parity = compare(write, as_compiled, [x, w])
        assert parity.agrees
        assert parity.error == 0

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

    def test_two_draws_that_became_one_do_not_hide_behind_the_noise(self) -> None:
        def two(x: Tensor, w: Tensor) -> tuple[Tensor]:
            return (F.dropout(x @ w, 0.5) + F.dropout(x @ w, 0.5),)

        def one(x: Tensor, w: Tensor) -> tuple[Tensor]:
            return (2 * F.dropout(x @ w, 0.5),)

        parity = compare(two, one, inputs(), draws_as_eager=True)
        assert parity.failed
        assert "as many random numbers" in parity.reason
        assert compare(two, one, inputs()).agrees  # numbers of a backend's own tell nothing
        assert compare(two, two, inputs(), draws_as_eager=True).agrees

    def test_draws_that_changed_places_do_not_hide_behind_the_noise(self) -> None:
        def one_then_other(x: Tensor, w: Tensor) -> tuple[Tensor]:
            one, other = torch.rand(4), torch.rand(4)
            return (x @ w * one.sum() + other.sum(),)

        def other_then_one(x: Tensor, w: Tensor) -> tuple[Tensor]:
            other, one = torch.rand(4), torch.rand(4)
            return (x @ w * one.sum() + other.sum(),)

        parity = compare(one_then_other, other_then_one, inputs(), draws_as_eager=True)
        assert parity.failed
        assert "with the same random numbers" in parity.reason
        assert compare(one_then_other, other_then_one, inputs()).agrees
        assert compare(one_then_other, one_then_other, inputs(), draws_as_eager=True).agrees

    def test_nor_behind_a_64_bit_run_that_draws_other_numbers(self) -> None:
        def one_then_other(x: Tensor, w: Tensor) -> tuple[Tensor]:
            one, other = torch.randn_like(x), torch.randn_like(x)
            return ((x + one) @ w * 2 + other @ w,)

        def other_then_one(x: Tensor, w: Tensor) -> tuple[Tensor]:
            other, one = torch.randn_like(x), torch.randn_like(x)
            return ((x + one) @ w * 2 + other @ w,)

        assert compare(one_then_other, other_then_one, inputs(), draws_as_eager=True).failed
        assert compare(one_then_other, one_then_other, inputs(), draws_as_eager=True).agrees

    def test_a_draw_that_nothing_reads_counts_for_those_after_it(self) -> None:
        def draws(x: Tensor, w: Tensor) -> tuple[Tensor]:
            torch.rand(3)
            return (x @ w,)

        def leaves_it_out(x: Tensor, w: Tensor) -> tuple[Tensor]:
            return (x @ w,)

        assert compare(draws, leaves_it_out, inputs(), draws_as_eager=True).failed
        assert compare(draws, leaves_it_out, inputs()).agrees
        assert compare(draws, draws, inputs(), draws_as_eager=True).agrees

    def test_random_state_and_gradients_are_as_before(self) -> None:
        given = inputs()
        torch.manual_seed(3)
        state = torch.get_rng_state()
        compare(linear, linear, given)
        assert torch.equal(torch.get_rng_state(), state)
        assert given[1].grad is None

    def test_an_accelerator_that_begins_later_has_the_seed_that_was_set(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """``torch.manual_seed`` leaves one for it, and only the last one counts."""
        monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail(f"left {seed}"))
        assert compare(linear, linear, inputs()).agrees

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_half_precision_has_its_own_tolerance(self, dtype: torch.dtype) -> None:
        """Of a graph that has no 64-bit form."""

        def pinned(x: Tensor, w: Tensor) -> tuple[Tensor]:
            assert x.dtype is dtype
            return (x @ w,)

        x, w = (t.detach().to(dtype) for t in inputs())
        parity = compare(pinned, lambda x, w: (pinned(x, w)[0] * (1 + 5e-3),), [x, w.requires_grad_()])
        assert parity.agrees is (dtype is torch.bfloat16), parity.reason

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


class OwnNumbers:
    """A backend that draws other random numbers than eager, and may be wrong on top."""

    def __init__(self, factor: float = 1.0, inner: str = "aot_eager") -> None:
        self.factor = factor
        self.compiles = 0
        self._inner = torch._dynamo.lookup_backend(inner)

    def __call__(self, graph: Any, example_inputs: Any, **_: Any) -> Any:
        self.compiles += 1
        code = self._inner(graph, example_inputs)

        def run(*args: Any) -> Any:
            torch.rand(7)
            return tuple(
                t * self.factor if isinstance(t, Tensor) and t.is_floating_point() else t for t in code(*args)
            )

        return run


class TestRandomNumbers:
    def parity(self, backend: Any, function: Callable[..., Any]) -> Parity:
        torch._dynamo.reset()
        witness = Witness(backend)
        compiled = torch.compile(function, backend=witness.backend_for("one"))
        x, w = inputs()
        compiled(x, w)
        parity = witness.graphs[0].parity
        assert parity is not None
        return parity

    def dropped(self, x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(F.gelu(x @ w), 0.2)

    def test_the_numbers_of_eager_are_compared_strictly_and_compiled_once(self) -> None:
        compiles = []

        def same_numbers(graph: Any, example_inputs: Any, **_: Any) -> Any:
            compiles.append(1)
            return graph.forward

        parity = self.parity(same_numbers, self.dropped)
        assert parity.agrees
        assert (parity.stochastic, parity.other_numbers, parity.error) == (True, False, 0)
        assert len(compiles) == 1

    def test_other_numbers_are_held_against_noise_and_compared_without_them(self) -> None:
        backend = OwnNumbers()
        parity = self.parity(backend, self.dropped)
        assert parity.agrees, parity.reason
        assert (parity.stochastic, parity.other_numbers, parity.reason) == (True, True, "")
        assert backend.compiles == 2

    def test_a_wrong_scale_does_not_hide_behind_the_noise(self) -> None:
        parity = self.parity(OwnNumbers(factor=1.01), self.dropped)
        assert parity.failed
        assert parity.reason.startswith("without its random numbers it differs from eager by up to ")

    @pytest.mark.parametrize("draw", [lambda x: torch.rand_like(x), lambda x: torch.empty_like(x).normal_()])
    def test_nor_behind_noise_that_is_added(self, draw: Callable[[Tensor], Tensor]) -> None:
        def noisy(x: Tensor, w: Tensor) -> Tensor:
            return x @ w + draw(x)

        assert self.parity(OwnNumbers(), noisy).agrees
        assert self.parity(OwnNumbers(factor=1.01), noisy).failed

    def test_what_cannot_be_taken_out_is_held_against_noise_only_and_says_so(self) -> None:
        def unknown(x: Tensor, w: Tensor) -> Tensor:
            return x @ w * torch.ops.aten.bernoulli.p(x, 0.5)

        parity = self.parity(OwnNumbers(factor=1.01), unknown)
        assert parity.agrees
        assert parity.reason == (
            "held against eager's noise only: it has random operations that are not known"
        )

    def test_a_backend_that_cannot_compile_it_without_them_says_so(self) -> None:
        backend = OwnNumbers()

        def once(graph: Any, example_inputs: Any, **_: Any) -> Any:
            if backend.compiles:
                raise RuntimeError("no second time")
            return backend(graph, example_inputs)

        parity = self.parity(once, self.dropped)
        assert parity.agrees
        assert parity.reason.endswith("it was not compiled: RuntimeError: no second time")

    def test_code_that_raises_without_them_is_wrong(self) -> None:
        def once(graph: Any, example_inputs: Any, **_: Any) -> Any:
            noisy = any(n.target is F.dropout for n in graph.graph.nodes)
            return OwnNumbers()(graph, example_inputs) if noisy else (lambda *args: 1 / 0)

        parity = self.parity(once, self.dropped)
        assert parity.failed
        assert "without its random numbers compiled code raised ZeroDivisionError" in parity.reason

    @pytest.mark.slow
    def test_inductor_with_numbers_of_its_own(self) -> None:
        torch._dynamo.reset()
        witness = Witness("inductor", random="backend")
        compiled = torch.compile(lambda x, w: self.dropped(x, w), backend=witness.backend_for("one"))
        compiled(*inputs())
        parity = witness.graphs[0].parity
        assert parity is not None
        assert (parity.agrees, parity.other_numbers, parity.reason) == (True, True, "")


class TestMemory:
    def test_lack_of_it_is_said_before_anything_is_copied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(free_memory, "free_memory", lambda device: 100)
        parity = compare(linear, lambda *args: pytest.fail("was run"), inputs())
        assert parity.agrees is None
        assert parity.reason == "not compared for lack of memory: 0 MB are needed, 0 MB are free (cpu)"

    def test_the_64_bit_run_is_made_only_where_something_is_not_close(self) -> None:
        dtypes = []

        def spied(x: Tensor, w: Tensor) -> tuple[Tensor]:
            dtypes.append(x.dtype)
            return linear(x, w)

        assert compare(spied, linear, inputs()).agrees
        assert torch.float64 not in dtypes
        assert compare(spied, lambda x, w: (F.gelu(x @ w) * 1.05,), inputs()).failed
        assert torch.float64 in dtypes

    def test_lack_of_it_in_64_bit_makes_no_code_wrong(self) -> None:
        def short(x: Tensor, w: Tensor) -> tuple[Tensor]:
            if x.dtype is torch.float64:
                raise torch.OutOfMemoryError("as on a GPU")
            return linear(x, w)

        parity = compare(short, lambda x, w: (F.gelu(x @ w) + 2e-3,), inputs())
        assert not parity.failed
        assert "memory" in (parity.reason or "")

    @pytest.mark.parametrize("wrong", [1.0, math.nan])
    def test_nor_right_what_no_rounding_explains(self, wrong: float) -> None:
        def short(x: Tensor, w: Tensor) -> tuple[Tensor]:
            if x.dtype is torch.float64:
                raise torch.OutOfMemoryError("as on a GPU")
            return linear(x, w)

        assert compare(short, lambda x, w: (F.gelu(x @ w) * 1.5 + wrong,), inputs()).failed

    def test_large_tensors_are_compared_piece_by_piece(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (difference, proportion):
            monkeypatch.setattr(module, "AT_A_TIME", 3)
        x = torch.arange(10.0)
        y = x.clone()
        y[7] += 0.25
        runs = [difference.Run([t], [], []) for t in (x, y)]
        assert difference.largest_difference(*runs) == 0.25
        assert proportion.norm(x) == pytest.approx(x.norm().item())
        assert proportion.norm(x, y) == 0.25


class TestChanges:
    def test_it_learns_what_a_graph_changes(self) -> None:
        held = torch.zeros(1)

        def changes(x: Tensor, w: Tensor) -> tuple[Tensor]:
            x.mul_(1)  # to the same values: only the count of changes tells
            held.add_(1)
            return (x @ w,)

        parity = compare(changes, changes, inputs(), [torch.ones(1), held])
        assert parity.agrees
        assert (parity.changed, parity.changed_held) == ((0,), (1,))
        assert held.item() == 0

    def test_a_held_tensor_that_comes_out_different_is_found(self) -> None:
        held = torch.zeros(1)
        parity = compare(lambda x, w: (held.add_(1),), lambda x, w: (held.add_(1.5),), inputs(), [held])
        assert parity.failed
        assert held.item() == 0

    def test_hooks_on_saved_tensors_do_not_see_the_comparison(self) -> None:
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            compare(linear, linear, inputs())
        assert not seen


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

    @pytest.mark.slow
    def test_inductor_trains_dropout_with_the_numbers_of_a_run_without_the_callback(self) -> None:
        torch._dynamo.reset()
        plain, model = seeded(Net, dropout=0.3), seeded(Net, dropout=0.3)
        callback = hot(backend="inductor", scope="step", compile_optimizer=False)
        fit(plain, max_epochs=2)
        state = torch.get_rng_state()
        fit(model, [callback], max_epochs=2)
        assert torch.equal(state, torch.get_rng_state())
        assert callback.report.regions[0].runs > 0
        assert_same(plain, model, tolerance=1e-4)

    def test_dropout_trains_with_eagers_own_numbers(self) -> None:
        plain, model, callback = seeded(Net, dropout=0.3), seeded(Net, dropout=0.3), hot(scope="step")
        fit(plain)
        fit(model, [callback])
        assert callback.report.phase == "steady"
        assert_proven(callback.report)
        assert "1 of them random, with eager's own numbers" in callback.report.parity
        assert_same(plain, model)

    def test_dropout_with_other_numbers_is_held_against_eagers_noise(self) -> None:
        callback = hot(scope="step", backend=OwnNumbers(), compile_optimizer=False)
        fit(seeded(Net, dropout=0.3), [callback])
        assert callback.report.phase == "steady"
        assert_proven(callback.report)
        assert "1 of them random, held against eager's own noise" in callback.report.parity

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
