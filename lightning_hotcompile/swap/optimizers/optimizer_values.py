"""Values that a compiled optimizer step needs in another form than eager: set before it, and put back after.

Eager steps, schedulers, checkpoints and whoever looks between steps find the user's own values. Dynamo would
have moved the counts to the accelerator for good, where eager waits for the device twice for each parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hotcompile.swap.dynamo import version_of

_SMALLEST = torch.finfo(torch.float32).tiny
"""Compiled code divides 32-bit numbers by a rate: a smaller one may be 0 there."""


class LearningRates:
    """Learning rates as tensors while a compiled step runs, as the user's floats otherwise.

    A float would be a constant of the graph, so that each change by a scheduler would recompile.
    The tensors are 64-bit scalars on the CPU: the same numbers that eager multiplies with.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._tensors: list[Tensor] = []
        self._held: list[float | None] = []
        self._given: list[Any] | None = None

    def as_tensors(self) -> None:
        """Put a tensor in place of each float."""
        groups = self._optimizer.param_groups
        self._given = [group["lr"] for group in groups]
        while len(self._tensors) < len(groups):
            self._tensors.append(torch.zeros((), dtype=torch.float64, device="cpu"))
            self._held.append(None)
        for i, (group, value) in enumerate(zip(groups, self._given, strict=True)):
            if isinstance(value, Tensor):
                continue
            if (rate := float(value)) != self._held[i]:  # it may be an array of numpy's, of no dimension
                self._tensors[i].fill_(rate)
                self._held[i] = rate
            group["lr"] = self._tensors[i]

    @property
    def has_zero(self) -> bool:
        """Whether a rate is 0, or so small that 32 bits have no normal number for it.

        Compiled steps divide by it, and weights that never had a gradient would become NaN.
        """
        return any(_is_zero(group["lr"]) for group in self._optimizer.param_groups)

    def as_given(self) -> None:
        """Put the user's values back; a second call does nothing."""
        self.in_groups(self._optimizer.param_groups)
        self._given = None

    def in_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Write the user's values into groups, or what is saved of them, if tensors are in their place."""
        for group, value in zip(groups, self._given or (), strict=False):
            group["lr"] = value


def _is_zero(rate: float | Tensor) -> bool:
    """A tensor on an accelerator is not asked: the step would wait for it, and eager divides by it too."""
    if isinstance(rate, Tensor) and rate.device.type != "cpu":
        return False
    return abs(float(rate)) < _SMALLEST


class Capturable:
    """``capturable=True`` in each group that knows it while a compiled step runs, as given otherwise.

    What is traced is captured so in any case; Dynamo sets it itself, for good, in groups on an accelerator
    that have no state yet. Without it an optimizer with ``foreach=True`` refuses learning rates that are
    tensors.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._given: list[tuple[dict[str, Any], Any]] = []

    def put(self) -> None:
        """Set it."""
        self._given = [
            (group, group["capturable"]) for group in self._optimizer.param_groups if "capturable" in group
        ]
        for group, _ in self._given:
            group["capturable"] = True

    def as_given(self) -> None:
        """Put the user's values back; a second call does nothing."""
        for group, value in self._given:
            group["capturable"] = value
        self._given = []

    def in_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Write the user's values into the groups of a state dict, if others are in their place now."""
        given = {id(group): value for group, value in self._given}
        for group, saved in zip(self._optimizer.param_groups, groups, strict=False):
            if id(group) in given:
                saved["capturable"] = given[id(group)]


class _Count:
    """How often one parameter was updated, once as eager has it and once like the parameter."""

    def __init__(self, host: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        self.on_device = torch.empty_like(host, device=device, dtype=dtype)
        self.host = host
        self._state: dict[str, Any] = {}
        self._seen: tuple[Tensor, int | None] | None = None

    def put(self, state: dict[str, Any], host: Tensor) -> None:
        """The one on the device; it is written anew if eager, or whoever has loaded a state, counted on."""
        self.host, self._state = host, state
        seen, self._seen = self._seen, None
        if seen is None or seen[0] is not host or seen[1] != version_of(host):
            self.on_device.fill_(float(host))  # a constant of a kernel: nothing waits for the device
        state["step"] = self.on_device

    def back(self) -> None:
        """The one in host memory."""
        self._state["step"] = self.host

    def is_in_line(self) -> None:
        """Both have the same number now."""
        self._seen = self.host, version_of(self.host)


def _is_usual(parameter: Tensor) -> bool:
    """Whether compiled code can count as eager does."""
    return parameter.device.type == "cpu" and parameter.dtype is not torch.float64


class StepCounts:
    """Counts of updates like their parameters while a compiled step runs, and as eager has them otherwise.

    That is on their device, and in 64 bit where they are: in 32 bit ``1 - beta ** step``, by which an update
    is divided, has seven digits. Two sets of tensors, so that neither way ever waits for the other: after a
    compiled step those of eager count on by themselves, as each of torch's optimizers does for a parameter
    that has a gradient.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._counts: dict[Tensor, _Count] = {}
        self._put: list[tuple[Tensor, _Count]] = []

    @property
    def are_missing(self) -> bool:
        """Whether a step would make counts of another kind than eager's: compiled, it would for good."""
        state = self._optimizer.state
        return any(
            parameter.grad is not None and not _is_usual(parameter) and not state.get(parameter)
            for group in self._optimizer.param_groups
            if not group.get("capturable", True)
            for parameter in group["params"]
        )

    def on_device(self) -> None:
        """Put them where their parameters are, and in 64 bit where these are."""
        every = self._optimizer.state
        for parameter in (p for group in self._optimizer.param_groups for p in group["params"]):
            if _is_usual(parameter) or (state := every.get(parameter)) is None:
                continue
            host = state.get("step")
            if not isinstance(host, Tensor) or host.device.type != "cpu":
                continue
            device, wide = parameter.device, parameter.dtype is torch.float64
            dtype = torch.float64 if wide else host.dtype
            if (host.device, host.dtype) == (device, dtype):
                continue  # the default dtype is of 64 bits
            count = self._counts.get(parameter)
            if count is None or (count.on_device.device, count.on_device.dtype) != (device, dtype):
                count = self._counts[parameter] = _Count(host, device, dtype)
            count.put(state, host)
            self._put.append((parameter, count))

    def in_host_memory(self, *, counted: bool) -> None:
        """Put them back; a second call does nothing.

        Args:
            counted: whether a compiled step has run since, which counted on the device.
        """
        put, self._put = self._put, []
        for _, count in put:
            count.back()
        if counted and put:
            hosts = [count.host for parameter, count in put if parameter.grad is not None]
            if hosts:
                torch._foreach_add_(hosts, 1.0)
            for _, count in put:
                count.is_in_line()

    def in_state(self, state: dict[Any, Any]) -> None:
        """Put those in host memory into a state dict that has some on a device."""
        hosts = {id(count.on_device): count.host for count in self._counts.values()}
        for name, entries in state.items():
            step = entries.get("step") if isinstance(entries, dict) else None
            if id(step) in hosts:  # the entries are the optimizer's own
                state[name] = {**entries, "step": hosts[id(step)]}


class OptimizerValues:
    """All of these of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.rates = LearningRates(optimizer)
        self.capturable = Capturable(optimizer)
        self.counts = StepCounts(optimizer)

    @contextlib.contextmanager
    def for_compiled(self) -> Iterator[None]:
        """As a compiled step wants them, and then as the user has them; a step that returns has counted."""
        counted = False
        try:
            self.rates.as_tensors()
            self.capturable.put()
            self.counts.on_device()
            yield
            counted = True
        finally:
            self.as_given(counted=counted)

    def as_given(self, *, counted: bool = False) -> None:
        """As the user has them; a second call does nothing.

        Args:
            counted: whether a compiled step has run since.
        """
        self.rates.as_given()
        self.capturable.as_given()
        self.counts.in_host_memory(counted=counted)

    def in_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Write what the user has into a state dict; what is put stays, since a step may be under way.

        A handler of signals may save wherever Python is: Lightning's does, where SLURM ends a job.
        """
        self.rates.in_groups(state_dict["param_groups"])
        self.capturable.in_groups(state_dict["param_groups"])
        self.counts.in_state(state_dict["state"])
