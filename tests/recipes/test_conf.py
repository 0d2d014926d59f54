"""Every option of every config group composes, builds what it names, and refuses a typo by name."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, InstantiationException
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.errors import PlanError
from tests.forks import in_a_fork

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
HAS_TE = importlib.util.find_spec("transformer_engine") is not None


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def groups_of(primary: Path) -> list[str]:
    """Groups that a primary config offers, from its defaults list."""
    names = [
        key for entry in OmegaConf.load(primary).defaults for key in entry if isinstance(entry, DictConfig)
    ]
    words = [name.split()[-1] for name in names if not name.startswith("override")]
    return [word for word in words if (CONF / word).is_dir()]


PRIMARIES = sorted(CONF.glob("*.yaml"))
CASES = [(p.stem, group, option) for p in PRIMARIES for group in groups_of(p) for option in options(group)]


@pytest.fixture(autouse=True)
def _conf_folder() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def composed(*overrides: str, primary: str = "train", folder: Path = Path("unused")) -> DictConfig:
    return compose(primary, overrides=[*overrides, f"output_dir={folder}"])


def test_every_folder_belongs_to_a_primary_config() -> None:
    offered = {group for primary in PRIMARIES for group in groups_of(primary)}
    assert {folder.name for folder in CONF.iterdir() if folder.is_dir()} == offered


@pytest.mark.parametrize(("primary", "group", "option"), CASES)
def test_every_option_composes(primary: str, group: str, option: str) -> None:
    config = composed(f"{group}={option}", primary=primary)
    # Only this part: a model of texts with data=digits composes, and cannot be trained.
    part = config.get(group)
    if isinstance(part, DictConfig):
        assert OmegaConf.to_container(part, resolve=True)


@pytest.mark.parametrize("option", options("experiment"))
def test_every_experiment_names_known_parts(option: str) -> None:
    config = composed(f"experiment={option}")
    OmegaConf.to_container(config, resolve=True)
    assert issubclass(get_class(config.model._target_), L.LightningModule)
    assert issubclass(get_class(config.data._target_), L.LightningDataModule)


@pytest.mark.parametrize("option", [name for name in options("model") if name != "te_gpt"])
def test_every_model_is_built(option: str) -> None:
    assert isinstance(instantiate(composed(f"model={option}").model), L.LightningModule)


@pytest.mark.parametrize("option", options("data"))
def test_every_data_module_gives_one_shape(option: str) -> None:
    data = instantiate(composed(f"data={option}").data)
    data.setup("fit")
    shapes = {tuple(leaf.shape for leaf in batch) for batch in data.train_dataloader()}
    assert len(shapes) == 1


@pytest.mark.parametrize("option", options("compile"))
def test_every_compile_option_builds_the_callback(option: str, tmp_path: Path) -> None:
    callback = instantiate(composed(f"compile={option}", folder=tmp_path).compile)
    assert callback is None if option == "off" else isinstance(callback, L.Callback)


def test_compile_lists_every_option() -> None:
    keys = {key for key in composed().compile if not key.startswith("_")}
    assert keys == set(HotCompileConfig.names())


def test_compile_repeats_the_defaults_of_the_package(tmp_path: Path) -> None:
    config = composed(folder=tmp_path).compile
    given = {name: config[name] for name in HotCompileConfig.names() if name != "event_log"}
    assert HotCompileConfig(**given) == HotCompileConfig()
    assert config.event_log == f"{tmp_path}/events.jsonl"


def test_events_and_outputs_go_to_hydras_output_folder() -> None:
    written = OmegaConf.to_container(compose("train"), resolve=False)
    assert isinstance(written, dict)
    assert written["output_dir"] == "${hydra:runtime.output_dir}"
    hydra = compose("train", return_hydra_config=True, overrides=["hydra.job.num=3"]).hydra
    assert hydra.run.dir.startswith("outputs/")
    assert hydra.sweep.dir.startswith("multirun/")
    assert hydra.sweep.subdir == "3"


@pytest.mark.parametrize("option", options("logger"))
def test_every_logger_is_built(option: str, tmp_path: Path) -> None:
    config = composed(f"logger={option}", "trainer=cpu", "compile=off", folder=tmp_path)
    trainer = instantiate(config.trainer)
    assert len(trainer.loggers) == (0 if option == "none" else 1)


@pytest.mark.parametrize("option", [name for name in options("trainer") if name != "gpu"])
def test_every_cpu_trainer_is_built(option: str, tmp_path: Path) -> None:
    config = composed(f"trainer={option}", "logger=none", folder=tmp_path)
    trainer = instantiate(config.trainer)
    assert isinstance(trainer, L.Trainer)
    assert trainer.num_devices == config.trainer.devices


@pytest.mark.parametrize(
    "typo", ["compile.treshold=10", "model.d_modle=8", "data.blok_size=8", "trainer.max_step=3"]
)
def test_a_typo_is_refused_by_name(typo: str) -> None:
    with pytest.raises(ConfigCompositionException, match=typo.partition("=")[0]):
        composed(typo)


@pytest.mark.skipif(HAS_TE, reason="TransformerEngine is installed")
def test_te_gpt_without_te_says_what_to_install() -> None:
    with pytest.raises(InstantiationException) as caught:
        instantiate(composed("model=te_gpt").model)
    cause = caught.value.__cause__
    assert isinstance(cause, PlanError)
    assert "pip install 'lightning-hotcompile[te]'" in str(cause)
    assert "CUDA GPU" in str(cause)
    assert "\n" not in str(cause)


def run_recipe(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return in_a_fork(folder, ROOT / "recipes" / "train.py", *arguments, f"hydra.run.dir={folder}")


@pytest.mark.skipif(HAS_TE, reason="TransformerEngine is installed")
def test_the_recipe_prints_just_that_line(tmp_path: Path) -> None:
    done = run_recipe(tmp_path, "model=te_gpt")
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("TEGPT needs TransformerEngine")
    assert "Traceback" not in done.stdout


def test_the_recipe_names_a_typo_and_stops(tmp_path: Path) -> None:
    done = run_recipe(tmp_path, "compile.treshold=10")
    assert done.returncode == 1
    assert "'treshold' is not in struct" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_recipe_refuses_a_value_in_one_line(tmp_path: Path) -> None:
    done = run_recipe(tmp_path, "compile.threshold=-5")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [
        "threshold=-5 is not allowed: give a whole number of 0 or more."
    ]
