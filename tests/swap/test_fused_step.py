"""torch's fused kernel in place of an optimizer's loop: the same weights, and nobody else sees it."""

from __future__ import annotations

import copy
import io
import itertools
import signal
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_hotcompile.plan.optimizers import why_not_fused
from lightning_hotcompile.swap.optimizers.fused_check import FusedCheck
from lightning_hotcompile.swap.optimizers.fused_kernels import GroupTensors
from lightning_hotcompile.swap.optimizers.fused_layout import FusedLayout
from lightning_hotcompile.swap.optimizers.fused_step import FusedStep, Stage
from lightning_hotcompile.watch.step_record import PairedUnits
from tests.elsewhere import compiling_elsewhere

Make = Callable[[Any], Optimizer]

KINDS: dict[str, Make] = {
    "Adam": lambda p: Adam(p, lr=0.01),
    "Adam with decay": lambda p: Adam(p, lr=0.01, weight_decay=0.1),
    "Adam, maximize": lambda p: Adam(p, lr=0.01, maximize=True),
    "Adam, amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True, betas=(0.8, 0.9), eps=1e-3),
    "AdamW": lambda p: AdamW(p, lr=0.01),
    "AdamW, amsgrad, maximize": lambda p: AdamW(p, lr=0.01, amsgrad=True, maximize=True, weight_decay=0.2),
    "AdamW, decay 0": lambda p: AdamW(p, lr=0.01, weight_decay=0.0),
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD with decay": lambda p: SGD(p, lr=0.1, weight_decay=0.01),
    "SGD, momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD, nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD, maximize": lambda p: SGD(p, lr=0.001, momentum=0.5, maximize=True),
    "Adagrad": lambda p: Adagrad(p, lr=0.1),
    "Adagrad, decay": lambda p: Adagrad(
        p, lr=0.1, lr_decay=0.01, weight_decay=0.1, initial_accumulator_value=0.3
    ),
    "Adagrad, maximize": lambda p: Adagrad(p, lr=0.1, eps=1e-3, maximize=True),
}


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 5), nn.Linear(5, 1, bias=False)
    ).to(dtype)


def inputs() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(6, 3, 4, 4, generator=generator)


def train(model: nn.Module, optimizer: Optimizer, steps: int, **options: Any) -> None:
    """Steps as Lightning makes them: gradients come to be in the closure."""
    dtype = next(model.parameters()).dtype
    for x in itertools.islice(inputs(), steps):

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x.to(dtype)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def on_trial(optimizer: Optimizer, pairs: PairedUnits | None = None, stage: Stage | None = None) -> FusedStep:
    step = FusedStep(optimizer, (pairs or PairedUnits()).add_unit)
    step.stage = stage or step.stage
    step.put()
    return step


def adamw(stage: Stage | None = None) -> tuple[nn.Module, Optimizer, FusedStep]:
    """A model, its optimizer, and the kernel in its place."""
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    return model, optimizer, on_trial(optimizer, stage=stage)


def tensors_of(optimizer: Optimizer) -> list[GroupTensors]:
    groups = FusedLayout(optimizer).groups()
    assert groups
    return groups


def assert_alike(model: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=lambda m, name=name: f"{name}: {m}")


class TestTheSameTraining:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
    def test_as_with_the_loop(self, make: Make, dtype: torch.dtype) -> None:
        plain, ours = net(dtype), net(dtype)
        train(plain, make(plain.parameters()), 40)
        optimizer = make(ours.parameters())
        pairs = PairedUnits()
        step = on_trial(optimizer, pairs)
        train(ours, optimizer, 20)
        assert (step.stage, pairs.n >= 8) == (Stage.TIMING, True)
        step.keep()
        # the same inputs again would do, but go on with those that follow
        batches = itertools.islice(inputs(), 20, 40)
        for x in batches:
            optimizer.zero_grad()
            ours(x.to(dtype)).square().mean().backward()
            optimizer.step()
        assert step.runs >= 20 + pairs.n
        assert_alike(ours, plain)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
    def test_to_the_last_bit_as_with_fused_true(self, make: Make, dtype: torch.dtype) -> None:
        """Torch's own way to the same kernel, from the second step on: the loop makes the state here."""
        theirs, ours = net(dtype), net(dtype)
        others, optimizer = make(theirs.parameters()), make(ours.parameters())
        train(theirs, others, 1)
        for group in others.param_groups:
            group["fused"] = True
        train(theirs, others, 12)
        step = on_trial(optimizer, stage=Stage.KEPT)
        step.take_out()
        train(ours, optimizer, 1)
        step.put()
        train(ours, optimizer, 12)
        assert step.runs == 12
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other)
            assert optimizer.state[mine].keys() == others.state[other].keys()
            for name, value in optimizer.state[mine].items():
                assert torch.equal(value, others.state[other][name])

    @pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
    def test_it_can_go_back_and_forth(self, make: Make) -> None:
        plain, ours = net(), net()
        train(plain, make(plain.parameters()), 30)
        optimizer = make(ours.parameters())
        step = on_trial(optimizer)
        train(ours, optimizer, 30)
        step.take_out()
        assert "step" not in vars(optimizer)
        assert_alike(ours, plain)

    def test_a_new_group_and_a_parameter_that_comes_later(self) -> None:
        def run(is_ours: bool) -> tuple[nn.Module, FusedStep | None]:
            model = net()
            *first, last = model.parameters()
            first[0].requires_grad_(False)
            optimizer = AdamW(first, lr=0.01)
            step = on_trial(optimizer) if is_ours else None
            train(model, optimizer, 5)
            if step is not None:
                step.keep()
            train(model, optimizer, 5)
            first[0].requires_grad_(True)
            optimizer.add_param_group({"params": [last], "lr": 0.1})
            train(model, optimizer, 5)
            return model, step

        (plain, _), (ours, step) = run(False), run(True)
        assert_alike(ours, plain)
        assert step is not None
        assert step.runs >= 9

    def test_parameters_without_gradients_are_left_alone(self) -> None:
        model = net()
        unused = nn.Parameter(torch.ones(3))
        optimizer = AdamW([*model.parameters(), unused], lr=0.01)
        step = on_trial(optimizer)
        step.stage = Stage.KEPT
        train(model, optimizer, 4)
        assert step.runs == 3  # the first one makes the state
        assert unused.tolist() == [1, 1, 1]
        assert unused not in optimizer.state

    def test_a_learning_rate_that_changes(self) -> None:
        def run(is_ours: bool) -> nn.Module:
            model = net()
            optimizer = AdamW(model.parameters(), lr=0.01)
            step = on_trial(optimizer) if is_ours else None
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
            for _ in range(30):
                train(model, optimizer, 1)
                schedule.step()
            assert step is None or step.stage is Stage.TIMING
            return model

        assert_alike(run(True), run(False))

    def test_a_checkpoint_of_before_goes_on(self) -> None:
        model = net()
        optimizer = Adam(model.parameters(), lr=0.01)
        train(model, optimizer, 3)
        state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        train(model, optimizer, 5)
        wanted = copy.deepcopy(model.state_dict())
        model.load_state_dict(weights)
        other = Adam(model.parameters(), lr=0.01)
        step = on_trial(other)
        step.stage = Stage.KEPT
        other.load_state_dict(state)
        train(model, other, 5)
        assert step.runs == 5
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, wanted[name])

    def test_it_updates_while_another_thread_compiles(self) -> None:
        model, optimizer, step = adamw(Stage.KEPT)
        with compiling_elsewhere():
            train(model, optimizer, 3)
        assert (step.updates, step.runs) == (3, 2), "the first one has no state yet"


class TestNobodySeesIt:
    def test_groups_and_state_are_as_without(self) -> None:
        plain, ours = net(), net()
        mine, theirs = AdamW(ours.parameters(), lr=0.01), AdamW(plain.parameters(), lr=0.01)
        step = on_trial(mine)
        seen = []
        mine.register_step_post_hook(lambda optimizer, args, kwargs: seen.append("post"))
        train(ours, mine, 12)
        train(plain, theirs, 12)
        assert step.runs >= 5
        assert len(seen) == 12
        mine_dict, their_dict = mine.state_dict(), theirs.state_dict()
        assert mine_dict["param_groups"] == their_dict["param_groups"]
        for index, state in their_dict["state"].items():
            assert list(mine_dict["state"][index]) == list(state)
            for name, value in state.items():
                torch.testing.assert_close(mine_dict["state"][index][name], value)

    def test_the_closure_sees_groups_as_they_are(self) -> None:
        model, optimizer, step = adamw(Stage.KEPT)
        seen = list[Any]()

        def closure() -> Tensor:
            seen.append(optimizer.param_groups[0]["fused"])
            optimizer.zero_grad()
            loss = model(next(inputs())).square().mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(3)]
        assert (step.runs, seen) == (2, [None] * 3)
        assert all(isinstance(loss, Tensor) for loss in losses)

    def test_whoever_counts_changes_of_a_tensor_still_can(self) -> None:
        model, optimizer, step = adamw(Stage.KEPT)
        train(model, optimizer, 1)
        weight = next(model.parameters())
        versions = [weight._version]
        for _ in range(3):
            train(model, optimizer, 1)
            versions.append(weight._version)
        assert (step.runs, versions) == (3, sorted(set(versions)))

    def test_weights_that_a_graph_needs_are_not_changed_behind_its_back(self) -> None:
        model, optimizer, step = adamw(Stage.KEPT)
        train(model, optimizer, 2)
        loss = model(next(inputs())).square().mean()
        train(model, optimizer, 1)
        assert step.runs == 2
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_copies_and_pickles_have_torchs_step(self) -> None:
        model = net()
        optimizer = AdamW(model.parameters(), lr=0.01)
        on_trial(optimizer)
        train(model, optimizer, 3)
        buffer = io.BytesIO()
        torch.save(optimizer, buffer)
        buffer.seek(0)
        for other in (copy.deepcopy(optimizer), torch.load(buffer, weights_only=False)):
            assert "step" not in vars(other)
            other.step()

    def test_who_has_wrapped_it_since_keeps_the_wrapper_and_the_loop(self) -> None:
        model, optimizer, step = adamw()
        inner, calls = optimizer.step, []

        def theirs(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return inner(*args, **kwargs)

        optimizer.step = theirs  # type: ignore[method-assign]
        step.stage = Stage.KEPT
        train(model, optimizer, 3)
        step.take_out()
        runs = step.runs
        train(model, optimizer, 2)
        assert (step.runs, runs, len(calls)) == (2, 2, 5)
        assert optimizer.step is theirs


def dense(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def halves(tensor: Tensor) -> Tensor:
    """The same values with a gap after each."""
    return torch.stack([tensor, tensor], -1)[..., 0]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "reversed": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "with gaps": halves,
    "expanded": lambda t: t[:1].expand_as(t),
}


class TestLayouts:
    """The kernel goes through memory with one index: what does not lie alike is for the loop."""

    @pytest.mark.parametrize("kind", ["Adam, amsgrad", "AdamW", "SGD", "SGD, momentum", "Adagrad"])
    @pytest.mark.parametrize("of_gradient", LAYOUTS)
    @pytest.mark.parametrize("of_weight", ["contiguous", "channels last", "reversed", "with gaps"])
    def test_any_layout_gives_what_the_loop_gives(self, kind: str, of_weight: str, of_gradient: str) -> None:
        def run(is_ours: bool) -> tuple[Tensor, int]:
            weight = nn.Parameter(LAYOUTS[of_weight](dense((4, 3, 5, 2))))
            optimizer = KINDS[kind]([weight])
            step = on_trial(optimizer) if is_ours else None
            if step is not None:
                step.stage = Stage.KEPT
            for n in range(1, 5):
                weight.grad = LAYOUTS[of_gradient](n * dense((4, 3, 5, 2)).flip(0))
                optimizer.step()
            return weight.detach().clone(), 0 if step is None else step.runs

        (loop, _), (ours, runs) = run(False), run(True)
        torch.testing.assert_close(ours, loop)
        may = of_weight == of_gradient and of_weight != "with gaps"
        assert runs == (
            0 if not may else 4 if kind in ("SGD", "Adagrad") else 3
        )  # others begin without state

    def test_state_of_another_layout(self) -> None:
        def run(is_ours: bool) -> tuple[Tensor, int]:
            weight = nn.Parameter(LAYOUTS["channels last"](dense((4, 3, 5, 2))))
            optimizer = AdamW([weight], lr=0.1)
            step = on_trial(optimizer) if is_ours else None
            if step is not None:
                step.stage = Stage.KEPT
            for n in range(6):
                weight.grad = LAYOUTS["channels last"](dense((4, 3, 5, 2)))
                if n == 3:
                    state = optimizer.state[weight]
                    state["exp_avg"] = state["exp_avg"].contiguous()
                optimizer.step()
            return weight.detach().clone(), 0 if step is None else step.runs

        (loop, _), (ours, runs) = run(False), run(True)
        torch.testing.assert_close(ours, loop)
        assert runs == 2

    def test_the_stride_of_a_single_row_does_not_matter(self) -> None:
        weight = nn.Parameter(dense((4, 1, 5, 2)))
        optimizer = SGD([weight], lr=0.1)
        step = on_trial(optimizer)
        step.stage = Stage.KEPT
        weight.grad = torch.empty_strided((4, 1, 5, 2), (10, 99, 2, 1)).fill_(1.0)
        before = weight.detach().clone()
        optimizer.step()
        assert step.runs == 1
        torch.testing.assert_close(weight.detach(), before - 0.1)

    def test_sparse_gradients(self) -> None:
        embedding = nn.Embedding(6, 3, sparse=True)
        optimizer = SGD(embedding.parameters(), lr=0.1)
        step = on_trial(optimizer)
        step.stage = Stage.KEPT
        before = embedding.weight.detach().clone()
        embedding(torch.tensor([1, 1, 4])).sum().backward()
        optimizer.step()
        moved = before - embedding.weight.detach()
        torch.testing.assert_close(moved[:, 0], torch.tensor([0, 0.2, 0, 0, 0.1, 0]))
        assert step.runs == 0

    def test_as_many_tensors_of_the_same_layouts_may_belong_together_otherwise(self) -> None:
        """One weight more in one group, one less in the other: a layout is no longer that of its weight."""

        def rows(values: Tensor) -> Tensor:
            return values.contiguous()

        def columns(values: Tensor) -> Tensor:
            return values.t().contiguous().t()

        def run(is_ours: bool) -> tuple[list[Tensor], int]:
            layouts = [rows, columns, rows, columns]
            weights = [nn.Parameter(layout(dense((2, 3)))) for layout in layouts]
            optimizer = SGD([{"params": weights[:2]}, {"params": weights[2:]}], lr=0.1, weight_decay=0.1)
            step = on_trial(optimizer, stage=Stage.KEPT) if is_ours else None
            for given in ({0: rows, 1: columns, 2: rows}, {0: columns, 2: rows, 3: rows}):
                for index, weight in enumerate(weights):
                    weight.grad = given[index](dense((2, 3)).flip(0)) if index in given else None
                optimizer.step()
            return [weight.detach() for weight in weights], 0 if step is None else step.runs

        (plain, _), (ours, runs) = run(False), run(True)
        assert runs == 1
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, theirs)

    @pytest.mark.parametrize("apart", [False, True], ids=["one group", "a group each"])
    @pytest.mark.parametrize("order", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
    def test_a_kernel_is_for_one_dtype(self, order: tuple[torch.dtype, ...], apart: bool) -> None:
        def run(is_ours: bool) -> tuple[list[Tensor], int]:
            weights = [nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in order]
            groups = [{"params": [weight]} for weight in weights] if apart else [{"params": weights}]
            optimizer = AdamW(groups, lr=0.1)
            step = on_trial(optimizer, stage=Stage.KEPT) if is_ours else None
            for n in range(1, 4):
                for weight in weights:
                    weight.grad = torch.full_like(weight, n)
                optimizer.step()
            return [weight.detach() for weight in weights], 0 if step is None else step.runs

        (plain, _), (ours, runs) = run(False), run(True)
        assert runs == (2 if apart else 0)
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, theirs)

    def test_a_weight_that_is_there_twice_is_updated_twice(self) -> None:
        def run(is_ours: bool) -> tuple[Tensor, int]:
            weight = nn.Parameter(dense((2, 3)))
            with pytest.warns(UserWarning, match="duplicate"):
                optimizer = AdamW([weight, weight], lr=0.1)
            step = on_trial(optimizer, stage=Stage.KEPT) if is_ours else None
            for _ in range(3):
                weight.grad = dense((2, 3)).flip(0)
                optimizer.step()
            return weight.detach(), 0 if step is None else step.runs

        (plain, _), (ours, runs) = run(False), run(True)
        assert runs == 0
        assert torch.equal(ours, plain)

    @pytest.mark.parametrize(
        ("kind", "changed", "runs"),
        [
            ("SGD with decay", {"momentum": 0.9}, 5),
            ("SGD, momentum", {"momentum": 0.0}, 5),
            ("SGD, nesterov", {"nesterov": 1}, 2),
            ("AdamW", {"maximize": 1}, 2),
            ("Adam", {"eps": 1}, 5),
            ("Adam, amsgrad", {"amsgrad": False}, 5),
            ("Adagrad", {"lr_decay": 1}, 6),  # has its state from the start
        ],
    )
    def test_settings_that_change_while_it_trains(
        self, kind: str, changed: dict[str, Any], runs: int
    ) -> None:
        """The loop makes what is new, and does updates with settings that the kernel would refuse."""

        def run(is_ours: bool) -> tuple[Tensor, int]:
            weight = nn.Parameter(dense((2, 3)))
            optimizer = KINDS[kind]([weight])
            step = on_trial(optimizer, stage=Stage.KEPT) if is_ours else None
            for n in range(6):
                if n == 3:
                    optimizer.param_groups[0].update(changed)
                weight.grad = (n + 1) * dense((2, 3)).flip(0)
                optimizer.step()
            return weight.detach(), 0 if step is None else step.runs

        (plain, _), (ours, found) = run(False), run(True)
        assert found == runs
        torch.testing.assert_close(ours, plain)

    def test_state_that_is_gone_is_for_the_loop(self) -> None:
        model, optimizer, step = adamw(Stage.KEPT)
        train(model, optimizer, 3)
        state = optimizer.state[next(model.parameters())]
        kept, state["exp_avg"] = state["exp_avg"], None
        with pytest.raises((AttributeError, TypeError)):  # the loop's own
            train(model, optimizer, 1)
        state["exp_avg"] = kept
        assert (step.stage, step.runs) == (Stage.KEPT, 2)
        train(model, optimizer, 1)
        assert step.runs == 3

    @pytest.mark.parametrize("attribute", ["grad_scale", "found_inf"])
    def test_gradients_that_a_scaler_has_the_optimizer_unscale_are_for_the_loop(self, attribute: str) -> None:
        model, optimizer, step = adamw(Stage.KEPT)
        train(model, optimizer, 2)
        setattr(optimizer, attribute, torch.ones(()))
        with pytest.raises(AssertionError):  # the loop's own: it does not unscale either
            train(model, optimizer, 1)
        assert step.runs == 1
        delattr(optimizer, attribute)
        train(model, optimizer, 1)
        assert step.runs == 2

    def test_a_decay_that_is_decoupled_in_one_group_only(self) -> None:
        def run(is_ours: bool) -> tuple[list[Tensor], int]:
            weights = [nn.Parameter(dense((3, 4))) for _ in range(2)]
            groups = [{"params": [weights[0]], "decoupled_weight_decay": True}, {"params": [weights[1]]}]
            optimizer = Adam(groups, lr=0.1, weight_decay=0.5)
            step = on_trial(optimizer, stage=Stage.KEPT) if is_ours else None
            for _ in range(4):
                for weight in weights:
                    weight.grad = dense((3, 4)).flip(0)
                optimizer.step()
            return [weight.detach() for weight in weights], 0 if step is None else step.runs

        (plain, _), (ours, runs) = run(False), run(True)
        assert runs == 3
        assert not torch.allclose(*ours, atol=1e-3)
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, theirs)

    def test_a_changed_setting_is_for_the_loop(self) -> None:
        model, optimizer, step = adamw(Stage.KEPT)
        train(model, optimizer, 3)
        for name, value in (
            ("foreach", True),
            ("fused", False),
            ("lr", torch.tensor(0.01)),
            ("betas", (torch.tensor(0.9), 0.999)),
        ):
            kept = optimizer.param_groups[0][name]
            optimizer.param_groups[0][name] = value
            runs = step.runs
            train(model, optimizer, 2)
            assert step.runs == runs
            assert optimizer.param_groups[0][name] is value
            optimizer.param_groups[0][name] = kept
            train(model, optimizer, 1)
            assert step.runs == runs + 1


class TestComparison:
    def test_a_kernel_that_is_wrong_is_never_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain, ours = net(), net()
        train(plain, AdamW(plain.parameters(), lr=0.01), 12)
        original = torch._fused_adamw_

        def wrong(*args: Any, **kwargs: Any) -> None:
            original(*args, **{**kwargs, "lr": 1.001 * kwargs["lr"]})

        monkeypatch.setattr(torch, "_fused_adamw_", wrong)
        optimizer = AdamW(ours.parameters(), lr=0.01)
        step = on_trial(optimizer)
        train(ours, optimizer, 12)
        assert (step.stage, step.runs, step.reason) == (
            Stage.LEFT,
            0,
            "its update differs from that of the loop",
        )
        assert "step" not in vars(optimizer)
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)

    def test_a_kernel_that_fails_is_never_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("not on this machine")

        monkeypatch.setattr(torch, "_fused_adamw_", broken)
        model, optimizer, step = adamw()
        train(model, optimizer, 3)
        assert (step.stage, step.runs) == (Stage.LEFT, 0)
        assert "not on this machine" in step.reason
        assert optimizer.state[next(model.parameters())]["step"] == 3

    def test_updates_that_are_not_finite_are_no_measure(self) -> None:
        model, optimizer, step = adamw()
        train(model, optimizer, 1)
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
        train(model, optimizer, 4)
        reason = "its updates cannot be compared: they are not finite, or move no weight"
        assert (step.stage, step.reason, step.runs) == (Stage.LEFT, reason, 0)

    @pytest.mark.parametrize(("most", "sizes"), [(40, [4, 5, 5, 16, 10]), (12, [4, 5, 3]), (1000, None)])
    def test_of_a_large_model_a_part_is_compared(self, most: int, sizes: list[int] | None) -> None:
        model = net()
        optimizer = AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, 2)
        check = FusedCheck(tensors_of(optimizer), most)
        copied = [tensor.numel() for tensor in check._results[: check._weights]]
        assert copied == (sizes or sorted(p.numel() for p in model.parameters()))
        optimizer.step()
        assert check.agrees() is True

    def test_each_group_has_its_share(self) -> None:
        frozen, used, other = (nn.Parameter(torch.ones(n)) for n in (50, 30, 40))
        optimizer = AdamW([{"params": [frozen, used]}, {"params": [other], "amsgrad": True}], lr=0.01)
        for _ in range(2):
            used.grad, other.grad = torch.ones(30), torch.ones(40)
            optimizer.step()
        check = FusedCheck(tensors_of(optimizer), 20)
        assert [tensor.numel() for tensor in check._results[: check._weights]] == [10, 10]
        optimizer.step()
        assert check.agrees() is True

    @pytest.mark.parametrize("part", ["weight", "state"])
    def test_a_difference_anywhere_is_found(self, part: str) -> None:
        model = net()
        optimizer = AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, 2)
        check = FusedCheck(tensors_of(optimizer))
        optimizer.step()
        last = list(model.parameters())[-1]
        with torch.no_grad():
            (last if part == "weight" else optimizer.state[last]["exp_avg_sq"])[0, 3] *= 1.001
        assert check.agrees() is False

    def test_an_update_that_moves_nothing_proves_nothing(self) -> None:
        weight = nn.Parameter(torch.ones(4))
        optimizer = AdamW([weight], lr=0.0)
        step = on_trial(optimizer)
        for _ in range(30):
            weight.grad = torch.ones(4)
            optimizer.step()
        assert step.stage is Stage.CHECKING  # a schedule that begins at 0 is waited for
        optimizer.param_groups[0]["lr"] = 0.1
        weight.grad = torch.ones(4)
        optimizer.step()
        assert step.stage is Stage.TIMING

    def test_what_others_keep_in_the_state_is_none_of_its_business(self) -> None:
        model, optimizer, step = adamw()
        train(model, optimizer, 1)
        for parameter in model.parameters():
            optimizer.state[parameter]["mask"] = torch.ones(3, dtype=torch.bool)
            optimizer.state[parameter]["age"] = torch.ones(2, dtype=torch.int64)
        train(model, optimizer, 5)
        assert (step.stage, step.runs) == (Stage.TIMING, 2)

    @pytest.mark.parametrize("name", ["agrees", "__init__"])
    def test_an_error_of_the_comparison_leaves_the_loop(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: Any) -> None:
            raise MemoryError("no memory is left")

        monkeypatch.setattr(FusedCheck, name, fails)
        model, optimizer, step = adamw()
        train(model, optimizer, 4)
        reason = "it could not be tried: MemoryError: no memory is left"
        assert (step.stage, step.reason, step.runs) == (Stage.LEFT, reason, 0)
        assert optimizer.state[next(model.parameters())]["step"] == 4

    @pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="a signal of POSIX systems")
    def test_what_a_handler_of_signals_raises_is_no_error_of_the_comparison(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def end(*_: Any) -> None:
            raise InterruptedError("the job ends")

        monkeypatch.setattr(FusedCheck, "agrees", lambda _: signal.raise_signal(signal.SIGUSR1))
        model, optimizer, _ = adamw()
        before = signal.signal(signal.SIGUSR1, end)
        try:
            with pytest.raises(InterruptedError, match="the job ends"):
                train(model, optimizer, 4)
        finally:
            signal.signal(signal.SIGUSR1, before)

    def test_an_error_of_the_look_at_layouts_leaves_the_loop(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(_: Any) -> None:
            raise RuntimeError("a guard")

        monkeypatch.setattr(FusedLayout, "groups", fails)
        model, optimizer, step = adamw(Stage.KEPT)
        train(model, optimizer, 4)
        assert (step.stage, step.runs) == (Stage.LEFT, 0)
        assert optimizer.state[next(model.parameters())]["step"] == 4

    def test_gradients_are_left_as_they_are(self) -> None:
        model, optimizer, step = adamw(Stage.KEPT)
        train(model, optimizer, 2)
        before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        assert (step.runs, len(before)) == (2, 7)
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            assert torch.equal(cast("Tensor", parameter.grad), gradient)

    def test_a_kernel_that_fails_later_leaves_no_trace_in_the_groups(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, optimizer, _ = adamw(Stage.KEPT)
        train(model, optimizer, 2)

        def broken(*args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(torch, "_fused_adamw_", broken)
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, 1)
        assert optimizer.param_groups[0]["fused"] is None

    def test_the_training_never_sees_the_copies(self) -> None:
        plain, ours = net(), net()
        train(plain, AdamW(plain.parameters(), lr=0.01), 2)
        optimizer = AdamW(ours.parameters(), lr=0.01)
        step = on_trial(optimizer)
        train(ours, optimizer, 2)
        assert step.stage is Stage.TIMING
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def never_fits(stage: Stage) -> tuple[nn.Module, Optimizer, FusedStep]:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 1)
    for state in optimizer.state.values():
        state["step"] = state["step"].double()  # as with a default dtype of 64 bits
    return model, optimizer, on_trial(optimizer, stage=stage)


@pytest.mark.parametrize("stage", [Stage.CHECKING, Stage.TIMING])
def test_what_never_fits_is_given_up(stage: Stage) -> None:
    """Looking at layouts closely, update after update, would cost more than it can gain."""
    model, optimizer, step = never_fits(stage)
    train(model, optimizer, 15)
    assert step.stage is stage
    train(model, optimizer, 5)
    assert (step.stage, step.runs) == (Stage.LEFT, 0)
    assert step.reason == "its tensors or settings are not those that it is made for"
    assert "step" not in vars(optimizer)


def test_one_that_was_kept_is_looked_at_seldom_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, step = never_fits(Stage.KEPT)
    looks = list[int]()
    original = FusedLayout.groups
    monkeypatch.setattr(FusedLayout, "groups", lambda self: (looks.append(1), original(self))[1])
    train(model, optimizer, 16 + 256 + 16 + 100)
    assert (step.stage, step.runs, len(looks)) == (Stage.KEPT, 0, 32)
    for state in optimizer.state.values():
        state["step"] = state["step"].float()
    train(model, optimizer, 200)
    assert step.runs == 44


def test_updates_without_gradients_are_no_misfits() -> None:
    model, optimizer, step = adamw(Stage.TIMING)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    for _ in range(40):
        optimizer.step()
    assert step.stage is Stage.TIMING
    train(model, optimizer, 4)
    assert step.runs == 3


def test_parameters_that_come_one_by_one_are_no_misfits() -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(30)]
    optimizer = AdamW(weights, lr=0.1)
    step = on_trial(optimizer, stage=Stage.KEPT)
    for weight in weights:
        weight.grad = torch.ones(3)
        optimizer.step()
    optimizer.step()
    assert (step.stage, step.runs) == (Stage.KEPT, 1)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float16])
def test_weights_of_another_kind_that_come_later_are_for_the_loop(dtype: torch.dtype) -> None:
    def run(is_ours: bool) -> tuple[list[Tensor], int]:
        first, late = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = AdamW([first], lr=0.1)
        step = on_trial(optimizer, stage=Stage.KEPT) if is_ours else None
        optimizer.add_param_group({"params": [late]})
        for _ in range(4):
            first.grad, late.grad = torch.ones(4), torch.ones(4, dtype=dtype)
            optimizer.step()
        return [first.detach(), late.detach()], 0 if step is None else step.runs

    (plain, _), (ours, runs) = run(False), run(True)
    assert runs == 0
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)


def test_a_misfit_now_and_then_is_no_reason() -> None:
    model, optimizer, step = adamw(Stage.KEPT)
    for n in range(80):
        optimizer.param_groups[0]["foreach"] = True if n % 4 else None
        train(model, optimizer, 1)
    assert step.stage is Stage.KEPT
    assert step.runs == 19


def test_turns_are_balanced() -> None:
    """Loop, kernel, kernel, loop and so on: neither is always the one that comes first."""
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    told = list[tuple[bool, float, bool]]()
    ticks = itertools.count()
    step = FusedStep(optimizer, lambda *update: told.append(update), now=lambda: float(next(ticks)))
    step.put()
    train(model, optimizer, 10)  # the first makes the state, the second is compared
    assert [by_kernel for by_kernel, _, _ in told] == [False, True, True, False] + [True, False] * 2
    assert all(seconds > 0 and not disturbed for _, seconds, disturbed in told)
    assert step.runs == 4


def test_a_pair_that_is_interrupted_does_not_count() -> None:
    model, pairs = net(), PairedUnits()
    optimizer = AdamW(model.parameters(), lr=0.01)
    on_trial(optimizer, pairs)
    train(model, optimizer, 3)  # the last one is the first half of a pair
    optimizer.param_groups[0]["foreach"] = True
    train(model, optimizer, 1)
    optimizer.param_groups[0]["foreach"] = None
    train(model, optimizer, 1)
    assert pairs.n == 0
    train(model, optimizer, 2)
    assert pairs.n == 1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: AdamW(p, fused=True), "fused=True was asked for"),
        (lambda p: AdamW(p, foreach=False), "foreach=False was asked for"),
        (lambda p: Adam(p, differentiable=True), "it is differentiable"),
        (lambda p: Adam(p, lr=torch.tensor(0.1)), "a setting of it is a tensor"),
        (
            torch.optim.RMSprop,
            "RMSprop is not one of torch.optim's optimizers with a fused kernel for the CPU",
        ),
        (lambda p: SGD(p, lr=0.1), "SGD without momentum and decay is one call for each tensor already"),
        (type("AdamW", (AdamW,), {}), "AdamW is not one of torch.optim's optimizers"),
    ],
)
def test_it_is_for_those_that_chose_nothing(make: Make, why: str) -> None:
    reason = why_not_fused(make(net().parameters()))
    assert reason is not None
    assert why in reason


def test_it_is_for_plain_tensors_of_full_precision() -> None:
    reason = "not all of its parameters are plain 32-bit or 64-bit tensors on the CPU"
    assert why_not_fused(AdamW(net(torch.bfloat16).parameters())) == reason
    assert why_not_fused(AdamW(net().to("meta").parameters())) == reason


def test_a_group_of_several_dtypes_has_none() -> None:
    weights = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    assert why_not_fused(AdamW(weights)) == "a group of it has parameters of several dtypes"
    assert why_not_fused(AdamW([{"params": [weight]} for weight in weights])) is None
