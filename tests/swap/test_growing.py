"""Lists and dicts that a step makes longer: compiled once, and Python fills them."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hot import assert_proven, assert_same, hot
from tests.models import Block, Net, fit, seeded


class Collects(Net):
    """Keeps the loss of each step until the epoch is over."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: Any = []
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen += [torch.stack(list(self.losses)).mean()] if self.losses else []
        self.losses.clear()


class CollectsForEver(Collects):
    def on_train_epoch_end(self) -> None:
        self.seen.append(len(self.losses))


class InADeque(Collects):
    def __init__(self) -> None:
        super().__init__()
        self.losses = deque()


class Numbers(Collects):
    """A graph ends at ``item()``, with the list's method on the stack."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss * 1.0

    def on_train_epoch_end(self) -> None:
        self.seen += list(self.losses)
        self.losses.clear()


class NumbersForEver(Numbers):
    def on_train_epoch_end(self) -> None:
        self.seen.append(sum(self.losses))


class NumbersInADeque(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.losses = deque()


class NumbersInPairs(Numbers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.extend([loss.item(), batch_idx])
        return loss * 1.0


class WithGradients(Collects):
    """What is collected holds on to the step's graph of derivatives, as in eager code."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss)
        return loss


class InTheMiddle(Collects):
    """Representations are kept before the step goes on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.inp(batch[0])
        for block in self.blocks:
            x = block(x)
        self.losses.append(x.detach().mean())
        return F.cross_entropy(self.head(x), batch[1])


class ByName(Collects):
    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, list[Tensor]] = defaultdict(list)
        self.by_step: dict[int, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.by_name["loss"].append(loss.detach())
        self.by_step[self.global_step] = loss.detach()
        return loss

    def on_train_end(self) -> None:
        self.seen += [*self.by_name["loss"], *self.by_step.items()]


class Reads(Collects):
    """The step goes by what was collected so far, in many ways."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if len(self.losses) > 2 and self.losses:
            loss = loss + 0.1 * torch.stack(self.losses[-3:]).mean() * loss.detach()
        if self.losses is None or not isinstance(self.losses, list):
            return loss
        total = sum(each.item() for each in self.losses[:2])
        for each in self.losses[-2:]:
            total = total + 0.01 * each
        self.losses += [loss.detach()]
        self.losses.extend([loss.detach(), loss.detach()])
        latest, self.last = self.losses[-1], self.losses
        return loss + 0.001 * total + 0 * latest


class InAHelper(Collects):
    def keep(self, loss: Tensor) -> None:
        self.losses.append(loss.detach())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.keep(loss)
        return loss * 1.0


class InALoop(Collects):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.inp(batch[0])
        for block in self.blocks:
            x = block(x)
            self.losses.append(x.detach().mean())
        return F.cross_entropy(self.head(x), batch[1])


class BeginsAnew(Collects):
    """One that is emptied in each step needs no break."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.losses.clear()
        x = self.inp(batch[0])
        for block in self.blocks:
            x = block(x)
            self.losses.append(x)
        return F.cross_entropy(self.head(sum(self.losses)), batch[1])


class HandsOn(Collects):
    """A list goes from block to block, and each makes it longer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping(16) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found: list[Tensor] = []
        x = self.inp(batch[0])
        for block in self.blocks:
            x = block(x, found)
        return F.cross_entropy(self.head(x + sum(found)), batch[1])


class Keeping(Block):
    def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        found.append(x)
        return x


class LooksUp(Collects):
    """What is made once for each size is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        n = batch[0].shape[1]
        if n not in self.tables:
            self.tables[n] = torch.arange(n) / n
        return F.cross_entropy(self(batch[0] + self.tables[n]), batch[1])


class HandsOnFarther(HandsOn):
    """More lengths than Dynamo compiles a function for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping(16) for _ in range(12))


STEP = """
def training_step(self, batch, batch_idx):
    loss = self.loss(batch)
    extra = {use}
    self.losses.append(loss.detach())
    self.queue.append(loss.detach())
    self.by_step[self.global_step] = loss.detach()
    return loss * (1 + 0.1 * extra)
"""

USES = [
    "1.0 if self.losses else 2.0",
    "1.0 if not self.losses else 2.0",
    "1.0 if self.queue else 2.0",
    "1.0 if self.by_step else 2.0",
    "float(bool(self.losses))",
    "(self.losses and self.losses[-1]) or 0.5",
    "0.01 * len(self.losses)",
    "0.01 * len(self.queue)",
    "0.01 * len(self.by_step)",
    "self.queue[-1] if len(self.queue) else 1.0",
    "length_or_none(self.losses) * 0.01",
    "1.0 if [] == self.losses else 2.0",
    "1.0 if self.losses == [] else 2.0",
    "1.0 if self.losses is None else 2.0",
    "1.0 if isinstance(self.losses, list) and self.losses else 2.0",
    "sum(self.losses) * 1.0",
    "sum(each for each in self.losses) * 1.0",
    "max([*self.losses, loss.detach()])",
    "torch.stack([*self.losses, loss.detach()]).mean()",
    "torch.stack(list(self.queue) + [loss.detach()]).mean()",
    "sum(self.losses[-2:]) * 1.0",
    "sum(a * b for a, b in zip(self.losses, self.losses[1:])) * 1.0",
    "len(self.losses + [1]) * 0.01",
    "len(self.losses * 2) * 0.01",
    "float(len(str(self.losses) * 0))",
    "1.0 if self.global_step - 1 in self.by_step else 2.0",
    "self.by_step.get(self.global_step - 1, 0.5) * 1.0",
    "sum(self.by_step.values()) * 1.0",
    "sum(v for k, v in self.by_step.items()) * 1.0",
    "len({**self.by_step}) * 0.01",
    "len(self.by_step | {}) * 0.01",
    "sum(self.by_step[k] for k in self.by_step) * 1.0",
]


def length_or_none(values: Any) -> int:
    """What is caught is none of Dynamo's own errors."""
    try:
        return len(values)
    except Exception:
        return 1000


def uses(expression: str) -> type[Collects]:
    """A step that makes use of what it collects, which is empty in the first step of each epoch."""
    namespace = {"torch": torch, "length_or_none": length_or_none}
    exec(STEP.format(use=expression), namespace)

    class Uses(Collects):
        training_step = namespace["training_step"]

        def __init__(self) -> None:
            super().__init__()
            self.queue: deque[Tensor] = deque()
            self.by_step: dict[int, Tensor] = {}

        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            self.queue.clear()
            self.by_step.clear()

    return Uses


class OfOneLength(Collects):
    """It holds one item before each step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.losses = [batch[0]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.inp(batch[0])
        for block in self.blocks:
            x = block(x)
            self.losses.append(x)
        return F.cross_entropy(self.head(sum(self.losses[1:])), batch[1])

    def on_train_epoch_end(self) -> None:
        self.seen.append(len(self.losses))


class Replaces(Collects):
    """It makes a longer list of the one that it has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses = [*self.losses, loss.detach()]
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen.append(len(self.losses))


class ReplacesTheFirst(Replaces):
    """What is new comes first, and what is old goes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses = [loss.detach(), *self.losses]
        self.losses = self.losses[:30]
        return loss


class ReplacesAnItem(Replaces):
    """Of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = {"train": []}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses["train"] = self.losses["train"] + [loss.detach()]
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen += self.losses["train"]


ONE_GRAPH = [Collects, CollectsForEver, InADeque, WithGradients, BeginsAnew, LooksUp, HandsOn]
ONE_GRAPH += [Replaces, ReplacesTheFirst, ReplacesAnItem]
SOME = [InTheMiddle, ByName, Reads, InAHelper, InALoop]


def compared(kind: type[Collects], **options: Any) -> Any:
    """The callback, after two trainings that are alike."""
    callback, models = hot(compile_optimizer=False, **options), []
    for callbacks in ([], [callback]):
        models.append(seeded(kind))
        fit(models[-1], callbacks)
    assert_same(*models)
    torch.testing.assert_close(models[0].seen, models[1].seen)
    assert len(models[0].losses) == len(models[1].losses)
    return callback


@pytest.mark.parametrize("kind", ONE_GRAPH)
def test_one_graph_is_enough(kind: type[Collects]) -> None:
    report = compared(kind, scope="step").report
    assert_proven(report)
    assert report.recompiles == 0
    assert [region.graphs for region in report.regions] == [1]


@pytest.mark.parametrize("kind", [Numbers, NumbersForEver, NumbersInADeque, NumbersInPairs])
def test_what_is_read_out_of_a_tensor_in_the_call(kind: type[Collects]) -> None:
    report = compared(kind, scope="step").report
    assert_proven(report)
    assert (report.phase, report.recompiles) == ("steady", 0), report.to_text()


@pytest.mark.parametrize("kind", [BeginsAnew, LooksUp, HandsOn, OfOneLength])
def test_what_has_one_length_before_each_step_ends_no_graph(kind: type[Collects]) -> None:
    assert compared(kind, scope="step").report.graph_breaks == 0


@pytest.mark.parametrize("kind", SOME)
def test_some_are_enough(kind: type[Collects]) -> None:
    report = compared(kind, scope="step", on_error="eager").report
    assert_proven(report)
    assert report.recompiles <= (3 if kind is ByName else 0), report.to_text()


@pytest.mark.parametrize("kind", [*ONE_GRAPH, *SOME])
@pytest.mark.parametrize("scope", ["regions", "module"])
def test_so_in_other_scopes(kind: type[Collects], scope: str) -> None:
    compared(kind, scope=scope, on_error="eager")


@pytest.mark.parametrize("use", USES)
def test_each_use_of_one_is_as_in_eager(use: str) -> None:
    report = compared(uses(use), scope="step", on_error="eager").report
    elsewhere = " for k in " in use  # a function of its own that reads it, and makes nothing longer
    assert elsewhere or any(region.runs > 30 for region in report.regions), report.to_text()


def test_a_region_that_is_called_with_many_lengths_is_kept() -> None:
    report = compared(HandsOnFarther, scope="regions").report
    assert_proven(report)
    assert report.phase in ("settling", "steady"), report.to_text()


def test_where_breaks_are_refused_it_is_as_torch_has_it() -> None:
    compared(Collects, scope="step", fullgraph=True, on_error="eager")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Collects, InTheMiddle])
def test_so_under_inductor(kind: type[Collects]) -> None:
    report = compared(kind, scope="step", backend="inductor", store=None).report
    assert_proven(report)
    assert report.recompiles == 0
