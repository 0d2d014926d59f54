"""Calls of a logger in a step: what writes nothing ends no graph, what is written is as in eager."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded

LOG = logging.getLogger("tests.silent")


@functools.lru_cache(None)
def _warn_once(self: logging.Logger, *args: Any, **kwargs: Any) -> None:
    self.warning(*args, **kwargs)


class Once(logging.Logger):
    """As transformers has it."""

    warn_once = _warn_once


ONCE = Once("tests.once")


@pytest.fixture(autouse=True)
def own_level() -> Iterator[None]:
    _warn_once.cache_clear()
    LOG.setLevel(logging.INFO)
    yield
    LOG.setLevel(logging.NOTSET)


class Layers(Net):
    """Each layer is told of, in a loop: a break there loses the whole function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def tell(self, i: int, x: Tensor) -> None:
        LOG.debug("layer %d: %s", i, tuple(x.shape))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        for i, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            self.tell(i, x)
        return super().loss((x, y))


class TellsOfTensors(Layers):
    def tell(self, i: int, x: Tensor) -> None:
        LOG.log(logging.DEBUG, "layer %d: %s", i, x.mean())


class Asks(Layers):
    def tell(self, i: int, x: Tensor) -> None:
        if LOG.isEnabledFor(logging.DEBUG) or LOG.getEffectiveLevel() <= logging.DEBUG:
            LOG.debug("layer %d", i)


class Warns(Layers):
    """For the first time only."""

    def tell(self, i: int, x: Tensor) -> None:
        ONCE.warn_once("an old layer", stacklevel=2)


@pytest.mark.parametrize("kind", [Layers, TellsOfTensors, Asks, Warns])
def test_what_writes_nothing_ends_no_graph(kind: type[Net]) -> None:
    plain, model = seeded(kind), seeded(kind)
    fit(plain)
    callback = hot(scope="step", compile_optimizer=False)
    fit(model, [callback])
    assert_proven(callback.report)
    assert callback.report.graph_breaks == 0, callback.report.to_text()
    assert_same(plain, model)


class Louder(Layers):
    """From some batch on all is written, later nothing again."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        LOG.setLevel(logging.DEBUG if 6 <= self.global_step < 9 else logging.INFO)


class Disables(Layers):
    """The step itself says which messages are written."""

    def loss(self, batch: Any) -> Tensor:
        logging.disable(logging.DEBUG if self.global_step < 9 else logging.NOTSET)
        return super().loss(batch)


class Writes(Layers):
    def tell(self, i: int, x: Tensor) -> None:
        LOG.info("layer %d", i)


@pytest.mark.parametrize("kind", [Louder, Disables, Writes])
def test_what_is_written_is_written(kind: type[Net], caplog: pytest.LogCaptureFixture) -> None:
    told: list[list[str]] = []
    try:
        for callbacks in ([], [hot(scope="step", compile_optimizer=False)]):
            LOG.setLevel(logging.DEBUG if kind is Disables else logging.INFO)
            caplog.clear()
            fit(seeded(kind), callbacks)
            told.append([each.getMessage() for each in caplog.records if each.name == LOG.name])
    finally:
        logging.disable(logging.NOTSET)
    assert told[0]
    assert told[0] == told[1]


def test_what_is_said_once_is_said_again_after_its_cache_was_cleared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Forgets(Warns):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step in (7, 9):
                _warn_once.cache_clear()

    told: list[int] = []
    ONCE.addHandler(caplog.handler)
    for callbacks in ([], [hot(scope="step", compile_optimizer=False)]):
        _warn_once.cache_clear()
        caplog.clear()
        fit(seeded(Forgets), callbacks)
        told.append(sum(each.name == ONCE.name for each in caplog.records))
    ONCE.removeHandler(caplog.handler)
    assert told == [3, 3]
