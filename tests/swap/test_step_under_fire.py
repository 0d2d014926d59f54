"""The step scope under fire: hostile training steps do what they do without the callback."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

from lightning_hotcompile.plan.planner import plan_compile
from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded
from tests.swap import step_control_cases, step_logging_cases, step_surroundings_cases, step_tensor_cases
from tests.swap.fire import Fire, under_fire

KNOWN: dict[str, str] = {
    "ReadsMetricsInTheStep": "what is logged reaches the Trainer at the end of the step",
}
"""Cases that do not hold yet, with their root cause."""


def cases(module: Any) -> list[Any]:
    found = [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, Fire) and c.__module__ == module.__name__
    ]
    return [
        pytest.param(
            c,
            id=c.__name__,
            marks=[pytest.mark.xfail(strict=True, reason=KNOWN[c.__name__])] if c.__name__ in KNOWN else [],
        )
        for c in found
    ]


@pytest.mark.parametrize("case", cases(step_logging_cases))
def test_what_a_step_logs(case: type[Fire]) -> None:
    under_fire(case)


CODE = [*cases(step_surroundings_cases), *cases(step_control_cases), *cases(step_tensor_cases)]


@pytest.mark.parametrize("case", CODE)
def test_what_a_step_does(case: type[Fire], capsys: Any) -> None:
    under_fire(case, capsys)


SOME = [
    step_logging_cases.EveryKeyword,
    step_surroundings_cases.Buffers,
    step_surroundings_cases.Draws,
    step_control_cases.Escapes,
]


@pytest.mark.parametrize("case", SOME)
def test_another_backend(case: type[Fire]) -> None:
    under_fire(case, backend="eager")


@pytest.mark.parametrize("case", [step_logging_cases.EveryKeyword, step_surroundings_cases.Draws])
def test_the_optimizer_too(case: type[Fire]) -> None:
    under_fire(case, compile_optimizer=True)


class TestIslands:
    def test_an_island_in_the_step_stays_eager_and_all_values_are_the_same(self) -> None:
        class TwoParts(Fire):
            most_graphs = 4

        callback = under_fire(TwoParts, keep_eager=["blocks.0"])
        assert "blocks.0 (Block): keep_eager='blocks.0'" in callback.report.plan
        assert callback.report.graph_breaks >= 1

    def test_auto_prefers_regions_where_islands_would_break_the_step(self) -> None:
        plan = plan_compile(seeded(Fire), keep_eager=["blocks.0"])
        assert plan.scope == "regions"
        assert "stay eager, which would break the step into fragments" in plan.reason

    def test_a_metric_alone_does_not_speak_against_the_step(self) -> None:
        plan = plan_compile(seeded(step_logging_cases.Metrics))
        assert plan.scope == "step"
        assert "accuracy (MulticlassAccuracy)" in str(plan)

    def test_the_plan_says_that_the_step_is_in_fragments(self) -> None:
        plan = plan_compile(seeded(Fire), scope="step", keep_eager=["blocks.0"])
        assert "one graph per fragment" in str(plan)


class TestWhatCompiledCodeCannotDo:
    class BoundedDeque(Fire):
        """The mean of the last five losses: Dynamo takes a deque with maxlen for one without."""

        captured = None

        def __init__(self) -> None:
            super().__init__()
            self.last: Any = collections.deque(maxlen=5)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.last.append(loss.detach())
            self.log("recent", torch.stack(list(self.last)).mean())
            return loss

    def test_a_deque_that_drops_keeps_the_step_eager(self) -> None:
        plan = plan_compile(seeded(self.BoundedDeque))
        assert plan.scope == "regions"
        assert "deque with maxlen" in plan.reason
        under_fire(self.BoundedDeque, scope="auto")

    def test_a_block_with_such_a_deque_stays_eager(self) -> None:
        model = seeded(Net)
        model.blocks[1].last = collections.deque(maxlen=2)
        plan = plan_compile(model, scope="regions")
        assert "blocks.1" not in [name for region in plan.regions for name in region.members]
        assert any(left.name == "blocks.1" and "deque" in left.reason for left in plan.left_eager)

    @pytest.mark.parametrize("case", ["GradientPenalty", "DoubleBackwardOutside"])
    @pytest.mark.parametrize(
        "options", [{}, {"scope": "regions"}, {"threshold": 0}, {"threshold": 1}], ids=str
    )
    def test_a_second_derivative_is_declined_before_it_fails(
        self, case: str, options: dict[str, Any]
    ) -> None:
        callback = hot(**options)
        plain, model = seeded(getattr(step_tensor_cases, case)), seeded(getattr(step_tensor_cases, case))
        fit(plain, max_epochs=1)
        fit(model, [callback], max_epochs=1)
        assert_same(plain, model, tolerance=0)
        assert callback.report.phase == "declined"
        assert "no second derivative" in callback.report.reason

    def test_one_that_only_running_it_shows_is_seen_in_the_recorded_step(self) -> None:
        class Hidden(Fire):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                x = batch[0].requires_grad_(True)
                loss = torch.nn.functional.cross_entropy(self(x), batch[1])
                (grad,) = torch.autograd.grad(loss, x, None, True, True)  # by position
                return loss + 0.1 * grad.square().mean()

        callback = hot(threshold=1)
        fit(seeded(Hidden), [callback], max_epochs=1)
        assert callback.report.phase == "declined"
        assert "create_graph=True" in callback.report.reason
