"""Train a model under HotCompile and end with its receipt.

python recipes/train.py [group=option] [key=value]     --help lists what there is
"""

from __future__ import annotations

from pathlib import Path

import hydra
import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_hotcompile import HotCompile
from lightning_hotcompile.bench.recipe_errors import refusals_in_one_line


def train(config: DictConfig) -> None:
    """Build the parts of ``config``, train, and hand over the receipt."""
    L.seed_everything(config.seed, workers=True, verbose=False)
    wanted = config.compile or {}  # null with compile=off, and an experiment may still set options of it
    hot: HotCompile | None = instantiate(wanted) if "_target_" in wanted else None
    data: L.LightningDataModule = instantiate(config.data)
    model: L.LightningModule = instantiate(config.model)
    build_trainer = instantiate(config.trainer, _partial_=True)
    trainer: L.Trainer = build_trainer(callbacks=[hot] if hot else [])
    trainer.fit(model, datamodule=data)
    if hot and trainer.is_global_zero:
        hand_over(hot, Path(config.output_dir))


def hand_over(hot: HotCompile, folder: Path) -> None:
    """Print the receipt, and write it as ``report.json`` and ``report.md``."""
    (folder / "report.json").write_text(hot.report.to_json(), encoding="utf-8")
    (folder / "report.md").write_text(hot.report.to_markdown(), encoding="utf-8")
    print(hot.report)
    print(f"receipt: {folder / 'report.md'}")


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(config: DictConfig) -> None:
    """Train; what this package refuses is one line without a traceback."""
    with refusals_in_one_line():
        train(config)


if __name__ == "__main__":
    main()
