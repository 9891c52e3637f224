"""Strategies of distributed training: what each device stores, and which collectives it takes part in.

Collectives are counted as rings, which send the least: each of n devices sends (n - 1) / n of the bytes of an
all-gather or reduce-scatter, and twice that for an all-reduce.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal

from onward.errors import UnsupportedError
from onward.model.sharding import Axes, Sharding
from onward.planning.tensor_parallel import Partition, divide
from onward.planning.workload import PlannedWeight, Workload

REPLICA, SHARD, TENSOR = "replica", "shard", "tensor"
"""The axes of the mesh: devices that replicate, that shard the state, and that shard matmuls."""


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Tensors that are sharded over the devices, and how far the shards reach."""

    title: str
    parameters: bool = False
    gradients: bool = False
    state: bool = False
    """The optimizer state."""
    within_a_machine: bool = False
    tensor: bool = False
    """True if the devices of a machine also shard matmuls."""


_ALL = {"parameters": True, "gradients": True, "state": True}
STRATEGIES = {
    "ddp": Strategy("everything on each device"),
    "zero1": Strategy("optimizer state sharded", state=True),
    "zero2": Strategy("optimizer state and gradients sharded", state=True, gradients=True),
    "fsdp": Strategy("optimizer state, gradients and parameters sharded (zero3)", **_ALL),
    "hybrid": Strategy("fsdp within a machine, machines replicated", **_ALL, within_a_machine=True),
    "tensor": Strategy("matmuls sharded within a machine, machines replicated", tensor=True),
    "tensor+fsdp": Strategy("matmuls sharded within a machine, fsdp across machines", **_ALL, tensor=True),
}
"""In the order of preference: the first communicate least."""
OTHER_NAMES = {"zero3": "fsdp"}


@dataclasses.dataclass(frozen=True)
class Machines:
    """The devices, their memory and links."""

    devices: int
    memory: float | None = None
    per_machine: int = 8
    bandwidth: float | None = None
    network: float | None = None
    flops: float | None = None
    utilization: float = 0.4

    def link(self, devices: int) -> float | None:
        """Return the bytes per second that a device sends in a collective of so many devices."""
        return self.bandwidth if devices <= self.per_machine else self.network or self.bandwidth


@dataclasses.dataclass(frozen=True)
class Memory:
    """Peak bytes on one device in a step."""

    parameters: int
    gradients: int
    state: int
    """Optimizer state, and all other state."""
    activations: int
    """Saved and temporary activations, and the batch."""
    gathered: int
    """Gathered parameters and gradients of blocks."""

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of an update."""

    kind: Literal["all-reduce", "all-gather", "reduce-scatter"]
    of: str
    sent: int
    """Bytes that each device sends."""
    devices: int
    seconds: float | None
    waits: bool
    """True if it cannot overlap with matmuls, because they wait for it."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The cost of a strategy."""

    strategy: str
    fits: bool | None
    memory: Memory
    communication: tuple[Collective, ...]
    samples: int | None
    """Samples per update, over all devices."""
    flops: int
    """Operations per device and update."""
    compute_seconds: float | None
    step_seconds: float | None
    """The longer of matmuls and overlapping collectives, plus the other collectives."""
    largest_block: int
    """Bytes of parameters that are gathered at once, if any."""
    sharding: Sharding = dataclasses.field(repr=False)

    @property
    def sent(self) -> int:
        return sum(collective.sent for collective in self.communication)


def degrees(name: str, machines: Machines) -> tuple[int, int, int]:
    """Return how many devices replicate, shard the state, and shard matmuls: three factors of the number of devices."""
    strategy, within = STRATEGIES[name], min(machines.per_machine, machines.devices)
    if machines.devices % within and (strategy.tensor or strategy.within_a_machine):
        raise UnsupportedError(
            f"the {machines.devices} devices are not whole machines of {within}",
            hint="set the devices per machine: `--per-machine 4`",
        )
    tensor = within if strategy.tensor else 1
    rest = machines.devices // tensor
    shard = within if strategy.within_a_machine else rest if strategy.state else 1
    return rest // shard, shard, tensor


class Estimator:
    """Estimates of one strategy."""

    def __init__(self, name: str, work: Workload, machines: Machines, accumulate: int):
        self.name, self.strategy, self.work, self.machines = name, STRATEGIES[name], work, machines
        self.replicas, self.shards, self.tensor = degrees(name, machines)
        self.accumulate = accumulate
        self.division = divide(work, self.tensor) if self.tensor > 1 else Partition({}, {}, 0, 0, 0)

    def estimate(self, recompute: bool, samples: int | None) -> Estimate:
        """Return the estimate; `samples` is the batch of one pass on one device."""
        memory = self._memory(recompute)
        communication = tuple(self._communication())
        whole = self.work.forward_flops + self.work.backward_flops + (self.work.flops_of_blocks if recompute else 0)
        flops = (whole - self.division.flops_saved) * self.accumulate
        limit, rate = self.machines.memory, self.machines.flops
        compute = flops / (rate * self.machines.utilization) if rate else None
        return Estimate(
            strategy=self.name,
            fits=None if limit is None else memory.total <= limit,
            memory=memory,
            communication=communication,
            samples=None if samples is None else samples * self.replicas * self.shards * self.accumulate,
            flops=flops,
            compute_seconds=compute,
            step_seconds=_step_seconds(compute, communication),
            largest_block=self._largest_block() if self.strategy.parameters else 0,
            sharding=self._sharding(),
        )

    # ---- memory

    def _memory(self, recompute: bool) -> Memory:
        strategy, weights = self.strategy, self.work.weights.values()
        usage = self.work.usage(recompute=recompute, shards=self.division.shards)
        gradients = sum(self._part(w, w.gradient, strategy.gradients) for w in weights)
        whole = sum(w.gradient for w in weights) or 1
        # DDP and ZeRO allocate all gradients at the first step, FSDP one after another
        allocated = not strategy.parameters and self.replicas * self.shards > 1
        copies = 0 if strategy.parameters and self.shards > 1 else self.work.copies // self.tensor
        peak = usage.peak(gradients_from_the_start=allocated or self.accumulate > 1, share=gradients / whole)
        return Memory(
            parameters=sum(self._part(w, w.bytes, strategy.parameters) for w in weights),
            gradients=gradients,
            state=sum(self._part(w, w.state, strategy.state) for w in weights) + self.work.other_state,
            activations=peak + copies + self.work.batch,
            gathered=self._gathered() if strategy.parameters and self.shards > 1 else 0,
        )

    def _part(self, weight: PlannedWeight, size: int, divided: bool) -> int:
        """Return a device's bytes of `size`, which is sharded like a weight."""
        axes = self._axes(weight, divided)
        parts = math.prod(math.ceil(weight.shape[a] / math.prod(self._mesh[axis] for axis in axes[a])) for a in axes)
        whole = math.prod(weight.shape[a] for a in axes)
        return math.ceil(size * parts / whole) if whole else 0

    def _computed(self, weights: Sequence[PlannedWeight]) -> int:
        """Return the gathered bytes of weights, in the type of matmuls."""
        return sum(self.work.computed_bytes(w) // self.division.parts(w.name, self.tensor) for w in weights)

    def _largest_block(self) -> int:
        blocks = map(self.work.weights_of, self.work.blocks)
        return max(map(self._computed, blocks), default=self._computed(self.work.outside))

    def _gathered(self) -> int:
        """Return the gathered bytes: weights outside of blocks stay gathered, and their gradients too.

        Three blocks count: one computes, the next is prefetched, and the gradients of one are being reduced.
        """
        outside, largest = self._computed(self.work.outside), self._largest_block() if self.work.blocks else 0
        trained = self._computed([weight for weight in self.work.outside if weight.gradient])
        return outside + trained + 3 * largest

    # ---- communication

    def _communication(self) -> Iterator[Collective]:
        strategy, many = self.strategy, self.accumulate
        trained = [w for w in self.work.weights.values() if w.gradient]
        gradients = sum(w.gradient // self.division.parts(w.name, self.tensor) for w in trained)
        if self.shards > 1:
            outside = self._computed(self.work.outside)
            blocks = self._computed([*self.work.weights.values()]) - outside
            if strategy.parameters:  # outside of blocks, weights stay gathered between forward and backward pass
                yield self._collective("all-gather", "parameters", (2 * blocks + outside) * many, SHARD)
                yield self._collective("reduce-scatter", "gradients", gradients * many, SHARD)
            else:
                times = many if strategy.gradients else 1
                yield self._collective("reduce-scatter", "gradients", gradients * times, SHARD)
                whole = sum(w.bytes // self.division.parts(w.name, self.tensor) for w in trained)
                yield self._collective("all-gather", "parameters", whole, SHARD)
        if self.replicas > 1:
            own = gradients // (self.shards if strategy.gradients else 1)
            yield self._collective("all-reduce", "gradients", own, REPLICA)
        if self.division.reduced:
            yield self._collective("all-reduce", "activations", self.division.reduced * many, TENSOR)
        if self.division.gathered:
            yield self._collective("all-gather", "activations", self.division.gathered * many, TENSOR)

    def _collective(
        self, kind: Literal["all-reduce", "all-gather", "reduce-scatter"], of: str, size: int, along: str
    ) -> Collective:
        devices = self._mesh[along]
        reach = {TENSOR: self.tensor, SHARD: self.tensor * self.shards, REPLICA: self.machines.devices}[along]
        sent = size * (devices - 1) // devices * (2 if kind == "all-reduce" else 1)
        link = self.machines.link(reach)
        return Collective(kind, of, sent, devices, sent / link if link else None, along == TENSOR)

    # ---- sharding

    @property
    def _mesh(self) -> dict[str, int]:
        return {REPLICA: self.replicas, SHARD: self.shards, TENSOR: self.tensor}

    def _axes(self, weight: PlannedWeight, divided: bool) -> dict[int, tuple[str, ...]]:
        axes: dict[int, tuple[str, ...]] = {}
        if (axis := self.division.weights.get(weight.name)) is not None:
            axes[axis] = (TENSOR,)
        if divided and self.shards > 1:
            best = self._axis_to_divide(weight.shape, axes)
            if best is not None:
                axes[best] = (*axes.get(best, ()), SHARD)
        return axes

    def _axis_to_divide(self, shape: Sequence[int], taken: Axes) -> int | None:
        """Return the first axis with equal shards, else the longest; None if all are too short."""
        parts = {axis: self.shards * (self.tensor if axis in taken else 1) for axis in range(len(shape))}
        equal = (axis for axis, count in parts.items() if shape[axis] % count == 0)
        enough = [axis for axis, count in parts.items() if shape[axis] >= count]
        return next(equal, max(enough, key=lambda axis: shape[axis], default=None))

    def _sharding(self) -> Sharding:
        mesh = {axis: size for axis, size in self._mesh.items() if size > 1} or {REPLICA: 1}
        tensors: dict[str, Axes] = {}
        for weight in self.work.weights.values():
            if axes := self._axes(weight, self.strategy.parameters):
                tensors[weight.name] = axes
            if (of_state := self._axes(weight, self.strategy.state)) != axes:
                tensors.update(dict.fromkeys(weight.slots, of_state))
        return Sharding(self.name, mesh, tensors)


def _step_seconds(compute: float | None, communication: Sequence[Collective]) -> float | None:
    if compute is None or any(collective.seconds is None for collective in communication):
        return None
    meanwhile = sum(collective.seconds or 0 for collective in communication if not collective.waits)
    return max(compute, meanwhile) + sum(collective.seconds or 0 for collective in communication if collective.waits)
