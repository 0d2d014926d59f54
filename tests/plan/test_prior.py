"""What a scope is expected to gain, by the operations of a step and its time."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hotcompile.bench.prior_fit import fitted
from lightning_hotcompile.plan.prior import AROUND_S, PRIOR, Gain, OpStatistics
from lightning_hotcompile.watch.opgraph import OpRecorder

GAIN = Gain(
    share=0.2, call_ms=0.5, density=0.05, batch_norm_ms=0.5, usual_fusible=10.0, usual_batch_norm=0.0,
    typical=1.3, least=0.8, most=2.0, rms=0.1, cases=9,
)  # fmt: skip
RESULTS = Path(__file__).parents[2] / "recipes" / "results" / "scopes"


class TestGain:
    def test_is_a_share_and_more_for_each_operation_less_a_call(self) -> None:
        ops = OpStatistics(fusible=100, batch_norm=400_000)
        # Of 10 ms: 2 ms, 0.5 ms by the root of 10 operations per ms, 0.2 ms for BatchNorm, less 0.5 ms.
        assert GAIN.speedup(0.010, ops) == pytest.approx(10 / (10 - 1.7 - 0.5 * math.sqrt(10)))

    def test_without_operations_they_are_the_usual_ones(self) -> None:
        assert GAIN.speedup(0.010) == GAIN.speedup(0.010, OpStatistics(fusible=100, batch_norm=0))

    def test_time_of_light_operations_is_saved(self) -> None:
        gain = replace(GAIN, density=0.0, light=1.2, usual_light=0.25)
        known = OpStatistics(fusible=100, batch_norm=0, light_s=0.002)
        # Of 10 ms: 2 ms, 2.4 ms for the light operations, less 0.5 ms.
        assert gain.speedup(0.010, known) == pytest.approx(10 / (10 - 3.9))
        usual = 10 / (10 - 2 - 3 + 0.5)
        assert gain.speedup(0.010) == pytest.approx(usual)
        assert gain.speedup(0.010, OpStatistics(fusible=100, batch_norm=0)) == pytest.approx(usual)
        odd = OpStatistics(
            fusible=100, batch_norm=0, light_s=3.0
        )  # a step that was slow when it was recorded
        assert gain.speedup(0.010, odd) == gain.most

    def test_of_a_short_step_is_a_loss(self) -> None:
        short = GAIN.speedup(0.001, OpStatistics(fusible=10, batch_norm=0))
        assert short == pytest.approx(1 / (1.3 - 0.05 * math.sqrt(10)))
        assert short < 1

    def test_nothing_known_is_the_mean(self) -> None:
        assert GAIN.speedup(None, OpStatistics(fusible=1000, batch_norm=0)) == 1.3
        assert GAIN.speedup(0.0) == 1.3

    @pytest.mark.parametrize("step_s", [1e-9, 1e-4, 0.01, 1.0, 1e4])
    @pytest.mark.parametrize("fusible", [0, 10, 10_000, 10**9])
    def test_never_leaves_what_was_measured(self, step_s: float, fusible: int) -> None:
        assert 0.8 <= GAIN.speedup(step_s, OpStatistics(fusible=fusible, batch_norm=0)) <= 2.0

    def test_grows_with_the_operations(self) -> None:
        found = [GAIN.speedup(0.01, OpStatistics(fusible=n, batch_norm=0)) for n in range(0, 400, 20)]
        assert found == sorted(found)
        assert found[0] < found[-1]


class TestOpStatistics:
    def test_of_a_real_step(self) -> None:
        model = nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4)
        )
        x = torch.randn(5, 1, 8, 8)
        with OpRecorder() as recorder:
            model(x).square().mean().backward()
        graph = recorder.graph()
        assert graph is not None
        found = OpStatistics.of(graph.counts, graph.elements_by_op)
        plumbing = {"aten.t.default", "aten.view.default", "aten.detach.default", "aten.expand.default"}
        library = {"aten.convolution.default", "aten.convolution_backward.default", "aten.addmm.default"}
        rest = [op for op in graph.ops if op not in plumbing | library | {"aten.mm.default"}]
        assert "aten.relu.default" in rest
        assert "aten.native_batch_norm_backward.default" in rest
        assert found.fusible == sum(op != "aten.empty.memory_format" for op in rest)
        images = 5 * 2 * 6 * 6
        seconds = recorder.seconds_by_op
        assert seconds.keys() == graph.counts.keys()
        light = OpStatistics.of(graph.counts, graph.elements_by_op, seconds).light_s
        assert light is not None
        assert seconds["aten.pow.Tensor_Scalar"] <= light < sum(seconds.values())
        assert found.batch_norm >= 5 * images  # in and out of the forward, two in and one out of the backward

    @pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
    def test_what_dynamo_leaves_to_eager_gains_nothing(self, kind: type[nn.RNNBase]) -> None:
        layer, head = kind(8, 16, num_layers=2, batch_first=True), nn.Linear(16, 3)
        x, seconds = torch.randn(4, 30, 8), 2e-3
        with OpRecorder() as recorder:
            head(layer(x)[0][:, -1]).mul(2).sin().sum().backward()
        graph = recorder.graph()
        assert graph is not None
        given = graph.counts, graph.elements_by_op, recorder.seconds_by_op
        all_of_it, found = OpStatistics.of(*given), OpStatistics.of(*given, recorder.forward_ops)
        assert all_of_it.fusible > 100
        assert 0 < found.fusible < 20
        assert found.light_s is not None
        assert all_of_it.light_s is not None
        assert found.light_s < 0.1 * all_of_it.light_s
        expected = [PRIOR["step+fused"].speedup(seconds, ops) for ops in (all_of_it, found)]
        assert expected[1] < 1.02 < expected[0], expected

    def test_a_forward_without_such_layers_counts_whole(self) -> None:
        with OpRecorder() as recorder:
            nn.Linear(4, 4)(torch.ones(2, 4)).sin().sum().backward()
        graph = recorder.graph()
        assert graph is not None
        everywhere, inside = recorder.forward_ops
        assert everywhere["aten.sin.default"] == 1
        assert "aten.cos.default" not in everywhere, "that one is in the backward"
        assert inside == {}
        given = graph.counts, graph.elements_by_op, recorder.seconds_by_op
        assert OpStatistics.of(*given) == OpStatistics.of(*given, recorder.forward_ops)

    def test_which_operations_are_light(self) -> None:
        light = ["aten.mul.Tensor", "aten.clone.default", "aten.sum.dim_IntList", "aten._to_copy.default"]
        light += [
            "aten.logical_and.default",
            "aten.pow.Tensor_Scalar",
            "aten.add_.Tensor",
            "aten.relu.default",
        ]
        heavy = ["aten.gelu.default", "aten.native_batch_norm_backward.default", "aten.bernoulli_.float"]
        heavy += ["aten.log.default", "aten.tanh_backward.default", "aten._softmax_backward_data.default"]
        heavy += ["aten._adaptive_avg_pool2d_backward.default", "aten.binary_cross_entropy.default"]
        unknown = [
            "aten._fft_r2c.default",
            "aten.sort.default",
            "mylib.mul.default",
            "aten._cdist_forward.default",
        ]
        others = ["aten.mm.default", "aten.view.default", "aten.convolution_backward.default"]
        seconds = {op: 2.0**n for n, op in enumerate([*light, *heavy, *unknown, *others])}
        counted = OpStatistics.of(dict.fromkeys(seconds, 1), {}, seconds)
        around_s = AROUND_S * len(light)
        assert counted.light_s == pytest.approx(2 ** len(light) - 1 + around_s, rel=1e-12)
        assert counted.all_s == pytest.approx(2 ** len(seconds) - 1 + around_s, rel=1e-12)
        assert OpStatistics.of(dict.fromkeys(seconds, 1), {}).light_s is None
        assert OpStatistics.of(dict.fromkeys(others, 1), {}, dict.fromkeys(others, 1.0)).light_s == 0

    def test_what_else_compiled_code_saves_is_counted_as_light(self) -> None:
        seconds = {"aten.bernoulli_.float": 4.0, "aten.mul.Tensor": 1.0, "mylib.bernoulli.default": 8.0}
        times = dict.fromkeys(seconds, 2)
        also = frozenset({"bernoulli"})
        assert OpStatistics.of(times, {}, seconds).light_s == pytest.approx(1 + 2 * AROUND_S)
        assert OpStatistics.of(times, {}, seconds, also_light=also).light_s == pytest.approx(5 + 4 * AROUND_S)

    def test_a_step_that_was_slow_when_it_was_recorded_has_the_share_of_that_step(self) -> None:
        ops = OpStatistics(fusible=10, batch_norm=0, light_s=0.3, all_s=1.2)
        assert ops.light_share(0.1) == 0.25
        assert ops.light_share(3.0) == pytest.approx(0.1)
        assert OpStatistics(fusible=10, batch_norm=0).light_share(0.1) is None

    def test_an_operation_of_a_library_that_is_not_loaded_counts_as_one_of_the_user(self) -> None:
        assert OpStatistics.of({"nobody.knows.default": 3, "strange": 2}, {}).fusible == 5

    def test_calls_of_libraries_and_views_do_not_count(self) -> None:
        names = ["aten._scaled_dot_product_flash_attention_for_cpu_backward.default", "aten.bmm.default"]
        names += ["aten.mkldnn_rnn_layer.default", "aten.embedding_dense_backward.default"]
        names += ["aten.select.int", "aten.transpose.int", "aten._local_scalar_dense.default"]
        assert OpStatistics.of(dict.fromkeys(names, 1), {}).fusible == 0


def rows_of_all_machines() -> list[dict[str, Any]]:
    files = (RESULTS / name for name in ("scopes.json", "epyc.json"))
    return [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]


class TestOfThePackage:
    def test_has_each_scope_that_is_asked_for(self) -> None:
        assert {"step", "step+optimizer", "regions+optimizer"} <= set(PRIOR)
        for gain in PRIOR.values():
            assert gain.least <= gain.typical <= gain.most
            assert gain.cases >= 10

    def test_is_the_one_that_was_measured(self) -> None:
        measured = json.loads((RESULTS / "prior.json").read_text(encoding="utf-8"))["gains"]
        assert {plan: Gain(**gain) for plan, gain in measured.items()} == PRIOR
        again = fitted(rows_of_all_machines())
        assert again.keys() == measured.keys()
        for plan, gain in again.items():
            assert gain == pytest.approx(measured[plan], abs=1e-5)

    def test_knows_more_than_the_mean(self) -> None:
        """The error for a case that was not seen is less than that of calling it the mean of all others."""
        for plan, gain in PRIOR.items():
            logs = [
                (row["case"], math.log(row["speedup"]))
                for row in rows_of_all_machines()
                if row["plan"] == plan and row.get("speedup")
            ]
            others = [fmean(value for case, value in logs if case != unseen) for unseen, _ in logs]
            errors = [value - mean for (_, value), mean in zip(logs, others, strict=True)]
            assert gain.rms < 0.85 * math.sqrt(fmean(error * error for error in errors))
