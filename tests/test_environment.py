"""Switching the callback on and off by environment variables."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hotcompile import HotCompile, HotCompileConfig, environment
from lightning_hotcompile.capture.ending import TrainingEnded
from lightning_hotcompile.capture.explanation import explanation_from
from lightning_hotcompile.capture.order import EXPLAIN_VARIABLE, EXPLANATION_FILE, ExplainOrder
from lightning_hotcompile.environment import callbacks_from_environment
from lightning_hotcompile.errors import ConfigError
from lightning_hotcompile.switch import switch

VARIABLES = (
    "HOTCOMPILE",
    "HOTCOMPILE_THRESHOLD",
    "HOTCOMPILE_DEBUG",
    "HOTCOMPILE_EVENT_LOG",
    "HOTCOMPILE_SCOPE",
    "HOTCOMPILE_KEEP_EAGER",
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger("lightning_hotcompile")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


class Tiny(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(tmp_path: Path, *callbacks: Any) -> Trainer:
    return Trainer(
        max_steps=3,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )


def fit(trainer: Trainer) -> None:
    trainer.fit(Tiny(), DataLoader(torch.ones(12, 4).split(1), batch_size=None, num_workers=0))  # type: ignore[arg-type]


def hot_compiles(trainer: Trainer) -> list[HotCompile]:
    return [c for c in trainer.callbacks if isinstance(c, HotCompile)]  # type: ignore[attr-defined]


def only_callback() -> HotCompile:
    (callback,) = callbacks_from_environment()
    assert isinstance(callback, HotCompile)
    return callback


class TestSwitch:
    @pytest.mark.parametrize("value", [None, "", "  "])
    def test_unset_or_empty_is_nothing(self, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        if value is not None:
            monkeypatch.setenv("HOTCOMPILE", value)
        assert switch() is None
        assert callbacks_from_environment() == []

    @pytest.mark.parametrize(
        ("value", "meant"), [("auto", "auto"), ("FORCE", "force"), (" off ", "off"), ("Auto", "auto")]
    )
    def test_values_in_any_case(self, value: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTCOMPILE", value)
        assert switch() == meant

    @pytest.mark.parametrize("value", ["1", "on", "true", "outo", "of"])
    def test_another_value_is_refused_by_name(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTCOMPILE", value)
        message = f"HOTCOMPILE='{value}' is not allowed: use auto, force or off"
        for ask in (switch, callbacks_from_environment):
            with pytest.raises(ConfigError, match=message):
                ask()

    def test_a_misspelt_value_gets_a_hint(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTCOMPILE", "outo")
        with pytest.raises(ConfigError, match="did you mean 'auto'"):
            switch()

    def test_off_disables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTCOMPILE", "off")
        assert switch() == "off"
        assert callbacks_from_environment() == []


class TestOptions:
    @pytest.mark.parametrize(("value", "cost_gate"), [("auto", True), ("force", False)])
    def test_only_force_leaves_the_forecast_away(
        self, value: str, cost_gate: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOTCOMPILE", value)
        assert only_callback().config == HotCompileConfig(cost_gate=cost_gate)
        assert only_callback().from_environment

    @pytest.mark.parametrize(("text", "threshold"), [("0", 0), ("25", 25), (" 7 ", 7), ("", 10)])
    def test_threshold(self, text: str, threshold: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTCOMPILE", "auto")
        monkeypatch.setenv("HOTCOMPILE_THRESHOLD", text)
        assert only_callback().config.threshold == threshold

    @pytest.mark.parametrize("text", ["ten", "1.5", "-1", "1e3", "1_0", "+3"])
    def test_a_wrong_threshold_is_refused_by_the_variable_name(
        self, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOTCOMPILE", "auto")
        monkeypatch.setenv("HOTCOMPILE_THRESHOLD", text)
        with pytest.raises(ConfigError) as caught:
            callbacks_from_environment()
        assert f"HOTCOMPILE_THRESHOLD={text!r} is not allowed: give a whole number" in str(caught.value)

    @pytest.mark.parametrize(("text", "scope"), [("regions", "regions"), (" step ", "step"), ("", "auto")])
    def test_scope(self, text: str, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTCOMPILE", "auto")
        monkeypatch.setenv("HOTCOMPILE_SCOPE", text)
        assert only_callback().config.scope == scope

    @pytest.mark.parametrize(("text", "hint"), [("region", "'regions'"), ("pattern", "use auto, step")])
    def test_a_wrong_scope_is_refused_by_the_variable_name(
        self, text: str, hint: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOTCOMPILE", "auto")
        monkeypatch.setenv("HOTCOMPILE_SCOPE", text)
        with pytest.raises(ConfigError) as caught:
            callbacks_from_environment()
        assert f"HOTCOMPILE_SCOPE={text!r} is not allowed" in str(caught.value)
        assert hint in str(caught.value)

    @pytest.mark.parametrize(
        ("text", "names"), [("net.head", ("net.head",)), ("a.*, Block ,", ("a.*", "Block")), ("", ())]
    )
    def test_keep_eager(self, text: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTCOMPILE", "auto")
        monkeypatch.setenv("HOTCOMPILE_KEEP_EAGER", text)
        assert only_callback().config.keep_eager == names

    def test_other_variables_do_nothing_without_the_switch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTCOMPILE_THRESHOLD", "ten")
        assert callbacks_from_environment() == []

    def test_explaining_goes_by_scope_and_keep_eager(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv(EXPLAIN_VARIABLE, ExplainOrder(folder=str(tmp_path)).to_text())
        monkeypatch.setenv("HOTCOMPILE_SCOPE", "module")
        monkeypatch.setenv("HOTCOMPILE_KEEP_EAGER", "layer")
        with pytest.raises(TrainingEnded):
            fit(trainer(tmp_path))
        found = explanation_from((tmp_path / EXPLANATION_FILE).read_text(encoding="utf-8"))
        assert "scope module" in found.plan
        assert "keep_eager='layer'" in found.plan
        own = HotCompile(scope="step")
        with pytest.raises(TrainingEnded):
            fit(trainer(tmp_path, own))
        found = explanation_from((tmp_path / EXPLANATION_FILE).read_text(encoding="utf-8"))
        assert found.scope == "step"
        assert "keep_eager" not in found.plan

    def test_explaining_refuses_a_wrong_scope(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv(EXPLAIN_VARIABLE, ExplainOrder(folder=str(tmp_path)).to_text())
        monkeypatch.setenv("HOTCOMPILE_SCOPE", "region")
        with pytest.raises(ConfigError, match="HOTCOMPILE_SCOPE='region' is not allowed"):
            callbacks_from_environment()

    def test_event_log(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HOTCOMPILE", "auto")
        monkeypatch.setenv("HOTCOMPILE_EVENT_LOG", str(tmp_path / "events.jsonl"))
        assert only_callback().config.event_log == str(tmp_path / "events.jsonl")
        monkeypatch.setenv("HOTCOMPILE_EVENT_LOG", "")
        assert only_callback().config.event_log is None

    @pytest.mark.parametrize(("text", "verbose"), [("1", True), ("0", False), ("", False)])
    def test_debug_is_verbose(self, text: str, verbose: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTCOMPILE", "auto")
        monkeypatch.setenv("HOTCOMPILE_DEBUG", text)
        assert only_callback().config.verbose is verbose
        assert logging.getLogger("lightning_hotcompile").isEnabledFor(logging.DEBUG) is verbose

    def test_debug_messages_are_shown_where_nobody_set_logging_up(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        monkeypatch.setenv("HOTCOMPILE", "auto")
        monkeypatch.setenv("HOTCOMPILE_DEBUG", "1")
        only_callback()
        only_callback()
        logging.getLogger("lightning_hotcompile.swap").debug("a trace")
        assert capsys.readouterr().err == "a trace\n"

    def test_debug_adds_no_second_handler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
        monkeypatch.setenv("HOTCOMPILE", "auto")
        monkeypatch.setenv("HOTCOMPILE_DEBUG", "1")
        only_callback()
        assert logging.getLogger("lightning_hotcompile").handlers == []


class TestWithTrainer:
    def test_the_entry_point_is_in_the_metadata(self) -> None:
        points = importlib.metadata.entry_points(group="lightning.pytorch.callbacks_factory")
        ours = [p for p in points if p.value.startswith("lightning_hotcompile")]
        assert {p.load() for p in ours} == {environment.callbacks_from_environment}

    def test_a_trainer_without_it_imports_none_of_it(self, tmp_path: Path) -> None:
        """A torch that has renamed a private name must not end each Trainer where this is installed."""
        script = (
            "import sys, warnings, lightning.pytorch as pl\n"
            "sys.modules['lightning_hotcompile.swap.dynamo'] = None\n"
            "with warnings.catch_warnings(record=True) as told:\n"
            "    warnings.simplefilter('always')\n"
            "    trainer = pl.Trainer(accelerator='cpu', logger=False)\n"
            "print(sum('HotCompile' in type(c).__name__ for c in trainer.callbacks),"
            " sum('HotCompile cannot be used' in str(w.message) for w in told),"
            " 'lightning_hotcompile.callback' in sys.modules)\n"
        )
        for value, expected in ((None, "0 0 False"), ("off", "0 0 False"), ("auto", "0 1 False")):
            known = {k: v for k, v in os.environ.items() if not k.startswith("HOTCOMPILE")}
            variables = known if value is None else {**known, "HOTCOMPILE": value}
            done = subprocess.run(
                [sys.executable, "-c", script], env=variables, cwd=tmp_path, capture_output=True, text=True
            )
            assert done.stdout.strip().splitlines()[-1] == expected, done.stderr

    @pytest.mark.parametrize("value", ["auto", "force"])
    def test_a_trainer_gets_the_callback(
        self, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("HOTCOMPILE", value)
        given = trainer(tmp_path)
        (callback,) = hot_compiles(given)
        assert callback.from_environment
        fit(given)
        assert callback.report.phase == "observing"
        assert sum(p.steps for p in callback.report.phases) == 3

    @pytest.mark.parametrize("value", [None, "off"])
    def test_a_trainer_gets_none(
        self, value: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        if value is not None:
            monkeypatch.setenv("HOTCOMPILE", value)
        assert hot_compiles(trainer(tmp_path)) == []

    def test_a_bad_value_stops_the_trainer(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HOTCOMPILE", "bad")
        with pytest.raises(ConfigError, match="HOTCOMPILE='bad'"):
            trainer(tmp_path)

    def test_a_callback_in_code_wins(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        log = tmp_path / "events.jsonl"
        monkeypatch.setenv("HOTCOMPILE", "auto")
        monkeypatch.setenv("HOTCOMPILE_EVENT_LOG", str(log))
        mine = HotCompile(threshold=5)
        given = trainer(tmp_path, mine)
        other = next(c for c in hot_compiles(given) if c is not mine)
        fit(given)
        assert other.report.phase == "declined"
        assert "of its own" in other.report.reason
        assert mine.report.phase == "observing"
        assert sum(p.steps for p in mine.report.phases) == 3
        assert not log.exists()

    def test_off_disables_a_callback_in_code(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HOTCOMPILE", "off")
        mine = HotCompile(threshold=0, cost_gate=False)
        fit(trainer(tmp_path, mine))
        assert mine.report.phase == "declined"
        assert "HOTCOMPILE=off" in mine.report.reason
