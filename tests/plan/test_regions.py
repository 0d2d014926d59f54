"""The module tree as groups of equal blocks and the heavy subtrees that remain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hotcompile.plan.regions import (
    MIN_PARAMETERS,
    count_parameters,
    find_regions,
    has_forward,
    modules_inside,
    structure_of,
    why_not_compiled,
)


class Block(nn.Module):
    def __init__(self, d: int = 8, act: type[nn.Module] = nn.GELU, p: float = 0.0) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(d, 4 * d), act()
        self.down, self.drop = nn.Linear(4 * d, d), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.act(self.up(x))))


class Stack(nn.Module):
    """Callable, with repeated blocks inside."""

    def __init__(self, depth: int = 2, d: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Root(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def blocks_of(root: nn.Module, **options: Any) -> list[str]:
    return [b.name for b in find_regions(root, **options)[0]]


def left_of(root: nn.Module, **options: Any) -> dict[str, str]:
    return {m.name: m.reason for m in find_regions(root, **options)[1]}


class TestStructure:
    def test_equal_blocks_with_other_values_are_equal(self) -> None:
        one, two = Block(), Block()
        two.eval()
        two.up.weight.requires_grad_(False)
        assert structure_of(one) == structure_of(two)

    @pytest.mark.parametrize(
        "other",
        [
            lambda: Block(16),
            lambda: Block(act=nn.ReLU),
            lambda: Block(p=0.1),
            lambda: Block().double(),
            lambda: Root(b=Block()),
            lambda: Block().down,
        ],
    )
    def test_what_is_built_differently_differs(self, other: Any) -> None:
        assert structure_of(Block()) != structure_of(other())

    def test_the_same_number_of_parameters_is_not_enough(self) -> None:
        one, two = nn.Linear(4, 9, bias=False), nn.Linear(9, 4, bias=False)
        assert count_parameters(one) == count_parameters(two)
        assert structure_of(one) != structure_of(two)

    def test_buffers_count(self) -> None:
        one, two = Block(), Block()
        two.register_buffer("mask", torch.ones(3))
        assert structure_of(one) != structure_of(two)

    def test_a_class_of_the_same_name_from_elsewhere_differs(self) -> None:
        other = type("Block", (Block,), {"__module__": "somewhere.else", "__qualname__": "Block"})
        assert structure_of(Block()) != structure_of(other())

    def test_a_lazy_module_has_a_structure(self) -> None:
        lazy = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
        assert structure_of(lazy) == structure_of(nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()))
        before = structure_of(lazy)
        lazy(torch.ones(4, 5))
        assert structure_of(lazy) != before
        assert count_parameters(nn.LazyLinear(3, bias=False)) == 0

    def test_an_address_in_the_settings_does_not_tell_blocks_apart(self) -> None:
        class Activated(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.function = lambda x: x

            def extra_repr(self) -> str:
                return f"function={self.function}"

        one, two = Activated(), Activated()
        assert one.extra_repr() != two.extra_repr()
        assert structure_of(one) == structure_of(two)


class TestFacts:
    @pytest.mark.parametrize(
        ("module", "expected"),
        [
            (nn.Linear(2, 2), True),
            (nn.Sequential(), True),
            (nn.ModuleList(), False),
            (nn.ModuleDict(), False),
            (nn.ParameterList(), False),
            (nn.Module(), False),
        ],
    )
    def test_has_forward(self, module: nn.Module, expected: bool) -> None:
        assert has_forward(module) is expected

    def test_a_forward_of_the_instance_counts(self) -> None:
        module = nn.Module()
        module.forward = lambda x: x
        assert has_forward(module)

    def test_what_the_user_compiled_is_left_alone(self) -> None:
        module = Block()
        assert why_not_compiled(module) is None
        module.compile(backend="eager")
        assert "already" in str(why_not_compiled(module))
        assert "already" in str(why_not_compiled(torch.compile(Block(), backend="eager")))  # type: ignore[arg-type]

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_torchscript_is_left_alone(self) -> None:
        scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
        assert why_not_compiled(scripted) == "is a TorchScript module"

    def test_shared_parameters_count_once(self) -> None:
        root = Root(a=nn.Linear(3, 3, bias=False), b=nn.Linear(3, 3, bias=False))
        root.b.weight = root.a.weight
        assert count_parameters(root) == 9

    def test_modules_inside(self) -> None:
        root = Stack(2)
        assert modules_inside(root, ["blocks.0"]) == {id(m) for m in root.blocks[0].modules()}
        assert modules_inside(root, []) == frozenset()


class TestRepeatedBlocks:
    @pytest.mark.parametrize(
        "container",
        [
            lambda: nn.ModuleList(Block() for _ in range(3)),
            lambda: nn.ModuleDict({str(i): Block() for i in range(3)}),
            lambda: nn.Sequential(*(Block() for _ in range(3))),
        ],
        ids=["ModuleList", "ModuleDict", "Sequential"],
    )
    def test_in_any_container(self, container: Any) -> None:
        root = Root(blocks=container(), head=nn.Linear(8, 2))
        assert blocks_of(root) == ["blocks.0", "blocks.1", "blocks.2"]
        assert all(b.repeated and b.class_name == "Block" for b in find_regions(root)[0])
        assert left_of(root) == {"head": "too small: a single operation gains nothing by itself"}

    def test_equal_blocks_have_equal_structures(self) -> None:
        blocks = find_regions(Root(a=Stack(2), b=Block(16), c=Block(16)))[0]
        assert [b.structure for b in blocks[:2]] == [blocks[0].structure] * 2
        assert blocks[2].structure == blocks[3].structure != blocks[0].structure

    def test_small_blocks_count_if_they_repeat(self) -> None:
        root = Root(a=Block(1), b=Block(1))
        assert count_parameters(root.a) < MIN_PARAMETERS
        assert blocks_of(root) == ["a", "b"]

    def test_repeats_of_repeats_are_taken_at_the_top(self) -> None:
        assert blocks_of(Root(a=Stack(2), b=Stack(2))) == ["a", "b"]

    def test_a_stack_that_does_not_repeat_is_split(self) -> None:
        assert blocks_of(Root(net=Stack(3))) == [f"net.blocks.{i}" for i in range(3)]

    def test_repeats_under_different_parents(self) -> None:
        assert blocks_of(Root(a=Stack(1), b=Root(block=Block()))) == ["a.blocks.0", "b.block"]

    def test_repeated_leaves_are_no_blocks(self) -> None:
        assert blocks_of(Root(a=nn.Linear(64, 64), b=nn.Linear(64, 64))) == []


class Numbered(nn.Module):
    """Blocks of one structure, each with a number of its own."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in numbers)
        for block, number in zip(self.blocks, numbers, strict=True):
            block.number = number


class TestNumbersOfBlocks:
    """One compiled function for all would have a symbol in place of a number in which they differ."""

    @pytest.mark.parametrize("numbers", [(0, 1), (0, 1, 2, 3), (64, 128, 192), (7, 7, 7)])
    def test_an_index_or_one_number_leaves_one_group(self, numbers):
        blocks, _ = find_regions(Numbered(*numbers))
        assert len({block.structure for block in blocks}) == 1
        assert all(block.repeated for block in blocks)

    def test_other_numbers_make_blocks_of_their_own(self):
        blocks, _ = find_regions(Numbered(2, 3, 5, 7, 11))
        assert len({block.structure for block in blocks}) == 5
        assert all(block.repeated for block in blocks)

    def test_blocks_of_many_numbers_stay_a_group(self):
        blocks, _ = find_regions(Numbered(*(7 * n**2 for n in range(12))))
        assert len({block.structure for block in blocks}) == 1

    def test_those_with_one_number_stay_a_group(self):
        blocks, _ = find_regions(Numbered(0, 4, 0, 4))
        first, second, third, fourth = (block.structure for block in blocks)
        assert (first, second) == (third, fourth)
        assert first != second

    def test_what_some_have_not_is_no_matter(self):
        root = Numbered(2, 3, 5)
        del root.blocks[1].number
        blocks, _ = find_regions(root)
        assert len({block.structure for block in blocks}) == 1


class TestOtherSubtrees:
    def test_a_large_one_is_a_block_and_a_small_one_is_searched(self) -> None:
        root = Root(large=Block(16), small=Block(2))
        assert blocks_of(root) == ["large"]
        assert set(left_of(root)) == {"small.up", "small.act", "small.down", "small.drop"}

    def test_the_least_size(self) -> None:
        block = Block(8)
        n = count_parameters(block)
        assert blocks_of(Root(a=block), min_parameters=n) == ["a"]
        assert blocks_of(Root(a=block), min_parameters=n + 1) == []

    def test_the_root_is_never_a_block(self) -> None:
        assert blocks_of(Block(64)) == []

    def test_what_the_user_compiled_is_left_with_its_reason(self) -> None:
        root = Root(a=Block(16))
        root.a.compile(backend="eager")
        assert blocks_of(root) == []
        assert left_of(root) == {"a": "is compiled already by the user"}

    def test_an_empty_module_has_nothing(self) -> None:
        assert find_regions(nn.Module()) == ((), ())


def watch(module: nn.Module, args: Any, output: Any) -> None:
    pass


class TestHooks:
    def test_a_block_with_a_hook_is_left_and_the_others_are_taken(self) -> None:
        root = Root(net=Stack(3))
        root.net.blocks[1].register_forward_hook(watch)
        assert blocks_of(root) == ["net.blocks.0", "net.blocks.2"]

    def test_a_hook_deep_inside_counts(self) -> None:
        root = Root(net=Stack(3))
        root.net.blocks[1].down.register_forward_hook(watch)
        assert blocks_of(root) == ["net.blocks.0", "net.blocks.2"]
        assert left_of(root)["net.blocks.1.down"] == "has hooks, which would be traced into the graph"
        assert "too small" in left_of(root)["net.blocks.1.up"]

    def test_a_hook_above_does_not(self) -> None:
        root = Root(net=Stack(3))
        root.net.register_forward_hook(watch)
        assert blocks_of(root) == [f"net.blocks.{i}" for i in range(3)]

    @pytest.mark.parametrize(
        "register",
        [
            "register_forward_hook",
            "register_forward_pre_hook",
            "register_full_backward_hook",
            "register_full_backward_pre_hook",
        ],
    )
    def test_hooks_of_every_kind(self, register: str) -> None:
        block = Block()
        handle = getattr(block.up, register)(watch)
        assert "hooks" in str(why_not_compiled(block))
        handle.remove()
        assert why_not_compiled(block) is None

    def test_hooks_of_torch_compile_well(self) -> None:
        block = Block()
        block.up = nn.utils.spectral_norm(block.up)
        assert block.up._forward_pre_hooks
        assert why_not_compiled(block) is None


class TestIslands:
    def test_an_island_is_neither_block_nor_left(self) -> None:
        root = Root(blocks=nn.ModuleList(Block() for _ in range(3)))
        assert blocks_of(root, islands=["blocks.1"]) == ["blocks.0", "blocks.2"]
        assert left_of(root, islands=["blocks.1"]) == {}

    def test_a_repeated_block_that_holds_one_stays_a_block(self) -> None:
        root = Root(a=Block(), b=Block())
        assert blocks_of(root, islands=["a.up", "b.up"]) == ["a", "b"]

    def test_a_repeated_parent_that_loops_over_blocks_with_islands_is_split(self) -> None:
        # A graph break inside of a loop loses the whole frame.
        root = Root(a=Stack(2), b=Stack(2))
        islands = [f"{s}.blocks.{i}.up" for s in "ab" for i in range(2)]
        assert blocks_of(root, islands=islands) == [f"{s}.blocks.{i}" for s in "ab" for i in range(2)]

    def test_an_island_at_the_root_leaves_nothing(self) -> None:
        assert find_regions(Root(a=Block(16)), islands=[""]) == ((), ())


class TestTied:
    def test_one_module_in_two_places_is_one_region(self) -> None:
        shared = Block(16)
        assert blocks_of(Root(a=shared, c=nn.ModuleList([shared]))) == ["a"]

    def test_it_does_not_count_as_repeated(self) -> None:
        shared = Block(1)
        assert blocks_of(Root(a=shared, c=nn.ModuleList([shared]))) == []

    def test_one_that_first_hangs_inside_of_a_block(self) -> None:
        shared = Block(16)
        root = Root(encoder=nn.Sequential(shared, nn.ReLU()), extra=nn.ModuleList([shared]))
        assert blocks_of(root) == ["encoder", "extra.0"]

    def test_an_island_stays_one_by_its_other_name(self) -> None:
        shared = Block(16)
        assert blocks_of(Root(a=shared, c=nn.ModuleList([shared])), islands=["a"]) == []

    def test_tied_weights_are_no_tied_modules(self) -> None:
        root = Root(a=Block(16), b=Block(16))
        root.b.up.weight = root.a.up.weight
        assert blocks_of(root) == ["a", "b"]
