"""Whether Inductor's kernels are called from C++, and what happens where they cannot be."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from lightning_hotcompile.swap.dynamo import RestartCompile
from lightning_hotcompile.swap.inductor import cpp_wrapper
from lightning_hotcompile.swap.inductor.compilers import backward_with_forward, resolve_backend
from lightning_hotcompile.swap.inductor.cpp_wrapper import or_else, why_not_asked, why_not_possible
from lightning_hotcompile.swap.process.time_limit import Alarm
from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded


@pytest.fixture(autouse=True)
def _as_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CPP_WRAPPER", raising=False)
    monkeypatch.setattr(cpp_wrapper, "TORCH", (2, 13))


class TestWhyNotAsked:
    def test_asked_by_default(self) -> None:
        assert why_not_asked({"max_autotune": True}) is None

    @pytest.mark.parametrize("value", [True, False])
    def test_not_where_the_options_say_it(self, value: bool) -> None:
        assert why_not_asked({"cpp_wrapper": value}) == "options have cpp_wrapper"

    @pytest.mark.parametrize("value", ["0", "1"])
    def test_not_where_the_environment_says_it(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_CPP_WRAPPER", value)
        assert why_not_asked({}) == "TORCHINDUCTOR_CPP_WRAPPER is set"

    def test_not_where_torch_would_not_check_layouts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpp_wrapper, "TORCH", (2, 12))
        reason = why_not_asked({})
        assert reason is not None
        assert "does not check sizes and strides" in reason


def captured(function: Any, *inputs: Any) -> tuple[GraphModule, Sequence[Any]]:
    found: list[tuple[GraphModule, Sequence[Any]]] = []

    def backend(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        found.append((graph_module, example_inputs))
        return graph_module.forward

    torch.compile(function, backend=backend)(*inputs)
    return found[0]


class TestWhyNotPossible:
    def test_possible_on_the_cpu(self) -> None:
        assert why_not_possible(*captured(lambda x: x.sin() + 1, torch.ones(2))) is None

    def test_not_with_an_input_elsewhere(self) -> None:
        assert (
            why_not_possible(*captured(torch.sin, torch.ones(2, device="meta"))) == "it has tensors on meta"
        )

    def test_not_with_a_tensor_in_between_that_is_elsewhere(self) -> None:
        def function(x: Tensor) -> Tensor:
            return x + torch.zeros(3, device="meta").size(0)

        def moved(x: Tensor) -> Tensor:
            return x.to("meta").sin()

        assert why_not_possible(*captured(function, torch.ones(2))) == "it has tensors on meta"
        assert why_not_possible(*captured(moved, torch.ones(2))) == "it has tensors on meta"


class TestOrElse:
    @pytest.fixture
    def graph(self) -> tuple[GraphModule, Sequence[Any]]:
        return captured(lambda x: x.sin() + 1, torch.ones(2))

    def test_the_first_one_is_used_where_it_can(self, graph: Any) -> None:
        calls: list[str] = []
        backend = or_else(lambda *_: calls.append("C++"), lambda *_: calls.append("usual"))
        backend(*graph)
        assert calls == ["C++"]

    def test_the_second_one_is_used_elsewhere(self) -> None:
        calls: list[str] = []
        backend = or_else(lambda *_: calls.append("C++"), lambda *_: calls.append("usual"))
        backend(*captured(torch.sin, torch.ones(2, device="meta")))
        assert calls == ["usual"]

    def test_after_a_failure_the_second_one_gets_the_graph_as_it_was(self, graph: Any) -> None:
        before, seen = graph[0].code, list[str]()
        sources = [getattr(node, "_dynamo_source", None) for node in graph[0].graph.nodes]

        def fails_half_way(graph_module: GraphModule, _: Any) -> Any:
            for node in graph_module.graph.nodes:
                if node.op == "call_method":
                    node.target = "cos"
            graph_module.recompile()
            raise NotImplementedError("no shim for this operation")

        def usual(graph_module: GraphModule, _: Any) -> Any:
            seen.append(graph_module.code)
            assert [getattr(node, "_dynamo_source", None) for node in graph_module.graph.nodes] == sources
            return graph_module.forward

        compiled = or_else(fails_half_way, usual)(*graph)
        assert seen == [before]
        (out,) = compiled(torch.ones(2))
        assert out.equal(torch.ones(2).sin() + 1)

    def test_only_an_operation_that_cpp_cannot_call_is_remembered(
        self, graph: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        calls: list[str] = []

        def fails(*_: Any) -> Any:
            calls.append("C++")
            raise MemoryError

        for _ in range(2):
            or_else(fails, lambda *_: calls.append("usual"))(*graph)
        assert calls == 2 * ["C++", "usual"]
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("restart", RestartCompile)
    def test_a_restart_is_no_failure(self, graph: Any, restart: type[Exception]) -> None:
        raised = restart.__new__(restart)

        def restarts(*_: Any) -> Any:
            raise raised

        with pytest.raises(restart):
            or_else(restarts, lambda *_: pytest.fail("compiled"))(*graph)


def of_a_multinomial(x: Tensor) -> tuple[Tensor, ...]:
    return torch.multinomial(x, 2), x + 1


def of_an_operation_of_ones_own(x: Tensor) -> tuple[Tensor, ...]:
    return (torch.ops.hotcompile_tests_cpp.twice(x) + 1,)


@torch.library.custom_op("hotcompile_tests_cpp::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """An operation of somebody's own."""
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.slow
@pytest.mark.parametrize("function", [of_a_multinomial, of_an_operation_of_ones_own, torch.sgn])
def test_what_cpp_cannot_call_is_called_as_usual(
    function: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # else it may be known already
    x = torch.rand(3, 4)
    caplog.set_level("DEBUG", logger=cpp_wrapper.__name__)

    def backend(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        with backward_with_forward():
            return resolve_backend("inductor", None, None)(graph_module, example_inputs)

    compiled = torch.compile(function, backend=backend)
    results, gradients = [], []
    for call in (function, compiled):
        torch.manual_seed(0)
        leaf = x.clone().requires_grad_(function is not of_an_operation_of_ones_own)  # that has no gradient
        out = call(leaf)
        out = out if isinstance(out, tuple) else (out,)
        if leaf.requires_grad:
            out[-1].sum().backward()
            gradients.append(leaf.grad + 0)
        results.append([each.detach() for each in out])
    assert "no C++ wrapper for a graph" in caplog.text
    for want, got in zip(*results, strict=True):
        assert want.device == got.device
        torch.testing.assert_close(want, got)
    if gradients:
        torch.testing.assert_close(*gradients)


@pytest.mark.slow
@pytest.mark.parametrize("writable", [True, False])
def test_what_cpp_cannot_call_is_known_the_next_time(
    writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    caplog.set_level("DEBUG", logger=cpp_wrapper.__name__)
    if not writable:
        (tmp_path / cpp_wrapper.NEED_PYTHON).touch()
    x, failed = torch.rand(3, 4), []
    for _ in range(2):
        torch._dynamo.reset()
        caplog.clear()
        compiled = torch.compile(of_a_multinomial, backend=resolve_backend("inductor", None, None))
        torch.manual_seed(0)
        drawn = compiled(x)[0]
        torch.manual_seed(0)
        assert drawn.equal(torch.multinomial(x, 2))
        failed.append("no C++ wrapper for a graph" in caplog.text)
    assert failed == [True, not writable]


@pytest.mark.slow
def test_what_was_ended_is_not_begun_again_the_other_way(own_alarm: None) -> None:
    """It went on for five seconds more, and from the beginning."""
    alarm = Alarm(60.0, TimeoutError, may_throw=lambda _: True)

    def is_ended(*_: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)

    graph = captured(torch.sin, torch.ones(2))
    alarm.start()
    try:
        with pytest.raises(TimeoutError):
            or_else(is_ended, lambda *_: pytest.fail("begun again"))(*graph)
    finally:
        alarm.stop()


def test_training_is_right_where_the_first_way_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any) -> Any:
        raise NotImplementedError("no C++ wrapper here")

    monkeypatch.setattr(torch._inductor.graph.GraphLowering, "codegen_with_cpp_wrapper", fails)
    callback = hot(backend="inductor", scope="step", store=None)
    plain, swapped = seeded(Net), seeded(Net)
    fit(plain, [], max_steps=20, max_epochs=-1)
    fit(swapped, [callback], max_steps=20, max_epochs=-1)
    assert_proven(callback.report)
    assert_same(plain, swapped)
