"""Resuming, several fits, other stages between fits, the finders of the Tuner, copies in mid-run."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner

from lightning_hotcompile import HotCompile
from tests.hot import assert_proven, hot
from tests.matrix.compare import assert_close, assert_same_run, outcome, saved, seed
from tests.matrix.nets import AdamNet, Searches, SgdNet
from tests.models import loader, make_trainer, seeded

SCOPES = pytest.mark.parametrize("scope", ["auto", "regions"])
AT_STEP = 31  # in the middle of the third epoch, in the steady phase


class Saves(ModelCheckpoint):
    """A checkpoint in the middle of an epoch."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, filename="at", every_n_train_steps=AT_STEP, save_top_k=-1)


def hotly(scope: str, **options: Any) -> HotCompile:
    return hot(**{"threshold": 2, "scope": scope, **options})


def fitted(model: Any, callbacks: list[Any], path: Any = None, **options: Any) -> pl.Trainer:
    seed()
    trainer = make_trainer(callbacks, **{"max_epochs": 3, "enable_checkpointing": True, **options})
    trainer.fit(model, loader(), ckpt_path=path)
    return trainer


@SCOPES
@pytest.mark.parametrize("who", [(True, False), (False, True), (True, True)], ids=str)
def test_resuming_in_mid_epoch(who: tuple[bool, bool], scope: str, tmp_path: Path) -> None:
    files, ends = [], []
    for run, (first, second) in enumerate([(False, False), who]):
        before, after = hotly(scope), hotly(scope)
        folder = tmp_path / str(run)
        fitted(seeded(AdamNet), [Saves(folder), *([before] if first else [])])
        path = next(folder.glob("*.ckpt"))
        files.append(torch.load(path, weights_only=False))
        model = seeded(AdamNet)
        trainer = fitted(model, [after] if second else [], path, max_epochs=6)
        ends.append(outcome(model, trainer))
        assert not first or before.report.phase == "steady"
        assert not second or run == 0 or after.report.phase == "steady"
    for checkpoint in files:
        checkpoint.pop("callbacks")
        checkpoint.pop("hotcompile", None)
    assert_close(*files, "checkpoint in mid-epoch")
    assert_same_run(*ends)


@SCOPES
def test_load_from_checkpoint(scope: str, tmp_path: Path) -> None:
    callback = hotly(scope)
    model = seeded(SgdNet)
    fitted(model, [callback, Saves(tmp_path)])
    assert callback.report.phase == "steady"
    loaded = SgdNet.load_from_checkpoint(next(tmp_path.glob("*.ckpt")))
    assert list(loaded.state_dict()) == list(SgdNet().state_dict())
    fitted(plain := seeded(SgdNet), [Saves(tmp_path / "plain")])
    expected = SgdNet.load_from_checkpoint(next((tmp_path / "plain").glob("*.ckpt")))
    assert_close(expected.state_dict(), loaded.state_dict(), "loaded")
    assert_close(plain.state_dict(), model.state_dict(), "model")


def several_fits(callbacks: list[Any]) -> Any:
    """One Trainer: two fits, with all other stages before, between and after."""
    seed()
    model, trainer = seeded(SgdNet), make_trainer(callbacks, max_epochs=3)
    seen = [trainer.validate(model, loader(16), verbose=False)]
    trainer.fit(model, loader(), loader(16))
    seen.append(trainer.validate(model, loader(16), verbose=False))
    seen.append(trainer.predict(model, torch.randn(3, 4, 8)))
    trainer.fit_loop.max_epochs = 6
    trainer.fit(model, loader(), loader(16))
    seen.append(trainer.validate(model, loader(16), verbose=False))
    return outcome(model, trainer), seen


@SCOPES
def test_several_fits_of_one_trainer(scope: str) -> None:
    callback = hotly(scope)
    (plain, before), (under, after) = several_fits([]), several_fits([callback])
    assert callback.report.phase == "steady"
    assert callback.report.steps == 36
    assert_close(before, after, "other stages")
    assert_same_run(plain, under)


@SCOPES
def test_one_callback_in_several_trainers(scope: str) -> None:
    callback = hotly(scope)
    for kind in (SgdNet, AdamNet, SgdNet):
        plain, under = seeded(kind), seeded(kind)
        trainers = [fitted(plain, []), fitted(under, [callback])]
        assert callback.report.phase == "steady"
        ends = [outcome(m, t) for m, t in zip((plain, under), trainers, strict=True)]
        assert_same_run(*ends)


def tuned(callbacks: list[Any], folder: Path) -> Any:
    seed()
    model = seeded(Searches)
    trainer = make_trainer(callbacks, max_epochs=3, default_root_dir=folder)
    tuner = Tuner(trainer)
    tuner.scale_batch_size(model, mode="power", max_trials=1, init_val=4)
    found = tuner.lr_find(model, num_training=12, early_stop_threshold=None)
    trainer.fit(model)
    return outcome(model, trainer), found.results, model.lr, model.batch_size


@SCOPES
def test_the_finders_of_the_tuner(scope: str, tmp_path: Path) -> None:
    callback = hotly(scope)
    plain, under = tuned([], tmp_path), tuned([callback], tmp_path)
    assert callback.report.phase == "steady", callback.report.to_text()
    assert_close(plain[1:], under[1:], "found")
    assert_same_run(plain[0], under[0])


class Copies(pl.Callback):
    """Copies the module, and the callback that is attached, in the steady phase."""

    def __init__(self, *how: Any) -> None:
        self.how = how
        self.modules: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step != AT_STEP:
            return
        pl_module.trainer = None
        try:
            self.modules += [how(pl_module) for how in self.how]
        finally:
            pl_module.trainer = trainer


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@SCOPES
def test_copies_in_mid_run_train_on_like_eager_ones(scope: str) -> None:
    ends, callback = [], hotly(scope)
    for callbacks in ([], [callback]):
        copies = Copies(copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_file)
        fitted(seeded(SgdNet), [*callbacks, copies], enable_checkpointing=False)
        for module in copies.modules:
            fitted(module, [], max_epochs=1, enable_checkpointing=False)
        assert len(copies.modules) == 3
        ends.append([m.state_dict() for m in copies.modules])
    assert_proven(callback.report)
    assert_close(*ends, "copies")


class Part(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 64), torch.nn.Linear(64, 3)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x).tanh())


class Nested(SgdNet):
    """A part of it is a LightningModule, which pickles its compiled call where another module does not."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Any) -> Any:
        return super().forward(x) + self.part(x)


@pytest.mark.parametrize("how", [copy.deepcopy, through_file], ids=["deepcopy", "torch.save"])
def test_copies_of_a_lightning_module_in_another_can_be_compiled(how: Any) -> None:
    ends = []
    for under in (False, True):
        copies = Copies(how)
        fitted(seeded(Nested), [*([hotly("regions")] if under else []), copies], enable_checkpointing=False)
        (module,) = copies.modules
        callback = hotly("regions")
        fitted(module, [callback] if under else [], max_epochs=1, enable_checkpointing=False)
        assert not under or "part" in [r.name for r in callback.report.regions]
        ends.append(module.state_dict())
    assert_close(*ends, "copies")


class CopiesTheCallback(pl.Callback):
    def __init__(self, how: Any) -> None:
        self.how, self.made = how, None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == AT_STEP:
            (callback,) = [c for c in trainer.callbacks if isinstance(c, HotCompile)]
            self.made = self.how(callback)


@pytest.mark.parametrize("how", [copy.deepcopy, through_file], ids=["deepcopy", "torch.save"])
@SCOPES
def test_a_copy_of_the_callback_in_mid_run_works_in_another_trainer(scope: str, how: Any) -> None:
    copies = CopiesTheCallback(how)
    fitted(seeded(SgdNet), [hotly(scope), copies], enable_checkpointing=False)
    assert copies.made is not None
    plain, model = seeded(SgdNet), seeded(SgdNet)
    fitted(plain, [])
    trainer = fitted(model, [copies.made])
    assert copies.made.report.phase == "steady"
    assert list(saved(trainer)["state_dict"]) == list(plain.state_dict())
    assert_close(plain.state_dict(), model.state_dict(), "model")
