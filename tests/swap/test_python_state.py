"""What a compiled function does with state of Python's own objects: the same as without, call after call."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import TORCH, compiling_allowed
from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded

CALLS = 7
COMPILING = 3
"""The first calls, in which new graphs are compiled; the others reuse them."""


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


class Part:
    """Two of them differ by nothing but that they are two."""


SHARED = Part()


class Settings:
    """A config that is copied."""

    def __init__(self, factors: list[float]) -> None:
        self.factors = factors
        self.name = "a"


class Holder:
    """What a module may hold."""

    seen = 0
    later: float

    def __init__(self) -> None:
        self.rng = random.Random(5)
        self.ordered = OrderedDict(a=1.0, b=5.0)
        self.plain = {"a": 1.0, "b": 5.0, "c": 7.0}
        self.latest: deque[Any] = deque(maxlen=3)
        self.numbers = (float(n) for n in range(1, 2 * CALLS))
        self.tensors = tensors()
        self.turned = {"a": 1.0, "b": 5.0, "c": 7.0}
        self.ids = [4, 0, 2]
        self.known = {16, 3, 8}
        self.late = {"a": 1.0}
        self.settings = Settings([2.0, 5.0])
        self.by_name = {f"{n:02}": float(n) for n in range(100)}
        self.n = 0
        self.pair = (Part(), Part())
        self.current = self.pair[0]
        self.by_step = self.pair[0]
        self.marks = (object(), object())
        self.mark = self.marks[0]
        self.layers = (torch.nn.Identity(), torch.nn.Identity())
        self.layer: torch.nn.Module = self.layers[0]
        self.shared: Part = SHARED
        self.method = self.double
        self.functions = (times(2.0), times(3.0))
        self.function = self.functions[0]

    def turn(self) -> None:
        """Between two calls: the same keys in another order, and new ones."""
        (first, value), *others = self.turned.items()
        self.turned = {**dict(others), first: value}
        self.later = 3.0
        self.current = self.pair[self.current is self.pair[0]]
        self.shared = self.pair[0] if self.shared is SHARED else SHARED
        self.mark = self.marks[self.mark is self.marks[0]]
        self.function = self.functions[self.function is self.functions[0]]
        self.method = self.triple if self.method == self.double else self.double
        self.layer = self.layers[self.layer is self.layers[0]]
        self.late = {"a": 1.0, "b": 3.0}

    def double(self, x: Tensor) -> Tensor:
        return x * 2

    def triple(self, x: Tensor) -> Tensor:
        return x * 3


def tensors() -> Iterator[Tensor]:
    n = 0.0
    while True:
        n += 1
        yield torch.tensor(n)


def random_number(h: Holder, x: Tensor) -> Tensor:
    return x * h.rng.random()


def random_branch(h: Holder, x: Tensor) -> Tensor:
    return x * 2 if h.rng.uniform(0, 1) < 0.5 else x * 3


def random_loop(h: Holder, x: Tensor) -> Tensor:
    for _ in range(3):
        x = x * h.rng.random() + 1
    return x


def random_integers(h: Holder, x: Tensor) -> Tensor:
    return x[:, : h.rng.randint(1, 8)].sum() * h.rng.randrange(1, 50)


def random_order(h: Holder, x: Tensor) -> Tensor:
    order = list(range(8))
    h.rng.shuffle(order)
    return x[:, order] + x[:, h.rng.sample(range(8), 1)]


def random_copy(h: Holder, x: Tensor) -> Tensor:
    return x * copy.deepcopy(h.rng).random() * h.rng.random()


def pythons_order(h: Holder, x: Tensor) -> Tensor:
    order = list(range(8))
    random.shuffle(order)
    return x[:, order] + x[:, random.sample(range(8), 1)]


def pythons_seed(h: Holder, x: Tensor) -> Tensor:
    h.n += 1
    random.seed(h.n)
    return x * random.random()


def own_generator_of_a_step(h: Holder, x: Tensor) -> Tensor:
    return x * random.Random(3).random()


def own_generator_with_another_seed_each_time(h: Holder, x: Tensor) -> Tensor:
    h.n += 1
    x = x.sin()
    rng = random.Random(h.n)
    return x * rng.random() + rng.randrange(5)


def last_item(h: Holder, x: Tensor) -> Tensor:
    name, value = h.plain.popitem()
    h.plain = {name: value, **h.plain}
    return x * value


def first_item(h: Holder, x: Tensor) -> Tensor:
    name, value = h.ordered.popitem(last=False)
    h.ordered[name] = value + 1
    return x * value


def promoted(h: Holder, x: Tensor) -> Tensor:
    value = h.ordered["a"]
    h.ordered.move_to_end("a")
    return x * value


def one_by_one(x: Tensor, **values: float) -> Tensor:
    for value in values.values():
        x = x * value + 1
    return x


def as_keywords(h: Holder, x: Tensor) -> Tensor:
    return one_by_one(x, **h.turned)


def as_a_copy(h: Holder, x: Tensor) -> Tensor:
    return one_by_one(x, **h.turned.copy()) + one_by_one(x, **{"d": 2.0, **h.turned})


def into_another(h: Holder, x: Tensor) -> Tensor:
    values = {"d": 2.0}
    values.update(h.turned)
    return one_by_one(x, **(values | h.turned))


def each_once(h: Holder, x: Tensor) -> Tensor:
    for i in set(h.ids):
        x = x * i + 1
    return x


def those_that_are_left(h: Holder, x: Tensor) -> Tensor:
    wanted = {*h.ids, 9} - {9}
    return torch.stack([x + i for i in wanted]) * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)


def common_ones(h: Holder, x: Tensor) -> Tensor:
    (first, second, third) = frozenset(h.ids) & {0, 2, 4}
    return x * first * 2 + second * 3 + third


def with_one_more(h: Holder, x: Tensor) -> Tensor:
    h.known.add(len(h.known) * 8)
    for i in h.known:
        x = x * i + 1
    return x


def one_of_them(h: Holder, x: Tensor) -> Tensor:
    value = h.known.pop()
    h.known.add(value)
    return x * value


def only_looked_at(h: Holder, x: Tensor) -> Tensor:
    wanted = set(h.ids)
    return x * (2 in wanted) + len(wanted)


def in_sorted_order(h: Holder, x: Tensor) -> Tensor:
    for name, i in zip(sorted({"z", "y", "x"} | set(h.plain)), sorted(set(h.ids) - {2}), strict=False):
        x = x * i + h.plain.get(name, 2.0)
    return x


def shared_by_all(h: Holder, x: Tensor) -> Tensor:
    type(h).seen += 1
    return x * h.seen


def with_a_late_key(h: Holder, x: Tensor) -> Tensor:
    return x * h.late.pop("a") * h.late.get("b", 2.0)


def or_another_key(h: Holder, x: Tensor) -> Tensor:
    try:
        return x * h.late["b"]
    except KeyError:
        return x * 2


def or_another_attribute(h: Holder, x: Tensor) -> Tensor:
    try:
        return x * h.later
    except AttributeError:
        return x * 2


def by_a_name_with_a_number(h: Holder, x: Tensor) -> Tensor:
    h.n += 1
    return x * h.by_name[f"{h.n:02}"]


def latest(h: Holder, x: Tensor) -> Tensor:
    h.latest.append(h.n)
    h.n += 1
    return x * sum(h.latest) + len(h.latest)


def latest_tensors(h: Holder, x: Tensor) -> Tensor:
    h.latest.append(x.mean() + (h.latest[0] if h.latest else 0))
    return x * torch.stack(list(h.latest)).sum()


def next_number(h: Holder, x: Tensor) -> Tensor:
    return x * next(h.numbers)


def next_tensor(h: Holder, x: Tensor) -> Tensor:
    return x * next(h.tensors)


def for_once(h: Holder, x: Tensor) -> Tensor:
    for number in h.numbers:
        x = x * number
        break
    return x


def one_of_two(h: Holder, x: Tensor) -> Tensor:
    x = x * 2 if h.by_step is h.pair[0] else x * 3
    h.by_step = h.pair[1] if h.by_step is h.pair[0] else h.pair[0]
    return x


def not_the_other(h: Holder, x: Tensor) -> Tensor:
    """Between two calls somebody else changes what it is."""
    return x * 2 if h.current is not h.pair[1] else x * 3


def not_the_other_mark(h: Holder, x: Tensor) -> Tensor:
    return x * 2 if h.mark is not h.marks[1] else x * 3


def equal_to_one_of_two(h: Holder, x: Tensor) -> Tensor:
    return x * 2 if h.current == h.pair[0] else x * 3


def among_them(h: Holder, x: Tensor) -> Tensor:
    return x * 2 if h.current in h.pair[:1] else x * 3


def not_the_last_layer(h: Holder, x: Tensor) -> Tensor:
    return x * 2 if h.layer is not h.layers[-1] else x * 3


def one_that_all_share(h: Holder, x: Tensor) -> Tensor:
    return x * 2 if h.shared is SHARED else x * 3


def not_the_other_function(h: Holder, x: Tensor) -> Tensor:
    return x * 2 if h.function is not h.functions[1] else x * 3


def one_of_two_methods(h: Holder, x: Tensor) -> Tensor:
    return h.method(x) * 2 if h.method == h.double else h.method(x) * 3


def a_method_and_no_mark(h: Holder, x: Tensor) -> Tensor:
    return h.method(x) if h.method is not h.mark else x


WITHOUT_GRAPH = (random_loop, for_once, latest, latest_tensors, each_once, those_that_are_left, common_ones)
"""A loop that would be left half-way is no graph, and these deques are used before any tensor is."""

FUNCTIONS = [
    value for value in list(vars().values()) if getattr(value, "__annotations__", {}).get("h") == "Holder"
]


def results(call: Callable[[Holder, Tensor], Tensor]) -> tuple[list[Tensor], Any]:
    random.seed(1)
    Holder.seen = 0
    holder = Holder()
    found = []
    for n in range(CALLS):
        found.append(call(holder, torch.arange(16.0).view(2, 8) + n))
        holder.turn()
    return found, (random.getstate(), holder.rng.getstate(), list(holder.ordered))


def in_compiled_code(function: Callable[..., Tensor], backend: Callable[..., Any]) -> Callable[..., Tensor]:
    """The function, compiled in its first calls, and only looked for from then on."""
    compiled = CompiledFunction(function, backend, dynamic=None, fullgraph=False)
    calls = iter(range(CALLS))

    def call(holder: object, x: Tensor) -> Tensor:
        if next(calls) >= COMPILING:
            return compiled.reuse(holder, x)  # type: ignore[no-any-return]
        with compiling_allowed(suppress_errors=True):
            return compiled.compile(holder, x)  # type: ignore[no-any-return]

    return call


def in_one_graph(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """What three calls give that are one graph, compiled once."""
    graphs: list[Any] = []
    compiled = CompiledFunction(
        function, lambda graph, _: graphs.append(graph) or graph.forward, dynamic=None, fullgraph=True
    )
    with compiling_allowed(suppress_errors=False):
        found: list[Tensor] = [compiled.compile(*args) for _ in range(3)]
    assert len(graphs) == 1
    assert all(torch.equal(each, found[0]) for each in found)
    return found[0]


def case(function: Callable[[Holder, Tensor], Tensor]) -> Any:
    unguarded = (
        shared_by_all,
        one_of_two,
        not_the_other,
        not_the_other_mark,
        equal_to_one_of_two,
        among_them,
    )
    unguarded += (not_the_last_layer, one_that_all_share, not_the_other_function, one_of_two_methods)
    stale = function in unguarded and TORCH < (2, 13)
    reason = "Dynamo has no place for a guard on an attribute of a class, or on which object it is"
    return pytest.param(function, id=function.__name__, marks=[pytest.mark.xfail(reason=reason)] * stale)


@pytest.mark.parametrize("function", [case(function) for function in FUNCTIONS])
def test_it_goes_on_in_compiled_code_as_it_does_without(function: Callable[[Holder, Tensor], Tensor]) -> None:
    runs: list[int] = []

    def backend(graph_module: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph_module.forward(*args)

        return run

    call = in_compiled_code(function, backend)
    (want, state), (got, state_now) = results(function), results(call)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b)
    assert state_now == state
    if (
        TORCH >= (2, 13) or function is not those_that_are_left
    ):  # before, this one was traced in Python's order
        assert bool(runs) is (function not in WITHOUT_GRAPH)


class Named(NamedTuple):
    name: str


@dataclasses.dataclass(frozen=True)
class Frozen:
    name: str


class Text(str):
    """A subclass of what Dynamo takes for a constant."""


def test_what_is_sorted_has_no_order_of_its_own() -> None:
    holder, x = Holder(), torch.ones(2)
    torch.testing.assert_close(in_one_graph(in_sorted_order, holder, x), in_sorted_order(holder, x))


class Slots:
    """Takes away from a set, which somebody else knows, too."""

    def __init__(self) -> None:
        self.free = self.known = {1, 2, 3, 4, 5}
        self.n = 0


def takes_one(slots: Slots, x: Tensor) -> Tensor:
    slots.n += 1
    slots.free -= {slots.n, 9}
    return x * len(slots.free)


def test_what_is_taken_from_a_set_is_gone() -> None:
    compiled = CompiledFunction(takes_one, lambda graph, _: graph.forward, dynamic=None, fullgraph=False)
    plain, ours, x = Slots(), Slots(), torch.ones(2)
    with compiling_allowed(suppress_errors=False):
        for _ in range(4):
            torch.testing.assert_close(compiled.compile(ours, x), takes_one(plain, x))
            assert ours.free == plain.free
            assert ours.known is ours.free or TORCH < (2, 13)


class KeyedByMethod:
    def __init__(self) -> None:
        self.by_method: dict[Any, float] = {}

    def helper(self) -> None: ...


def by_its_method(h: KeyedByMethod, x: Tensor) -> Tensor:
    return x.sin() * h.by_method.get(h.helper, 2.0)


def test_a_method_as_a_key_is_one_graph() -> None:
    """Each read of a method makes another."""
    x = torch.ones(2)
    torch.testing.assert_close(in_one_graph(by_its_method, KeyedByMethod(), x), x.sin() * 2)


def by_an_equal_key(table: dict[Any, float], key: Any, x: Tensor) -> Tensor:
    return x.sin() * table.get(key, 2.0)


@pytest.mark.parametrize(("kind", "most"), [(Named, 2), (Frozen, 2), (Text, 4), (PurePath, 4)])
def test_an_equal_key_is_found_and_no_reason_to_compile(kind: Callable[[str], Any], most: int) -> None:
    """Of what Dynamo's guards do not see the value of, a graph ends before the look-up."""
    graphs: list[Any] = []
    compiled = CompiledFunction(
        by_an_equal_key, lambda graph, _: graphs.append(graph) or graph.forward, dynamic=None, fullgraph=False
    )
    table, x = {kind("a"): 3.0}, torch.ones(2)
    with compiling_allowed(suppress_errors=True):
        for name in "aabbaabb":  # another one that is equal, each time
            torch.testing.assert_close(
                compiled.compile(table, kind(name), x), by_an_equal_key(table, kind(name), x)
            )
    assert len(graphs) <= most


class OneOfTwo:
    """Holds two things that are equal, and one of them once more."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.first, self.second = make(), make()
        self.by_first: dict[Any, int] = {}
        self.only_first: set[Any] = set()
        self.both: dict[Any, int] = {}
        self.current = self.first


def by_which_it_is(h: OneOfTwo, x: Tensor) -> Tensor:
    return x.sin() * 2 if h.current is h.first else x.sin() * 3


def made_in_the_step(h: OneOfTwo, x: Tensor) -> Tensor:
    kept = [x.sin()]
    also = kept
    return x * 2 if also is kept and kept is not h.current else x * 3


NO_PLACE = pytest.mark.skipif(TORCH < (2, 13), reason="Dynamo has no place for it")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(dict, id="dict", marks=NO_PLACE),
        pytest.param(lambda: [1, 2], id="list", marks=NO_PLACE),
        pytest.param(set, id="set", marks=NO_PLACE),
        pytest.param(lambda: (1, [2]), id="tuple", marks=NO_PLACE),
        pytest.param(lambda: range(3), id="range", marks=NO_PLACE),
        pytest.param(lambda: Named("a"), id="named tuple", marks=NO_PLACE),
        pytest.param(lambda: Frozen("a"), id="frozen", marks=NO_PLACE),
        pytest.param(deque, id="deque", marks=NO_PLACE),
        pytest.param(OrderedDict, id="OrderedDict", marks=NO_PLACE),
        pytest.param(lambda: torch.nn.Parameter(torch.ones(2)), id="Parameter"),
        pytest.param(lambda: torch.ones(2), id="Tensor"),
        pytest.param(torch.Generator, id="Generator", marks=NO_PLACE),
    ],
)
def test_which_of_two_it_is_is_seen_of_anything(make: Callable[[], Any]) -> None:
    call = in_compiled_code(by_which_it_is, lambda graph, _: graph.forward)
    holder, x = OneOfTwo(make), torch.ones(2)
    for _ in range(CALLS):
        torch.testing.assert_close(call(holder, x), by_which_it_is(holder, x))
        holder.current = holder.second if holder.current is holder.first else holder.first


def in_a_dict(h: OneOfTwo, x: Tensor) -> Tensor:
    return x.sin() * 2 if h.current in h.by_first else x.sin() * 3


def in_a_set(h: OneOfTwo, x: Tensor) -> Tensor:
    return x.sin() * 2 if h.current in h.only_first else x.sin() * 3


def in_what_the_step_makes(h: OneOfTwo, x: Tensor) -> Tensor:
    return x.sin() * 2 if h.current in {h.first: 1} else x.sin() * 3


def by_a_key_or_not(h: OneOfTwo, x: Tensor) -> Tensor:
    return x.sin() * h.by_first.get(h.current, 3)


def by_its_key(h: OneOfTwo, x: Tensor) -> Tensor:
    return x.sin() * h.both[h.current]


@pytest.mark.parametrize(
    "function", [by_its_key, in_a_dict, in_a_set, in_what_the_step_makes, by_a_key_or_not]
)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Part, id="object"),
        pytest.param(lambda: type("Kind", (), {}), id="class"),
        pytest.param(lambda: times(2.0), id="function"),
        pytest.param(torch.nn.Identity, id="module"),
        pytest.param(lambda: torch.nn.Parameter(torch.ones(2)), id="Parameter"),
        pytest.param(iter(["a", "b"] * 10).__next__, id="str"),
        pytest.param(iter([(1, 2), (1, 3)] * 10).__next__, id="tuple"),
        pytest.param(iter([Named("a"), Named("b")] * 10).__next__, id="named tuple"),
        pytest.param(iter([Frozen("a"), Frozen("b")] * 10).__next__, id="frozen"),
    ],
)
def test_which_one_is_looked_up_is_seen(
    make: Callable[[], Any], function: Callable[[OneOfTwo, Tensor], Tensor]
) -> None:
    call = in_compiled_code(function, lambda graph, _: graph.forward)
    holder, x = OneOfTwo(make), torch.ones(2)
    holder.by_first, holder.only_first = {holder.first: 2}, {holder.first}
    holder.both = {holder.first: 2, holder.second: 3}
    for _ in range(CALLS):
        torch.testing.assert_close(call(holder, x), function(holder, x))
        holder.current = holder.second if holder.current is holder.first else holder.first


def copied_in_the_step(h: Holder, x: Tensor) -> Tensor:
    plan = copy.deepcopy(h.settings)
    plan.factors[0] += 1.0
    return x * plan.factors[0] + x * h.settings.factors[0]


@NO_PLACE
def test_what_a_step_copies_is_copied_in_the_graph() -> None:
    """``deepcopy`` asks whether what it has found is the very list that stands for nothing."""
    holder = Holder()
    assert in_one_graph(copied_in_the_step, holder, torch.ones(2)).sum() == 10
    assert holder.settings.factors == [2.0, 5.0]


SHARED_LIST: list[int] = []


def by_which_list_it_is(h: OneOfTwo, x: Tensor) -> Tensor:
    return x.sin() * 2 if h.current is SHARED_LIST else x.sin() * 3


@NO_PLACE
def test_a_list_of_pythons_that_a_module_holds_too_is_told_from_one_that_is_equal() -> None:
    call = in_compiled_code(by_which_list_it_is, lambda graph, _: graph.forward)
    holder, x = OneOfTwo(list), torch.ones(2)
    for _ in range(CALLS):
        holder.current = holder.second if holder.current is SHARED_LIST else SHARED_LIST
        torch.testing.assert_close(call(holder, x), by_which_list_it_is(holder, x))


@pytest.mark.skipif(TORCH < (2, 13), reason="to Dynamo one that is made and one that was there may be one")
@pytest.mark.parametrize("make", [dict, lambda: [1, 2], lambda: (1, [2])])
def test_what_the_step_makes_is_compared_in_the_graph(make: Callable[[], Any]) -> None:
    assert in_one_graph(made_in_the_step, OneOfTwo(make), torch.ones(2)).sum() == 4


def test_a_method_and_something_else_break_no_graph() -> None:
    assert in_one_graph(a_method_and_no_mark, Holder(), torch.ones(2, 8)).sum() == 32


def test_a_generator_without_a_seed_draws_other_numbers_each_time() -> None:
    def drawn(_: None, x: Tensor) -> Tensor:
        return x.sin() * random.Random().random()

    compiled = in_compiled_code(drawn, lambda graph, _: graph.forward)
    assert len({compiled(None, torch.ones(1)).item() for _ in range(CALLS)}) == CALLS


def test_what_the_user_compiles_is_left_as_it_is() -> None:
    theirs = torch.compile(random_number, backend="eager", fullgraph=True)
    with compiling_allowed(suppress_errors=True):
        theirs(Holder(), torch.ones(2, 8))  # a graph break would raise


class Augmented(Net):
    """Draws from a generator of its own, as augmentations do, and takes what a generator gives."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(4)
        self.factors = (1 + 1 / n for n in range(1, 1000))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, *others = batch if isinstance(batch, (list, tuple)) else (batch,)
        x = x * self.rng.uniform(0.5, 1.5) * next(self.factors)
        return super().training_step((x, *others) if others else x, batch_idx)


@pytest.mark.parametrize("threshold", [0, 2])
@pytest.mark.parametrize("scope", ["step", "regions"])
def test_a_training_goes_on_as_it_does_without(threshold: int, scope: str) -> None:
    callback = hot(scope=scope, threshold=threshold)
    plain, swapped = seeded(Augmented), seeded(Augmented)
    fit(plain, [], max_steps=20, max_epochs=-1)
    fit(swapped, [callback], max_steps=20, max_epochs=-1)
    assert any(region.proven for region in callback.report.regions), callback.report.to_text()
    assert plain.rng.getstate() == swapped.rng.getstate()
    assert_same(plain, swapped)
