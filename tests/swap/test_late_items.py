"""Numbers of tensors that are asked for in a loop."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from lightning_hotcompile.swap.tracing.breaks import GraphBreak
from tests.hot import STEP, Counting, assert_proven, assert_same, hot
from tests.models import Small, fit, seeded


class Kept:
    """What the functions write down."""

    def __init__(self) -> None:
        self.found: Any = None
        self.lines: list[Any] = []
        self.total = torch.zeros(())

    def note(self, *values: Any, **others: Any) -> None:
        self.lines.append((values, others))


def losses_of(x: Tensor) -> dict[str, Tensor]:
    return {"a": x.sin().mean(), "b": x.square().sum(), "c": (x > 0.5).sum(), "d": (x > 0.5).any()}


def noted_by_name(kept: Kept, x: Tensor) -> Tensor:
    for name, loss in losses_of(x).items():
        kept.note(name, loss.item(), prog_bar=True)
    return x.cos()


def noted_by_a_helper(kept: Kept, x: Tensor) -> Tensor:
    def helper(losses: dict[str, Tensor]) -> None:
        for name, loss in losses.items():
            kept.note(name, loss.detach().cpu().item())

    helper(losses_of(x))
    return x.cos()


def in_a_dict(kept: Kept, x: Tensor) -> Tensor:
    kept.found = {name: loss.item() for name, loss in losses_of(x).items()}
    return x.cos()


def in_a_list(kept: Kept, x: Tensor) -> Tensor:
    kept.found = [loss.item() for loss in losses_of(x).values()]
    return x.cos()


def as_floats(kept: Kept, x: Tensor) -> Tensor:
    kept.found = [float(loss) for loss in losses_of(x).values()]
    return x.cos()


def added_up(kept: Kept, x: Tensor) -> Tensor:
    total = 0.0
    for loss in losses_of(x).values():
        total += loss.item()
    kept.found = total, total / 4, -total, abs(total), round(total, 2), 2 * total - 1, max(total, 0.5)
    return x.cos()


def added_to_what_is_kept(kept: Kept, x: Tensor) -> Tensor:
    for name, loss in losses_of(x).items():
        kept.found = kept.found or {}
        kept.found[name] = kept.found.get(name, 0) + loss.item()
    return x.cos()


def summed(kept: Kept, x: Tensor) -> Tensor:
    numbers = [loss.item() for loss in losses_of(x).values()]
    kept.found = sum(numbers), sum(numbers) / len(numbers), len(numbers), numbers[::-1], tuple(numbers)
    return x.cos()


def as_text(kept: Kept, x: Tensor) -> Tensor:
    texts = []
    for name, loss in losses_of(x).items():
        number = loss.item()
        texts.append(f"{name}: {number:.3f}" if isinstance(number, float) else f"{name}={number!r}")
        texts.append(str(number) + "; " + repr(number) + format(number, ">8"))
        texts.append("{}: {}".format(name, number))  # noqa: UP032
    kept.found = texts
    return x.cos()


def before_it_changes(kept: Kept, x: Tensor) -> Tensor:
    kept.found = []
    running = x.sum()
    for _ in range(3):
        running += 1
        kept.found.append(running.item())
    running.zero_()
    return x.cos() + running


def what_kind_it_is(kept: Kept, x: Tensor) -> Tensor:
    kept.found = []
    for loss in losses_of(x).values():
        number = loss.item()
        kept.found.append(
            (isinstance(number, float), isinstance(number, int), number is None, number is not None)
        )
        kept.found.append(type(number))
    return x.cos()


def over_a_break(kept: Kept, x: Tensor) -> Tensor:
    numbers = []
    for loss in losses_of(x).values():
        numbers.append(loss.item())
    torch._dynamo.graph_break()
    kept.found = [number * 2 for number in numbers]
    return x.cos() * numbers[0]


FOLLOWED = [
    noted_by_name,
    noted_by_a_helper,
    in_a_dict,
    in_a_list,
    as_floats,
    added_up,
    added_to_what_is_kept,
    summed,
    as_text,
    before_it_changes,
    what_kind_it_is,
    over_a_break,
]


def compared(kept: Kept, x: Tensor) -> Tensor:
    kept.found = []
    for loss in losses_of(x).values():
        number = loss.item()
        kept.found.append((number > 0.5, number == 1, number != number, number in (0, 1), bool(number)))
        kept.found.append("large" if number > 2 else "small")
        if not number:
            kept.found.append("none")
    return x.cos()


def among_others(kept: Kept, x: Tensor) -> Tensor:
    numbers = [loss.item() for loss in losses_of(x).values()]
    kept.found = 1 in numbers, 0 in numbers, numbers.index(max(numbers)), sorted(numbers), numbers == [0] * 4
    kept.found += (min(numbers), max(numbers), any(numbers), all(numbers), numbers.count(1))
    return x.cos()


def as_keys(kept: Kept, x: Tensor) -> Tensor:
    kept.found = {loss.item(): name for name, loss in losses_of(x).items()}
    kept.found[1] = "one"
    kept.lines.append({loss.item() for loss in losses_of(x).values()})
    return x.cos()


def divided(kept: Kept, x: Tensor) -> Tensor:
    kept.found = []
    for loss in losses_of(x).values():
        try:
            kept.found.append(1 / loss.item())
        except ZeroDivisionError:
            kept.found.append("none")
    return x.cos()


def weighed(kept: Kept, x: Tensor) -> Tensor:
    total = x.new_zeros(())
    for loss in list(losses_of(x).values())[:2]:
        total = total + loss / (abs(loss.item()) + 1) * loss.item()
    return total * x.cos()


def calculated(kept: Kept, x: Tensor) -> Tensor:
    numbers = [math.sqrt(abs(loss.item())) for loss in losses_of(x).values()]
    kept.found = numbers, [math.isnan(n) for n in numbers], [n**2 for n in numbers], [int(n) for n in numbers]
    return x.cos()


def measured(kept: Kept, x: Tensor) -> Tensor:
    parts = []
    for bound in (0.2, 0.5):
        parts.append(x.flatten()[: (x > bound).sum().item()].sum())
    return torch.stack(parts).sum() * x.cos()


def parts_by(kept: Kept, x: Tensor, find: Callable[[list[Tensor], int], Any]) -> Tensor:
    parts = [x * n for n in range(1, 5)]
    for bound in (0.2, 0.5):
        kept.found = find(parts, (x > bound).sum().item() % 3)
    return torch.stack(parts).sum(0)


def indexed(kept: Kept, x: Tensor) -> Tensor:
    return parts_by(kept, x, lambda parts, n: parts[n]).cos()


def sliced(kept: Kept, x: Tensor) -> Tensor:
    return parts_by(kept, x, lambda parts, n: parts[1 : n + 2]).cos()


def placed(kept: Kept, x: Tensor) -> Tensor:
    return parts_by(kept, x, lambda parts, n: operator.setitem(parts, n, x)).cos()


def removed(kept: Kept, x: Tensor) -> Tensor:
    return parts_by(kept, x, lambda parts, n: operator.delitem(parts, slice(n, n + 1))).cos()


FINDING = [indexed, sliced, placed, removed]
"""Functions that go on in a graph after what Python has to do for them."""


def of_what_comes_in(kept: Kept, x: Tensor) -> Tensor:
    kept.found = [part.item() for part in x.flatten()[:3]] + [kept.total.item() for _ in range(2)]
    kept.total += 1
    return x.cos()


def with_numbers_of_numpys(kept: Kept, x: Tensor) -> Tensor:
    kept.found = []
    for loss in losses_of(x).values():
        for number in (np.float32(0.5), np.float64(0.5), np.int64(2)):
            product = number * loss.item()
            kept.found.append((product, isinstance(product, float), isinstance(product, np.generic)))
    return x.cos()


OTHERS = [compared, among_others, as_keys, divided, weighed, calculated, measured, of_what_comes_in]
OTHERS += [with_numbers_of_numpys]


def states(function: Callable[[Kept, Tensor], Tensor]) -> list[Any]:
    found = []
    for seed in range(5):
        kept = Kept()
        x = torch.rand(2, 3, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        if seed == 3:
            x = torch.zeros(2, 3, requires_grad=True)
        loss = function(kept, x).sum()
        loss.backward()
        found.append((loss.item(), x.grad, repr(kept.found), repr(kept.lines)))
    return found


def assert_as_eager(function: Callable[[Kept, Tensor], Tensor], backend: Counting) -> list[GraphBreak]:
    compiled, breaks = CompiledFunction(function, backend, dynamic=None, fullgraph=False), list[GraphBreak]()
    with compiling_allowed(suppress_errors=True, on_break=breaks.append):
        for ours, plain in zip(states(compiled.compile), states(function), strict=True):
            assert ours[0] == plain[0]
            assert torch.equal(ours[1], plain[1])
            assert ours[2:] == plain[2:]
    return breaks


@pytest.mark.parametrize("function", FOLLOWED)
def test_python_has_them_after_the_graph(function: Callable[[Kept, Tensor], Tensor]) -> None:
    backend = Counting()
    breaks = assert_as_eager(function, backend)
    assert not any(found.loses_function for found in breaks), breaks
    if function is not over_a_break:
        assert (backend.graphs, backend.runs, breaks) == (1, 5, [])


@pytest.mark.parametrize("function", OTHERS)
def test_what_has_to_know_them_is_pythons(function: Callable[[Kept, Tensor], Tensor]) -> None:
    assert_as_eager(function, Counting())


@pytest.mark.parametrize("function", FINDING)
def test_what_they_find_in_a_list_is_pythons(function: Callable[[Kept, Tensor], Tensor]) -> None:
    backend = Counting()
    breaks = assert_as_eager(function, backend)
    assert breaks
    assert backend.graphs >= 1


def test_outside_of_a_loop_they_end_the_graph_as_ever() -> None:
    def once(kept: Kept, x: Tensor) -> Tensor:
        kept.note(x.sin().mean().item())
        return x.cos()

    backend = Counting()
    assert_as_eager(once, backend)
    assert backend.graphs >= 2


class ManyLosses(Small):
    """Logs each of its losses, as many do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        losses = {"ce": F.cross_entropy(out, batch[1]), "norm": out.square().mean()}
        total = 0
        for name, loss in losses.items():
            total += loss
            self.log(f"train/{name}", loss.item(), on_step=True, on_epoch=True)
        self.log_dict({f"mean/{name}": loss.item() for name, loss in losses.items()})
        return total


def test_a_step_that_logs_them_is_one_graph() -> None:
    plain, model, backend = seeded(ManyLosses), seeded(ManyLosses), Counting()
    expected = fit(plain).logged_metrics
    callback = hot(**STEP, backend=backend)
    found = fit(model, [callback]).logged_metrics
    assert_proven(callback.report)
    assert_same(plain, model)
    assert {name: found[name] for name in expected} == expected
    assert len(expected) >= 4
    assert (callback.report.graph_breaks, callback.report.recompiles, backend.graphs) == (0, 0, 1)


class SavesWeights(nn.Module):
    """Asks for a number inside of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            for _ in range(2):
                x = self.linear(x)
                self.last = x.detach().mean().item()
            return x

        found: Tensor = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)
        return found


def test_in_a_checkpoint_they_are_asked_for_there() -> None:
    ours, plain = seeded(SavesWeights), seeded(SavesWeights)
    compiled = CompiledFunction(SavesWeights.forward, Counting(), dynamic=None, fullgraph=False)
    with compiling_allowed(suppress_errors=True):
        for seed in range(3):
            x = torch.rand(2, 3, generator=torch.Generator().manual_seed(seed))
            compiled.compile(ours, x).sum().backward()
            plain(x).sum().backward()
            assert ours.last == plain.last
    assert torch.equal(ours.linear.weight.grad, plain.linear.weight.grad)
