"""Which steps are the same kind of step, and what changed when they are not."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn

from lightning_hotcompile.watch.signature import SignatureReader, StepSignature


class Pair(NamedTuple):
    x: Any
    y: Any


class OtherPair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Batch:
    x: Any
    n: Any = None


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 2))


def read(batch: Any, **options: Any) -> StepSignature:
    return SignatureReader(model()).read(batch, **options)


def x(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(*(shape or (8, 4)), **options)


def jagged(*lengths: int) -> Tensor:
    parts = [torch.zeros(n, 3) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


SAME: list[tuple[str, Any, Any]] = [
    ("tensor, other values", x(), x() + 1),
    ("tuple", (x(), x(8)), (x(), x(8))),
    ("list", [x(), [x(8)]], [x(), [x(8)]]),
    ("dict", {"a": x(), "b": x(8)}, {"a": x(), "b": x(8)}),
    ("namedtuple", Pair(x(), x(8)), Pair(x(), x(8))),
    ("dataclass", Batch(x(), 3), Batch(x(), 3)),
    ("None", None, None),
    ("str", "en", "en"),
    ("float, other value", (x(), 0.5), (x(), 0.7)),
    ("bytes, other value", (x(), b"a"), (x(), b"b")),
    ("any object by its type", SimpleNamespace(a=1), SimpleNamespace(a=2)),
    ("empty", (), ()),
    ("nested", {"a": [(x(), {"b": Pair(x(2), None)})]}, {"a": [(x(), {"b": Pair(x(2), None)})]}),
    ("jagged, other lengths", jagged(2, 3), jagged(4, 1)),
    ("sparse", x().to_sparse(), x().to_sparse()),
]


class Shares(nn.Module):
    """A parameter of its own, one under two names, a module under two, and one that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.one = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        self.two = nn.Linear(4, 4)
        self.two.weight = cast(nn.Linear, self.one[0]).weight
        self.again = self.one


def test_the_flags_of_all_parameters_are_read_each_once() -> None:
    module = Shares()
    reader = SignatureReader(module)
    for frozen in module.parameters():
        before = reader.read(x())
        frozen.requires_grad_(False)
        assert reader.read(x()).requires_grad != before.requires_grad
    assert reader.read(x()).requires_grad == bytes(len(list(module.parameters())))


@pytest.mark.parametrize(("one", "two"), [c[1:] for c in SAME], ids=[c[0] for c in SAME])
def test_equal_kinds_of_batches_are_equal(one: Any, two: Any) -> None:
    a, b = read(one), read(two)
    assert a == b
    assert hash(a) == hash(b)
    assert a.digest == b.digest


CHANNELS_LAST = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)

DIFFERENT: list[tuple[str, Any, Any]] = [
    ("shape", (x(8, 64),), (x(3, 64),)),
    ("dtype", x(), x(dtype=torch.float64)),
    ("device", x(), x(device="meta")),
    ("requires_grad", x(), x(requires_grad=True)),
    ("channels_last", x(2, 3, 4, 4), CHANNELS_LAST),
    ("transposed", x(4, 4), x(4, 4).t()),
    ("a key", {"a": x()}, {"b": x()}),
    ("in a dict", {"a": x(), "b": x(8)}, {"a": x(), "b": x(9)}),
    ("in a dataclass", Batch(x(2)), Batch(x(3))),
    ("in a namedtuple", Pair(x(2), None), Pair(x(3), None)),
    ("deep inside", {"a": [(x(2),)]}, {"a": [(x(3),)]}),
    ("in a tuple of one", [(x(2),)], [(x(3),)]),
    ("under a key named like a type", {"Tensor": x(2)}, {"Tensor": x(3)}),
    ("a second tensor", (x(),), (x(), x())),
    ("list or tuple", (x(),), [x()]),
    ("the class of a namedtuple", Pair(x(), x()), OtherPair(x(), x())),
    ("tensor or None", (x(8, 4),), (None,)),
    ("int", (x(), 1), (x(), 2)),
    ("str", {"lang": "en"}, {"lang": "de"}),
    ("bool", (x(), True), (x(), False)),
    ("int or float", 1, 1.0),
    ("sparse", x(3, 3), x(3, 3).to_sparse()),
    ("sparse shape", x(3, 3).to_sparse(), x(4, 3).to_sparse()),
    ("two changes", (x(2), x(3)), (x(4), x(3, dtype=torch.int64))),
]


@pytest.mark.parametrize(("one", "two"), [c[1:] for c in DIFFERENT], ids=[c[0] for c in DIFFERENT])
def test_different_batches_differ(one: Any, two: Any) -> None:
    a, b = read(one), read(two)
    assert a != b
    assert a.digest != b.digest
    assert a._replace(batch=b.batch, values=b.values) == b


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: jagged(2, 3),
        lambda: torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)]),
        lambda: torch.tensor(1.0),
        lambda: torch.zeros(0, 3),
        lambda: torch.zeros(2, 3, device="meta"),
        lambda: nn.Parameter(torch.ones(2)),
        lambda: collections.OrderedDict(a=torch.ones(2)),
        lambda: {1: torch.ones(2), ("a", 2): torch.ones(2)},
        lambda: {torch.float32, "a"},
        lambda: torch.Size([2, 3]),
        lambda: Batch,
    ],
)
def test_odd_leaves_are_read_and_hashable(make: Any) -> None:
    a, b = read(make()), read(make())
    assert a == b
    assert hash(a) == hash(b)
    assert a.digest == b.digest


def test_a_signature_keeps_no_tensor_alive() -> None:
    tensor = x()
    reference = weakref.ref(tensor)
    signature = read({"a": (tensor,)})
    del tensor
    assert reference() is None
    assert signature.digest


class TestValues:
    def test_ints_and_strings_that_vary_are_dropped_after_three_changes(self) -> None:
        reader = SignatureReader(model())
        signatures = [reader.read((x(), i, f"file{i}")) for i in range(8)]
        assert len(set(signatures[:4])) == 4
        assert len(set(signatures[4:])) == 1
        assert signatures[-1].values == ()

    def test_those_that_stay_are_kept(self) -> None:
        reader = SignatureReader(model())
        assert len({reader.read((x(), 5, "en")) for _ in range(20)}) == 1
        assert reader.read((x(), 5, "en")).values == (5, "en")

    def test_a_change_that_comes_with_another_shape_is_no_variation(self) -> None:
        reader = SignatureReader(model())
        for i in range(20):
            n = i % 2 + 1
            assert reader.read((x(n, 4), n)).values == (n,)

    def test_bools_count_always(self) -> None:
        reader = SignatureReader(model())
        signatures = {reader.read((x(), i % 2 == 0)) for i in range(20)}
        assert len(signatures) == 2

    def test_bools_count_also_beside_what_varies(self) -> None:
        reader = SignatureReader(model())
        for i in range(6):
            reader.read((x(), i, True))
        assert reader.read((x(), 7, True)) == reader.read((x(), 8, True))
        assert reader.read((x(), 7, True)) != reader.read((x(), 7, False))

    def test_the_type_still_counts_when_the_value_does_not(self) -> None:
        reader = SignatureReader(model())
        for i in range(6):
            reader.read((x(), i))
        assert reader.read((x(), 1)) != reader.read((x(), "1"))

    def test_of_a_long_list_only_the_number_and_the_types_count(self) -> None:
        reader = SignatureReader(model())
        first = reader.read((x(), [list(range(n)) for n in (100, 65)]))
        assert reader.read((x(), [[7] * n for n in (100, 65)])) == first
        assert first.values == ()
        assert reader.read((x(), [[7] * 100, [7] * 66])) != first
        assert reader.read((x(), [[7] * 100, [*range(64), "a"]])) != first
        assert reader.read((x(), [[7] * 100, [*range(64), x()]])) != first

    def test_a_new_reader_starts_afresh(self) -> None:
        reader = SignatureReader(model())
        for i in range(6):
            reader.read(i)
        assert SignatureReader(model()).read(3).values == (3,)


class TestModelState:
    def test_train_and_eval(self) -> None:
        module = model()
        reader = SignatureReader(module)
        before = reader.read(x())
        module[1].eval()
        after = reader.read(x())
        assert before != after == before._replace(training=after.training)
        module[1].train()
        assert reader.read(x()) == before

    def test_requires_grad(self) -> None:
        module = model()
        reader = SignatureReader(module)
        before = reader.read(x())
        module[0].requires_grad_(False)
        after = reader.read(x())
        assert before != after == before._replace(requires_grad=after.requires_grad)

    def test_a_new_module_is_seen_after_refresh(self) -> None:
        module = model()
        reader = SignatureReader(module)
        before = reader.read(x())
        module.append(nn.Linear(2, 2))
        reader.refresh()
        after = reader.read(x())
        assert [len(cast(bytes, flags)) for flags in (after.training, after.requires_grad)] == [5, 6]
        assert before == after._replace(training=before.training, requires_grad=before.requires_grad)

    def test_one_that_is_given_up_is_not_kept(self) -> None:
        module = model()
        reader, gone = SignatureReader(module), weakref.ref(module[0])
        del module[0]
        for _ in range(20):
            reader.read(x())
        assert gone() is None

    def test_odd_training_flags_are_read(self) -> None:
        module = model()
        module[1].training = None  # type: ignore[assignment]
        assert SignatureReader(module).read(x()) != read(x())

    def test_a_model_without_parameters(self) -> None:
        assert SignatureReader(nn.ReLU()).read(x()).requires_grad == b""


class TestModes:
    def test_autocast(self) -> None:
        reader = SignatureReader(model())
        before = reader.read(x())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = reader.read(x())
        with torch.autocast("cpu", dtype=torch.float16):
            other = reader.read(x())
        assert len({before, inside, other}) == 3
        assert inside == before._replace(autocast=(("cpu", True, torch.bfloat16),))
        assert reader.read(x()) == before

    def test_grad_mode(self) -> None:
        reader = SignatureReader(model())
        found = [reader.read(x()).grad_mode]
        with torch.no_grad():
            found.append(reader.read(x()).grad_mode)
        with torch.inference_mode():
            found.append(reader.read(x()).grad_mode)
        assert found == ["grad", "no_grad", "inference"]

    @pytest.mark.parametrize("options", [{"stage": "validate"}, {"fp8": ("on", 1)}], ids=str)
    def test_what_the_caller_tells(self, options: dict[str, Any]) -> None:
        reader = SignatureReader(model())
        told = reader.read(x(), **options)
        assert reader.read(x()) != told == reader.read(x())._replace(**options)

    def test_precision(self) -> None:
        a, b = (SignatureReader(model(), precision=p).read(x()) for p in ("32-true", "bf16-mixed"))
        assert a != b == a._replace(precision="bf16-mixed")


EVERYTHING = (
    "{'a': [torch.zeros(8, 4), (torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), None)],"
    " 'b': 'en', 'c': {'d': 3, 'e': True}, 'f': torch.eye(3).to_sparse(), 'g': object()}"
)


def test_the_digest_is_the_same_in_every_process() -> None:
    code = (
        "import torch\n"
        "from torch import nn\n"
        "from lightning_hotcompile.watch.signature import SignatureReader\n"
        "module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 2))\n"
        f"print(SignatureReader(module, '32-true').read({EVERYTHING}).digest)\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    here = SignatureReader(model(), "32-true").read(eval(EVERYTHING)).digest
    assert done.stdout.strip() == here
    assert len(here) == 12
