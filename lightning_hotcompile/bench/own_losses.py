"""Small models with losses of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from lightning_hotcompile.bench.small_models import Batch


class VAE(LightningModule):
    """A variational autoencoder with its own loss: reconstruction and divergence from a Gaussian."""

    def __init__(self, inputs: int = 784, width: int = 256, latent: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, inputs))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The bound on the evidence, negative, per image."""
        x = batch[0]
        mean, log_variance = self.encoder(x).chunk(2, -1)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        reconstruction = F.binary_cross_entropy_with_logits(self.decoder(z), torch.sigmoid(x))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        loss: Tensor = reconstruction + divergence / x.shape[-1]
        self.log_dict({"loss": loss, "reconstruction": reconstruction, "divergence": divergence})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Contrastive(LightningModule):
    """Two encoders whose outputs for the same row are drawn together, others pushed apart."""

    def __init__(self, inputs: int = 128, width: int = 256, out: int = 64) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(inputs, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, out))
            for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(2.0))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross entropy of the similarities, in both directions."""
        left, right = (
            F.normalize(net(x), dim=-1) for net, x in zip((self.left, self.right), batch, strict=True)
        )
        logits = self.scale.exp() * left @ right.T
        target = torch.arange(len(logits), device=logits.device)
        loss = 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with a rate that falls along a cosine."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
