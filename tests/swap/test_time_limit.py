"""A call that takes too long is interrupted, and nobody else's alarm is lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType
from typing import Any

import pytest

from lightning_hotcompile.swap.process import time_limit as module
from lightning_hotcompile.swap.process.time_limit import Alarm, is_over, time_limit

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs an alarm signal"),
    pytest.mark.usefixtures("own_alarm"),
]

NEVER = 20.0
"""What stands for ever in these tests has an end of its own, should the limit not work."""


def hang() -> None:
    threading.Event().wait(NEVER)
    pytest.fail("was not interrupted")


def test_a_hang_ends_with_the_limit_and_its_value() -> None:
    with (
        pytest.raises(TimeoutError, match=r"^took longer than compile_timeout=0\.005 s$"),
        time_limit(0.005, "compile_timeout"),
    ):
        hang()


def test_code_that_swallows_every_exception_is_interrupted_too() -> None:
    with pytest.raises(TimeoutError), time_limit(0.005, "limit"), contextlib.suppress(Exception):
        hang()


def end_now_and_hang(alarm: Alarm) -> None:
    alarm.end_now()
    hang()


def test_an_alarm_may_be_told_to_ring_at_once() -> None:
    alarm = Alarm(NEVER, RuntimeError)
    alarm.end_now()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "it was not started yet"
    alarm.start()
    over = [is_over()]
    try:
        with pytest.raises(RuntimeError):
            end_now_and_hang(alarm)
        over.append(is_over())
    finally:
        alarm.stop()
    assert [*over, is_over()] == [False, True, False]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_question_itself_may_need_more_frames_than_there_are() -> None:
    def at_the_limit(frame: FrameType | None) -> bool:
        asked.append(frame)
        raise RecursionError

    asked: list[FrameType | None] = []
    alarm = Alarm(0.005, RuntimeError, may_throw=at_the_limit)
    alarm.start()
    threading.Event().wait(0.05)
    alarm.stop()
    assert asked


def test_what_is_fast_enough_is_left_alone() -> None:
    with time_limit(NEVER, "limit"):
        result = 1 + 1
    assert result == 2
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_error_inside_stays_what_it_is() -> None:
    with pytest.raises(ZeroDivisionError), time_limit(NEVER, "limit"):
        1 / 0  # noqa: B018
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_handler_found_there_is_put_back() -> None:
    def own(*_: Any) -> None:
        pass

    signal.signal(signal.SIGALRM, own)
    with time_limit(NEVER, "limit"):
        assert signal.getsignal(signal.SIGALRM) is not own
    assert signal.getsignal(signal.SIGALRM) is own
    with contextlib.suppress(TimeoutError), time_limit(0.005, "limit"):
        hang()
    assert signal.getsignal(signal.SIGALRM) is own


def test_a_timer_that_was_running_goes_on_with_the_rest_of_its_time() -> None:
    ticks = iter([100.0, 130.0])
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("came too early"))
    signal.setitimer(signal.ITIMER_REAL, 500.0, 7.0)
    with time_limit(NEVER, "limit", now=lambda: next(ticks)):
        pass
    rest, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    assert rest == pytest.approx(470.0, abs=5.0)
    assert interval == 7.0


def test_a_timer_that_would_have_ended_in_the_meantime_ends_right_afterwards() -> None:
    ended = threading.Event()
    ticks = iter([100.0, 700.0])
    signal.signal(signal.SIGALRM, lambda *_: ended.set())
    signal.setitimer(signal.ITIMER_REAL, 500.0)
    with time_limit(NEVER, "limit", now=lambda: next(ticks)):
        assert not ended.is_set()
    assert ended.wait(NEVER)


def test_limits_can_be_nested() -> None:
    with (
        pytest.raises(TimeoutError, match=r"inner=0\.005"),
        time_limit(NEVER, "outer"),
        time_limit(0.005, "inner"),
    ):
        hang()
    with (
        pytest.raises(TimeoutError, match=r"outer=0\.005"),
        time_limit(0.005, "outer"),
        time_limit(None, "inner"),
    ):
        hang()


def test_without_a_limit_no_alarm_is_touched() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(None, "limit"):
        assert signal.getsignal(signal.SIGALRM) is before
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("missing", ["main thread", "setitimer", "a handler that can be put back"])
def test_where_nothing_can_be_interrupted_there_is_no_limit(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "setitimer":
        monkeypatch.delattr(module.signal, "setitimer")
    if missing == "a handler that can be put back":
        monkeypatch.setattr(module.signal, "getsignal", lambda _: None)
    done = []

    def limited() -> None:
        with time_limit(1e-6, "limit"):
            done.append(threading.Event().wait(0.02))

    if missing == "main thread":
        thread = threading.Thread(target=limited)
        thread.start()
        thread.join(NEVER)
    else:
        limited()
    assert done == [False]
