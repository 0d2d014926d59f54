"""The module tree as groups of structurally equal blocks, and the heavy subtrees that remain."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from lightning_hotcompile.plan.obstacles import holds_bounded_deque

MIN_PARAMETERS = 512
"""A subtree that does not repeat and has fewer parameters is too small to be a region of its own."""

# A setting that is an object of its own may print its address, which differs between equal blocks.
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One module that can be compiled, with the key of its structural group."""

    name: str
    class_name: str
    structure: str
    parameters: int
    repeated: bool


@dataclass(frozen=True, kw_only=True)
class LeftEager:
    """One module that is not compiled, and why."""

    name: str
    class_name: str
    reason: str


def structure_of(module: nn.Module) -> str:
    """A digest of what decides whether two modules can share one compiled function.

    Class names and settings (``extra_repr``, where it can be had) of all submodules, names, shapes and
    dtypes of all parameters and buffers; never their values. Equal in every process.
    """
    parts = [
        (name, type(m).__module__, type(m).__qualname__, "" if list(m.children()) else _settings(m))
        for name, m in module.named_modules()
    ]
    tensors = [*module.named_parameters(), *module.named_buffers()]
    shapes = [(name, _shape(t), str(t.dtype)) for name, t in tensors]
    return hashlib.blake2b(repr((parts, shapes)).encode(), digest_size=8).hexdigest()


_KINDS = 8
"""So many kinds of equal blocks may differ by numbers alone: as many as Dynamo compiles one piece of code."""


def _own_numbers(modules: list[nn.Module]) -> list[tuple[int, ...]]:
    """By what structurally equal modules differ: whole numbers that do not merely count them."""
    each = [
        {(name, key): v for name, m in module.named_modules() for key, v in vars(m).items() if type(v) is int}
        for module in modules
    ]
    shared = [key for key in each[0] if all(key in numbers for numbers in each)]
    differ = [key for key in shared if not _is_index([numbers[key] for numbers in each])]
    return [tuple(numbers[key] for key in differ) for numbers in each]


def _is_index(values: list[int]) -> bool:
    """Whether these are one number, or go on by the same step, as ``layer_idx`` does."""
    steps = {after - before for before, after in pairwise(values)}
    return steps <= {0} or steps == {1} or (len(steps) == 1 and len(values) > 2)


def _settings(module: nn.Module) -> str:
    try:
        return _ADDRESS.sub("", module.extra_repr())
    except Exception:  # noqa: BLE001  # it may read what only another constructor, or the first call, sets
        return ""


def _shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """``None`` for a parameter that gets its shape at the first call."""
    return None if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called: a ``ModuleList`` or ``ModuleDict`` cannot."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def why_not_compiled(module: nn.Module) -> str | None:
    """A reason why this module can never be a region, or ``None``."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is a TorchScript module"
    # among the children, where torch.compile(module) has it: hasattr would ask a __getattr__ of the user's
    if module._compiled_call_impl is not None or "_orig_mod" in dict(module.named_children()):
        return "is compiled already by the user"
    if holds_bounded_deque(module):
        return "holds a deque with maxlen, which Dynamo takes for one without"
    if any(map(holds_bounded_deque, module.modules())):
        return _DEQUE_BELOW
    if has_foreign_hooks(module):
        return _HAS_HOOKS
    return None


_DEQUE_BELOW = "a module below it holds a deque with maxlen, which Dynamo takes for one without"
_HAS_HOOKS = "has hooks, which would be traced into the graph"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_foreign_hooks(module: nn.Module) -> bool:
    """Whether somebody registered hooks on the module or below it.

    Torch's own hooks (``weight_norm``, ``spectral_norm``) are tensor code and compile well.
    """
    hooks = (hook for m in module.modules() for kind in _HOOKS for hook in getattr(m, kind).values())
    return any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)


def count_parameters(module: nn.Module) -> int:
    """Number of parameter elements; a parameter that is not materialised yet counts as 0."""
    return sum(p.numel() for p in module.parameters() if not nn.parameter.is_lazy(p))


def modules_inside(root: nn.Module, names: Collection[str]) -> frozenset[int]:
    """The ``id`` of each named module and of all that hangs below it."""
    return frozenset(id(m) for name in names for m in root.get_submodule(name).modules())


def find_regions(
    root: nn.Module, islands: Collection[str] = (), min_parameters: int = MIN_PARAMETERS
) -> tuple[tuple[Block, ...], tuple[LeftEager, ...]]:
    """Split the tree below ``root`` into blocks to compile and modules that stay eager.

    A block is the topmost callable module with children whose structure occurs more than once,
    or the topmost other subtree that is large enough. The root itself is never a block: a
    LightningModule's ``training_step`` need not call its ``forward``.

    Returns:
        The blocks and the modules left eager, both in the order of ``named_modules``.
    """
    return _Search(root, frozenset(islands), min_parameters).run()


class _Search:
    def __init__(self, root: nn.Module, islands: frozenset[str], min_parameters: int) -> None:
        self._root = root
        self._eager = modules_inside(root, islands)
        self._min_parameters = min_parameters
        # By identity, not by name: a module may hang in two places.
        self._structures = {
            id(m): structure_of(m) for m in root.modules() if m is not root and list(m.children())
        }
        self._times = Counter(self._structures.values())
        self._apart = self._told_apart()
        self._blocks: list[Block] = []
        self._left: list[LeftEager] = []
        self._seen: set[int] = set()

    def run(self) -> tuple[tuple[Block, ...], tuple[LeftEager, ...]]:
        if id(self._root) not in self._eager:
            for name, child in self._root.named_children():
                self._visit(name, child)
        return tuple(self._blocks), tuple(self._left)

    def _visit(self, name: str, module: nn.Module) -> None:
        if id(module) in self._eager or id(module) in self._seen:
            return
        self._seen.add(id(module))  # a module that hangs in two places is one region
        reason, children = why_not_compiled(module), list(module.children())
        if reason is not None and not (children and reason in (_HAS_HOOKS, _DEQUE_BELOW)):
            self._leave(name, module, reason)
        elif not children:
            self._leave(name, module, "too small: a single operation gains nothing by itself")
        elif reason is None and self._is_block(module):
            self._take(name, module)
        else:
            for child_name, child in module.named_children():
                self._visit(f"{name}.{child_name}", child)

    def _is_block(self, module: nn.Module) -> bool:
        if not has_forward(module):
            return False
        inner_repeats = any(self._times[structure] > 1 for structure in self._inside(module))
        holds_islands = any(id(m) in self._eager for m in module.modules())
        if self._times[self._structures[id(module)]] > 1:
            return not (inner_repeats and holds_islands)
        if inner_repeats:
            return False
        return count_parameters(module) >= self._min_parameters

    def _inside(self, module: nn.Module) -> Iterator[str]:
        inside = (id(m) for m in module.modules() if m is not module)
        return (self._structures[i] for i in inside if i in self._structures)

    def _take(self, name: str, module: nn.Module) -> None:
        structure = self._structures[id(module)]
        self._blocks.append(
            Block(
                name=name,
                class_name=type(module).__name__,
                structure=structure + self._apart.get(id(module), ""),
                parameters=count_parameters(module),
                repeated=self._times[structure] > 1,
            )
        )

    def _told_apart(self) -> dict[int, str]:
        """Equal blocks with different numbers, such as the periods of discriminators, are no group.

        What is compiled for all of them would have a symbol in place of the number, and sizes made of it.
        Where there are many numbers, such as seeds, that is better than as many compiles.
        """
        alike: dict[str, list[nn.Module]] = {}
        for module in self._root.modules():
            if self._times[self._structures.get(id(module), "")] > 1:
                alike.setdefault(self._structures[id(module)], []).append(module)
        apart = {}
        for modules in alike.values():
            found = _own_numbers(modules)
            if len(set(found)) <= _KINDS:
                apart.update({id(m): f" with {own}" for m, own in zip(modules, found, strict=True) if own})
        return apart

    def _leave(self, name: str, module: nn.Module, reason: str) -> None:
        self._left.append(LeftEager(name=name, class_name=type(module).__name__, reason=reason))
