"""Events: the records, the log on disk, and reading it back."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import warnings
from pathlib import Path

import pytest

from lightning_hotcompile.errors import HotCompileWarning
from lightning_hotcompile.receipt import event_kinds
from lightning_hotcompile.receipt.event_kinds import (
    Compiled,
    Compiling,
    Declined,
    Detected,
    Event,
    Fallback,
    FreedMemoryKept,
    FusedTried,
    ParityChecked,
    PartTried,
    PhaseChanged,
    Planned,
    Recompiled,
    Reverted,
    ScopesRaced,
    SpeedUp,
)
from lightning_hotcompile.receipt.events import (
    EventLog,
    describe,
    event_from_dict,
    event_to_dict,
    read_events,
)

AT = {"step": 12, "time": 1000.5}
ONE_OF_EACH: list[Event] = [
    PhaseChanged(**AT, phase="flipping", reason="the step is hot"),
    Detected(**AT, signature="3fa2", count=10, op_sequence="linear -> relu -> sum", n_ops=120),
    Planned(**AT, scope="regions", reason="24 repeated blocks", regions=2, tree="plan\n├── compiled"),
    Declined(**AT, reason="40 steps remain"),
    Compiling(**AT, regions=1),
    Compiled(**AT, region="net.blocks.*", seconds=3.5, n_ops=None, cache_hit=True),
    SpeedUp(**AT, value=1.42, low=1.38, high=1.47, n=40, verdict="faster", confidence=0.98),
    Recompiled(**AT, region="net.head", reason="length 128 -> 96"),
    ParityChecked(**AT, region="net.head", agrees=True, error=1e-6, reason=""),
    Fallback(**AT, region="net.head", reason="BackendCompilerFailed"),
    FreedMemoryKept(**AT, faults=870),
    FusedTried(**AT, optimizer="optimizer 0 (AdamW)", value=3.0, low=2.8, high=3.3, n=8, kept=True),
    FusedTried(
        **AT,
        optimizer="0",
        value=2.0,
        low=1.9,
        high=2.1,
        n=8,
        kept=True,
        timed_before="2026-11-23T10:00:00+00:00",
    ),
    Reverted(**AT, reason="1.00x is below min_speedup=1.02"),
    PartTried(**AT, part="optimizer", value=1.1, low=1.05, high=1.2, n=10, kept=True),
    ScopesRaced(**AT, kept="step", left="module", value=1.02, low=1.01, high=1.03, n=80),
]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run" / "events.jsonl")


def emit_all(log: EventLog) -> None:
    for event in ONE_OF_EACH:
        log.emit(event)


def write_all(path: str) -> None:
    log = EventLog(path)
    emit_all(log)
    log.close()


def test_there_is_an_example_of_each_kind() -> None:
    assert {type(event) for event in ONE_OF_EACH} == set(Event.__subclasses__())
    assert {cls.__module__ for cls in Event.__subclasses__()} == {event_kinds.__name__}


@pytest.mark.parametrize(
    ("event", "kind"),
    [(ONE_OF_EACH[0], "phase_changed"), (ONE_OF_EACH[6], "speed_up"), (ONE_OF_EACH[3], "declined")],
)
def test_kind_is_the_class_name_in_snake_case(event: Event, kind: str) -> None:
    assert event.kind == kind


def test_events_are_frozen_and_take_keywords_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ONE_OF_EACH[0].step = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Declined("no")  # type: ignore[call-arg,misc]


def test_time_is_taken_when_it_is_not_given() -> None:
    assert Declined(step=1, reason="no").time > 1_000_000_000


class TestFile:
    def test_round_trip_of_each_kind(self, path: str) -> None:
        write_all(path)
        assert read_events(path) == (ONE_OF_EACH, [])

    def test_one_json_line_each_readable_without_this_package(self, path: str) -> None:
        write_all(path)
        records = [json.loads(line) for line in Path(path).read_text().splitlines()]
        assert [record["kind"] for record in records] == [event.kind for event in ONE_OF_EACH]
        words = {"phase": "flipping", "reason": "the step is hot", "stage": "train"}
        assert records[0] == {"kind": "phase_changed", **AT, **words}

    def test_nothing_is_made_before_the_first_event(self, path: str) -> None:
        EventLog(path).close()
        assert not Path(path).parent.exists()

    def test_each_event_is_there_before_emit_returns(self, path: str) -> None:
        log = EventLog(path)
        for n, event in enumerate(ONE_OF_EACH, start=1):
            log.emit(event)
            assert len(read_events(path)[0]) == n
        log.close()

    def test_a_second_log_appends_and_close_may_be_followed_by_events(self, path: str) -> None:
        write_all(path)
        log = EventLog(path)
        log.emit(ONE_OF_EACH[0])
        log.close()
        log.close()
        log.emit(ONE_OF_EACH[1])
        log.close()
        assert read_events(path)[0] == [*ONE_OF_EACH, *ONE_OF_EACH[:2]]

    def test_a_line_that_a_crash_cut_off_does_not_swallow_the_next(self, path: str) -> None:
        write_all(path)
        whole = Path(path).read_bytes()
        Path(path).write_bytes(whole[:-20])
        write_all(path)
        events, problems = read_events(path)
        assert events == [*ONE_OF_EACH[:-1], *ONE_OF_EACH]
        assert len(problems) == 1
        assert problems[0].startswith(f"line {len(ONE_OF_EACH)}: is not JSON")

    def test_numbers_that_are_not_finite_are_null_in_the_file(self, path: str) -> None:
        log = EventLog(path)
        log.emit(SpeedUp(**AT, value=math.nan, low=0.9, high=math.inf, n=0, verdict="no difference"))
        log.close()
        assert "NaN" not in Path(path).read_text()
        assert "Infinity" not in Path(path).read_text()
        (event,), problems = read_events(path)
        assert isinstance(event, SpeedUp)
        assert math.isnan(event.value)
        assert not problems
        assert "not measured" in describe(event)


class TestUnwritable:
    def test_one_warning_with_path_and_remedy_for_all_events(self, tmp_path: Path) -> None:
        in_the_way = tmp_path / "file"
        in_the_way.write_text("")
        log = EventLog(str(in_the_way / "events.jsonl"))
        with pytest.warns(HotCompileWarning, match=r"events\.jsonl.*may write") as caught:
            emit_all(log)
        assert len(caught) == 1
        log.close()

    def test_a_folder_as_path(self, tmp_path: Path) -> None:
        with pytest.warns(HotCompileWarning):
            EventLog(str(tmp_path)).emit(ONE_OF_EACH[0])

    def test_a_disk_that_fills_up_warns_once_though_closing_fails_too(self, path: str) -> None:
        class FullDisk:
            def write(self, _: bytes) -> int:
                return 0

            def flush(self) -> None:
                raise OSError(28, "No space left on device")

            close = flush

        log = EventLog(path)
        log._file = FullDisk()  # type: ignore[assignment]
        with pytest.warns(HotCompileWarning, match="No space left") as caught:
            emit_all(log)
        assert len(caught) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda log: pickle.loads(pickle.dumps(log))])
def test_copies_leave_the_open_file_behind(copied, path: str) -> None:
    log = EventLog(path)
    log.emit(ONE_OF_EACH[0])
    other = copied(log)
    log.close()
    assert other._file is None
    other.emit(ONE_OF_EACH[1])
    other.close()
    assert read_events(path)[0] == ONE_OF_EACH[:2]


class TestReading:
    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            ('{"kind": "declined", "step": 1', "is not JSON"),
            ("\x00\x00", "is not JSON"),
            ("[" * 100_000, "is not JSON"),
            ("17", "is int, not an event"),
            ('{"kind": "from_the_future", "step": 1, "time": 2.0}', "no known kind"),
            ('{"step": 1, "time": 2.0}', "no known kind"),
            ('{"kind": "event", "step": 1, "time": 2.0}', "no known kind"),
            ('{"kind": "declined", "step": 1, "time": 2.0}', "Declined lacks 'reason'"),
            (
                '{"kind": "declined", "step": "1", "time": 2.0, "reason": "no"}',
                "step='1', which is not of type int",
            ),
            ('{"kind": "declined", "step": true, "time": 2.0, "reason": "no"}', "step=True"),
            ('{"kind": "declined", "step": 1, "time": 2.0, "reason": null}', "reason=None"),
        ],
    )
    def test_a_bad_line_is_named_and_hides_nothing(self, line: str, problem: str, path: str) -> None:
        write_all(path)
        lines = Path(path).read_bytes().splitlines(keepends=True)
        Path(path).write_bytes(b"".join([*lines[:4], line.encode() + b"\n\n", *lines[4:]]))
        events, problems = read_events(path)
        assert events == ONE_OF_EACH
        assert len(problems) == 1
        assert problems[0].startswith("line 5: ")
        assert problem in problems[0]

    def test_bytes_that_are_not_utf8(self, path: str) -> None:
        write_all(path)
        Path(path).write_bytes(b'{"kind": "\xff\xfe"}\n' + Path(path).read_bytes())
        events, problems = read_events(path)
        assert events == ONE_OF_EACH
        assert len(problems) == 1

    def test_a_field_of_a_newer_version_is_reported_and_the_event_kept(self, path: str) -> None:
        Path(path).parent.mkdir()
        Path(path).write_text(json.dumps({**event_to_dict(ONE_OF_EACH[3]), "mood": "sad"}) + "\n")
        events, problems = read_events(path)
        assert events == [ONE_OF_EACH[3]]
        assert problems == ["line 1: Declined has fields that are not known: mood"]

    def test_a_whole_number_is_a_float_too(self, path: str) -> None:
        Path(path).parent.mkdir()
        Path(path).write_text('{"kind": "declined", "step": 1, "time": 2, "reason": "no"}\n')
        assert read_events(path) == ([Declined(step=1, time=2, reason="no")], [])

    def test_a_missing_file_is_an_error(self, path: str) -> None:
        with pytest.raises(FileNotFoundError):
            read_events(path)


class TestDescribe:
    @pytest.mark.parametrize(
        ("event", "words"),
        [
            (ONE_OF_EACH[0], "step     12  PHASE_CHANGED   now flipping: the step is hot"),
            (ONE_OF_EACH[1], "step 3fa2 is hot after 10 times, 120 ops: linear -> relu -> sum"),
            (ONE_OF_EACH[2], "scope regions, 2 regions: 24 repeated blocks"),
            (ONE_OF_EACH[3], "stays eager: 40 steps remain"),
            (ONE_OF_EACH[4], "COMPILING       1 region"),
            (ONE_OF_EACH[5], "net.blocks.* in 3.50 s, from the cache"),
            (ONE_OF_EACH[6], "faster: 1.42x, 98% interval 1.38 to 1.47, 40 pairs"),
            (ONE_OF_EACH[7], "net.head: length 128 -> 96"),
            (ONE_OF_EACH[8], "net.head agrees with eager, largest difference 1e-06"),
            (ONE_OF_EACH[9], "net.head runs eagerly: BackendCompilerFailed"),
            (ONE_OF_EACH[10], "steps had 870 page faults each; what is freed stays with the process now"),
            (
                ONE_OF_EACH[11],
                "optimizer 0 (AdamW): torch's fused kernel is kept: 3.00x, interval 2.80 to 3.30",
            ),
            (ONE_OF_EACH[12], "kept: 2.00x, interval 1.90 to 2.10, as an earlier run has measured it"),
            (ONE_OF_EACH[13], "back to eager: 1.00x is below min_speedup=1.02"),
            (ONE_OF_EACH[14], "optimizer kept: 1.10x with it, interval 1.05 to 1.20"),
        ],
    )
    def test_each_kind(self, event: Event, words: str) -> None:
        assert words in describe(event)

    def test_a_long_reason_with_line_breaks_stays_one_line(self) -> None:
        line = describe(Fallback(**AT, region="net", reason="Traceback:\n" + "  deep frame\n" * 200))
        assert "\n" not in line
        assert line.endswith(" ...")
        assert len(line) < 240

    def test_unknown_size_and_ops_are_left_out(self) -> None:
        event = Detected(**AT, signature="3fa2", count=10, op_sequence="", n_ops=None)
        assert describe(event).endswith("step 3fa2 is hot after 10 times")


def test_a_log_that_works_gives_no_warning(path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_all(path)


def test_an_interval_of_a_log_that_does_not_say_how_sure_it_is(path: str) -> None:
    record = event_to_dict(ONE_OF_EACH[6])
    del record["confidence"]
    event, problem = event_from_dict(record)
    assert isinstance(event, SpeedUp)
    assert (event.confidence, problem) == (None, "")
    assert "faster: 1.42x, interval 1.38 to 1.47, 40 pairs" in describe(event)
