"""self.log in a step: collected, and replayed in order."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule

from lightning_hotcompile.swap.steplog import recorded_logs


class Module(LightningModule):
    """Has the logging methods of Lightning, which the fixture makes remember what reached them."""

    seen: ClassVar[list[Any]] = []


@pytest.fixture(autouse=True)
def _real_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    Module.seen.clear()

    def log(_: Any, name: str, value: Any, **kwargs: Any) -> None:
        Module.seen.append(("log", (name, value), kwargs))

    def log_dict(_: Any, dictionary: Any, **kwargs: Any) -> None:
        Module.seen.append(("log_dict", (dictionary,), kwargs))

    monkeypatch.setattr(LightningModule, "log", log)
    monkeypatch.setattr(LightningModule, "log_dict", log_dict)


def test_calls_are_replayed_at_the_end_in_order_with_all_arguments() -> None:
    module = Module()
    with recorded_logs(module):
        module.log("a", 1.0, prog_bar=True)
        module.log_dict({"b": 2.0, "c": 3.0}, on_epoch=True)
        module.log(name="d", value=4.0, batch_size=8)
        assert module.seen == []
    assert module.seen == [
        ("log", ("a", 1.0), {"prog_bar": True}),
        ("log_dict", ({"b": 2.0, "c": 3.0},), {"on_epoch": True}),
        ("log", ("d", 4.0), {"batch_size": 8}),
    ]


def test_the_module_is_afterwards_as_before() -> None:
    module = Module()
    before = set(vars(module))
    with recorded_logs(module):
        module.log("a", 1.0)
    assert set(vars(module)) == before


def test_also_after_an_exception_what_was_logged_before_it_is_logged() -> None:
    module = Module()
    before = set(vars(module))

    def step() -> None:
        module.log("a", 1.0)
        module.log("b", 2.0)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), recorded_logs(module):
        step()
    assert [args[0] for _, args, _ in module.seen] == ["a", "b"]
    assert set(vars(module)) == before


def test_a_value_that_changes_in_place_later_is_logged_as_it_was() -> None:
    module, value = Module(), torch.ones(1)
    with recorded_logs(module):
        module.log("a", value)
        module.log_dict({"b": value})
        value.zero_()
    (_, (_, logged), _), (_, (logged_dict,), _) = module.seen
    assert torch.equal(logged, torch.ones(1))
    assert torch.equal(logged_dict["b"], torch.ones(1))


@pytest.mark.parametrize("enable_graph", [False, True])
def test_the_graph_is_kept_only_if_asked_for(enable_graph: bool) -> None:
    module, value = Module(), torch.ones((), requires_grad=True)
    with recorded_logs(module):
        module.log("a", value * 2, enable_graph=enable_graph)
    assert module.seen[0][1][1].requires_grad is enable_graph


def test_each_step_begins_with_an_empty_list() -> None:
    module = Module()
    for i in range(3):
        with recorded_logs(module):
            assert module._hotcompile_log_calls == []
            module.log("a", float(i))
    assert [args[1] for _, args, _ in module.seen] == [0.0, 1.0, 2.0]


def test_a_log_of_the_instance_is_called_at_once_and_stays() -> None:
    module, mine = Module(), []

    def log(name: str, value: Any) -> int:
        mine.append((name, value))
        return len(mine)

    module.log = log  # type: ignore[method-assign]
    with recorded_logs(module):
        assert module.log("a", 1.0) == 1
        assert mine == [("a", 1.0)]
    assert mine == [("a", 1.0)]
    assert vars(module)["log"] is log
    assert module.seen == []


class Own(Module):
    """Has a ``log`` of its own, which may do anything."""

    def log(self, *args: Any, **kwargs: Any) -> Any:
        super().log(*args, **kwargs)
        return "mine"


class OwnDict(Module):
    """Has a ``log_dict`` of its own, which calls Lightning's ``log``."""

    def log_dict(self, dictionary: Any, **kwargs: Any) -> Any:
        for name, value in dictionary.items():
            self.log(f"own/{name}", value, **kwargs)
        return "mine"


def test_a_log_of_the_class_is_called_at_once_with_its_return_value() -> None:
    module = Own()
    with recorded_logs(module):
        assert module.log("a", 1.0) == "mine"
        module.log_dict({"b": 2.0})
        assert [args[0] for _, args, _ in module.seen] == ["a", {"b": 2.0}]
    assert len(module.seen) == 2
    assert "log" not in vars(module)


def test_a_log_dict_of_the_class_is_called_at_once_and_its_calls_keep_their_order() -> None:
    module = OwnDict()
    with recorded_logs(module):
        module.log("a", 1.0)
        assert module.log_dict({"b": 2.0}) == "mine"
        assert module.seen == []
    assert [args[0] for _, args, _ in module.seen] == ["a", "own/b"]


def test_a_metric_object_is_logged_at_once_after_what_was_logged_before_it() -> None:
    module, metric = Module(), torchmetrics.MeanMetric()
    with recorded_logs(module):
        module.log("a", 1.0)
        module.log("metric", metric, on_epoch=True)
        assert [args for _, args, _ in module.seen] == [("a", 1.0), ("metric", metric)]
        module.log("b", 2.0)
        assert len(module.seen) == 2
    assert [args[0] for _, args, _ in module.seen] == ["a", "metric", "b"]


@pytest.mark.parametrize("value", ["text", torch.ones(2), np.ones(2), {"a": {"b": "text"}}, None])
def test_what_lightning_may_refuse_is_logged_at_once(value: Any) -> None:
    module = Module()
    with recorded_logs(module):
        module.log("a", value)
        assert len(module.seen) == 1


def test_an_array_without_dimensions_is_logged_as_a_number() -> None:
    module = Module()
    with recorded_logs(module):
        module.log("a", np.array(0.5, dtype=np.float32))
        module.log_dict({"b": np.array(2)})
        assert module.seen == []
    (_, (_, a), _), (_, (b,), _) = module.seen
    assert (type(a), a) == (np.float32, 0.5)
    assert type(b["b"]) is np.int64


def test_the_graph_is_kept_if_that_is_asked_for_by_position() -> None:
    module, value = Module(), torch.ones((), requires_grad=True)
    with recorded_logs(module):
        module.log("a", value * 2, True, True, True, True, "mean", True)
        (_, (_, logged, *_), _), *_ = vars(module)["_hotcompile_log_calls"]
        assert logged.requires_grad
        vars(module)["_hotcompile_log_calls"].clear()


def test_an_error_of_the_real_log_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise KeyError("no such metric")

    monkeypatch.setattr(LightningModule, "log", refuses)
    module = Module()
    with pytest.raises(KeyError, match="no such metric"), recorded_logs(module):
        module.log("a", 1.0)
    assert "log" not in vars(module)


class TestAmongRanks:
    """A value that Lightning reduces in the call is logged in its place."""

    def recorded(self, module: Module) -> recorded_logs:
        """As one of two ranks would."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "is_initialized", lambda: True)
            patch.setattr(torch.distributed, "get_world_size", lambda: 2)
            return recorded_logs(module)

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            ((), {"sync_dist": True}),
            ((), {"sync_dist": True, "on_step": True, "on_epoch": True}),
            ((False, True, None, None, "mean", False, True), {}),
        ],
    )
    @pytest.mark.parametrize("compiled", [False, True])
    def test_it_is_made_at_once_and_those_before_it_too(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[Any] = []
        monkeypatch.setattr(LightningModule, "log", lambda _, name, *a, **k: seen.append(name))
        monkeypatch.setattr(LightningModule, "log_dict", lambda _, values, *a, **k: seen.append(list(values)))
        module = Module()

        def step(x: torch.Tensor) -> torch.Tensor:
            module.log("first", x)
            module.log("reduced", x + 1, *args, **kwargs)
            module.log_dict({"also": x + 2}, *args, **kwargs)
            seen.append("collective")
            module.log("last", x)
            return x

        with self.recorded(module):
            (torch.compile(step, backend="eager") if compiled else step)(torch.ones(()))
            assert seen == ["first", "reduced", ["also"], "collective"]
        assert seen[-1] == "last"

    @pytest.mark.parametrize("kwargs", [{}, {"sync_dist": False}, {"sync_dist": True, "on_step": False}])
    def test_others_wait(self, kwargs: dict[str, Any]) -> None:
        module = Module()
        with self.recorded(module):
            module.log("a", 1.0, **kwargs)
            module.log_dict({"b": 1.0}, **kwargs)
            assert module.seen == []
        assert len(module.seen) == 2


def test_in_one_process_a_value_to_reduce_waits_like_any_other() -> None:
    module = Module()
    with recorded_logs(module):
        module.log("a", 1.0, sync_dist=True)
        assert module.seen == []
