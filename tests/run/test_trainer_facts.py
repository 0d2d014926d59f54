"""What is left of a training, held against what then comes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from lightning_hotcompile.run.trainer_facts import remaining_batches
from tests.models import Batches, Net, fit, loader, seeded


class Looks(Net):
    """Writes down before each batch how many are left."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int | None] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(remaining_batches(self.trainer, None))


@pytest.mark.parametrize(
    ("per_epoch", "accumulate", "max_steps"), [(10, 4, 9), (10, 3, 8), (2, 8, 5), (8, 4, 6), (10, 1, 25)]
)
def test_what_is_left_of_max_steps_under_accumulation(
    per_epoch: int, accumulate: int, max_steps: int
) -> None:
    """The last batch of an epoch ends a step, however many were accumulated."""
    model = seeded(Looks)
    fit(
        model,
        train=loader(8 * per_epoch),
        max_epochs=-1,
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
    )
    batches = len(model.seen)
    assert model.seen[0] == batches
    for done, left in enumerate(model.seen):
        assert left == pytest.approx(batches - done, abs=accumulate)


def test_where_an_epoch_has_no_known_end_all_steps_have_as_many_batches() -> None:
    model = seeded(Looks)
    data = DataLoader(Batches([8] * 30), batch_size=None)
    fit(model, train=data, max_epochs=1, max_steps=6, accumulate_grad_batches=4)
    assert model.seen[0] == len(model.seen) == 24


def test_only_the_timer_of_the_trainer_says_how_much_time_is_left() -> None:
    class Arrival(pl.Callback):
        def time_remaining(self, trainer: Any) -> float:
            raise AssertionError("this is for the progress bar")

    model = seeded(Looks)
    fit(model, [Arrival()], max_epochs=2)
    assert model.seen == list(range(24, 0, -1))


def test_the_time_that_is_left_is_a_limit() -> None:
    class Once(Net):
        left: int | None = None

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.left = remaining_batches(self.trainer, 36.0)
            self.trainer.should_stop = True

    model = seeded(Once)
    fit(model, max_epochs=-1, max_time={"hours": 1})
    assert model.left in (99, 100)
