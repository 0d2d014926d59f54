"""What tells a plan from others in the store and in checkpoints."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_hotcompile.callback import HotCompile
from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.plan.planner import plan_compile
from lightning_hotcompile.run.plan_key import key_of
from tests.models import Net, fit, seeded


def one(graph: Any, inputs: Any, level: int = 0) -> Any:
    return graph.forward


class Backend:
    def __call__(self, graph: Any, inputs: Any) -> Any:
        return graph.forward


class Another(Backend):
    pass


def inductor(graph: Any, inputs: Any) -> Any:
    return graph.forward


BACKENDS = {
    "a name": "inductor",
    "a function of that name": inductor,
    "a function": one,
    "a partial": functools.partial(one, level=1),
    "a partial with another setting": functools.partial(one, level=2),
    "an object": Backend(),
    "an object of another class": Another(),
}


def key(backend: Any) -> str:
    return key_of(plan_compile(seeded(Net)), replace(HotCompileConfig(), backend=backend), "train")


def test_backends_are_told_apart() -> None:
    assert len(set(map(key, BACKENDS.values()))) == len(BACKENDS)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_same_backend_is_the_same(name: str) -> None:
    assert key(BACKENDS[name]) == key(BACKENDS[name])
    assert key(Backend()) == key(Backend())


def test_a_run_under_anomaly_detection_has_verdicts_of_its_own(tmp_path: Path) -> None:
    for slowed, files in ((True, 1), (False, 2)):
        options: dict[str, Any] = {"threshold": 2, "backend": "aot_eager", "fused_optimizer": False}
        callback = HotCompile(**options, cost_gate=False, min_speedup=0.0, store=tmp_path / "s")
        fit(seeded(Net), [callback], max_steps=40, max_epochs=-1, detect_anomaly=slowed)
        assert callback.report.phase == "steady"
        assert len(list((tmp_path / "s" / "profiles").iterdir())) == files
