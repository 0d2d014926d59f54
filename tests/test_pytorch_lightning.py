"""Trainers and modules of the package ``pytorch_lightning``: the same code as Lightning's, other classes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hotcompile import HotCompile
from lightning_hotcompile.run.trainer_facts import accumulation
from tests.cli.command import in_a_process
from tests.hot import assert_proven, assert_same, hot
from tests.models import Block

pl = pytest.importorskip("pytorch_lightning")

ROOT = Path(__file__).parents[1]


class Net(pl.LightningModule):  # type: ignore[misc, name-defined]  # found by importorskip
    """A small classifier that logs in both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), Block(16), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"accuracy": (out.argmax(1) == y).float().mean(), "size": float(len(y))})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class LogsByItself(Net):
    """``log`` is the user's own: it is called at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.seen.append(name)
        super().log(name, *args, **kwargs)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 8, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    settings = {
        "accelerator": "cpu",
        "max_epochs": 5,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "callbacks": list(callbacks),
    }
    return pl.Trainer(**{**settings, **options})


def trained(folder: Path, *callbacks: Any, kind: type[Any] = Net, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, this = kind(), trainer(folder, *callbacks, **options)
    this.fit(model, data(), data())
    return model, this


def test_the_callback_is_one_of_both_packages() -> None:
    callback = HotCompile()
    assert isinstance(callback, lightning.pytorch.Callback)
    assert isinstance(callback, pl.Callback)


@pytest.mark.parametrize("alias", ["lightning.pytorch", "broken"])
def test_one_package_may_stand_for_both_or_be_broken(alias: str, tmp_path: Path) -> None:
    if alias == "broken":
        (tmp_path / "pytorch_lightning.py").write_text("raise RuntimeError('too old')", encoding="utf-8")
    code = f"""
import sys, lightning.pytorch
sys.path.insert(0, {str(tmp_path)!r})
if {alias != "broken"}:
    sys.modules["pytorch_lightning"] = lightning.pytorch
from lightning_hotcompile import HotCompile
assert isinstance(HotCompile(), lightning.pytorch.Callback)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("scope", ["step", "regions"])
def test_it_compiles_and_logs_as_without(scope: str, tmp_path: Path) -> None:
    plain, expected = trained(tmp_path)
    callback = hot(scope=scope, stages=("train", "validate"), compile_optimizer=False)
    model, found = trained(tmp_path, callback)
    assert callback.report.phase == "steady"
    assert_proven(callback.report)
    assert callback.reports["validate"].phase == "steady"
    assert_same(plain, model)
    assert list(found.callback_metrics) == list(expected.callback_metrics)
    for name, value in expected.callback_metrics.items():
        torch.testing.assert_close(found.callback_metrics[name], value, rtol=1e-4, atol=1e-5)


def test_the_users_own_log_is_called_at_once(tmp_path: Path) -> None:
    callback = hot(scope="step", compile_optimizer=False)
    plain, _ = trained(tmp_path, kind=LogsByItself)
    model, _ = trained(tmp_path, callback, kind=LogsByItself)
    assert callback.report.phase == "steady"
    assert model.seen == plain.seen


def test_its_progress_bar_loggers_and_checkpoints_work(tmp_path: Path) -> None:
    callback, bar = hot(), pl.callbacks.TQDMProgressBar()
    logger = pl.loggers.CSVLogger(tmp_path)
    saved = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=20)
    trained(
        tmp_path,
        callback,
        bar,
        saved,
        logger=logger,
        enable_progress_bar=True,
        enable_checkpointing=True,
        log_every_n_steps=4,
    )
    assert callback.report.phase == "steady"
    rows = (Path(logger.log_dir) / "metrics.csv").read_text(encoding="utf-8")
    assert "hotcompile/phase" in rows
    checkpoint = torch.load(saved.best_model_path, weights_only=True)
    assert list(checkpoint["state_dict"]) == list(Net().state_dict())
    assert checkpoint["hotcompile"]["phase"] == "steady"


def test_its_schedule_of_accumulation_is_seen(tmp_path: Path) -> None:
    schedule = pl.callbacks.GradientAccumulationScheduler(scheduling={0: 1, 1: 4})
    assert accumulation(trainer(tmp_path, schedule)) == 4


def test_from_the_yaml_of_its_command_line(tmp_path: Path) -> None:
    cli = pytest.importorskip("pytorch_lightning.cli")
    config = tmp_path / "config.yaml"
    callbacks = [{"class_path": "lightning_hotcompile.HotCompile", "init_args": {"threshold": 7}}]
    config.write_text(yaml.safe_dump({"trainer": {"accelerator": "cpu", "callbacks": callbacks}}))
    line = cli.LightningCLI(Net, args=["--config", str(config)], run=False, save_config_callback=None)
    (found,) = [c for c in line.trainer.callbacks if isinstance(c, HotCompile)]
    assert found.config.threshold == 7


SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
torch.set_num_threads(1)
from pathlib import Path
from tests.test_pytorch_lightning import *
"""


def run_script(folder: Path, body: str, **environment: str) -> None:
    file = folder / "train.py"
    file.write_text(SCRIPT + body, encoding="utf-8")
    command = [sys.executable, str(file)]
    ran = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_the_environment_adds_it(tmp_path: Path) -> None:
    body = """
this = trainer(Path("."), max_steps=30)
this.fit(Net(), data())
found, = [c for c in this.callbacks if isinstance(c, HotCompile)]
Path("phase").write_text(found.report.phase)
"""
    run_script(tmp_path, body, HOTCOMPILE="auto")
    assert (tmp_path / "phase").read_text() == "declined"


def test_the_commands_work_on_a_script_of_it(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT + "trainer(Path('.'), max_epochs=100).fit(Net(), data())\n", encoding="utf-8")
    ran = in_a_process("explain", "--quiet", "--json", sys.executable, str(file), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["scope"] == "step"


def test_two_ranks_change_together(tmp_path: Path) -> None:
    body = """
if __name__ == "__main__":
    import json
    callback = hot()
    this = trainer(Path("."), callback, devices=2, strategy="ddp", max_epochs=10)
    torch.manual_seed(0)
    model = Net()
    this.fit(model, data())
    found = {"phase": callback.report.phase, "weight": model.net[0].weight.sum().item()}
    Path(f"rank{this.global_rank}.json").write_text(json.dumps(found))
"""
    run_script(tmp_path, body)
    one, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert one == other
    assert one["phase"] == "steady"


SAYS_WHO_SPEAKS = """
import {package}
from lightning_utilities.core import rank_zero
before = rank_zero.log.name, rank_zero.rank_zero_deprecation_category
from lightning_hotcompile import HotCompile
assert {{"lightning.pytorch", "pytorch_lightning"}} <= set(__import__("sys").modules)
after = rank_zero.log.name, rank_zero.rank_zero_deprecation_category
assert before == after, (before, after)
assert before[0].startswith("{package}."), before
"""


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_package_of_the_script_logs_and_warns_as_before(package: str) -> None:
    """Each of both takes over the logger and the deprecation warnings of the other as it is imported."""
    script = SAYS_WHO_SPEAKS.format(package=package)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
