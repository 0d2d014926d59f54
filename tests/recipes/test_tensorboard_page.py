"""What a person finds in TensorBoard after a training: asked from the real server, tab by tab."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorboard", reason="tensorboard is in the extra 'recipes'")

import numpy as np
from PIL import Image

from lightning_hotcompile.receipt.metrics import PHASE_NUMBER
from lightning_hotcompile.view.timeline import PHASE_COLOURS
from tests.forks import in_a_fork
from tests.hot import ALWAYS_LOGGED
from tests.recipes.tensorboard_server import Server, tensorboard

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "train.py"
STEPS = 80
SMALL = ("model.d_model=16", "model.n_head=2", "data.block_size=16", "data.batch_size=4")
RUN = "."
"""TensorBoard's name of a run whose files lie in the folder itself."""

ALWAYS = {*ALWAYS_LOGGED, "step_ms"}


@dataclass(frozen=True)
class Page:
    """A server, and the report of the training that it shows."""

    server: Server
    report: dict[str, Any]
    markdown: str

    def points(self, name: str) -> list[tuple[int, float]]:
        found = self.server.json("scalars/scalars", run=RUN, tag=f"hotcompile/{name}")
        return [(step, value) for _, step, value in found]


def train(folder: Path, *arguments: str) -> None:
    """``recipes/train.py experiment=smoke``, made smaller."""
    steps = (f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=5", f"hydra.run.dir={folder}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOTCOMPILE_STORE": str(folder / "store")}
    done = in_a_fork(folder, RECIPE, "experiment=smoke", *steps, *arguments, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("page")
    train(folder, "compile.backend=aot_eager", *SMALL)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    with tensorboard(folder / "tensorboard") as server:
        server.wait_for("images", "hotcompile/timeline")  # the last thing that is written
        yield Page(server, report, (folder / "report.md").read_text(encoding="utf-8"))


def test_the_training_came_to_rest(page: Page) -> None:
    assert (page.report["phase"], page.report["steps"]) == ("steady", STEPS), page.report["reason"]


def test_the_scalars_are_all_there(page: Page) -> None:
    found = {tag for tag in page.server.tags("scalars") if tag.startswith("hotcompile/")}
    maybe = {"break_even_step"} if page.report["break_even_step"] is not None else set()
    # A break-even that was expected for a while has points too; no accelerator, so no peak_memory_mb.
    assert {tag.removeprefix("hotcompile/") for tag in found} - {"break_even_step"} == ALWAYS
    assert {f"hotcompile/{name}" for name in maybe} <= found


def test_the_last_point_of_each_curve_is_what_the_report_says(page: Page) -> None:
    report = page.report
    expected = {
        "phase": PHASE_NUMBER[report["phase"]],
        "eager_ms": report["eager_ms"]["median"],
        "compiled_ms": report["compiled_ms"]["median"],
        "speedup": report["speedup"]["value"],
        **{n: report[n] for n in ("compile_s", "stall_s", "saved_s", "total_speedup")},
        **{n: report[n] for n in ("recompiles", "graph_breaks")},
        "parity_error": report["parity_error"],
    }
    for name, value in expected.items():
        assert page.points(name)[-1] == (STEPS, pytest.approx(value, rel=1e-6)), name


def test_step_times_come_as_often_as_lightning_logs(page: Page) -> None:
    own = page.server.json("scalars/scalars", run=RUN, tag="train/loss")
    assert [step for step, _ in page.points("step_ms")] == [step for _, step, _ in own]
    assert all(value > 0 for _, value in page.points("step_ms"))


def test_the_text_tab_shows_the_receipt(page: Page) -> None:
    (tag,) = [tag for tag in page.server.tags("text") if tag.startswith("hotcompile/receipt")]
    (found,) = page.server.json("text/text", run=RUN, tag=tag)
    assert found["step"] == STEPS
    html = found["text"]
    assert "<h2>hotcompile receipt</h2>" in html
    assert f"<strong>{page.report['headline']}" in html.replace("&#39;", "'")
    assert f"<td>{page.report['steps']}</td>" in html
    assert html.count("<pre><code>") == 1  # the plan's tree
    assert "\u251c\u2500\u2500 compiled" in html
    for region in page.report["regions"]:
        assert f"<td>{region['name']}</td>" in html
    titles = re.findall(r"^### (.+)$", page.markdown, flags=re.MULTILINE)
    assert [t for t in titles if f"<h3>{t}</h3>" not in html] == []
    shown = re.sub(r"<pre>.*?</pre>", "", html, flags=re.DOTALL)
    assert "|" not in shown, "a table that was not understood"
    assert "**" not in shown


def test_the_image_tab_shows_the_timeline(page: Page) -> None:
    assert page.server.tags("images") == {"hotcompile/timeline"}
    (entry,) = page.server.json("images/images", run=RUN, tag="hotcompile/timeline", sample=0)
    assert entry["step"] == STEPS
    content = page.server.get(f"images/individualImage?{entry['query']}")
    image = np.asarray(Image.open(io.BytesIO(content)))
    assert image.shape[2] == 3
    assert image.shape[0] > 300
    assert image.shape[1] > 800
    for phase in ("observing", "settling", "steady"):
        colour = [int(PHASE_COLOURS[phase][i : i + 2], 16) for i in (1, 3, 5)]
        assert (image == colour).all(axis=2).any(), f"no step of phase {phase}"
