"""Real text that every Python brings along: the documentation behind ``help()``."""

from __future__ import annotations

import hashlib
from pydoc_data.topics import topics

import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_hotcompile.errors import ConfigError


def pydoc_text() -> str:
    """All help topics of the running Python in the order of their names (about 465,000 characters).

    The text differs between versions of Python, so name its hash beside every loss.
    """
    return "".join(topics[name] for name in sorted(topics))


class Windows(Dataset[Tensor]):
    """Windows of ``length`` tokens that follow each other without overlap.

    Item ``i`` has shape ``(length,)``; a list of items comes as one tensor by one gather.
    """

    def __init__(self, tokens: Tensor, length: int) -> None:
        # One token beyond the window is its last target, so neighbours share that one.
        enough = len(tokens) >= length
        self._windows = tokens.unfold(0, length, length - 1) if enough else tokens.new_empty(0, length)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Tensor:
        return self._windows[index]

    def __getitems__(self, indices: list[int]) -> Tensor:
        """The windows of a whole batch, shape ``(len(indices), length)``, as int64."""
        return self._windows[torch.tensor(indices)].long()


def inputs_and_targets(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Two contiguous tensors of shape ``(batch, length - 1)``: the tokens, and each one's successor."""
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class PydocText(LightningDataModule):
    """Next-byte prediction on :func:`pydoc_text`; tokens are the UTF-8 bytes, so there are 256.

    Every batch is ``(tokens, targets)``, two int64 tensors of shape ``(batch_size, block_size)``:
    an incomplete last batch is dropped. Rank 0 prints the size and the SHA-256 of the text.

    Args:
        block_size: tokens in a sequence.
        batch_size: sequences in a batch, on each rank.
        val_fraction: share of the text, at its end, that is kept for validation.
        seed: seed of the order of training; epochs differ from each other, runs do not.
        num_workers: processes that load; the data is in memory, so 0 is fastest.

    Raises:
        ConfigError: the text is too short for one batch of this shape.
    """

    def __init__(
        self,
        *,
        block_size: int,
        batch_size: int,
        val_fraction: float = 0.1,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        text = pydoc_text()
        content = text.encode("utf-8")
        self.characters = len(text)
        self.digest = hashlib.sha256(content).hexdigest()
        tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        cut = round(len(tokens) * (1.0 - val_fraction))
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.train_windows = Windows(tokens[:cut], block_size + 1)
        self.val_windows = Windows(tokens[cut:], block_size + 1)
        self.seed = seed
        for name, windows in (("training", self.train_windows), ("validation", self.val_windows)):
            if len(windows) < batch_size:
                raise ConfigError(
                    f"batch_size={batch_size} is more than the {len(windows)} windows of "
                    f"block_size={block_size} in the {name} text: make one of them smaller, "
                    f"or change val_fraction={val_fraction}."
                )

    def prepare_data(self) -> None:
        """Print what the model is trained on."""
        self._announce()

    @rank_zero_only
    def _announce(self) -> None:
        print(f"text: pydoc_data.topics, {self.characters:,} characters, sha256 {self.digest}")

    def _loader(self, windows: Windows, shuffle: bool) -> DataLoader[Tensor]:
        return DataLoader(
            windows,
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=True,
            generator=torch.Generator().manual_seed(self.seed),
            collate_fn=inputs_and_targets,  # type: ignore[arg-type]  # __getitems__ gives one tensor
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Shuffled windows of the first part of the text."""
        return self._loader(self.train_windows, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """The windows of the last part of the text, in order."""
        return self._loader(self.val_windows, shuffle=False)
