"""Sharding of tensors among devices, stored in the file.

    configuration { name: "fsdp"  num_devices: 8  device: "shard=0" ... }          of the model
    sharding_spec { tensor_name: "fc1.weight"  device: [0, 1, ...]  sharded_dim { axis: 0 ... } }      of each reader

Device names hold the position in the mesh, so the file alone describes it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from onward.arguments import checked
from onward.errors import InvalidModelError, UnknownNameError, UnsupportedError, suggest_or_list
from onward.model.core import Model, require_tensor
from onward.model.serde import Source, load_references
from onward.standard import DEVICES_IR

_MOST_AXES = 6
"""Limit of axes in a mesh that is read: the search tries all orders."""
Axes = Mapping[int, Sequence[str]]
"""Axis of a tensor -> the axes of the mesh that divide it, the outermost first."""


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A mesh of devices, and the mesh axes that divide tensor axes. Other tensors are replicated.

        sharding = onward.Sharding.of("sharded.onnx")
        sharding.mesh                          # {"replica": 2, "shard": 4}
        sharding.tensors["fc1.weight"]         # {0: ("shard",)}

    Optimizer state (`fc1.weight/exp_avg`) is divided like its parameter (default).
    """

    name: str
    """Name of the configuration: the strategy."""
    mesh: Mapping[str, int]
    """Axis -> its size, outermost first: the last axis varies fastest over device numbers."""
    tensors: Mapping[str, Axes] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, axes in self.tensors.items():
            used = [*itertools.chain.from_iterable(axes.values())]
            if unknown := [mesh_axis for mesh_axis in used if mesh_axis not in self.mesh]:
                raise UnknownNameError(
                    f"the mesh has no axis `{unknown[0]}`, which divides `{name}`",
                    hint=suggest_or_list(unknown[0], self.mesh),
                )
            if len(set(used)) < len(used):
                raise InvalidModelError(
                    f"an axis of the mesh divides `{name}` twice", hint="name each axis of the mesh once"
                )

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    def shards(self, mesh_axes: Iterable[str]) -> int:
        """Return the number of shards if these mesh axes divide an axis."""
        return math.prod(self.mesh[mesh_axis] for mesh_axis in mesh_axes)

    def spec(self, name: str, rank: int) -> tuple[tuple[str, ...], ...]:
        """Return the mesh axes that divide each axis of a tensor, like a `PartitionSpec` of JAX."""
        axes = self.tensors.get(name, {})
        return tuple(tuple(axes.get(i, ())) for i in range(rank))

    def placements(self, name: str) -> tuple[int | None, ...]:
        """Return the tensor axis that each mesh axis divides, like a `DTensor`'s placements."""
        divided = {mesh_axis: axis for axis, of_axis in self.tensors.get(name, {}).items() for mesh_axis in of_axis}
        return tuple(divided.get(mesh_axis) for mesh_axis in self.mesh)

    @staticmethod
    @checked()
    def of(source: Source, name: str | None = None) -> Sharding:
        """Read the sharding of a model, by name if it has several."""
        return read_sharding(load_references(source), name)

    @checked()
    def write_to(self, model: Model) -> None:
        """Write the sharding to a model; replaces a configuration of the same name."""
        write_sharding(self, model)


def write_sharding(sharding: Sharding, model: Model) -> None:
    """Write a configuration to the model, and a spec to each node that reads a divided tensor."""
    by_name = {value.name: value for value in model.initializers()}
    for name, axes in sharding.tensors.items():
        if name not in by_name:
            raise UnknownNameError(
                f"the model has no tensor `{name}`", hint=suggest_or_list(name, [n for n in by_name if n])
            )
        for axis, of_axis in axes.items():
            _check_axis(by_name[name], axis, sharding.shards(of_axis))
    configuration = ir.ModelConfiguration(sharding.name, sharding.devices, tuple(_device_names(sharding.mesh)))
    others = [other for other in model.ir.device_configurations if other.name != sharding.name]
    model.ir.device_configurations = (*others, configuration)
    model.ir.ir_version = max(model.ir.ir_version or 0, DEVICES_IR)
    for node in _nodes(model):
        read = dict.fromkeys(
            v for v in node.inputs if v is not None and v.name in sharding.tensors and v is by_name[v.name]
        )
        specs = tuple(_spec(value, sharding) for value in read)
        others_of_node = tuple(
            c for c in node.device_configurations if c.configuration and c.configuration.name != sharding.name
        )
        node.device_configurations = (
            (*others_of_node, ir.NodeDeviceConfiguration(configuration, specs)) if specs else others_of_node
        )


def read_sharding(model: Model, name: str | None = None) -> Sharding:
    """Return the sharding in a model: the mesh, and the divided axes."""
    configurations = {configuration.name: configuration for configuration in model.ir.device_configurations}
    if not configurations:
        raise UnsupportedError("the model has no device configuration", hint="add one: `onward plan MODEL -o FILE`")
    if name is None and len(configurations) > 1:
        raise UnsupportedError(
            f"the model has {len(configurations)} device configurations", hint=f"name one: {', '.join(configurations)}"
        )
    chosen = next(iter(configurations)) if name is None else name
    if chosen not in configurations:
        raise UnknownNameError(
            f"the model has no device configuration `{chosen}`", hint=suggest_or_list(chosen, configurations)
        )
    mesh = _mesh_of(configurations[chosen])
    tensors: dict[str, Axes] = {}
    for node in _nodes(model):
        for configuration in node.device_configurations:
            if configuration.configuration is not None and configuration.configuration.name == chosen:
                specs = {spec.value.name: spec for spec in configuration.sharding_specs if spec.value is not None}
                stored = {n: s for n, s in specs.items() if n and s.value is not None and s.value.is_initializer()}
                for tensor, spec in stored.items():
                    axes = _axes_of(spec, mesh, tensor)
                    if tensors.setdefault(tensor, axes) != axes:
                        raise UnsupportedError(f"nodes that read `{tensor}` divide it in different ways")
    return Sharding(chosen, mesh, {tensor: axes for tensor, axes in tensors.items() if axes})


def _check_axis(value: ir.Value, axis: int, parts: int) -> None:
    shape = value.const_value.shape.numpy() if value.const_value is not None else ()
    if not 0 <= axis < len(shape):
        raise InvalidModelError(f"`{value.name}` has {len(shape)} axes: axis {axis} cannot be divided")
    if shape[axis] < parts:
        raise InvalidModelError(f"axis {axis} of `{value.name}` is {shape[axis]} long, too short for {parts} parts")


def _nodes(model: Model) -> Iterator[ir.Node]:
    return (node for graph in (model.graph, *(step.algorithm for step in model.steps)) for node in graph.all_nodes())


# ---- meshes ----------------------------------------------------------------------------------------------------------


def _device_names(mesh: Mapping[str, int]) -> Iterator[str]:
    for position in itertools.product(*(range(size) for size in mesh.values())):
        yield ",".join(f"{axis}={i}" for axis, i in zip(mesh, position, strict=True))


def _mesh_of(configuration: ir.ModelConfiguration) -> dict[str, int]:
    """Parse the names of devices; return a single axis if they do not describe a mesh."""
    names = list(configuration.device_names)
    mesh = {axis: int(i) + 1 for axis, i in re.findall(r"([^=,]+)=(\d{1,9})", names[-1] if names else "")}
    is_small = 0 < len(mesh) <= _MOST_AXES and math.prod(mesh.values()) == len(names)
    if is_small and names == list(_device_names(mesh)):
        return mesh
    return {"device": configuration.num_devices}


def _spec(value: ir.Value, sharding: Sharding) -> ir.ShardingSpec:
    axes, shape = sharding.tensors[value.name or ""], require_tensor(value).shape.numpy()
    groups = _groups(sharding.mesh, [*itertools.chain.from_iterable(axes.values())])
    dims = tuple(
        ir.ShardedDim(axis, (ir.SimpleShardedDim(int(shape[axis]), sharding.shards(of_axis)),))
        for axis, of_axis in axes.items()
    )
    if all(len(group) == 1 for group in groups):
        return ir.ShardingSpec(value, tuple(group[0] for group in groups), (), dims)
    keys = tuple(-1 - i for i in range(len(groups)))
    entries = tuple(ir.IndexToDeviceGroupMapEntry(key, group) for key, group in zip(keys, groups, strict=True))
    return ir.ShardingSpec(value, keys, entries, dims)


def _groups(mesh: Mapping[str, int], dividing: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the devices of each shard, in order, if these mesh axes divide a tensor."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, position in enumerate(itertools.product(*(range(size) for size in mesh.values()))):
        at = dict(zip(mesh, position, strict=True))
        groups.setdefault(tuple(at[axis] for axis in dividing), []).append(device)
    return [tuple(groups[shard]) for shard in sorted(groups)]


def _axes_of(spec: ir.ShardingSpec, mesh: Mapping[str, int], tensor: str) -> dict[int, tuple[str, ...]]:
    """Return the mesh axes of a spec, which only lists devices."""
    groups = {entry.key: tuple(entry.value) for entry in spec.index_to_device_group_map}
    listed = [groups.get(device, (device,)) for device in spec.device]
    rank = len(spec.value.shape) if spec.value is not None and spec.value.shape is not None else 0
    parts = {
        dim.axis % rank if rank else dim.axis: math.prod(dimension.num_shards for dimension in dim.simple_shardings)
        for dim in spec.sharded_dims
    }
    parts = {axis: count for axis, count in parts.items() if count > 1}
    if not parts:
        return {}
    orders = itertools.chain.from_iterable(itertools.permutations(mesh, n) for n in range(1, len(mesh) + 1))
    is_whole = sum(map(len, listed)) == math.prod(mesh.values())  # a file may claim any number of devices
    for order in orders if is_whole else ():
        axes = _divided(order, mesh, parts)
        if axes is not None and _groups(mesh, order) == listed:
            return axes
    raise UnsupportedError(f"how `{tensor}` is divided follows no axes of the mesh {dict(mesh)}")


def _divided(
    order: Sequence[str], mesh: Mapping[str, int], parts: Mapping[int, int]
) -> dict[int, tuple[str, ...]] | None:
    """Distribute mesh axes, in order, to tensor axes so that each gets its number of shards."""
    left, axes = list(order), {}
    for axis, count in parts.items():
        taken: list[str] = []
        while left and math.prod(mesh[mesh_axis] for mesh_axis in taken) < count:
            taken.append(left.pop(0))
        if math.prod(mesh[mesh_axis] for mesh_axis in taken) != count:
            return None
        axes[axis] = tuple(taken)
    return None if left else axes
