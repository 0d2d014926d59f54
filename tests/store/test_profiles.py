"""Profiles, samples and machines: round trips, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from lightning_hotcompile.store import checked, hardware, samples
from lightning_hotcompile.store.checked import InvalidRecord, NewerFormat
from lightning_hotcompile.store.hardware import Machine
from lightning_hotcompile.store.profiles import KIND, Profile, ProfileKey, merged, utc_now
from lightning_hotcompile.store.samples import CompileSample
from tests.store.examples import LATER, MACHINE, WHEN, key, profile, sample, unmeasured


def document(**changes: Any) -> bytes:
    """A profile's file with some fields of the record changed; ``...`` removes one."""
    content = json.loads(profile().to_bytes())
    content["record"].update(changes)
    content["record"] = {k: v for k, v in content["record"].items() if v is not ...}
    return json.dumps(content).encode()


class TestRoundTrip:
    @pytest.mark.parametrize("given", [profile(), unmeasured(), profile(reason="é\n\t€")])
    def test_of_a_profile(self, given: Profile) -> None:
        assert Profile.from_bytes(given.to_bytes()) == given

    def test_of_a_profile_that_is_written_twice_has_the_same_bytes(self) -> None:
        assert Profile.from_bytes(profile().to_bytes()).to_bytes() == profile().to_bytes()

    def test_of_samples(self) -> None:
        given = (sample(3.0), sample(20.0, assumed_s=0.0, by_child=True))
        assert samples.from_bytes(samples.to_bytes(given)) == given

    def test_of_samples_keeps_the_last(self) -> None:
        given = [sample(float(i)) for i in range(samples.MOST_SAMPLES + 5)]
        assert samples.from_bytes(samples.to_bytes(given)) == tuple(given[5:])


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "truncated": profile().to_bytes()[:-30],
    "binary": bytes(range(256)) * 4,
    "a list": b"[]",
    "null": b"null",
    "nested too deeply": b"[" * 100_000,
    "a number of too many digits": b"1" * 10_000,
    "another kind": profile().to_bytes().replace(KIND.encode(), b"something else"),
    "format 0": profile().to_bytes().replace(b'"format": 2', b'"format": 0'),
    "format true": profile().to_bytes().replace(b'"format": 2', b'"format": true'),
    "format 2.0": profile().to_bytes().replace(b'"format": 2', b'"format": 2.0'),
    "NaN": profile().to_bytes().replace(b"20.5", b"NaN"),
    "infinity": profile().to_bytes().replace(b"20.5", b"Infinity"),
    "infinity as a large number": profile().to_bytes().replace(b"20.5", b"1e999"),
    "a field is missing": document(verdict=...),
    "a field is unknown": document(more=1),
    "verdict": document(verdict="excellent"),
    "verdict of a wrong type": document(verdict=["good"]),
    "negative time": document(eager_s=-1.0),
    "time as text": document(eager_s="0.013"),
    "time as a bool": document(eager_s=True),
    "huge time": document(compile_s=1e30),
    "half an interval": document(speedup_low=None),
    "speed-up outside of its interval": document(speedup=1.5),
    "pairs as a fraction": document(pairs=1.5),
    "negative pairs": document(pairs=-1),
    "no run": document(runs=0),
    "one part as a word": document(eager_parts="optimizer"),
    "a part without a name": document(eager_parts=[""]),
    "scope that moves the cursor": document(scope="step\x1b[2J"),
    "long scope": document(scope="x" * 201),
    "no reason": document(reason=None),
    "local time": document(when="2026-01-31T12:00:00"),
    "time of another zone": document(when="2026-01-31T12:00:00+01:00"),
    "no time": document(when="yesterday"),
    "key of a wrong type": document(key="p1"),
    "machine of a wrong type": document(key={**dataclasses.asdict(key()), "machine": None}),
    "empty plan": document(key={**dataclasses.asdict(key()), "plan": ""}),
    "devices as text": document(
        key={**dataclasses.asdict(key()), "machine": {**dataclasses.asdict(MACHINE), "devices": "H1"}}
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_content_is_refused(name: str) -> None:
    assert Profile.from_bytes(document()) == profile(), "the unchanged one is read"
    with pytest.raises(InvalidRecord):
        Profile.from_bytes(BROKEN[name])


def test_a_later_format_is_told_apart_from_damage() -> None:
    with pytest.raises(NewerFormat, match=r"format 3.*up to 2"):
        Profile.from_bytes(profile().to_bytes().replace(b'"format": 2', b'"format": 3'))


@pytest.mark.parametrize(
    "changes",
    [
        {"assumed_s": -1.0},
        {"seconds": None},
        {"warm": False},
        {"by_child": 1},
        {"when": ""},
    ],
)
def test_broken_samples_are_refused(changes: dict[str, Any]) -> None:
    record = {**dataclasses.asdict(sample()), **changes}
    with pytest.raises(InvalidRecord):
        CompileSample.from_dict(json.loads(json.dumps(record)))


def test_too_many_samples_are_refused() -> None:
    record = [dataclasses.asdict(sample())] * (samples.MOST_SAMPLES + 1)
    with pytest.raises(InvalidRecord, match="at most 200"):
        samples.from_bytes(checked.wrap(record, kind=samples.KIND, version=samples.FORMAT))


def test_a_profile_cannot_be_made_wrong_either() -> None:
    with pytest.raises(InvalidRecord, match=r"Profile\.eager_s is nan, allowed is nothing or a number"):
        profile(eager_s=float("nan"))


def test_a_reason_is_cut_and_cleaned() -> None:
    assert profile(reason="a\x00b\x1b" + "x" * 3000).reason == "a?b?" + "x" * 1996


@pytest.mark.parametrize(
    ("given", "kept"), [("x" * 2001, "x" * 2000), ("\x1b[2J", "?[2J"), ("\ud800", "?"), ("a\nb", "a\nb")]
)
def test_so_is_one_from_a_file(given: str, kept: str) -> None:
    assert Profile.from_bytes(document(reason=given)).reason == kept


class TestKey:
    def test_digest_is_the_same_in_every_process(self) -> None:
        assert key().digest == "02b041946dcef756812f5263901b7dd1"

    @pytest.mark.parametrize(
        "other",
        [
            {"plan": "p2"},
            {"signature": "s2"},
            {"torch": "2.13.1"},
            {"package": "0.1.1"},
            {"machine": dataclasses.replace(MACHINE, threads=1)},
        ],
    )
    def test_each_field_makes_another_digest(self, other: dict[str, Any]) -> None:
        assert key(**other).digest != key().digest

    def test_fields_are_not_run_together(self) -> None:
        assert key(plan="ab", signature="c").digest != key(plan="a", signature="bc").digest

    def test_round_trip(self) -> None:
        assert ProfileKey.from_dict(dataclasses.asdict(key())) == key()


class TestMerged:
    def test_the_newer_judgement_wins_in_any_order(self) -> None:
        old, new = profile(verdict="good"), profile(verdict="bad", speedup=1.2, when=LATER)
        for one, other in ((old, new), (new, old)):
            result = merged(one, other, now=LATER)
            assert (result.verdict, result.speedup, result.when, result.runs) == ("bad", 1.2, LATER, 2)

    def test_costs_that_only_the_older_knows_are_kept(self) -> None:
        old, new = profile(compile_s=20.0), profile(compile_s=None, warm_compile_s=2.0, when=LATER)
        result = merged(old, new, now=LATER)
        assert (result.compile_s, result.warm_compile_s) == (20.0, 2.0)

    def test_a_judgement_is_taken_as_a_whole(self) -> None:
        declined = unmeasured(verdict="bad", reason="parity", when=LATER)
        assert merged(profile(), declined, now=LATER).speedup is None

    def test_a_run_that_ended_early_replaces_no_judgement(self) -> None:
        result = merged(profile(runs=3), unmeasured(when=LATER, eager_s=0.5), now=LATER)
        assert (result.verdict, result.speedup, result.pairs, result.runs) == ("good", 1.3, 40, 4)
        assert (result.eager_s, result.when) == (0.5, LATER)

    def test_what_runs_have_forgone_adds_up_until_one_compiles(self) -> None:
        one = unmeasured(verdict="declined", forgone_s=3.0)
        two = merged(one, unmeasured(verdict="declined", forgone_s=4.0, when=LATER), now=LATER)
        assert (two.verdict, two.forgone_s, two.runs) == ("declined", 7.0, 2)
        for verdict in ("good", "bad", "unknown"):
            compiled = merged(two, unmeasured(verdict=verdict, when=LATER), now=LATER)
            assert (compiled.verdict, compiled.forgone_s) == (verdict, None)

    def test_after_a_compile_in_vain_it_begins_anew(self) -> None:
        vain = unmeasured(verdict="declined", forgone_s=0.0, when=LATER)
        assert merged(unmeasured(verdict="declined", forgone_s=3.0), vain, now=LATER).forgone_s == 0.0

    @pytest.mark.parametrize(("there", "taken_in"), [(3.0, 4.0), (4.0, 3.0)])
    def test_what_is_taken_in_may_tell_of_the_same_runs(self, there: float, taken_in: float) -> None:
        known = unmeasured(verdict="declined", forgone_s=there)
        other = unmeasured(verdict="declined", forgone_s=taken_in, when=LATER)
        assert merged(known, other, now=LATER, adds=False).forgone_s == 4.0

    def test_a_run_that_compiled_nothing_replaces_none_that_did(self) -> None:
        for known in (profile(), unmeasured(compile_s=9.0)):
            result = merged(known, unmeasured(verdict="declined", forgone_s=3.0, when=LATER), now=LATER)
            assert (result.verdict, result.speedup, result.forgone_s) == (known.verdict, known.speedup, 3.0)
            assert result.compile_s == known.compile_s

    def test_a_clock_that_was_wrong_does_not_win_for_ever(self) -> None:
        wrong = profile(verdict="bad", when="2099-01-01T00:00:00+00:00")
        assert merged(wrong, profile(when=WHEN), now=LATER).verdict == "good"


class TestMachine:
    def test_this_one_can_be_described_and_written_down(self) -> None:
        here = Machine.here()
        assert Machine.from_dict(json.loads(json.dumps(dataclasses.asdict(here)))) == here
        assert here.cpu
        assert here.threads == torch.get_num_threads()
        assert here.cores >= 1
        assert here.cpu in str(here)

    def test_free_cores_change_the_speed_but_not_the_code(self) -> None:
        other = dataclasses.replace(MACHINE, cores=64)
        assert other.digest != MACHINE.digest
        assert other.code_digest == MACHINE.code_digest

    @pytest.mark.parametrize(
        "change", [{"cpu": "x"}, {"vector": "AVX512"}, {"threads": 9}, {"devices": ()}, {"system": "x"}]
    )
    def test_all_else_changes_both(self, change: dict[str, Any]) -> None:
        other = dataclasses.replace(MACHINE, **change)
        assert other.digest != MACHINE.digest
        assert other.code_digest != MACHINE.code_digest

    @pytest.mark.parametrize(
        ("cpuinfo", "model"),
        [
            ("processor : 0\nmodel name\t: Fast One v2\n", "Fast One v2"),
            ("CPU implementer : 0x41\nCPU part : 0xd40\n", "0x41 0xd40"),
        ],
    )
    def test_processors_with_and_without_a_name(self, tmp_path: Any, cpuinfo: str, model: str) -> None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
        assert hardware._cpu_model(tmp_path / "cpuinfo") == model

    def test_a_system_without_a_list_of_processors(self, tmp_path: Any) -> None:
        assert hardware._cpu_model(tmp_path / "missing")

    def test_a_build_for_an_accelerator_that_is_not_there_has_no_device(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def of_the_build(check_available: bool = False) -> torch.device | None:
            return None if check_available else torch.device("cuda")

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", of_the_build)
        assert Machine.here().devices == ()

    def test_equal_devices_are_named_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "B" if i else "A")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
        assert Machine.here().devices == ("A 9.0", "B 9.0")


def test_now_is_a_time_that_a_profile_takes() -> None:
    assert profile(when=utc_now()).when.endswith("+00:00")
