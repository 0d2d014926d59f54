"""Source that the interpreter warns of is read like any other."""

from __future__ import annotations

import ast
import types
import warnings
from pathlib import Path

import pytest
from torch import nn

from lightning_hotcompile.plan.source import parsed
from lightning_hotcompile.plan.switched_off import is_switched_off

SOURCE = r'''
def slope(self, x):
    """Of a \d escape."""
    if self.hparams.weight != 0:
        return grad(x, create_graph=True)
    return x
'''


@pytest.fixture
def function(tmp_path: Path) -> types.FunctionType:
    """Imported where warnings are none, as from a compiled file."""
    file = tmp_path / "escapes.py"
    file.write_text(SOURCE, encoding="utf-8")
    space: dict[str, types.FunctionType] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(SOURCE, str(file), "exec"), space)
    return space["slope"]


class Owner(nn.Module):
    hparams = {"weight": 0}  # noqa: RUF012  # as Lightning's


@pytest.mark.filterwarnings("error")
def test_its_lines_are_those_of_the_file(function: types.FunctionType) -> None:
    found = parsed(function.__code__)
    assert found is not None
    tree, above = found
    lines = [above + node.lineno for node in ast.walk(tree) if isinstance(node, ast.If)]
    assert lines == [4]


@pytest.mark.filterwarnings("error")
def test_what_hyperparameters_switch_off_is_found(function: types.FunctionType) -> None:
    assert is_switched_off(function, "create_graph", Owner())


def test_what_was_made_without_a_file_has_none() -> None:
    assert parsed(eval("lambda x: x").__code__) is None
