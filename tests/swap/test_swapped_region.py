"""Compiled callables in a model: put in place, used as the gate says, taken out without a trace."""

from __future__ import annotations

import copy
import pickle
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import InternalTorchDynamoError
from torch.utils.flop_counter import FlopCounterMode

from lightning_hotcompile.errors import TargetError
from lightning_hotcompile.plan.regions import why_not_compiled
from lightning_hotcompile.plan.scopes import Region
from lightning_hotcompile.swap.gate import Gate, Lane
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.swapped_region import SwappedRegion
from tests import functions
from tests.elsewhere import compiling_elsewhere
from tests.models import Block, Net


class Setup:
    """A model of three blocks with one region, a gate and a witness."""

    def __init__(self, kind: str = "group", members: Any = None, backend: Any = "aot_eager") -> None:
        torch.manual_seed(0)
        self.root = nn.Sequential(*(Block(8) for _ in range(3)))
        names = tuple(members or ("0", "1", "2"))
        region = Region(name="region", kind=kind, members=names, class_name="Block")
        self.gate = Gate()
        self.witness = Witness(backend)
        self.swapped = SwappedRegion(region, self.gate, self.witness, dynamic=None, fullgraph=False)
        self.x = torch.randn(4, 8, requires_grad=True)  # as each block but the first has it

    def run(self, lane: Lane = Lane.COMPILE) -> Tensor:
        self.gate.open(lane)
        try:
            return self.root(self.x)
        finally:
            self.gate.close()


class TestModules:
    def test_one_compile_serves_all_blocks_of_a_group(self) -> None:
        setup = Setup()
        expected = setup.run(Lane.EAGER)
        setup.swapped.put(setup.root)
        torch.testing.assert_close(setup.run(), expected)
        assert len(setup.witness.graphs) == 1
        assert setup.witness.runs_of("region") == 3

    def test_a_builtin_module_is_compiled_too(self) -> None:
        setup = Setup(members=["0.up"])
        setup.swapped.put(setup.root)
        setup.run()
        assert setup.witness.runs_of("region") == 1

    @pytest.mark.parametrize(("lane", "runs"), [(Lane.EAGER, 0), (Lane.REUSE, 0), (Lane.COMPILE, 3)])
    def test_the_gate_decides(self, lane: Lane, runs: int) -> None:
        setup = Setup()
        expected = setup.run(Lane.EAGER)
        setup.swapped.put(setup.root)
        torch.testing.assert_close(setup.run(lane), expected)
        assert setup.witness.watch.total_runs == runs

    def test_reuse_runs_what_was_compiled(self) -> None:
        setup = Setup()
        setup.swapped.put(setup.root)
        setup.run()
        setup.run(Lane.REUSE)
        setup.x = torch.randn(2, 3, 8)  # not compiled for, and not allowed to be
        setup.run(Lane.REUSE)
        assert (len(setup.witness.graphs), setup.witness.watch.total_runs) == (1, 6)

    def test_what_another_thread_compiles_is_no_reason_to_be_eager(self) -> None:
        setup = Setup()
        setup.swapped.put(setup.root)
        with compiling_elsewhere():
            setup.run()
            setup.run(Lane.REUSE)
        assert (len(setup.witness.graphs), setup.witness.watch.total_runs) == (1, 6)

    def test_what_is_traced_around_it_is_traced_through_it(self) -> None:
        setup = Setup()
        setup.swapped.put(setup.root)
        of_others: list[torch.fx.GraphModule] = []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            of_others.append(graph)
            return graph

        setup.gate.open(Lane.COMPILE)
        torch.compile(lambda x: setup.root(x), backend=backend, fullgraph=True)(setup.x)
        torch.export.export(setup.root, (setup.x,), strict=False)
        setup.gate.close()
        assert (len(of_others), setup.witness.graphs) == (1, [])

    def test_where_a_mode_sees_each_operation_nothing_is_lost_for_what_the_user_compiles(self) -> None:
        setup, graphs = Setup(), list[torch.fx.GraphModule]()
        setup.swapped.put(setup.root)

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            graphs.append(graph)
            return graph

        with FlopCounterMode(display=False):
            setup.run()
        setup.swapped.take_out()
        torch.compile(Block.forward, backend=backend)(setup.root[0], setup.x)
        assert (setup.witness.graphs, len(graphs)) == ([], 1)

    def test_outside_of_a_step_all_is_eager(self) -> None:
        setup = Setup()
        setup.swapped.put(setup.root)
        setup.root(setup.x)
        assert setup.witness.graphs == []

    def test_taking_it_out_leaves_the_modules_as_they_were(self) -> None:
        setup = Setup()
        before = [dict(vars(m)) for m in setup.root.modules()]
        keys = list(setup.root.state_dict())
        setup.swapped.put(setup.root)
        assert setup.swapped.is_in_place
        assert list(setup.root.state_dict()) == keys
        setup.run()
        setup.swapped.take_out()
        setup.swapped.take_out()
        assert not setup.swapped.is_in_place
        after = [vars(m) for m in setup.root.modules()]
        for old, new in zip(before, after, strict=True):
            assert {k: v for k, v in old.items() if k != "_compiled_call_impl"} == {
                k: v for k, v in new.items() if k != "_compiled_call_impl"
            }
            assert new.get("_compiled_call_impl") is None

    def test_what_the_user_has_compiled_since_stays(self) -> None:
        setup = Setup()
        setup.swapped.put(setup.root)
        setup.root[1].compile(backend="eager")
        theirs = setup.root[1]._compiled_call_impl
        setup.swapped.take_out()
        assert [m._compiled_call_impl for m in setup.root] == [None, theirs, None]

    def test_it_can_be_put_again(self) -> None:
        setup = Setup()
        for _ in range(2):
            setup.swapped.put(setup.root)
            setup.run()
            setup.swapped.take_out()
        assert setup.witness.runs_of("region") == 6

    def test_a_name_that_is_gone_leaves_nothing_half_done(self) -> None:
        setup = Setup(members=("0", "1", "7"))
        with pytest.raises(AttributeError):
            setup.swapped.put(setup.root)
        assert not setup.swapped.is_in_place
        assert all(m._compiled_call_impl is None for m in setup.root.modules())

    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_copies_are_eager_and_have_weights_of_their_own(self, clone: Any) -> None:
        setup = Setup()
        setup.swapped.put(setup.root)
        other = clone(setup.root)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        setup.gate.open(Lane.COMPILE)
        assert torch.equal(other(setup.x), setup.x)
        setup.gate.close()
        assert setup.witness.watch.total_runs == 0

    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_copies_of_a_lightning_module_are_plain(self, clone: Any) -> None:
        setup = Setup()
        setup.root[1] = net = Net(width=8)
        setup.swapped.put(setup.root)
        other = clone(net)
        assert net._compiled_call_impl is not None
        assert why_not_compiled(other) is None
        x = torch.randn(4, 8)
        assert torch.equal(other(x), net(x))
        setup.gate.open(Lane.COMPILE)
        other(x)
        setup.gate.close()
        assert setup.witness.watch.total_runs == 0

    def test_who_opens_a_pickled_copy_needs_nothing_of_this_package(self) -> None:
        setup = Setup()
        setup.root[1] = Net(width=8)
        setup.swapped.put(setup.root)
        assert b"hotcompile" not in pickle.dumps(setup.root)

    def test_hooks_run_once_a_call(self) -> None:
        setup, calls = Setup(), []
        setup.root[1].register_forward_hook(lambda *_: calls.append(1))
        setup.swapped.put(setup.root)
        for lane in (Lane.COMPILE, Lane.REUSE, Lane.EAGER):
            setup.run(lane)
        assert len(calls) == 3

    def test_a_backend_that_fails_leaves_the_region_eager(self) -> None:
        def refuses(graph: Any, inputs: Any, **_: Any) -> Any:
            raise RuntimeError("not today")

        setup = Setup(backend=refuses)
        expected = setup.run(Lane.EAGER)
        setup.swapped.put(setup.root)
        assert torch.equal(setup.run(), expected)
        assert setup.witness.error_of("region") == "RuntimeError: not today"

    def test_an_error_of_the_users_is_theirs_and_the_code_ran_once(self) -> None:
        calls: list[int] = []

        class Fails(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                calls.append(1)
                torch._dynamo.graph_break()
                raise ValueError("mine")

        setup = Setup(members=("0",))
        setup.root = nn.Sequential(Fails())
        setup.swapped.put(setup.root)
        with pytest.raises(ValueError, match="mine"):
            setup.run()
        assert calls == [1]
        assert setup.swapped.error is None

    def test_nor_does_code_run_twice_for_an_error_of_the_compilers_after_a_graph_break(self) -> None:
        calls: list[int] = []

        class Fails(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                calls.append(1)
                torch._dynamo.graph_break()
                raise InternalTorchDynamoError("of a later frame")

        setup = Setup(members=("0",))
        setup.root = nn.Sequential(Fails())
        setup.swapped.put(setup.root)
        with pytest.raises(InternalTorchDynamoError, match="of a later frame"):
            setup.run()
        assert calls == [1]
        assert setup.swapped.error == "InternalTorchDynamoError: of a later frame"

    def test_an_error_of_the_compilers_that_comes_first_is_answered_by_eager(self) -> None:
        setup = Setup()
        expected = setup.run(Lane.EAGER)
        setup.swapped.put(setup.root)
        compiled = setup.swapped._compiled_call
        assert compiled is not None

        def fails(*_: Any) -> Any:
            raise InternalTorchDynamoError("of the first frame")

        compiled.compile = fails
        assert torch.equal(setup.run(), expected)
        assert setup.swapped.error == "InternalTorchDynamoError: of the first frame"


class TestFunctions:
    TARGET = "tests.functions:scaled"

    @pytest.fixture
    def importer(self, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
        """Another module with ``from tests.functions import scaled as shrink``."""
        module = types.ModuleType("tests_importer")
        module.shrink = functions.scaled  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "tests_importer", module)
        return module

    def test_it_is_replaced_wherever_it_was_imported_and_put_back(self, importer: Any) -> None:
        original = functions.scaled
        setup = Setup("function", [self.TARGET])
        setup.swapped.put(setup.root)
        assert functions.scaled is importer.shrink
        assert functions.scaled is not original
        assert functions.scaled.__wrapped__ is original
        setup.gate.open(Lane.COMPILE)
        for call in (functions.scaled, importer.shrink):
            torch.testing.assert_close(call(torch.ones(2)), torch.ones(2))
        setup.gate.close()
        assert (len(setup.witness.graphs), setup.witness.watch.total_runs) == (1, 2)
        setup.swapped.take_out()
        assert functions.scaled is importer.shrink is original

    def test_an_inherited_method_is_inherited_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Heir(functions.Scaler):
            pass

        monkeypatch.setattr(functions, "Heir", Heir, raising=False)
        setup = Setup("function", ["tests.functions:Heir.scale"])
        setup.swapped.put(setup.root)
        assert "scale" in vars(Heir)
        setup.swapped.take_out()
        assert "scale" not in vars(Heir)

    def test_what_somebody_else_has_put_there_since_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        setup = Setup("function", [self.TARGET])
        setup.swapped.put(setup.root)

        def other(x: torch.Tensor) -> torch.Tensor:
            return x

        monkeypatch.setattr(functions, "scaled", other)
        setup.swapped.take_out()
        assert functions.scaled is other

    def test_put_again_it_finds_its_compiled_code(self) -> None:
        setup = Setup("function", [self.TARGET])
        runs = []
        for lane in (Lane.COMPILE, Lane.REUSE, Lane.REUSE):
            setup.swapped.put(setup.root)
            setup.gate.open(lane)
            functions.scaled(torch.ones(2))
            setup.gate.close()
            setup.swapped.take_out()
            runs.append(setup.witness.watch.total_runs)
        assert runs == [1, 2, 3]
        assert len(setup.witness.graphs) == 1

    def test_outside_of_a_step_it_is_the_users(self) -> None:
        setup = Setup("function", [self.TARGET])
        setup.swapped.put(setup.root)
        functions.scaled(torch.ones(2))
        setup.swapped.take_out()
        assert setup.witness.graphs == []

    def test_a_method_of_a_class(self) -> None:
        original = Block.forward
        setup = Setup("function", ["tests.models:Block.forward"])
        expected = setup.run(Lane.EAGER)
        setup.swapped.put(setup.root)
        torch.testing.assert_close(setup.run(), expected)
        assert setup.witness.runs_of("region") == 3
        setup.swapped.take_out()
        assert Block.forward is original

    def test_one_that_is_gone_changes_nothing(self) -> None:
        original = functions.scaled
        setup = Setup("function", ["tests.functions:scald"])
        with pytest.raises(TargetError, match="did you mean 'scaled'"):
            setup.swapped.put(setup.root)
        assert functions.scaled is original
        assert not setup.swapped.is_in_place
