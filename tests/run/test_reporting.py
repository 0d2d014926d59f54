"""The picture of a run for the loggers, with and without matplotlib."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_hotcompile.errors import HotCompileWarning
from lightning_hotcompile.run.flip import allocated_peak_mb
from lightning_hotcompile.run.reporting import timeline_image
from tests.hot import hot
from tests.models import Net, fit, loader, seeded
from tests.view.examples import events, report


def logged_images(folder: Path) -> list[Any]:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulators.EventAccumulator(str(folder))
    found.Reload()
    tags = found.Tags()["images"]
    assert tags in ([], ["hotcompile/timeline"])
    return [event for tag in tags for event in found.Images(tag)]


def test_it_is_an_array_of_pixels() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is in the extra 'recipes'")
    image = timeline_image(report(), events(), "train")
    assert image is not None
    assert image.shape[2] == 3


def test_without_a_timed_step_there_is_none() -> None:
    assert timeline_image(dataclasses.replace(report(), samples=()), events(), "train") is None


def test_without_matplotlib_there_is_none(no_matplotlib: None) -> None:
    assert timeline_image(report(), events(), "train") is None


def test_a_training_logs_it_once_at_the_end(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is in the extra 'recipes'")
    callback = hot()
    fit(seeded(Net), [callback], logger=TensorBoardLogger(tmp_path, name="", version=""), max_epochs=2)
    (event,) = logged_images(tmp_path)
    assert (event.step, event.width > event.height) == (callback.report.steps, True)


def test_a_training_without_matplotlib_logs_none_and_says_nothing(
    tmp_path: Path, no_matplotlib: None
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HotCompileWarning)
        fit(seeded(Net), [hot()], logger=TensorBoardLogger(tmp_path, name="", version=""), max_epochs=1)
    assert logged_images(tmp_path) == []


@pytest.mark.parametrize(("allocated", "peak"), [(3 * 2**20, 3.0), (0, None)])
def test_a_gpu_that_was_not_used_has_no_peak(
    allocated: int, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training on the CPU can initialize CUDA; what was not measured is never 0."""
    for name, value in (
        ("is_available", True),
        ("is_initialized", True),
        ("max_memory_allocated", allocated),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert allocated_peak_mb() == peak


def test_the_speed_up_is_that_of_the_signature_that_the_reason_is_about() -> None:
    """A smaller last batch of each epoch is hot later, and its first steps are none to report."""
    callback = hot(threshold=3)
    fit(seeded(Net), [callback], train=loader(36), max_epochs=14)
    settled = [e for e in callback.report.events if e.get("phase") == "settling"]
    assert len(settled) == 2, "both sizes were compiled"
    assert callback.report.phase == "steady"
    assert callback.report.speedup is not None
    assert str(callback.report.speedup) in callback.report.reason
