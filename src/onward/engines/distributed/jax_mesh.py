"""Training on a mesh of devices, in one process or in several.

The step is one program for the whole batch, which XLA divides by where its arrays are. So what it computes does not
depend on the mesh: BatchNormalization has the statistics of the whole batch, clipping the norm of all gradients.
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
    """JAX, with arrays that are spread over devices."""

    only_compiled = True

    def __init__(self, layout: MeshLayout, device: str = "cpu", **options: Any):
        super().__init__(device, **options)
        self.layout = layout
        devices = _devices(device, layout.mesh)
        self._mesh = jax.sharding.Mesh(np.array(devices).reshape(*layout.mesh.values()), tuple(layout.mesh))
        self._specs: dict[str, Spec] = {}
        """Those of state and constants."""

    def hold(self, name: str, value: Any) -> jax.Array:
        array = value if isinstance(value, np.ndarray) else self.host(self.adopt(value))
        self._specs[name] = self.layout.spec(name, array.shape)
        return self.spread(array, self.sharding(self._specs[name]))

    def sharding(self, spec: Sequence[Sequence[str]] = ()) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*(tuple(axes) or None for axes in spec)))

    def spread(self, array: np.ndarray, sharding: NamedSharding, start: int = 0, whole: int | None = None) -> jax.Array:
        """An array on the mesh; or a part of one along its first axis, which begins there and has what is needed."""
        shape = array.shape if whole is None else (whole, *array.shape[1:])
        with self.active():
            parts = [
                jax.device_put(array[_moved(index, start)], device, may_alias=False)
                for device, index in sharding.addressable_devices_indices_map(shape).items()
            ]
            return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    def tensor(self, array: np.ndarray) -> jax.Array:
        with self.active(), jax.ensure_compile_time_eval():
            return jnp.array(array)  # a constant of what is traced, which is on no device in particular

    def array(self, tensor: Any) -> np.ndarray:
        if isinstance(tensor, jax.core.Tracer) or tensor.is_fully_addressable or tensor.is_fully_replicated:
            return super().array(tensor)
        with self.active():
            return np.asarray(multihost_utils.process_allgather(tensor, tiled=True))

    def feed(self, value: Any) -> Any:
        return value  # it has been spread already

    def _compiled(self, function: Function, *, in_place: bool) -> Function:
        held = {name: self.sharding(spec) for name, spec in self._specs.items()}
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

        out = ({name: held[name] for name in self.layout.carried}, self.sharding()) if in_place else None
        jitted = jax.jit(
            compute,
            donate_argnums=0 if in_place else (),
            compiler_options=self._options or None,
            **({"out_shardings": out} if in_place else {}),
        )
        compiled = Compiled(self, compute, jitted, self._on_compile)
        return run


class OnMesh(Interpreted):
    """A step of a training model on a mesh of devices."""

    _framework: JaxOnMesh

    def __init__(self, model: Model, step: Steps, framework: Framework, *, compile: bool = True, **options: Any):
        if not compile:
            raise UnsupportedError(
                "on a mesh, a step is compiled as a whole", hint="leave `compile=False` (`--no-compile`) out"
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
                "a step on a mesh is one for the whole batch, whose statistics BatchNormalization has",
                hint="leave `sync_batch_norm=False` (`--no-sync-batch-norm`) out",
            )
        check_options(engine, options, Jax)
        device = options.get("device", "cpu")
        join_group(device, "jax")  # before anybody asks which devices there are
        one = as_one_step(model, step)
        devices = len(jax.devices(device)) if device in Jax.devices() else 1  # what is not there, JAX refuses next
        return JaxOnMesh(MeshLayout(one.model, one.index, mesh, devices, rules), **options)

    def held_bytes(self) -> int:
        """What a device holds of parameters and other state."""
        return sum(tensor.addressable_data(0).nbytes for tensor in self._state.values())

    def evaluate(self, batch: Arrays) -> dict[str, np.ndarray]:
        """Of outputs, the rows of this process's samples."""
        results = super().evaluate(batch)
        lengths = self._lengths(batch)
        return {name: self._own_rows(name, value, lengths) for name, value in results.items()} if lengths else results

    def _fitting(self, batch: Arrays | Sequence[Arrays], names: Collection[str]) -> dict[str, Any]:
        given = super()._fitting(batch, names)
        parts = [batch] if isinstance(batch, Mapping) else batch
        lengths = {
            input_of_run(name, number): lengths
            for number, part in enumerate(parts)
            for lengths in [self._lengths(part)]
            for name in part
        }
        return {name: self._spread(value, lengths[name]) for name, value in given.items()}

    def _lengths(self, batch: Arrays) -> list[int]:
        """How many samples of a batch each process has; empty if all have all of them."""
        group = self.group
        if group.size == 1 or (isinstance(batch, Portion) and batch.whole < group.size):
            return []
        if isinstance(batch, Portion):
            shares = [group.share(batch.whole, rank) for rank in range(group.size)]
            return [share.stop - share.start for share in shares]
        return group.gather(max((len(array) for array in batch.values() if array.ndim), default=1))

    def _spread(self, value: Any, lengths: Sequence[int]) -> jax.Array:
        """An input of the whole batch, of which this process has its part."""
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
        each, start = len(value) // whole, sum(lengths[: self.group.rank])
        return value[start * each : (start + lengths[self.group.rank]) * each]


def _devices(device: str, mesh: Mapping[str, int]) -> list[Any]:
    """The devices of a mesh: the first of this process, or all of several."""
    there, wanted = jax.devices(device), math.prod(mesh.values())
    said = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    if wanted > len(there):
        more = f"; XLA_FLAGS=--xla_force_host_platform_device_count={wanted} makes so many of a CPU"
        raise UnsupportedError(
            f"the mesh `{said}` has {wanted} devices, and there are {len(there)}",
            hint=f"make it smaller{more if device == 'cpu' and jax.process_count() == 1 else ''}",
        )
    if jax.process_count() > 1 and wanted < len(there):
        raise UnsupportedError(
            f"the mesh `{said}` has {wanted} of the {len(there)} devices of all processes",
            hint="take all: an axis without a size takes those that are left, as in `data`",
        )
    return there[:wanted]


def _moved(index: tuple[slice, ...], start: int) -> tuple[slice, ...]:
    """The place in a part that begins there of what is at a place in the whole."""
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
"""Bytes that go in one message; what is longer takes another."""


class JaxProcessGroup(ProcessGroup):
    """Processes of torchrun, those that JAX's own variables or the cluster tell of, or those that are connected."""

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
        lengths = [int(part[:8].view(np.int64)[0]) for part in first]
        if max(lengths) <= _ROOM:
            return [pickle.loads(part[8 : 8 + n].tobytes()) for part, n in zip(first, lengths, strict=True)]
        room = 1 << max(lengths).bit_length()  # few sizes, since each is compiled
        parts = _exchange(data, room)
        return [pickle.loads(part[:n].tobytes()) for part, n in zip(parts, lengths, strict=True)]


def _exchange(data: np.ndarray, room: int) -> np.ndarray:
    padded = np.zeros(room, np.uint8)
    padded[: data.size] = data
    return np.asarray(multihost_utils.process_allgather(padded))


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what libraries print elsewhere: gloo tells of its connections, and the output of a command may be JSON."""
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
    jax.config.update("jax_enable_preemption_service", False)  # which would keep SIGTERM from us, and from torchrun
    if "JAX_COORDINATOR_ADDRESS" in environment:
        numbers = (environment.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        size, rank = (None if number is None else int(number) for number in numbers)
        jax.distributed.initialize(environment["JAX_COORDINATOR_ADDRESS"], size, rank)
        return
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    own = None if device == "cpu" else int(environment["LOCAL_RANK"])
    jax.distributed.initialize(_meeting_point(rank), size, rank, local_device_ids=own)


def _meeting_point(rank: int) -> str:
    """Where processes of torchrun find each other: at a port that is free, which the first one tells the others."""
    from onward.engines.distributed.torch_group import open_store

    store, _, _ = open_store()
    if rank == 0:
        with socket.socket() as one:
            one.bind(("", 0))
            store.set("jax coordinator", f"{os.environ['MASTER_ADDR']}:{one.getsockname()[1]}")
    address: bytes = store.get("jax coordinator")
    return address.decode()
