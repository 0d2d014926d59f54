"""Measure, and write tables and a picture.

python recipes/benchmark.py suite=regret [quick=true] [case=NAME] [threads=N] [output_dir=FOLDER]
python recipes/benchmark.py suite=all [device=cuda] [size=full] [format=[csv,png]]

Suites: hotpath, mlp, patterns, attention, transformer, rope, surgical, detector, all of these (all),
and about the callback itself regret, steady, scopes and heap.

The same output_dir again goes on where an earlier call has stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate, to_absolute_path
from omegaconf import DictConfig, OmegaConf

from lightning_hotcompile.bench.recipe_errors import refusals_in_one_line
from lightning_hotcompile.errors import ConfigError


def command() -> str:
    """What was called, without the folders of whoever made it."""
    given = HydraConfig.get().overrides.task
    return " ".join(["python recipes/benchmark.py", *(x for x in given if not x.startswith("output_dir="))])


def output_folder(config: DictConfig) -> Path:
    """Where the results go, as meant where the command was given: ``hydra.job.chdir`` changes the folder.

    Each job of a sweep has a folder of its own in it, where Hydra keeps its record of the job: in a common
    one results of other settings would be refused.
    """
    folder = Path(to_absolute_path(config.output_dir))
    job = HydraConfig.get()
    return folder / str(job.sweep.subdir) if job.mode == RunMode.MULTIRUN else folder


def suite_of(config: DictConfig) -> Any:
    """The suite that was chosen, with the files that it names as meant where the command was given."""
    if OmegaConf.is_list(config.suite.get("also")):
        config.suite.also = [to_absolute_path(file) for file in config.suite.also]
    return instantiate(config.suite)


def benchmark(config: DictConfig) -> None:
    """Run the suite that ``config`` chooses."""
    name = HydraConfig.get().runtime.choices["suite"]
    if config.device != "cpu" and name in ("regret", "steady", "scopes", "heap"):
        raise ConfigError(f"device={config.device!r} is not for {name}, which measures on the CPU.")
    case = OmegaConf.to_object(config.case) if OmegaConf.is_config(config.case) else config.case
    suite = suite_of(config).chosen(case, config.quick)
    folder = output_folder(config)
    suite.run(folder, threads=config.threads, command=command())
    print(f"results: {folder}")


@hydra.main(version_base="1.3", config_path="../conf", config_name="benchmark")
def main(config: DictConfig) -> None:
    """Measure; what this package refuses is one line without a traceback."""
    with refusals_in_one_line():
        benchmark(config)


if __name__ == "__main__":
    main()
