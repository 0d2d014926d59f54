"""Trainings on two processes that the tests of more than one file look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import train_in_turn
from tests.distributed.test_two_ranks import run_script


@pytest.fixture(scope="session")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What both kinds of training wrote, and what they printed."""
    folder = tmp_path_factory.mktemp("in_turn")
    return folder, run_script(train_in_turn.__file__, str(folder))
