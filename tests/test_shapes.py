"""Batches of many shapes in real training: what is compiled, how often, and what stays eager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.data import DataLoader, Dataset

from lightning_hotcompile import HotCompile
from tests.hot import assert_same, hot
from tests.models import fit, seeded

VOCABULARY = 30


class Counting:
    """A backend that remembers after how many training steps each graph was compiled."""

    def __init__(self, name: str = "aot_eager") -> None:
        self._compile = lookup_backend(name)
        self.graphs = 0
        self.of_any_size = 0

    def __call__(self, graph_module: Any, inputs: Sequence[Any], **options: Any) -> Any:
        self.graphs += 1
        self.of_any_size += any(isinstance(each, torch.SymInt) for each in inputs)
        return self._compile(graph_module, inputs, **options)


class GraphsPerStep(pl.Callback):
    """How many graphs there were at the end of each step."""

    def __init__(self, backend: Counting) -> None:
        self._backend = backend
        self.graphs: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.graphs.append(self._backend.graphs)


class Batches(Dataset[Any]):
    """Ready-made batches, one for each shape."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


def loader_of(batches: Sequence[Any]) -> DataLoader[Any]:
    return DataLoader(Batches(batches), batch_size=None)


def text(shapes: Sequence[tuple[int, int]], seed: int = 0) -> DataLoader[Any]:
    """Token ids, padding mask and targets of given shapes (batch, length)."""
    g = torch.Generator().manual_seed(seed)
    batches = []
    for n, length in shapes:
        ids = torch.randint(0, VOCABULARY, (n, length), generator=g)
        mask = torch.ones(n, length)
        mask[0, length - length // 3 :] = 0
        batches.append({"ids": ids, "mask": mask, "labels": ids.roll(1, 1)})
    return loader_of(batches)


def rows(sizes: Sequence[int], seed: int = 0) -> DataLoader[Any]:
    """Batches of 8 features and a class of 3, of given sizes."""
    g = torch.Generator().manual_seed(seed)
    return loader_of(
        [(torch.randn(n, 8, generator=g), torch.randint(0, 3, (n,), generator=g)) for n in sizes]
    )


def lengths(n: int, least: int = 17, most: int = 29, seed: int = 0) -> list[int]:
    """Random lengths."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(least, most + 1, (n,), generator=g).tolist()


class TokenBlock(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # a bias of keys has a gradient of noise only
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU())
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :].bool())
        x = x + self.out(y.transpose(1, 2).reshape(n, length, width))
        return x + self.down(self.mlp(x))


class TokenModel(pl.LightningModule):
    """A small encoder with a masked loss."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(64, width))
        self.blocks = nn.ModuleList(TokenBlock(width, 2) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, mask = batch["ids"], batch["mask"]
        x = self.embedding(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        losses = F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten(), reduction="none")
        loss = (losses * mask.flatten()).sum() / mask.sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Rows(pl.LightningModule):
    """An MLP whose batch size may vary."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = x + block(x)
        loss = F.cross_entropy(self.head(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Run:
    """One training with the callback and one without, which must give the same weights and metrics."""

    def __init__(self, make: Any, loader: Any, *, epochs: int = 1, **options: Any) -> None:
        self.backend = Counting(options.pop("counts", "aot_eager"))
        per_step = GraphsPerStep(self.backend)
        extra = options.pop("callbacks", list)
        self.callback: HotCompile = hot(**{"backend": self.backend, **options})
        eager, compiled = seeded(make), seeded(make)
        plain = fit(eager, extra(), train=loader(), max_epochs=epochs)
        trainer = fit(compiled, [*extra(), self.callback, per_step], train=loader(), max_epochs=epochs)
        assert_same(eager, compiled)
        for name, value in plain.callback_metrics.items():
            torch.testing.assert_close(trainer.callback_metrics[name], value, rtol=1e-4, atol=1e-4)
        self.per_step = per_step.graphs
        self.report = self.callback.report

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.report.events if e["kind"] == kind]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(before)


SCOPES = [("step", True), ("regions", False)]


class TestFamilies:
    @pytest.mark.parametrize(("scope", "optimizer"), SCOPES)
    def test_text_of_any_length_is_compiled_once(self, scope: str, optimizer: bool) -> None:
        shapes = [(4, n) for n in lengths(40)]
        run = Run(TokenModel, lambda: text(shapes), scope=scope, compile_optimizer=optimizer)
        assert run.report.phase == "steady"
        assert len(run.events("detected")) == 1
        first = next(i for i, n in enumerate(run.per_step) if n)
        assert len(set(shapes[first:])) > 8
        assert len(set(run.per_step[first + 1 :])) == 1
        assert run.report.recompiles == 0
        assert all(not r.note for r in run.report.regions)

    @pytest.mark.parametrize("scope", ["step", "regions"])
    def test_batches_of_any_size_are_compiled_once(self, scope: str) -> None:
        run = Run(Rows, lambda: rows(lengths(30, 9, 20)), scope=scope)
        first = next(i for i, n in enumerate(run.per_step) if n)
        assert first < 20
        # of the blocks, the first gets an input without gradient: a second graph in the same step
        assert len(set(run.per_step[first + 1 :])) == 1
        assert len(run.events("detected")) == 1

    def test_both_dimensions_may_vary(self) -> None:
        shapes = [(120 // n, n) for n in lengths(30, 10, 20)]
        run = Run(TokenModel, lambda: text(shapes), scope="step", compile_optimizer=False)
        assert run.backend.graphs == 1
        assert run.report.recompiles == 0
        assert len(run.events("detected")) == 1

    def test_an_odd_batch_of_a_family_runs_eagerly(self) -> None:
        shapes = [(4, n) for n in lengths(16)] + [(4, 1), (3, 20)]
        run = Run(TokenModel, lambda: text(shapes), scope="step", compile_optimizer=False, epochs=2)
        assert run.backend.graphs == 1
        assert len(run.events("detected")) == 1

    def test_it_waits_for_a_size_that_is_like_no_other(self) -> None:
        # 8, 16, 24, 30 and 64 are sizes of parameters, 4 is that of the batch
        shapes = [(4, n) for n in (8, 16, 24, 30)] * 3 + [(4, n) for n in (19, 8, 21, 16)]
        run = Run(TokenModel, lambda: text(shapes), scope="step", compile_optimizer=False)
        first = next(i for i, n in enumerate(run.per_step) if n)
        assert shapes[first] == (4, 19)
        assert run.backend.graphs == 1

    def test_with_dynamic_false_each_length_is_its_own(self) -> None:
        shapes = [(4, n) for n in lengths(20)]
        run = Run(TokenModel, lambda: text(shapes), scope="step", dynamic=False)
        assert run.backend.graphs == 0
        assert run.report.phase == "observing"

    def test_with_dynamic_true_two_sizes_are_enough(self) -> None:
        run = Run(Rows, lambda: rows([12, 13] * 6 + [14, 15]), scope="step", dynamic=True)
        first = next(i for i, n in enumerate(run.per_step) if n)
        assert len(set(run.per_step[first + 1 :])) == 1
        assert len(run.events("detected")) == 1

    def test_a_size_that_python_code_asks_for_ends_in_few_graphs(self) -> None:
        class Asks(Rows):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                loss = super().training_step(batch, batch_idx)
                return loss * (2 if len(batch[0]) % 2 else 1)

        run = Run(Asks, lambda: rows(lengths(30, 9, 20)), scope="step", compile_optimizer=False)
        assert run.backend.graphs == 2
        assert run.report.recompiles == 1
        assert (
            "% 2" in run.events("recompiled")[0]["reason"] or "size" in run.events("recompiled")[0]["reason"]
        )


class TestFixedShapes:
    @pytest.mark.parametrize("scope", ["step", "regions"])
    def test_the_short_last_batch_compiles_nothing(self, scope: str) -> None:
        run = Run(Rows, lambda: rows([12] * 5 + [5]), scope=scope, epochs=4)
        first = next(i for i, n in enumerate(run.per_step) if n)
        assert len(set(run.per_step[first:])) == 1
        assert len(run.events("detected")) == 1

    def test_two_shapes_in_turn_have_a_flip_each(self) -> None:
        run = Run(Rows, lambda: rows([12, 20] * 10), scope="step", compile_optimizer=False)
        assert len(run.events("detected")) == 2
        assert run.backend.graphs == 2
        assert "12" in run.events("recompiled")[0]["reason"]
        assert run.report.regions[0].note == ""

    @pytest.mark.parametrize("scope", ["step", "module", "regions"])
    def test_the_next_training_in_a_process_has_code_of_its_own_size(self, scope: str) -> None:
        """As in a search over batch sizes: Dynamo remembers for as long as the process lives."""
        first, second = (
            Run(Rows, lambda size=size: rows([size] * 8), scope=scope, compile_optimizer=False).backend
            for size in (12, 20)
        )
        assert first.graphs == second.graphs > 0
        assert first.of_any_size == second.of_any_size == 0

    def test_a_shape_too_many_stays_eager_and_says_why(self) -> None:
        run = Run(Rows, lambda: rows([12] * 9 + [20] * 9 + [28] * 9), scope="step", max_signatures=2)
        assert [e["reason"] for e in run.events("declined")] == ["max_signatures=2 is reached"]
        assert len(set(run.per_step[18:])) == 1


class Switching(pl.Callback):
    """Changes the model at one step in the middle of the training."""

    def __init__(self, step: int, change: Any) -> None:
        self._step = step
        self._change = change

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self._step:
            self._change(pl_module)


class Frozen(Rows):
    """The head learns later."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].append(nn.Dropout(0.0))
        self.head.requires_grad_(False)


class TestModelState:
    @pytest.mark.parametrize(
        "change",
        [lambda m: m.blocks[0].eval(), lambda m: m.head.requires_grad_(True)],
        ids=["eval", "unfreeze"],
    )
    def test_a_switch_in_mid_run_is_another_signature(self, change: Any) -> None:
        run = Run(
            Frozen,
            lambda: rows([12] * 24),
            scope="step",
            compile_optimizer=False,
            callbacks=lambda: [Switching(9, change)],
        )
        assert len(run.events("detected")) == 2
        first = next(i for i, n in enumerate(run.per_step) if n)
        assert len(set(run.per_step[first:10])) == 1
        assert run.per_step[10:12] == [run.per_step[9]] * 2
        assert run.per_step[-1] == run.per_step[9] + 1


class CountsItself(Rows):
    """A model that makes each of its own steps another one."""

    def __init__(self) -> None:
        super().__init__()
        self.done = ""  # an integer would become a symbol

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + 0.001 * len(self.done))

    def on_train_batch_end(self, *_: Any) -> None:
        self.done += "."


class TestOwnRecompiles:
    def test_they_end_and_the_reason_is_told(self) -> None:
        run = Run(CountsItself, lambda: rows([12] * 60), scope="step", compile_optimizer=True)
        graphs = run.per_step[-1] - 1  # without that of the optimizer
        assert 2 <= graphs <= 10
        assert len(run.events("recompiled")) >= graphs - 3
        assert all("module.done" in e["reason"] for e in run.events("recompiled"))
        ends = [e["reason"] for e in run.events("fallback")]
        assert any("recompile limit" in reason and "module.done" in reason for reason in ends)
        assert len(set(run.per_step[45:])) == 1
        assert "recompile limit" in run.report.to_text()
