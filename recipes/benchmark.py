"""Measure, and write tables and a picture.

python recipes/benchmark.py suite=regret [quick=true] [case=NAME] [threads=N] [output_dir=FOLDER]

The same output_dir again goes on where an earlier call has stopped.
"""

from __future__ import annotations

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_hotcompile.errors import HotCompileError


def command() -> str:
    """What was called, without the folders of whoever made it."""
    given = HydraConfig.get().overrides.task
    return " ".join(["python recipes/benchmark.py", *(x for x in given if not x.startswith("output_dir="))])


def benchmark(config: DictConfig) -> None:
    """Run the suite that ``config`` chooses."""
    case = OmegaConf.to_object(config.case) if OmegaConf.is_config(config.case) else config.case
    suite = instantiate(config.suite).chosen(case, config.quick)
    folder = Path(config.output_dir)
    suite.run(folder, threads=config.threads, command=command())
    print(f"results: {folder}")


@hydra.main(version_base="1.3", config_path="../conf", config_name="benchmark")
def main(config: DictConfig) -> None:
    """Measure; what this package refuses is one line without a traceback."""
    try:
        benchmark(config)
    except InstantiationException as error:
        if isinstance(error.__cause__, HotCompileError):
            raise SystemExit(str(error.__cause__)) from None
        raise
    except HotCompileError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
