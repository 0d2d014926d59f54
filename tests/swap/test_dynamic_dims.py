"""Marks on the dimensions that vary, and on which batches to compile."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hotcompile.swap.tracing.dynamic_dims import NOTHING_VARIES, BatchInStep, DynamicDims
from lightning_hotcompile.watch.family import Families
from lightning_hotcompile.watch.structure import describe
from tests.hot import assert_proven, assert_same, hot
from tests.models import Net, fit, seeded

MARK = "_dynamo_weak_dynamic_indices"


def marks(tensor: Tensor) -> set[int] | None:
    return getattr(tensor, MARK, None)


def family_of(make: Any, sizes: tuple[int, ...] = (5, 6, 7, 11)) -> tuple[Any, Any]:
    """The last batch, and its description."""
    families = Families()
    return [(batch := make(n), families.described(describe(batch, []))) for n in sizes][-1]


def text(n: int) -> Any:
    return {"ids": torch.zeros(4, n), "mask": torch.zeros(4, n), "weight": torch.zeros(3)}


class TestMarks:
    def test_the_batch_where_it_varies(self) -> None:
        batch, described = family_of(text)
        dims = DynamicDims.of(batch, described)
        with dims.marked((batch,)):
            assert (marks(batch["ids"]), marks(batch["mask"]), marks(batch["weight"])) == ({1}, {1}, None)
        assert vars(batch["ids"]) == {}

    def test_activations_by_their_size(self) -> None:
        batch, described = family_of(text)
        hidden, scores, flat, other = (torch.zeros(*s) for s in ((4, 11, 8), (4, 11, 11), (44, 8), (4, 8)))
        with DynamicDims.of(batch, described).marked((hidden, [scores]), {"a": flat}, other):
            assert [marks(t) for t in (hidden, scores, flat, other)] == [{1}, {1, 2}, {0}, None]
        assert all(vars(t) == {} for t in (hidden, scores, flat))

    def test_parameters_never(self) -> None:
        batch, described = family_of(text)
        weight = nn.Parameter(torch.zeros(11, 11))
        with DynamicDims.of(batch, described).marked(weight):
            assert marks(weight) is None

    def test_marks_of_the_user_stay_as_they_were(self) -> None:
        batch, described = family_of(text)
        torch._dynamo.maybe_mark_dynamic(batch["ids"], 0)
        with DynamicDims.of(batch, described).marked(batch):
            assert marks(batch["ids"]) == {1}
        assert marks(batch["ids"]) == {0}

    def test_after_an_error_too(self) -> None:
        batch, described = family_of(text)
        try:
            with DynamicDims.of(batch, described).marked(batch):
                raise KeyError
        except KeyError:
            pass
        assert MARK not in vars(pickle.loads(pickle.dumps(batch["ids"])))

    def test_nothing_without_a_family(self) -> None:
        batch = text(5)
        dims = DynamicDims.of(batch, describe(batch, []))
        assert dims is NOTHING_VARIES
        with dims.marked(batch):
            assert vars(batch["ids"]) == {}


class TestAmbiguous:
    def dims(self, make: Any, *sizes: int, others: tuple[int, ...] = ()) -> DynamicDims:
        return DynamicDims.of(*family_of(make, (20, 21, 22, *sizes)), frozenset(others))

    def test_a_size_like_no_other(self) -> None:
        assert not self.dims(text, 23).ambiguous
        assert not self.dims(text, 23, others=(8, 16)).ambiguous

    def test_that_of_another_dimension(self) -> None:
        assert self.dims(text, 4).ambiguous
        assert self.dims(text, 3).ambiguous

    def test_that_of_a_parameter(self) -> None:
        assert self.dims(text, 16, others=(8, 16)).ambiguous

    def test_two_that_vary_and_are_equal_now(self) -> None:
        def pair(n: int) -> Any:
            return (torch.zeros(n), torch.zeros(46 - n))

        assert self.dims(pair, 23).ambiguous
        assert not self.dims(pair, 19).ambiguous


class TestWaiting:
    def test_patience_has_an_end(self) -> None:
        step = BatchInStep(nn.Linear(11, 2), patience=2)
        answers = []
        for _ in range(4):
            step.begin(*family_of(text))
            answers.append(step.is_one_to_wait_after())
        assert answers == [True, True, False, False]

    def test_a_good_batch_costs_none(self) -> None:
        step = BatchInStep(nn.Linear(13, 2), patience=2)
        step.begin(*family_of(text))
        assert not step.is_one_to_wait_after()
        assert step.patience == 2

    def test_a_parameter_that_has_no_shape_yet_is_like_none(self) -> None:
        step = BatchInStep(nn.ModuleList([nn.Linear(13, 2), nn.LazyLinear(11), nn.LazyBatchNorm1d()]))
        step.begin(*family_of(text))
        assert step.dims.sizes == {11, 44}
        assert not step.is_one_to_wait_after()

    def test_after_the_step_the_batch_is_gone(self) -> None:
        step = BatchInStep(nn.Linear(13, 2))
        step.begin(*family_of(text))
        assert step.dims.sizes == {11, 44}
        step.end()
        assert step.dims is NOTHING_VARIES
        assert not step.is_one_to_wait_after()


class Graphs:
    """A backend that counts."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, graph_module: Any, inputs: Any) -> Any:
        self.n += 1
        return graph_module


def test_a_marked_first_call_is_enough_for_all_sizes() -> None:
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(lambda b: (b["ids"] * b["mask"]).sum(1), backend=graphs)
    batch, described = family_of(text)
    with DynamicDims.of(batch, described).marked(batch):
        compiled(batch)
    for n in (2, 4, 5, 30):
        assert compiled(text(n)).shape == (4,)
    assert graphs.n == 1


class WithSpare(Net):
    """A layer that training does not call, so that its parameters never get a shape."""

    def __init__(self) -> None:
        super().__init__(n_block=1)
        self.spare = nn.LazyLinear(3)


def test_a_layer_without_a_shape_keeps_nothing_from_being_compiled() -> None:
    plain, model = seeded(WithSpare), seeded(WithSpare)
    callback = hot(scope="step", fused_optimizer=True)
    fit(plain)
    fit(model, [callback])
    assert_proven(callback.report)
    assert nn.parameter.is_lazy(model.spare.weight)
    for part in ("inp", "blocks", "head"):
        assert_same(getattr(plain, part), getattr(model, part))
