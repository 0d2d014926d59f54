"""Texts of numbers that vary: those of a step without the callback, in code that is compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from tests.hot import STEP, Counting, assert_same, hot
from tests.models import Small, fit, seeded


class Notes:
    """Keeps texts of numbers that vary."""

    def __init__(self) -> None:
        self.n = self.given = 0
        self.text: Any = ""
        self.by_name: dict[str, Any] = {}
        self.length: Any = None
        self.rate = 0.5
        self.at = {str(n): float(n) for n in range(100)} | {f"{n} rows": float(n) for n in range(100)}


def keeps_the_text(h: Notes, x: Tensor) -> Tensor:
    h.n += 1
    h.text = f"{h.n}"
    return x.sin() * h.n


def keeps_the_text_of_a_size(h: Notes, x: Tensor) -> Tensor:
    n = x.shape[0]
    h.by_name["rows"] = f"{n}"
    h.length = (f"{n!r}", [f"{n + 1!s}"], n)
    return x.sin() * n


def by_the_text_of_a_size(h: Notes, x: Tensor) -> Tensor:
    h.by_name[f"{x.shape[0]}"] = x.shape[0]
    return x.sin() * len(f"{x.shape[0]}")


def reads_what_it_wrote(h: Notes, x: Tensor) -> Tensor:
    text = f"{x.shape[0]}"
    h.by_name[text] = h.by_name.get(text, 0) + 1
    h.text = text
    return x.sin() * h.by_name[h.text] + x.shape[0]


def keeps_a_text_with_the_size(h: Notes, x: Tensor) -> Tensor:
    h.text = f"{x.shape[0]} rows"
    h.length = f"{x.shape[0]} {x.shape[1]}"
    return x.sin()


def keeps_the_text_of_what_it_is_given(h: Notes, x: Tensor) -> Tensor:
    text = f"{h.given}"
    h.by_name["last"] = text
    h.text, h.length = (text, f"{h.given!r}"), [f"{h.given}", h.given]
    return x.sin() * h.given + len(text)


def keeps_text_after_a_break(h: Notes, x: Tensor) -> Tensor:
    n = x.shape[0]
    torch._dynamo.graph_break()
    h.text = f"{n}"
    h.length = (n, f"{n}")
    return x.sin() * n


def keeps_text_across_a_break(h: Notes, x: Tensor) -> Tensor:
    text = f"{x.shape[0]}"
    x = x.sin()
    torch._dynamo.graph_break()
    h.text = text
    return x * len(text) + x.shape[0]


def writes_it_in_many_ways(h: Notes, x: Tensor) -> Tensor:
    n = x.shape[0]
    h.text = str(n) + " of " + repr(n) + "{}" + f"{n:>5}{n!r:<6}{n:04}{{}}"
    h.text += "%s and %05d, %.1f" % (n, n + 1, n)  # noqa: UP031
    h.text += "%d" % n  # noqa: UP031
    h.length = (format(n), format(n, "+"), format(3, ">5"), "{}|{}".format("a", n), 3 * f"{n}")
    return x.sin() * n


def writes_what_it_is_given(h: Notes, x: Tensor) -> Tensor:
    h.text = f"{h.rate:.3f}" + str(h.rate) + "%g" % h.rate  # noqa: UP031
    h.rate *= 0.75
    h.length = f"{h.rate}"
    return x.sin() * h.rate


def writes_it_before_it_changes(h: Notes, x: Tensor) -> Tensor:
    text = "at {}".format(h.rate)  # noqa: UP032
    x = x.sin()
    h.n += 1
    h.given += 1
    h.rate *= 0.75
    h.text = text
    return x + h.rate


def finds_it_in_a_dict(h: Notes, x: Tensor) -> Tensor:
    n = x.shape[0]
    h.length = h.at.get(f"{n} rows", -1), h.at.get("{} rows".format(n), -1), h.at.get(str(n), -1)  # noqa: UP032
    h.by_name = {"{}".format(n): n}  # noqa: UP032
    return x.sin() * n


def looks_for_a_part(h: Notes, x: Tensor) -> Tensor:
    n = x.shape[0]
    text, other, third = f"a/{n}/b", "a{}".format(n), "a/%d" % n  # noqa: UP031, UP032
    found = (
        "/" in text,
        "/b" in text,
        "/9" in text,
        "/" in other,
        "/9" in third,
        "/dat" in third,
        "9" in other,
    )
    h.length = (
        *found,
        "" in text,
        f"{n}" in text,
        "/dat" in f"{n:/>4}",
        "/d" in f"/{n:d>4}",
        "/a" in f"/{n:x}",
    )
    return x.sin() * n


def compares_it(h: Notes, x: Tensor) -> Tensor:
    text = f"{x.shape[0]}"
    h.text = f"{x.shape[0]:{x.shape[0]}}"
    h.length = (text == "9", text in ("9", "10"), text in h.at, bool(text), text < "9", text[0], text * 2)
    return x.sin() * len(text)


def writes_it_with_unusual_formats(h: Notes, x: Tensor) -> Tensor:
    n = x.shape[0]
    h.text = format(n, "}>5") + format(n, "{>5")
    return x.sin() * n


def writes_others_as_wide_as_it_is(h: Notes, x: Tensor) -> Tensor:
    n = x.shape[0]
    h.text = f"{'rows':>{n}}" + f"{0.5:.{n}f}"
    return x.sin() * n


def has_an_empty_one(h: Notes, x: Tensor) -> Tensor:
    text = 0 * f"{x.shape[0]}"
    h.length = bool(text), not text, "some" if text else "none"
    return x.sin() * 2 if text else x.sin()


@pytest.mark.parametrize(
    "function",
    [
        keeps_the_text,
        keeps_the_text_of_a_size,
        by_the_text_of_a_size,
        reads_what_it_wrote,
        keeps_a_text_with_the_size,
        keeps_the_text_of_what_it_is_given,
        keeps_text_after_a_break,
        keeps_text_across_a_break,
        writes_it_in_many_ways,
        writes_what_it_is_given,
        writes_it_before_it_changes,
        finds_it_in_a_dict,
        looks_for_a_part,
        compares_it,
        writes_it_with_unusual_formats,
        writes_others_as_wide_as_it_is,
        has_an_empty_one,
    ],
)
@pytest.mark.parametrize("dynamic", [None, True])
def test_what_is_kept_is_the_text_and_not_its_number(
    function: Callable[[Notes, Tensor], Tensor], dynamic: bool | None
) -> None:
    compiled = CompiledFunction(function, lambda graph, _: graph.forward, dynamic=dynamic, fullgraph=False)
    plain, ours = Notes(), Notes()
    with compiling_allowed(suppress_errors=False):
        for rows in (8, 9, 10, 11, 10, 12):
            x = torch.ones(rows, 3)
            plain.given = ours.given = rows
            torch.testing.assert_close(compiled.compile(ours, x), function(plain, x))
            assert vars(ours) == vars(plain)


@pytest.mark.parametrize(
    "function", [keeps_a_text_with_the_size, keeps_the_text_of_a_size, writes_it_in_many_ways]
)
def test_a_text_that_is_only_kept_ends_no_graph(function: Callable[[Notes, Tensor], Tensor]) -> None:
    backend = Counting()
    compiled = CompiledFunction(function, backend, dynamic=True, fullgraph=True)
    with compiling_allowed(suppress_errors=False):
        for rows in (8, 9, 10, 11):
            compiled.compile(Notes(), torch.ones(rows, 3))
    assert (backend.graphs, backend.runs) == (1, 4)


class LogsByNumber(Small):
    """Names hold numbers that vary, and one is made before the network."""

    last = ""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.last = f"batch {batch_idx}" + " of %d" % self.trainer.num_training_batches  # noqa: UP031
        with torch.profiler.record_function("step " + str(self.global_step)):
            loss = super().training_step(batch, batch_idx)
        self.log(f"loss_{batch_idx}", loss)
        self.log(f"epoch/{self.current_epoch}", loss)
        self.log("step/%03d" % (self.global_step % 5), loss)  # noqa: UP031
        self.log("also {}".format(batch_idx + 1), loss)  # noqa: UP032
        return loss


def test_a_step_with_texts_is_one_graph() -> None:
    plain, model, backend = seeded(LogsByNumber), seeded(LogsByNumber), Counting()
    expected = fit(plain)
    callback = hot(**STEP, backend=backend)
    trainer = fit(model, [callback])
    assert len(expected.callback_metrics) > 30
    assert list(trainer.callback_metrics) == list(expected.callback_metrics)
    for name, value in expected.callback_metrics.items():
        torch.testing.assert_close(trainer.callback_metrics[name], value)
    assert model.last == plain.last == "batch 11 of 12"
    assert_same(plain, model)
    assert (callback.report.graph_breaks, backend.graphs) == (0, 1), callback.report.to_text()
