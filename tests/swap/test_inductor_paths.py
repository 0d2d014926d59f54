"""Whether there is compiled code in the folder that Inductor uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._inductor.codecache import FxGraphCache

from lightning_hotcompile.swap.inductor import paths as inductor_paths


@pytest.fixture
def graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch keeps its graphs."""
    monkeypatch.setenv(inductor_paths.FOLDER, str(tmp_path))
    return Path(FxGraphCache._get_tmp_dir())


def test_a_graph_is_found_where_torch_keeps_it(graphs: Path) -> None:
    (graphs / "ab" / "abcdef").mkdir(parents=True)
    assert inductor_paths.holds_graphs(inductor_paths.folder_in_use())


def test_no_folder_and_one_that_was_emptied_hold_none(graphs: Path) -> None:
    assert not inductor_paths.holds_graphs(inductor_paths.folder_in_use())
    (graphs / "ab").mkdir(parents=True)
    assert not inductor_paths.holds_graphs(inductor_paths.folder_in_use())
