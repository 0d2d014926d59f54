"""The HTML page: well-formed, self-contained, with the numbers in it, and deaf to hostile names."""

from __future__ import annotations

import math
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_hotcompile.receipt.rendering import facts
from lightning_hotcompile.receipt.report import Report
from lightning_hotcompile.receipt.wording import headline
from lightning_hotcompile.view.from_events import report_from_events
from lightning_hotcompile.view.page import run_to_html
from lightning_hotcompile.view.run import Run, load_run
from tests.view.examples import (
    HOSTILE,
    TREE,
    captured,
    events,
    hostile_report,
    report,
    samples,
    write_report,
)

VOID = {"meta"}


class Page(HTMLParser):
    """Counts tags and classes, gathers text, and insists that each tag is closed."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.classes: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        self.classes.update((dict(attrs).get("class") or "").split())
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def page(made: Report | None, name: str = "outputs/a", **facts_of_run: object) -> Page:
    told = tuple(events()) if made is not None else ()
    return Page(run_to_html(Run(name=name, report=made, **{"events": told, **facts_of_run})))  # type: ignore[arg-type]


def test_the_numbers_are_on_it() -> None:
    text = page(report()).text
    assert headline(report()) in text
    for name, value in facts(report()):
        assert name in text
        assert value in text
    for line in TREE.splitlines():
        assert line in text
    for part in ("Regions: 1 of 1 proven", "flipping", "3.20 s", "torch 2.13.0", "linear -> relu -> sum"):
        assert part in text


def test_the_title_and_the_headline_come_first() -> None:
    words = " ".join(page(report()).text.split())
    assert words.startswith(f"hotcompile: outputs/a hotcompile: outputs/a {headline(report())}")


def test_each_step_has_a_mark() -> None:
    found = page(report()).classes
    assert found["stall"] == 1
    assert found["step"] == found["eager"] + found["compiled"] == len(samples()) - 1
    assert found["compiled"] == sum(s.compiled for s in samples()) - 1
    assert found["band"] == 4
    assert (found["flip"], found["verdict"]) == (1, 1)
    assert found["interval"] == found["value"] == 1


def test_it_needs_no_network_and_runs_no_script() -> None:
    made = page(report())
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(made.tags)
    assert not [
        n for n, _ in made.attributes if n.startswith("on") or n in ("src", "href", "action", "srcset")
    ]
    source = run_to_html(Run(name="a", report=report()))
    assert not re.search(r"https?:|url\(|@import", source)
    assert "default-src 'none'" in source


def test_light_dark_and_print() -> None:
    source = run_to_html(Run(name="a", report=report()))
    assert "@media (prefers-color-scheme: dark)" in source
    assert "@media print" in source
    used = set(re.findall(r"var\((--[a-z]+)\)", source))
    light, dark = (set(re.findall(r"(--[a-z]+): #", part)) for part in source.split("@media")[:2])
    assert used <= light == dark


class TestHostileNames:
    def test_they_are_text_and_nothing_else(self, tmp_path: Path) -> None:
        run = load_run(write_report(tmp_path, hostile_report()))
        source = run_to_html(Run(name=HOSTILE, report=run.report, events=run.events, problems=(HOSTILE,)))
        assert "<script" not in source
        assert "<img" not in source
        made = Page(source)
        usual = Page(run_to_html(Run(name="a", report=report(), events=tuple(events()))))
        assert set(made.tags) <= set(usual.tags) | {"ul", "li", "p"}
        assert not [name for name, _ in made.attributes if name.startswith("on")]
        assert made.text.count("<script>alert('x')</script>") >= 20

    def test_no_attribute_is_left_early(self) -> None:
        made = page(hostile_report(), name=HOSTILE)
        known = {name for name, _ in page(report()).attributes}
        assert {name for name, _ in made.attributes} <= known


class TestLess:
    def test_an_event_log_has_bands_and_no_steps(self) -> None:
        made = page(report_from_events(events()))
        assert (made.classes["band"], made.classes["step"], made.classes["stall"]) == (4, 0, 0)
        assert "does not hold the time of each step" in made.text

    def test_a_capture_has_its_numbers(self) -> None:
        made = page(None, captured=captured(launches_per_step=None))
        assert made.classes["step"] == 100
        assert "eager, or not known" in made.text
        assert ", eager" not in made.text.replace("eager, or", "")
        for part in ("python train.py", "operators a step", "412", "0.0% of the step time", "28.0 ms"):
            assert part in made.text

    def test_nothing_measured_is_a_page_too(self) -> None:
        bare = report(
            phase="observing", samples=(), speedup=None, regions=(), phases=(), plan="", notes=(), versions={}
        )
        made = page(bare, events=())
        assert made.tags["svg"] == 0
        assert "not measured" in made.text

    def test_what_is_not_finite_is_never_shown_as_a_number(self) -> None:
        wild = report(saved_s=math.nan, stall_s=math.inf, compile_s=math.nan)
        assert not re.search(r"\b(nan|inf|None)\b", page(wild).text)

    @pytest.mark.parametrize("verdict", ["faster", "slower", "no-difference"])
    def test_the_speed_up_is_coloured_by_its_verdict(self, verdict: str) -> None:
        ends = {"faster": (1.2, 1.6), "slower": (0.7, 0.9), "no-difference": (0.9, 1.6)}[verdict]
        ratio = report().speedup
        assert ratio is not None
        other = type(ratio)(value=sum(ends) / 2, low=ends[0], high=ends[1], n=9, confidence=0.98)
        assert page(report(speedup=other)).classes[verdict] == 2

    def test_problems_are_on_the_page(self) -> None:
        assert "line 3: is not JSON" in page(report(), problems=("line 3: is not JSON",)).text

    def test_a_thinned_run_says_so(self) -> None:
        assert "320 of 12,000 steps are shown" in page(report(steps=12_000)).text
