"""Training on a JAX mesh, in one process or in several.

The step is one program for the global batch, which XLA partitions by the sharding of its arrays. The numbers therefore
do not depend on the mesh: BatchNormalization uses global statistics, clipping the global norm.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import socket
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from onward.engines.distributed import Portion, ProcessGroup, join_group, refuse_fixed_batches
from onward.engines.distributed.layout import FSDP, MeshLayout, Spec
from onward.engines.engine import Arrays, check_options
from onward.engines.framework import Framework, Function
from onward.engines.framework_engine import Interpreted
from onward.engines.jax import Jax
from onward.engines.shared.compilation import Compiled
from onward.errors import UnsupportedError
from onward.lowering.rounds import Steps, as_one_step, input_of_run
from onward.model import Model


class JaxOnMesh(Jax):
    """JAX with sharded arrays."""

    only_compiled = True

    def __init__(self, layout: MeshLayout, device: str = "cpu", **options: Any):
        super().__init__(device, **options)
        self.layout = layout
        devices = _devices(device, layout.mesh)
        self._mesh = jax.sharding.Mesh(np.array(devices).reshape(*layout.mesh.values()), tuple(layout.mesh))
        self._specs: dict[str, Spec] = {}
        """Sharding of state and constants."""

    def hold(self, name: str, value: Any) -> jax.Array:
        array = value if isinstance(value, np.ndarray) else self.host(self.adopt(value))
        self._specs[name] = self.layout.spec(name, array.shape)
        return self.spread(array, self.sharding(self._specs[name]))

    def sharding(self, spec: Sequence[Sequence[str]] = ()) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*(tuple(axes) or None for axes in spec)))

    def spread(self, array: np.ndarray, sharding: NamedSharding, start: int = 0, whole: int | None = None) -> jax.Array:
        """Return an array on the mesh; `array` may be the rows from `start` on of one of length `whole`."""
        shape = array.shape if whole is None else (whole, *array.shape[1:])
        with self.active():
            shards = [
                jax.device_put(np.array(array[_shifted(index, start)]), device)
                for device, index in sharding.addressable_devices_indices_map(shape).items()
            ]
            return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    def tensor(self, array: np.ndarray) -> jax.Array:
        with self.active(), jax.ensure_compile_time_eval():
            return jnp.asarray(np.array(array))  # a constant of the traced function, on no particular device

    def array(self, tensor: Any) -> np.ndarray:
        if isinstance(tensor, jax.core.Tracer) or tensor.is_fully_addressable or tensor.is_fully_replicated:
            return super().array(tensor)
        with self.active():
            return np.asarray(multihost_utils.process_allgather(tensor, tiled=True))

    def feed(self, value: Any) -> Any:
        return value  # it is on the mesh already

    def _compiled(self, function: Function, *, in_place: bool) -> Function:
        shardings = {name: self.sharding(spec) for name, spec in self._specs.items()}
        gathered = {
            name: self.sharding([[axis for axis in axes if axis != FSDP] for axes in spec])
            for name, spec in self._specs.items()
            if any(FSDP in axes for axes in spec) and self.layout.is_read_whole(name)
        }

        def compute(state: Any, constants: Any, batch: Any) -> Any:
            return function(_constrain(state, gathered), _constrain(constants, gathered), batch)

        def run(state: Any, constants: Any, batch: Any) -> Any:
            with self.active():
                return compiled(state, constants, batch)

        out = ({name: shardings[name] for name in self.layout.carried}, self.sharding()) if in_place else None
        jitted = jax.jit(
            compute,
            donate_argnums=0 if in_place else (),
            compiler_options=self._options or None,
            **({"out_shardings": out} if in_place else {}),
        )
        compiled = Compiled(self, compute, jitted, self._on_compile)
        return run


class OnMesh(Interpreted):
    """A step of a training model on a mesh."""

    _framework: JaxOnMesh

    def __init__(self, model: Model, step: Steps, framework: Framework, *, compile: bool = True, **options: Any):
        if not compile:
            raise UnsupportedError(
                "a step on a mesh is always compiled", hint="remove `compile=False` (`--no-compile`)"
            )
        super().__init__(model, step, framework, **options)
        self.group = join_group(engine="jax")
        self.is_sharded = not all(x.is_fully_addressable or x.is_fully_replicated for x in self._state.values())
        if self.group.size > 1:
            refuse_fixed_batches(self.inputs)

    @classmethod
    def make_framework(cls, engine: str, model: Model, step: Steps, options: dict[str, Any]) -> JaxOnMesh:
        mesh, rules = options.pop("mesh"), options.pop("shard", None)
        if not options.pop("sync_batch_norm", True):
            raise UnsupportedError(
                "on a mesh, BatchNormalization always uses global statistics",
                hint="remove `sync_batch_norm=False` (`--no-sync-batch-norm`)",
            )
        check_options(engine, options, Jax)
        device = options.get("device", "cpu")
        join_group(device, "jax")  # before `jax.devices` is called, which fixes the devices
        single = as_one_step(model, step)
        devices = len(jax.devices(device)) if device in Jax.devices() else 1  # `Jax` refuses a missing device
        return JaxOnMesh(MeshLayout(single.model, single.index, mesh, devices, rules), **options)

    def evaluate(self, batch: Arrays) -> dict[str, np.ndarray]:
        """Return metrics, and the output rows of this process's samples."""
        results = super().evaluate(batch)
        lengths = self._lengths(batch)
        return {name: self._own_rows(name, value, lengths) for name, value in results.items()} if lengths else results

    def _fitting(self, batch: Arrays | Sequence[Arrays], names: Collection[str]) -> dict[str, Any]:
        arrays = super()._fitting(batch, names)
        batches = [batch] if isinstance(batch, Mapping) else batch
        lengths = {
            input_of_run(name, number): lengths
            for number, batch_of_run in enumerate(batches)
            for lengths in [self._lengths(batch_of_run)]
            for name in batch_of_run
        }
        return {name: self._spread(value, lengths[name]) for name, value in arrays.items()}

    def _lengths(self, batch: Arrays) -> list[int]:
        """Return the number of samples of each process; empty if each has the whole batch."""
        group = self.group
        if group.size == 1 or (isinstance(batch, Portion) and batch.whole < group.size):
            return []
        if isinstance(batch, Portion):
            shares = [group.share(batch.whole, rank) for rank in range(group.size)]
            return [share.stop - share.start for share in shares]
        return group.gather(max((len(array) for array in batch.values() if array.ndim), default=1))

    def _spread(self, value: Any, lengths: Sequence[int]) -> jax.Array:
        """Return an input of the global batch, of which this process has its share."""
        framework, rank = self._framework, self.group.rank
        array = value if isinstance(value, np.ndarray) else framework.host(framework.adopt(value))
        if not array.ndim:
            return framework.spread(array, framework.sharding())
        whole = sum(lengths) or len(array)
        sharding = framework.sharding([framework.layout.batch_axes(whole)])
        if not lengths:
            return framework.spread(array, sharding)
        starts = np.cumsum([0, *lengths])
        shape = (whole, *array.shape[1:])
        for device, (rows, *_) in sharding.devices_indices_map(shape).items():
            first, last, _ = rows.indices(whole)
            if first < starts[device.process_index] or last > starts[device.process_index + 1]:
                return framework.spread(np.concatenate(self.group.gather(array)), sharding)
        return framework.spread(array, sharding, int(starts[rank]), whole)

    def _own_rows(self, name: str, value: Any, lengths: Sequence[int]) -> Any:
        declared = next((v.shape for v in self.model.outputs if v.name == name), None)
        is_fixed = declared is not None and len(declared) > 0 and isinstance(declared[0], int)
        whole = sum(lengths)
        if not isinstance(value, np.ndarray) or not value.ndim or is_fixed or len(value) % whole:
            return value
        rows_per_sample, start = len(value) // whole, sum(lengths[: self.group.rank])
        return value[start * rows_per_sample : (start + lengths[self.group.rank]) * rows_per_sample]


def _devices(device: str, mesh: Mapping[str, int]) -> list[Any]:
    """Return the devices of a mesh: the first ones of a single process, or all devices of several processes."""
    available, count = jax.devices(device), math.prod(mesh.values())
    shown = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    if count > len(available):
        more = f", or divide a CPU: `XLA_FLAGS=--xla_force_host_platform_device_count={count}`"
        raise UnsupportedError(
            f"the mesh `{shown}` needs {count} devices, but there are {len(available)}",
            hint=f"use a smaller mesh{more if device == 'cpu' and jax.process_count() == 1 else ''}",
        )
    if jax.process_count() > 1 and count < len(available):
        raise UnsupportedError(
            f"the mesh `{shown}` uses {count} of the {len(available)} devices of all processes",
            hint="use all: an axis without a size takes the remaining devices, as in `--mesh data`",
        )
    return available[:count]


def _shifted(index: tuple[slice, ...], start: int) -> tuple[slice, ...]:
    """Return an index of the whole array as an index of its rows from `start` on."""
    if not start:
        return index
    rows, *others = index
    return (slice(rows.start - start, rows.stop - start), *others)


def _constrain(tensors: Any, shardings: Mapping[str, NamedSharding]) -> Any:
    return {
        name: jax.lax.with_sharding_constraint(x, shardings[name]) if name in shardings else x
        for name, x in tensors.items()
    }


# ---- processes that JAX connects -------------------------------------------------------------------------------------

_ROOM = 1024
"""Bytes of the first message; a longer value needs a second one."""


class JaxProcessGroup(ProcessGroup):
    """Processes of torchrun, of JAX's own variables or cluster detection, or already connected by the user."""

    def __init__(self, device: str = "cpu"):
        if not jax.distributed.is_initialized():
            _connect(device)
        self.rank, self.size = jax.process_index(), jax.process_count()
        with _stdout_to_stderr():
            self.wait()

    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(sum(parts[1:], start=parts[0])) for parts in zip(*self.gather(list(arrays)), strict=True)]

    def gather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        first = _exchange(np.concatenate([np.array([data.size], np.int64).view(np.uint8), data[:_ROOM]]), _ROOM + 8)
        lengths = [int(message[:8].view(np.int64)[0]) for message in first]
        if max(lengths) <= _ROOM:
            return [pickle.loads(message[8 : 8 + n].tobytes()) for message, n in zip(first, lengths, strict=True)]
        room = 1 << max(lengths).bit_length()  # a power of two: each size is compiled
        parts = _exchange(data, room)
        return [pickle.loads(message[:n].tobytes()) for message, n in zip(parts, lengths, strict=True)]


def _exchange(data: np.ndarray, room: int) -> np.ndarray:
    padded = np.zeros(room, np.uint8)
    padded[: data.size] = data
    return np.asarray(multihost_utils.process_allgather(padded))


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout of C libraries: gloo prints its connections, and the output of a command may be JSON."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(own, 1)
        os.close(own)


def _connect(device: str) -> None:
    environment = os.environ
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM before Onward and torchrun
    if "JAX_COORDINATOR_ADDRESS" in environment:
        numbers = (environment.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        size, rank = (None if number is None else int(number) for number in numbers)
        jax.distributed.initialize(environment["JAX_COORDINATOR_ADDRESS"], size, rank)
        return
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    own = None if device == "cpu" else int(environment["LOCAL_RANK"])
    jax.distributed.initialize(_meeting_point(rank), size, rank, local_device_ids=own)


def _meeting_point(rank: int) -> str:
    """Return the address at which JAX processes meet: rank 0 chooses a free port and stores it for the others."""
    from onward.engines.distributed.torch_group import open_store

    store, _, _ = open_store()
    if rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            store.set("jax coordinator", f"{os.environ['MASTER_ADDR']}:{free.getsockname()[1]}")
    address: bytes = store.get("jax coordinator")
    return address.decode()
