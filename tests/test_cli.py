"""The callback from YAML, by Lightning's own command line."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import LightningDataModule

from lightning_hotcompile import HotCompile, HotCompileConfig
from tests.models import Net, loader

jsonargparse = pytest.importorskip("jsonargparse")

from lightning.pytorch.cli import LightningCLI  # noqa: E402

CLASS_PATH = "lightning_hotcompile.HotCompile"

EVERY_OPTION: dict[str, Any] = {
    "threshold": 4,
    "scope": "pattern",
    "targets": ["blocks.*", "head"],
    "keep_eager": ["inp"],
    "compile_anyway": ["blocks.0"],
    "backend": "aot_eager",
    "mode": "max-autotune-no-cudagraphs",
    "dynamic": False,
    "fullgraph": True,
    "options": None,
    "cost_gate": False,
    "min_speedup": 0.0,
    "parity": "warn",
    "random": "backend",
    "stages": ["train", "validate"],
    "compile_timeout": 30.0,
    "prewarm": False,
    "fused_optimizer": False,
    "keep_freed_memory": False,
    "store": None,
    "compile_optimizer": True,
    "max_flips": 2,
    "max_signatures": 1,
    "on_error": "raise",
    "log_prefix": "speed",
    "verbose": True,
    "event_log": "events.jsonl",
}


class Data(LightningDataModule):
    """The batches of the shared test model."""

    def train_dataloader(self) -> Any:
        return loader()


def config_file(folder: Path, options: dict[str, Any], **trainer: Any) -> Path:
    path = folder / "config.yaml"
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **trainer,
        "callbacks": [{"class_path": CLASS_PATH, "init_args": options}],
    }
    path.write_text(yaml.safe_dump({"trainer": settings}), encoding="utf-8")
    return path


def command_line(*args: str, run: bool = False) -> LightningCLI:
    return LightningCLI(Net, Data, args=list(args), run=run, save_config_callback=None)


def callback_of(cli: LightningCLI) -> HotCompile:
    (callback,) = [c for c in cli.trainer.callbacks if isinstance(c, HotCompile)]
    return callback


@pytest.fixture(autouse=True)
def _not_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTCOMPILE", raising=False)


def test_it_trains_from_yaml(tmp_path: Path) -> None:
    options = {
        "threshold": 3,
        "scope": "regions",
        "backend": "aot_eager",
        "cost_gate": False,
        "min_speedup": 0.0,
    }
    cli = command_line("fit", "--config", str(config_file(tmp_path, options, max_epochs=4)), run=True)
    report = callback_of(cli).report
    assert report.phase == "steady", report.reason
    assert report.scope == "regions"
    assert cli.trainer.global_step == 48


def test_the_defaults_from_yaml_are_those_of_code(tmp_path: Path) -> None:
    cli = command_line("--config", str(config_file(tmp_path, {})))
    assert callback_of(cli).config == HotCompileConfig()


def test_every_option_can_be_given(tmp_path: Path) -> None:
    assert set(EVERY_OPTION) == set(HotCompileConfig.names()), "add new options to this test"
    cli = command_line("--config", str(config_file(tmp_path, EVERY_OPTION)))
    config = dataclasses.asdict(callback_of(cli).config)
    assert {n: list(v) if isinstance(v, tuple) else v for n, v in config.items()} == EVERY_OPTION


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("options", {"max_autotune": True, "triton.cudagraphs": False}),
        ("dynamic", "auto"),
        ("dynamic", True),
        ("dynamic", None),
        ("compile_optimizer", "auto"),
        ("compile_optimizer", False),
        ("mode", None),
        ("event_log", None),
        ("min_speedup", 1),
        ("backend", "tests.test_cli.a_backend"),
    ],
    ids=str,
)
def test_each_kind_of_value_is_understood(tmp_path: Path, name: str, value: Any) -> None:
    cli = command_line("--config", str(config_file(tmp_path, {name: value})))
    given = getattr(callback_of(cli).config, name)
    if name == "backend":
        assert given is a_backend or given == value
    else:
        assert given == value
        assert type(given) is type(value) or name == "min_speedup"


def a_backend(graph: Any, inputs: Any, **_: Any) -> Any:
    return graph.forward


def test_an_option_on_the_command_line_wins(tmp_path: Path) -> None:
    path = config_file(tmp_path, {"threshold": 3})
    cli = command_line("--config", str(path), "--trainer.callbacks.init_args.threshold=7")
    assert callback_of(cli).config.threshold == 7


def test_without_a_file_it_can_be_added_by_its_name() -> None:
    quiet = ("--trainer.logger=false", "--trainer.accelerator=cpu")
    cli = command_line(*quiet, "--trainer.callbacks+=HotCompile", "--trainer.callbacks.scope=regions")
    assert callback_of(cli).config.scope == "regions"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"treshold": 3}, "treshold"),
        ({"threshold": "many"}, "threshold"),
        ({"threshold": -1}, "threshold=-1"),
        ({"scope": "region"}, "did you mean 'regions'"),
        ({"targets": "blocks.*"}, "targets"),
        ({"fullgraph": "perhaps"}, "fullgraph"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], named: str
) -> None:
    path = config_file(tmp_path, options)
    with pytest.raises((SystemExit, ValueError)) as caught:
        command_line("--config", str(path))
    assert named in f"{capsys.readouterr().err} {caught.value}"


def test_print_config_shows_the_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file(tmp_path, {"threshold": 3})
    with pytest.raises(SystemExit) as ended:
        command_line("--config", str(path), "--print_config")
    assert ended.value.code == 0
    (shown,) = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    assert shown["class_path"] == CLASS_PATH
    assert shown["init_args"]["threshold"] == 3
    assert set(shown["init_args"]) == set(HotCompileConfig.names())


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line(f"--trainer.callbacks.help={CLASS_PATH}")
    shown = capsys.readouterr().out
    assert all(f".{name}" in shown for name in HotCompileConfig.names())


def test_arguments_and_options_are_the_same_with_the_same_defaults() -> None:
    arguments = inspect.signature(HotCompile).parameters
    assert tuple(arguments) == HotCompileConfig.names()
    defaults = {f.name: f.default for f in dataclasses.fields(HotCompileConfig)}
    assert {name: p.default for name, p in arguments.items()} == defaults


def test_what_print_config_shows_can_be_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command_line("--config", str(config_file(tmp_path, EVERY_OPTION)), "--print_config")
    again = tmp_path / "again.yaml"
    again.write_text(capsys.readouterr().out, encoding="utf-8")
    cli = command_line("--config", str(again))
    assert callback_of(cli).config == HotCompileConfig(**EVERY_OPTION)
