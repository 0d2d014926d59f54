"""Small workloads: chains of operations, training steps and the patterns that a compiler fuses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hotcompile.bench.small_models import ElementwiseChain
from lightning_hotcompile.bench.workloads.workload import Workload, generator


def _weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


class MatmulChain(nn.Module):
    """A product of matrices with nothing in between: there is nothing to fuse."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(_weights(width, width) for _ in range(length))

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(width, width)`` in and out."""
        for weight in self.weights:
            x = x @ weight
        return x


class Classifier(nn.Module):
    """784-256-10 by default, cross-entropy included."""

    def __init__(self, inputs: int = 784, hidden: int = 256, classes: int = 10) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss of inputs ``(batch, inputs)`` and classes ``(batch,)``."""
        return F.cross_entropy(self.net(x), y)


class AttentionBlock(nn.Module):
    """Projections, softmax attention of one head written out, residual and norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, length, width)`` in and out."""
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1)
        y: Tensor = self.norm(x + self.out(scores @ v))
        return y


class MixedOperations(nn.Module):
    """A product, activations, a reduction and element-wise operations, as a hot path has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = _weights(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, width)`` in and out."""
        y = torch.relu(x @ self.weight) * self.scale
        y = torch.sigmoid(y) + torch.tanh(y)
        return (y - y.mean(-1, keepdim=True)) / (y.std(-1, keepdim=True) + 1e-5)


class MatmulReLU(nn.Module):
    """The textbook pattern of one product and one activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = _weights(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, width)`` in and out."""
        return torch.relu(x @ self.weight)


class Reduction(nn.Module):
    """Element-wise operations that end in sums: a compiler needs no memory in between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, width)`` in, ``(batch,)`` out."""
        y = x * self.scale
        return (y * y).sum(-1) + y.abs().mean(-1) + y.exp().mean(-1)


class SimpleOperations(nn.Module):
    """Two operations: the price of calling compiled code is as large as the work."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``(batch, width)`` in and out."""
        return x * self.scale + 1.0


def _of(module: nn.Module, *shape: int, training: bool) -> Workload:
    return Workload(module=module, inputs=(torch.randn(*shape, generator=generator()),), training=training)


def matmul_chain(*, width: int, length: int = 8, training: bool = True) -> Workload:
    """``length`` products of square matrices."""
    return _of(MatmulChain(width, length), width, width, training=training)


def attention_block(*, batch_size: int, seq_len: int, width: int, training: bool = True) -> Workload:
    """Attention with its projections."""
    return _of(AttentionBlock(width), batch_size, seq_len, width, training=training)


def mixed(*, batch_size: int, width: int, training: bool = True) -> Workload:
    """Operations of several kinds."""
    return _of(MixedOperations(width), batch_size, width, training=training)


def matmul_relu(*, batch_size: int, width: int, training: bool = True) -> Workload:
    """One product and ReLU."""
    return _of(MatmulReLU(width), batch_size, width, training=training)


def elementwise(*, batch_size: int, width: int, length: int = 24, training: bool = True) -> Workload:
    """A chain of element-wise operations behind one linear layer."""
    return _of(ElementwiseChain(width, length), batch_size, width, training=training)


def reduction(*, batch_size: int, width: int, training: bool = True) -> Workload:
    """Three reductions over one input."""
    return _of(Reduction(width), batch_size, width, training=training)


def simple(*, batch_size: int, width: int, training: bool = True) -> Workload:
    """One product and one sum."""
    return _of(SimpleOperations(width), batch_size, width, training=training)


def mlp(*, batch_size: int, hidden: int = 256, lr: float = 0.01) -> Workload:
    """A training step of 784-hidden-10 with SGD."""
    made = generator()
    x = torch.randn(batch_size, 784, generator=made)
    return Workload(
        module=Classifier(hidden=hidden),
        inputs=(x, torch.randint(0, 10, (batch_size,), generator=made)),
        make_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=lr),
    )
