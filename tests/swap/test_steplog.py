"""self.log in a step: collected, and replayed in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_hotcompile.swap.steplog import recorded_logs


class Module(LightningModule):
    """Remembers what reached the real methods."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(("log", args, kwargs))

    def log_dict(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(("log_dict", args, kwargs))


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
        ("log", (), {"name": "d", "value": 4.0, "batch_size": 8}),
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
    module, value = Module(), torch.ones(2)
    with recorded_logs(module):
        module.log("a", value)
        module.log_dict({"b": value})
        value.zero_()
    (_, (_, logged), _), (_, (logged_dict,), _) = module.seen
    assert torch.equal(logged, torch.ones(2))
    assert torch.equal(logged_dict["b"], torch.ones(2))


@pytest.mark.parametrize("enable_graph", [False, True])
def test_the_graph_is_kept_only_if_asked_for(enable_graph: bool) -> None:
    module, value = Module(), torch.ones(2, requires_grad=True)
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


def test_a_log_of_the_instance_gets_the_replayed_calls_and_stays() -> None:
    module, mine = Module(), []

    def log(name: str, value: Any) -> None:
        mine.append((name, value))

    module.log = log  # type: ignore[method-assign]
    with recorded_logs(module):
        module.log("a", 1.0)
        assert mine == []
    assert mine == [("a", 1.0)]
    assert vars(module)["log"] is log
    assert module.seen == []


def test_an_error_of_the_real_log_is_not_swallowed() -> None:
    class Refuses(Module):
        def log(self, *args: Any, **kwargs: Any) -> None:
            raise KeyError("no such metric")

    module = Refuses()
    with pytest.raises(KeyError, match="no such metric"), recorded_logs(module):
        module.log("a", 1.0)
    assert "log" not in vars(module)
