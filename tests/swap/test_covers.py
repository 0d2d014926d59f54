"""Attributes that stand over a module's own for a while."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from torch import nn

from lightning_hotcompile.swap.covers import cover, uncover


class Module(nn.Module):
    """Has one attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = "mine"


class WithoutDict(Module):
    """Has a state that is no dict."""

    def __getstate__(self) -> Any:
        return (self.own,)

    def __setstate__(self, state: Any) -> None:
        super().__init__()
        (self.own,) = state


def test_an_attribute_is_covered_and_uncovered() -> None:
    module = Module()
    before = dict(vars(module))
    over = cover(module, {"own": "ours", "new": "ours"})
    assert (module.own, module.new) == ("ours", "ours")
    uncover(module, over)
    assert vars(module) == before
    assert list(vars(module)) == list(before)


@pytest.mark.parametrize("first", [0, 1])
def test_covers_go_in_any_order(first: int) -> None:
    module = Module()
    before = dict(vars(module))
    covers = [cover(module, {name: "ours"}) for name in ("own", "new")]
    uncover(module, covers.pop(first))
    assert set(vars(copy.copy(module))) == set(before)
    uncover(module, covers.pop())
    assert vars(module) == before


def test_what_somebody_puts_over_a_cover_stays() -> None:
    module = Module()
    over = cover(module, {"own": "ours"})
    module.own = "theirs"
    assert copy.copy(module).own == "theirs"
    uncover(module, over)
    assert module.own == "theirs"
    assert set(vars(module)) == set(vars(Module()))


def test_copies_look_through_two_covers_of_one_attribute() -> None:
    module = Module()
    covers = [cover(module, {"own": value}) for value in ("first", "second")]
    assert copy.deepcopy(module).own == "mine"
    assert pickle.loads(pickle.dumps(module)).own == "mine"
    for over in reversed(covers):
        uncover(module, over)
    assert module.own == "mine"


def test_a_state_that_is_no_dict_is_that_of_the_class() -> None:
    module = WithoutDict()
    over = cover(module, {"new": "ours"})
    assert set(vars(copy.copy(module))) == set(vars(Module()))
    uncover(module, over)


def test_a_getstate_of_the_instance_stays() -> None:
    module = Module()
    vars(module)["__getstate__"] = theirs = dict
    over = cover(module, {"own": "ours"})
    assert vars(module)["__getstate__"] is theirs
    uncover(module, over)
    assert vars(module)["__getstate__"] is theirs
