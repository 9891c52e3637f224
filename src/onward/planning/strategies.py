"""Ways to spread a training over devices: what each device holds, and what they have to tell each other.

Collectives are counted as rings do them, which is the least that any can do: of n devices, each sends (n - 1) / n of
what is gathered or scattered, and twice that for a sum that all get.
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
"""The axes of the mesh: devices that have the same, parts of the state, and parts of the products."""


@dataclasses.dataclass(frozen=True)
class Strategy:
    """What is divided among the devices that compute different samples."""

    title: str
    parameters: bool = False
    gradients: bool = False
    state: bool = False
    """What the optimizer keeps."""
    within_a_machine: bool = False
    tensor: bool = False
    """Whether the devices of a machine also divide products among them."""


STRATEGIES = {
    "ddp": Strategy("everything on each device"),
    "zero1": Strategy("the state of the optimizer divided", state=True),
    "zero2": Strategy("gradients divided, too", state=True, gradients=True),
    "fsdp": Strategy("parameters divided, too (zero3)", parameters=True, gradients=True, state=True),
    "hybrid": Strategy(
        "the same within a machine, machines alike", parameters=True, gradients=True, state=True, within_a_machine=True
    ),
    "tensor": Strategy("products divided within a machine, machines alike", tensor=True),
    "tensor+fsdp": Strategy(
        "products divided within a machine, the rest among machines",
        parameters=True, gradients=True, state=True, tensor=True,
    ),
}  # fmt: skip
"""In the order of preference: the first tell each other least."""
OTHER_NAMES = {"zero3": "fsdp"}


@dataclasses.dataclass(frozen=True)
class Machines:
    """What there is to train on."""

    devices: int
    memory: float | None = None
    per_machine: int = 8
    bandwidth: float | None = None
    network: float | None = None
    flops: float | None = None
    utilization: float = 0.4

    def link(self, devices: int) -> float | None:
        """How many bytes a second a device sends to others, if that many neighbours take part."""
        return self.bandwidth if devices <= self.per_machine else self.network or self.bandwidth


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, at the worst moment of a step."""

    parameters: int
    gradients: int
    state: int
    """What the optimizer keeps, and all other state."""
    activations: int
    """What the way back needs, and what comes and goes; with the batch."""
    gathered: int
    """Parameters and gradients of a block that are whole for a moment."""

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Collective:
    """What devices tell each other in one update."""

    kind: Literal["all-reduce", "all-gather", "reduce-scatter"]
    of: str
    sent: int
    """Bytes that each device sends."""
    devices: int
    """How many take part."""
    seconds: float | None
    waits: bool
    """Whether products wait for it, and it cannot happen meanwhile."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a strategy comes to."""

    strategy: str
    fits: bool | None
    memory: Memory
    communication: tuple[Collective, ...]
    samples: int | None
    """How many an update is made from."""
    flops: int
    """What a device computes for an update."""
    compute_seconds: float | None
    step_seconds: float | None
    """Products, or what happens meanwhile if that takes longer; and what they wait for."""
    largest_block: int
    """Bytes of the parameters that are gathered at once, if any are."""
    sharding: Sharding = dataclasses.field(repr=False)

    @property
    def sent(self) -> int:
        return sum(each.sent for each in self.communication)


def degrees(name: str, machines: Machines) -> tuple[int, int, int]:
    """Devices that are alike, that divide the state, and that divide products: three factors of all."""
    strategy, within = STRATEGIES[name], min(machines.per_machine, machines.devices)
    if machines.devices % within and (strategy.tensor or strategy.within_a_machine):
        raise UnsupportedError(
            f"there are no whole machines of {within} in {machines.devices} devices",
            hint="say how many one has: `--per-machine`",
        )
    tensor = within if strategy.tensor else 1
    rest = machines.devices // tensor
    shard = within if strategy.within_a_machine else rest if strategy.state else 1
    return rest // shard, shard, tensor


class Estimator:
    """What a device holds and sends with a strategy."""

    def __init__(self, name: str, work: Workload, machines: Machines, accumulate: int):
        self.name, self.strategy, self.work, self.machines = name, STRATEGIES[name], work, machines
        self.replicas, self.shards, self.tensor = degrees(name, machines)
        self.accumulate = accumulate
        self.division = divide(work, self.tensor) if self.tensor > 1 else Partition({}, {}, 0, 0, 0)

    def estimate(self, recompute: bool, samples: int | None) -> Estimate:
        """Return the estimate; `samples` are those of one pass of a device."""
        memory = self._memory(recompute)
        told = tuple(self._communication())
        whole = self.work.forward_flops + self.work.backward_flops + (self.work.flops_of_blocks if recompute else 0)
        flops = (whole - self.division.flops_saved) * self.accumulate
        limit, rate = self.machines.memory, self.machines.flops
        compute = flops / (rate * self.machines.utilization) if rate else None
        return Estimate(
            strategy=self.name,
            fits=None if limit is None else memory.total <= limit,
            memory=memory,
            communication=told,
            samples=None if samples is None else samples * self.replicas * self.shards * self.accumulate,
            flops=flops,
            compute_seconds=compute,
            step_seconds=_step_seconds(compute, told),
            largest_block=self._largest_block() if self.strategy.parameters else 0,
            sharding=self._sharding(),
        )

    # ---- memory

    def _memory(self, recompute: bool) -> Memory:
        strategy, weights = self.strategy, self.work.weights.values()
        usage = self.work.usage(recompute=recompute, shards=self.division.shards)
        gradients = sum(self._part(w, w.gradient, strategy.gradients) for w in weights)
        whole = sum(w.gradient for w in weights) or 1
        # DDP and ZeRO hold gradients from the first step on, FSDP as they come
        kept = not strategy.parameters and self.replicas * self.shards > 1
        copies = 0 if strategy.parameters and self.shards > 1 else self.work.copies // self.tensor
        peak = usage.peak(gradients_from_the_start=kept or self.accumulate > 1, share=gradients / whole)
        return Memory(
            parameters=sum(self._part(w, w.bytes, strategy.parameters) for w in weights),
            gradients=gradients,
            state=sum(self._part(w, w.state, strategy.state) for w in weights) + self.work.other_state,
            activations=peak + copies + self.work.batch,
            gathered=self._gathered() if strategy.parameters and self.shards > 1 else 0,
        )

    def _part(self, weight: PlannedWeight, size: int, divided: bool) -> int:
        """A device's part of something that belongs to a weight."""
        axes = self._axes(weight, divided)
        parts = math.prod(math.ceil(weight.shape[a] / math.prod(self._mesh[axis] for axis in axes[a])) for a in axes)
        whole = math.prod(weight.shape[a] for a in axes)
        return math.ceil(size * parts / whole) if whole else 0

    def _computed(self, weights: Sequence[PlannedWeight]) -> int:
        """Bytes of weights that are gathered from all that divide the state, in the type of products."""
        return sum(self.work.computed_bytes(w) // self.division.parts(w.name, self.tensor) for w in weights)

    def _largest_block(self) -> int:
        blocks = map(self.work.weights_of, self.work.blocks)
        return max(map(self._computed, blocks), default=self._computed(self.work.outside))

    def _gathered(self) -> int:
        """What is in no block is whole all the time, and so are its gradients; of blocks one is computed with, the next
        is on its way, and the gradients of one are not summed yet."""
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
            if strategy.parameters:  # what is in no block stays whole between the ways forward and back
                yield self._collective("all-gather", "parameters", (2 * blocks + outside) * many, SHARD)
                yield self._collective("reduce-scatter", "gradients", gradients * many, SHARD)
            else:
                times = many if strategy.gradients else 1
                yield self._collective("reduce-scatter", "gradients", gradients * times, SHARD)
                whole = sum(w.bytes // self.division.parts(w.name, self.tensor) for w in trained)
                yield self._collective("all-gather", "parameters", whole, SHARD)
        if self.replicas > 1:
            part = gradients // (self.shards if strategy.gradients else 1)
            yield self._collective("all-reduce", "gradients", part, REPLICA)
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

    # ---- who holds what

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
        """The first that gives equal parts, else the longest; none of what is too small for all."""
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


def _step_seconds(compute: float | None, told: Sequence[Collective]) -> float | None:
    if compute is None or any(each.seconds is None for each in told):
        return None
    meanwhile = sum(each.seconds or 0 for each in told if not each.waits)
    return max(compute, meanwhile) + sum(each.seconds or 0 for each in told if each.waits)
