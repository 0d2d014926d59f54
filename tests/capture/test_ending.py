"""How a training is ended from within."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_hotcompile.capture.ending import TrainingEnded, WorkerEnded, end_training, write_whole


def test_the_script_ends_with_exit_code_0() -> None:
    trainer = SimpleNamespace(callbacks=["a", 1])
    with pytest.raises(TrainingEnded) as ended:
        end_training(trainer, but_for=(str,))
    assert ended.value.code == 0
    assert trainer.callbacks == [1]


def test_a_process_of_the_script_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "the script")
    with pytest.raises(WorkerEnded, match="on purpose"):
        end_training(SimpleNamespace(callbacks=[]), but_for=(str,))


def test_a_file_is_written_whole_and_over_an_older_one(tmp_path: Path) -> None:
    for text in ("one", "two"):
        write_whole(tmp_path / "a.json", text)
        assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
        assert (tmp_path / "a.json").read_text(encoding="utf-8") == text
