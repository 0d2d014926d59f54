"""Graph breaks as Dynamo's log tells them: a fact of torch that an upgrade may change."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

import lightning_hotcompile
from lightning_hotcompile.run.reporting import BREAKS_IN_FULL, notes_on_breaks
from lightning_hotcompile.swap.tracing import breaks
from lightning_hotcompile.swap.tracing.breaks import LOGGER, GraphBreak, break_from, graph_breaks_told
from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded


def prints(x: Tensor) -> Tensor:
    y = x.sin()
    print("in the middle")
    return y.cos()


def asks_in_a_loop(x: Tensor) -> Tensor:
    for _ in range(2):
        if x.sum().item() > 0:
            x = x + 1
    return x


def breaks_of(function: Callable[..., Any]) -> list[GraphBreak]:
    found: list[GraphBreak] = []
    torch._dynamo.reset()
    with graph_breaks_told(found.append):
        torch.compile(function, backend=lambda graph, inputs: graph.forward)(torch.ones(3))
    torch._dynamo.reset()
    return found


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(i for i, line in enumerate(lines) if text in line)


def test_a_break_has_its_reason_and_the_users_line() -> None:
    (found,) = breaks_of(prints)
    assert "builtin" in found.reason
    assert (found.file, found.line) == (__file__, line_of(prints, "print("))
    assert found.function == "prints"
    assert found.code == 'print("in the middle")'
    assert "print" in found.explanation
    assert found.hints
    assert not any("report an issue" in hint for hint in found.hints)
    assert not found.loses_function


def test_a_break_in_a_loop_loses_the_function() -> None:
    (found,) = breaks_of(asks_in_a_loop)
    assert found.line == line_of(asks_in_a_loop, "item()")
    assert "item()" in found.reason
    assert found.loses_function


@pytest.mark.parametrize(
    ("given", "told"), [("it counts", "not compiled: it counts"), (None, "Skip calling")]
)
def test_what_was_switched_off_is_told_with_its_reason(given: str | None, told: str) -> None:
    counts = torch.compiler.disable(lambda x: x + 1, reason=given)
    (found,) = breaks_of(lambda x: counts(x.sin()).cos())
    assert found.reason.startswith(told)
    assert bool(found.hints) is (given is None), "to switch it on is no advice where it has a reason"


def test_a_metric_is_told_as_what_stays_eager() -> None:
    class Measures(Net):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = MulticlassAccuracy(3)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.accuracy(self(batch[0]), batch[1])
            return loss

    callback = hot(scope="step", compile_optimizer=False)
    fit(seeded(Measures), [callback])
    (note,) = (note for note in callback.report.notes if note.startswith("graph break"))
    assert note.endswith("(self.accuracy(self(batch[0]), batch[1])): not compiled: kept eager as an island")


def test_code_without_breaks_has_none() -> None:
    assert breaks_of(lambda x: x + 1) == []


def test_the_logger_is_left_as_it_was() -> None:
    logger = logging.getLogger(LOGGER)
    before = (logger.level, logger.propagate, list(logger.handlers))
    breaks_of(prints)
    assert (logger.level, logger.propagate, logger.handlers) == before


def test_the_line_is_the_users_and_not_the_librarys() -> None:
    message = (
        "Graph break in user code at {torch}/nn/modules/module.py:7\n"
        "Graph Break Reason: Something leads up to it:\n\n"
        "The reason\n  Explanation: Because.\n  Hint: Do it.\n"
        "  Hint: Please report an issue to PyTorch.\n\n  Developer debug context: x\n\n"
        "User code traceback:\n"
        '  File "/home/a/model.py", line 12, in training_step\n    self.thing()\n    ~~~~~~~~~~\n'
        '  File "{torch}/nn/modules/module.py", line 7, in thing\n    pass\n'
    ).replace("{torch}", torch.__path__[0])
    assert break_from(message) == GraphBreak(
        reason="The reason",
        file="/home/a/model.py",
        line=12,
        function="training_step",
        code="self.thing()",
        explanation="Because.",
        hints=("Do it.",),
    )


@pytest.mark.parametrize(
    "message", ["", "Graph break (user stack suppressed due to duplicate graph break) in user code at a.py:1"]
)
def test_other_messages_are_passed_over(message: str) -> None:
    assert break_from(message) is None


def test_a_message_without_a_traceback_has_its_own_place() -> None:
    found = break_from("Graph break in user code at a.py:3\nGraph Break Reason: ")
    assert found == GraphBreak(reason="not told", file="a.py", line=3)


class Masked(Net):
    """Has a learned vector in place of some rows, as models of speech do."""

    def __init__(self) -> None:
        super().__init__()
        self.mark = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x).clone()
        hidden[x[:, 0] > 0] = self.mark
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


@pytest.mark.parametrize(("scope", "on_error"), [("step", "raise"), ("step", "eager"), ("module", "eager")])
def test_what_no_graph_can_have_is_left_out_of_it(
    scope: str, on_error: str, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """The backend is the first to see it: Dynamo makes smaller graphs then."""
    plain, model, callback = seeded(Masked), seeded(Masked), hot(scope=scope, on_error=on_error)
    fit(plain)
    fit(model, [callback])
    assert callback.report.phase == "steady", callback.report.reason
    assert any(region.runs for region in callback.report.regions if region.kind != "optimizer")
    assert_same(plain, model)
    assert "Backend compiler" not in capfd.readouterr().err
    assert not [warning for warning in recwarn if "Error detected" in str(warning.message)]


class AsksIfLarge(Net):
    """A branch that depends on data: Dynamo makes two graphs of it, and counts no graph break."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x)
        if hidden.norm() > 1e9:
            hidden = hidden / 2
        return self.head(hidden)


class PrintsInALoop(Net):
    """Dynamo gives up the whole function, and has no graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for _ in range(2):
            x = x + 1
            print(end="")
        return nn.functional.cross_entropy(self.head(self.inp(x)), y)


def test_a_receipt_tells_where_and_why() -> None:
    plain, line = seeded(AsksIfLarge), line_of(AsksIfLarge, "if hidden.norm()")
    fit(plain)
    for _ in range(2):  # Dynamo's own log has a place once in a process
        model, callback = seeded(AsksIfLarge), hot(scope="step")
        fit(model, [callback])
        notes = [note for note in callback.report.notes if note.startswith("graph break")]
        assert callback.report.graph_breaks == len(notes) == 1
        assert f"{Path(__file__).name}:{line} in forward (if hidden.norm() > 1e9:): " in notes[0]
        assert "branching" in notes[0]
        assert_same(plain, model)


class Kept(logging.Handler):
    """What would be printed."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class Plain:
    """Can be gone through, and has no length: Dynamo fails to make a guard on that."""

    def __iter__(self) -> Iterator[float]:
        yield 2.0


class GoesThrough(Net):
    def __init__(self) -> None:
        super().__init__()
        self.factors = Plain()

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * next(f for f in list(self.factors))


def test_a_guard_that_cannot_be_made_is_no_page_of_text() -> None:
    plain, model = seeded(GoesThrough), seeded(GoesThrough)
    callback, printed = hot(scope="step", on_error="eager"), Kept()
    logger = logging.getLogger("torch._guards")
    logger.addHandler(printed)
    try:
        fit(plain)
        fit(model, [callback])
    finally:
        logger.removeHandler(printed)
    assert_same(plain, model)
    assert not printed.messages


def test_the_reason_of_no_graph_is_the_break_that_has_cost_it() -> None:
    plain, model = seeded(PrintsInALoop), seeded(PrintsInALoop)
    callback = hot(scope="step", compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    line = line_of(PrintsInALoop.training_step, "print(")
    assert "no graph was captured" in callback.report.reason
    assert f"{Path(__file__).name}:{line} in training_step" in callback.report.reason
    assert "runs eagerly" in callback.report.reason
    assert_same(plain, model)


def test_more_than_a_few_are_counted() -> None:
    some = [GraphBreak(reason="why", file="a.py", line=i) for i in range(BREAKS_IN_FULL + 2)]
    assert list(notes_on_breaks(some[:BREAKS_IN_FULL])) == [str(each) for each in some[:BREAKS_IN_FULL]]
    assert list(notes_on_breaks(some))[-1].startswith("2 more graph breaks")


def test_a_place_is_told_without_a_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = GraphBreak(reason="why", file=str(tmp_path / "a.py"), line=3, function="forward")
    assert found.place == "a.py:3 in forward"
    tmp_path.rmdir()
    assert found.place == f"{tmp_path}/a.py:3 in forward"


def test_they_are_told_where_all_logs_are_switched_off() -> None:
    logging.disable(logging.CRITICAL)
    try:
        assert len(breaks_of(prints)) == 1
    finally:
        logging.disable(logging.NOTSET)


def test_who_asked_torch_for_its_log_still_gets_it() -> None:
    logger, handler = logging.getLogger(LOGGER), Kept()
    parent, level = logging.getLogger("torch._dynamo"), logger.level
    logger.setLevel(logging.DEBUG)
    parent.addHandler(handler)
    propagate, logger.propagate = logger.propagate, True
    try:
        breaks_of(prints)
    finally:
        parent.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
    assert any("Graph break in user code" in text for text in handler.messages)


def test_no_frame_of_this_package_is_the_users() -> None:
    assert str(Path(lightning_hotcompile.__file__).parent) in breaks._NOT_THE_USERS


class LastStates(Net):
    """As pytorch-lifestream's encoders take the last state of each sequence."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        states = x.unsqueeze(1).expand(-1, 3, -1)
        ends = torch.ones(len(x), dtype=torch.long)
        return super().loss((last_of(states, ends), y))


def last_of(states: Tensor, lengths: Tensor) -> Tensor:
    return states[range(len(states)), [length - 1 for length in lengths]]


def test_where_dynamo_fails_on_an_operation_is_in_the_receipt() -> None:
    plain, model = seeded(LastStates), seeded(LastStates)
    callback = hot(scope="step", compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    (told,) = [note for note in callback.report.notes if note.startswith("a part of the step runs eagerly")]
    line = last_of.__code__.co_firstlineno + 1
    assert re.search(rf"test_breaks\.py:{line} in last_of \(return states\[range", told), told


class Sizes(tuple[int, ...]):
    """Has no length, as the irreducible representations of e3nn have none: a guard on it cannot be made."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError("these have no length")


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = Sizes((1, 2))

    def loss(self, batch: Any) -> Tensor:
        scaled = super().loss(batch)
        for size in self.sizes:
            scaled = scaled / size
        return scaled


def test_a_function_that_dynamo_fails_on_is_in_the_receipt() -> None:
    plain, model = seeded(Scaled), seeded(Scaled)
    callback = hot(scope="step", compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model)
    (region,), notes = callback.report.regions, callback.report.notes
    assert region.proven, callback.report.to_text()
    (told,) = [note for note in notes if "these have no length" in note]
    assert told.startswith("a part of the step runs eagerly: NotImplementedError")
    found = re.fullmatch(
        r"(\d+) of (\d+) graphs agree with eager.*; (\d+) have not run", callback.report.parity
    )
    assert found, callback.report.parity
    agree, made, idle = map(int, found.groups())
    assert made == region.graphs
    assert idle == made - agree > 0
