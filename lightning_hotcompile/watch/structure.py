"""What a batch is made of: containers, shapes, dtypes and strides as one comparable value."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_hotcompile.watch.attributes import PLAIN, attributes_of

_SUBCLASS = "Tensor as "
_VALUE_TYPES = (bool, int, str)

MANY = 64
"""Plain Python values in a list that are described one by one."""


class Member(NamedTuple):
    """A named part of a batch: an entry of a mapping, a field of a dataclass, an attribute."""

    name: str
    described: Hashable


class FamilyShape(tuple[Any, ...]):
    """The shape of a tensor in all batches of a family: a symbol in place of each size that varies."""

    __slots__ = ()


def describe(value: Any, values: list[Hashable]) -> Hashable:
    """The structure of a batch: shape, dtype, device, strides and ``requires_grad`` of each tensor.

    Bools, ints and strings are appended to ``values``; of anything else only the type counts. Of those
    in a list of more than ``MANY`` plain values (token ids, a polygon) only the number and the types count.
    """
    if type(value) is Tensor:
        return _describe_tensor(value)
    if isinstance(value, Tensor):
        described = _describe_tensor(value)
        return described if _is_traceable(type(value)) else (_SUBCLASS + type(value).__name__, described)
    if isinstance(value, (tuple, list)):
        if len(value) > MANY and (kinds := set(map(type, value))).issubset(PLAIN):
            return (type(value).__name__, len(value), "many", *sorted(kind.__name__ for kind in kinds))
        return (type(value).__name__, *[describe(item, values) for item in value])
    if isinstance(value, Mapping):
        entries = [Member(str(key), describe(item, values)) for key, item in value.items()]
        return (type(value).__name__, *entries)
    if isinstance(value, PLAIN):
        if isinstance(value, _VALUE_TYPES):
            values.append(value)
        return type(value).__name__
    if members := _named_parts(value):
        entries = [Member(name, describe(item, values)) for name, item in members.items()]
        return (type(value).__name__, *entries)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _named_parts(value: Any) -> Mapping[str, Any]:
    """The fields of a dataclass, or what another object holds."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return attributes_of(value)


def _describe_tensor(tensor: Tensor) -> Hashable:
    if tensor.is_nested:  # its sizes belong to this one tensor, not to a kind of tensors
        return ("Tensor", "nested", tensor.dtype, tensor.device, tensor.requires_grad, str(tensor.layout))
    if tensor.layout is not torch.strided:
        return ("Tensor", tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, str(tensor.layout))
    strides = "contiguous" if tensor.is_contiguous() else tensor.stride()
    return ("Tensor", tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, strides)


def _is_traceable(kind: type[Tensor]) -> bool:
    """Whether compiled code takes tensors of this type: plain ones, and those that tell what is in them."""
    return kind in (Tensor, nn.Parameter, nn.Buffer) or hasattr(kind, "__tensor_flatten__")


def untraceable_in(described: Any, path: str = "batch") -> Iterator[tuple[str, str]]:
    """Place and name of the type of each tensor of a described batch that compiled code cannot take.

    A subclass of Tensor says by ``__tensor_flatten__`` which tensors it is made of; of others AOTAutograd
    finds no operation that would take them, when the code runs for the first time.
    """
    if not isinstance(described, tuple) or not described:
        return
    name = described[0]
    if isinstance(name, str) and name.startswith(_SUBCLASS):
        yield path, name.removeprefix(_SUBCLASS)
        return
    for place, item in _members(described):
        yield from untraceable_in(item, f"{path}.{place}")


def _members(described: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Names, or numbers, and descriptions of what a described container holds."""
    for index, item in enumerate(described[1:]):
        yield (item.name, item.described) if isinstance(item, Member) else (str(index), item)


def is_strided(described: Any) -> bool:
    """Whether this describes one ordinary tensor: not nested, not sparse."""
    return (
        isinstance(described, tuple)
        and len(described) == 6
        and isinstance(described[1], (torch.Size, FamilyShape))
        and (isinstance(described[5], tuple) or described[5] == "contiguous")
    )


def shapes_in(described: Any, path: str = "batch") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Place and shape of each ordinary tensor of a described batch, in order."""
    if is_strided(described):
        yield path, described[1]
    elif isinstance(described, tuple):
        for place, item in _members(described):
            yield from shapes_in(item, f"{path}.{place}")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The ordinary tensors of a batch, in the order in which it is described."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_nested:
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif not isinstance(value, PLAIN):
        for item in _named_parts(value).values():
            yield from tensors_in(item)
