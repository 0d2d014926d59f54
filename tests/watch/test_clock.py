from __future__ import annotations

import pytest

from lightning_hotcompile.watch.clock import MAX_PENDING, StepClock, StepTime


class FakeTime:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class FakeDevice:
    """Its events are passed when ``passed`` says so; asking too early is an error, as on a real device."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.made = 0
        self.passed = 0

    def event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at: float | None = None

    def record(self) -> None:
        self.device.made += 1
        self.order = self.device.made
        self.at = self.device.milliseconds

    def query(self) -> bool:
        return self.order <= self.device.passed

    def synchronize(self) -> None:
        self.device.passed = max(self.device.passed, self.order)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query()
        assert end.query()
        return end.at - self.at


@pytest.fixture
def now():
    return FakeTime()


@pytest.fixture
def device():
    return FakeDevice()


def host_step(clock, now, tag, seconds, wait=0.0):
    now.seconds += wait
    clock.start(tag)
    now.seconds += seconds
    clock.stop()


def device_step(clock, device, tag, milliseconds):
    clock.start(tag)
    device.milliseconds += milliseconds
    clock.stop()


def test_host_clock_measures_steps_and_waits(now):
    clock = StepClock(now=now)
    host_step(clock, now, "a", 2.0)
    host_step(clock, now, "b", 3.0, wait=0.5)
    assert clock.drain() == [
        StepTime(tag="a", seconds=2.0, wait_seconds=0.0),
        StepTime(tag="b", seconds=3.0, wait_seconds=0.5),
    ]
    assert clock.drain() == []


def test_abandoned_step_leaves_no_time_and_no_wait(now):
    clock = StepClock(now=now)
    host_step(clock, now, "a", 1.0)
    clock.start("broken")
    now.seconds += 50
    clock.abandon()
    clock.stop()
    now.seconds += 7
    host_step(clock, now, "b", 1.0)
    assert [(s.tag, s.wait_seconds) for s in clock.drain()] == [("a", 0.0), ("b", 0.0)]


def test_what_goes_on_in_between_is_no_wait(now):
    clock = StepClock(now=now)
    host_step(clock, now, "a", 1.0)
    now.seconds += 0.5
    clock.leave()
    now.seconds += 20
    host_step(clock, now, "b", 1.0)
    host_step(clock, now, "c", 1.0, wait=0.25)
    assert [(s.tag, s.wait_seconds, s.away_seconds) for s in clock.drain()] == [
        ("a", 0.0, 0.0),
        ("b", 0.0, 20.0),
        ("c", 0.25, 0.0),
    ]


def test_nor_on_a_device(now, device):
    clock = StepClock("cuda", now=now, make_event=device.event)
    clock.leave()
    now.seconds += 20
    device_step(clock, device, "a", 1.0)
    device.passed = device.made
    assert [(s.wait_seconds, s.away_seconds) for s in clock.drain()] == [(0.0, 20.0)]


def test_start_forgets_a_step_that_was_never_stopped(now):
    clock = StepClock(now=now)
    clock.start("lost")
    now.seconds += 9
    host_step(clock, now, "kept", 1.0)
    assert clock.drain() == [StepTime(tag="kept", seconds=1.0, wait_seconds=0.0)]


def test_stop_without_start_does_nothing(now):
    clock = StepClock(now=now)
    clock.stop()
    assert clock.drain() == []


def test_device_steps_come_when_the_device_has_passed_them_and_in_order(now, device):
    clock = StepClock("cuda", now=now, make_event=device.event)
    device_step(clock, device, "a", 2.0)
    device_step(clock, device, "b", 4.0)
    assert clock.drain() == []
    device.passed = 1  # the first step began, but has not ended
    assert clock.drain() == []
    device.passed = 3
    assert clock.drain() == [StepTime(tag="a", seconds=0.002, wait_seconds=0.0)]
    device.passed = 4
    assert clock.drain() == [StepTime(tag="b", seconds=0.004, wait_seconds=0.0)]


def test_at_the_end_the_device_is_waited_for(now, device):
    clock = StepClock("cuda", now=now, make_event=device.event)
    device_step(clock, device, "a", 2.0)
    device_step(clock, device, "b", 4.0)
    assert [step.tag for step in clock.drain(wait=True)] == ["a", "b"]
    assert clock.drain(wait=True) == []


def test_a_device_that_hangs_is_not_waited_for_after_an_error(now, device):
    clock = StepClock("cuda", now=now, make_event=device.event)
    device_step(clock, device, "a", 2.0)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert clock.drain(wait=True) == []
    assert [step.tag for step in clock.drain(wait=True)] == ["a"]


def test_an_end_on_another_stream_does_not_count_before_the_begin(now, device):
    clock = StepClock("cuda", now=now, make_event=device.event)
    device_step(clock, device, "a", 2.0)
    pending = clock._pending[0]
    device.passed = 2
    pending.begin.order = 3
    assert clock.drain() == []


def test_wait_on_a_device_is_time_in_which_it_did_nothing(now, device):
    """The host is ahead of it, and waits for it in a callback: that is no time between two steps."""
    clock = StepClock("cuda", now=now, make_event=device.event)
    device_step(clock, device, "a", 1.0)
    now.seconds += 0.25
    device_step(clock, device, "b", 1.0)
    device.milliseconds += 30.0
    device_step(clock, device, "c", 1.0)
    clock.abandon()
    device.milliseconds += 30.0
    device_step(clock, device, "d", 1.0)
    device.passed = device.made
    assert [step.wait_seconds for step in clock.drain()] == [0.0, 0.0, 0.03, 0.0]


def test_streams_may_end_in_another_order(now, device):
    clock = StepClock("cuda", now=now, make_event=device.event)
    device_step(clock, device, "a", 5.0)
    device.milliseconds -= 2.0
    device_step(clock, device, "b", 1.0)
    device.passed = device.made
    assert [step.wait_seconds for step in clock.drain()] == [0.0, 0.0]


def test_marks_that_are_passed_at_one_moment_are_no_error(now, device):
    class StrictEvent(FakeEvent):
        """As Metal's: the end has to be later."""

        def elapsed_time(self, end: FakeEvent) -> float:
            if end.at <= self.at:
                raise RuntimeError("End event 2 was not recorded after start event 1")
            return super().elapsed_time(end)

    clock = StepClock("mps", now=now, make_event=lambda: StrictEvent(device))
    device_step(clock, device, "a", 1.0)
    device_step(clock, device, "b", 2.0)
    device_step(clock, device, "empty", 0.0)
    device.milliseconds += 4.0
    device_step(clock, device, "c", 1.0)
    device.passed = device.made
    assert [(s.tag, s.wait_seconds) for s in clock.drain()] == [("a", 0.0), ("b", 0.0), ("c", 0.004)]


def test_pending_steps_are_bounded(now, device):
    clock = StepClock("cuda", now=now, make_event=device.event)
    for i in range(MAX_PENDING + 5):
        device_step(clock, device, i, 1.0)
    device.passed = device.made
    steps = clock.drain()
    assert [step.tag for step in steps] == list(range(5, MAX_PENDING + 5))


def test_finished_steps_are_bounded_when_nobody_drains(now):
    clock = StepClock(now=now)
    for i in range(MAX_PENDING + 3):
        host_step(clock, now, i, 1.0)
    assert len(clock.drain()) == MAX_PENDING


def test_abandon_keeps_what_already_ended(now, device):
    clock = StepClock("cuda", now=now, make_event=device.event)
    device_step(clock, device, "a", 1.0)
    clock.start("broken")
    clock.abandon()
    device.passed = device.made
    assert [step.tag for step in clock.drain()] == ["a"]


def test_an_error_of_the_device_is_raised_once(now, device):
    clock = StepClock("cuda", now=now, make_event=device.event)
    for tag in ("a", "b", "c"):
        device_step(clock, device, tag, 1.0)
    device.passed = 2
    broken = clock._pending[1].begin
    broken.query = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        clock.drain()
    assert [step.tag for step in clock.drain()] == ["a"]
    assert not clock._pending


def test_an_error_that_is_waited_for_is_raised_once(now, device):
    clock = StepClock("cuda", now=now, make_event=device.event)
    device_step(clock, device, "a", 1.0)
    clock._pending[0].end.synchronize = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        clock.drain(wait=True)
    assert clock.drain(wait=True) == []
    assert not clock._pending


def test_a_device_without_events_is_timed_by_the_host(now):
    clock = StepClock("meta", now=now)
    host_step(clock, now, "a", 1.0)
    assert clock.drain() == [StepTime(tag="a", seconds=1.0, wait_seconds=0.0)]
