"""An optimizer in words: what its compiled step depends on, and no data of its tensors.

Dynamo captures an optimizer's step again from what is said here, and the graph is the same one: the class,
the hyperparameters, and how parameters, gradients and state look. The words are JSON, so that reading
them runs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hotcompile.plan.optimizers import COMPILABLE
from lightning_hotcompile.swap.optimizers.gradients import usual_strides
from lightning_hotcompile.swap.prewarm.symbols import NotPortable
from lightning_hotcompile.swap.prewarm.tensor_spec import TensorSpec, refuse_shared_memory

_PLAIN = (bool, int, float, str, type(None))
_MAY_BE_TENSOR = ("lr", "initial_lr")


def describe(optimizer: Optimizer) -> str:
    """An optimizer as JSON, at a moment when its gradients and its state are there.

    Raises:
        NotPortable: it has something that cannot be described.
    """
    kind = type(optimizer)
    if kind.__name__ not in COMPILABLE or getattr(torch.optim, kind.__name__, None) is not kind:
        raise NotPortable(f"{kind.__name__} is not one of torch.optim's multi-tensor optimizers")
    parameters = _parameters_of(optimizer)
    said = {
        "class": kind.__name__,
        "parameters": [{"tensor": _tensor("a parameter", p), "grad": _gradient(p)} for p in parameters],
        "groups": _groups_of(optimizer, parameters),
        "state": _state_of(optimizer, parameters),
    }
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        raise NotPortable("it has no gradient yet")
    state = [v for entries in optimizer.state.values() for v in entries.values() if isinstance(v, Tensor)]
    refuse_shared_memory([*parameters, *gradients, *state])
    return json.dumps(said)


def rebuild(described: str) -> Optimizer:
    """An optimizer that looks like the described one; its tensors have no memory, so it cannot step.

    Scalars on the CPU, such as a step count, have their values.

    Raises:
        NotPortable: this is no description.
    """
    try:
        said = json.loads(described)
        if said["class"] not in COMPILABLE:
            raise NotPortable(f"{said['class']} is not one of torch.optim's multi-tensor optimizers")
        parameters = [_rebuilt_parameter(one) for one in said["parameters"]]
        groups = [
            {k: [parameters[i] for i in v] if k == "params" else _value(v) for k, v in group.items()}
            for group in said["groups"]
        ]
        optimizer: Optimizer = getattr(torch.optim, said["class"])([{"params": g["params"]} for g in groups])
        for ours, given in zip(optimizer.param_groups, groups, strict=True):
            ours.clear()
            ours.update(given)
        optimizer.state.clear()
        for index, entries in said["state"]:
            optimizer.state[parameters[index]] = {name: _value(v) for name, v in entries.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise NotPortable(f"not a description of an optimizer: {error!r}") from error
    return optimizer


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _groups_of(optimizer: Optimizer, parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    index = {id(p): i for i, p in enumerate(parameters)}
    groups = []
    for group in optimizer.param_groups:
        if group.get("differentiable") or group.get("fused"):
            raise NotPortable("it is differentiable or fused")
        groups.append(  # in the order of the group, which is that of the graph's inputs
            {k: [index[id(p)] for p in v] if k == "params" else _said(k, v) for k, v in group.items()}
        )
    return groups


def _state_of(optimizer: Optimizer, parameters: Iterable[Tensor]) -> list[tuple[int, dict[str, Any]]]:
    index = {id(p): i for i, p in enumerate(parameters)}
    if not all(id(key) in index for key in optimizer.state):
        raise NotPortable("it has state that belongs to none of its parameters")
    return [
        (index[id(p)], {name: _said(name, value, tensor=True) for name, value in entries.items()})
        for p, entries in optimizer.state.items()
    ]


def _gradient(parameter: Tensor) -> dict[str, Any] | None:
    """As the compiled step will have it at the flip."""
    grad = parameter.grad
    return None if grad is None else {**_tensor("a gradient", grad), "stride": usual_strides(grad, parameter)}


def _said(name: Any, value: Any, *, tensor: bool = False) -> Any:
    """A hyperparameter, or an entry of the state, in words."""
    if not isinstance(name, str):
        raise NotPortable(f"it has an option {name!r} that has no name")
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor) and (tensor or name in _MAY_BE_TENSOR):
        return {"tensor": _tensor(name, value)}
    if type(value) in (tuple, list) and all(type(v) in _PLAIN for v in value):
        return {type(value).__name__: list(value)}
    raise NotPortable(f"its {name} is a {type(value).__name__}: only plain values can be described")


def _value(said: Any) -> Any:
    """The opposite of :func:`_said`."""
    if not isinstance(said, dict):
        return said
    ((kind, value),) = said.items()
    if kind == "tensor":
        return _rebuilt(value)
    return {"tuple": tuple, "list": list}[kind](value)


def _tensor(name: str, value: Tensor) -> dict[str, Any]:
    spec = TensorSpec.of(name, value)
    if not spec.is_leaf:
        raise NotPortable(f"{name} is the result of a computation that is still known")
    scalar = value.dim() == 0 and value.device.type == "cpu"
    return {
        **vars(spec),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "value": value.item() if scalar and not value.is_complex() else None,
    }


def _rebuilt(said: dict[str, Any]) -> Tensor:
    content = said["value"]
    spec = {name: v for name, v in said.items() if name != "value"}
    dtype = getattr(torch, spec["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise NotPortable(f"torch.{spec['dtype']} is no dtype")
    shapes = {name: tuple(spec[name]) for name in ("shape", "stride")}
    value, memory = TensorSpec(**{**spec, **shapes, "dtype": dtype}).hollow()
    if content is None:
        memory.untyped_storage().resize_(0)
    else:
        with torch.no_grad():
            value.fill_(content)
    return value


def _rebuilt_parameter(said: dict[str, Any]) -> Tensor:
    parameter = _rebuilt(said["tensor"])
    if said["grad"] is not None:
        parameter.grad = _rebuilt(said["grad"])
    return parameter
