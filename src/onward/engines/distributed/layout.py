"""Device meshes, and the sharding of tensors along their axes."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from onward.analysis.tensor_parallel import divide_matmuls
from onward.errors import ArgumentError, UnknownNameError, UnsupportedError, suggest, suggest_or_list
from onward.model import Model
from onward.model.sharding import Sharding, read_sharding
from onward.model.state import carried_state
from onward.recipe.trainable import matching

DATA, FSDP, MODEL = "data", "fsdp", "model"
AXES = (DATA, FSDP, MODEL)
"""Devices along `data` and `fsdp` compute different samples, along `fsdp` they also shard parameters and their state;
devices along `model` share matmuls."""
FROM_FILE = "file"
"""The mesh that the model file describes."""
_IN_FILES = {"replica": DATA, "shard": FSDP, "tensor": MODEL}
"""Names of the axes in plans."""
_SHARDED_ROLES = ("parameter", "optimizer_state", "master", "ema", "accum")
"""Roles of state that has the size of parameters."""

Spec = tuple[tuple[str, ...], ...]
"""For each axis of a tensor, the axes of the mesh that shard it."""
Rules = Mapping[str, str | Sequence[str | None]]
"""Pattern of names -> for each axis of the tensor, an axis of the mesh or None."""


class MeshLayout:
    """The sharding of a training model's tensors on a mesh."""

    def __init__(self, model: Model, step: int, mesh: str, devices: int, rules: Rules | None = None):
        file = _renamed(read_sharding(model)) if mesh == FROM_FILE else None
        self.mesh: dict[str, int] = dict(file.mesh) if file is not None else read_mesh(mesh, devices)
        """Axis -> number of devices along it, the outermost first."""
        self._file = file
        carried = carried_state(model, step)
        shapes = {value.name or "": _shape(value.shape) for value in model.graph.initializers.values()}
        self._owners = {
            s.name: s.parameter for s in carried if s.parameter and shapes.get(s.parameter) == s.array.shape
        }
        self.carried = [s.name for s in carried]
        self._parameters = {s.name for s in carried if s.role == "parameter"}
        self._whole = {s.name for s in carried if s.role not in _SHARDED_ROLES}
        self._products = divide_matmuls(model.graph, size) if (size := self.mesh.get(MODEL, 1)) > 1 and not file else {}
        self._rules = {pattern: _read_rule(pattern, rule, self.mesh) for pattern, rule in (rules or {}).items()}
        reshaped = {s.name for s in carried if s.parameter and s.name not in self._owners}
        self._chosen = self._choose([*shapes, *self.carried], reshaped)

    def _choose(self, names: Sequence[str], reshaped: Collection[str]) -> dict[str, str]:
        """Return the first pattern of each name; state with another shape than its parameter needs one with `/`."""
        chosen: dict[str, str] = {}
        for pattern in self._rules:
            matches = matching([pattern], [name for name in names if "/" in pattern or name not in reshaped])
            if not matches:
                raise UnknownNameError(
                    f"`{pattern}` matches no tensor", hint=suggest_or_list(pattern.strip("*"), names)
                )
            for name in matches:
                chosen.setdefault(name, pattern)
        return chosen

    def spec(self, name: str, shape: Sequence[int]) -> Spec:
        """Return the sharding of a tensor: by a rule, the file, or the default of the mesh."""
        owner = self._owners.get(name, name)
        for candidate in (name, owner):
            if candidate in self._chosen:
                return self._ruled(self._chosen[candidate], name, shape)
        if self._file is not None:
            stored = name if name in self._file.tensors else owner
            spec = self._file.spec(stored, len(shape))
            return tuple(axes if not size % self.parts(axes) else () for axes, size in zip(spec, shape, strict=True))
        return _whole(shape) if name in self._whole else self._default(owner, shape)

    def is_read_whole(self, name: str) -> bool:
        """True for sharded weights that a step gathers: parameters and constants, but no optimizer state."""
        return name in self._parameters or name not in self.carried

    def batch_axes(self, samples: int) -> tuple[str, ...]:
        """Return the axes that shard a batch: as many as divide it evenly, since padding samples would count."""
        axes = [axis for axis in (DATA, FSDP) if self.mesh.get(axis, 1) > 1]
        choices = [tuple(axes), *((axis,) for axis in sorted(axes, key=lambda axis: -self.mesh[axis]))]
        return next((axes for axes in choices if samples % self.parts(axes) == 0), ())

    def parts(self, axes: Iterable[str]) -> int:
        return math.prod(self.mesh[axis] for axis in axes)

    def _default(self, owner: str, shape: Sequence[int]) -> Spec:
        spec = list(_whole(shape))
        if (axis := self._products.get(owner)) is not None:
            spec[axis] = (MODEL,)
        parts = self.mesh.get(FSDP, 1)
        free = [i for i, axes in enumerate(spec) if not axes and shape[i] % parts == 0 and shape[i]]
        if parts > 1 and free:
            spec[max(free, key=lambda i: shape[i])] = (FSDP,)
        return tuple(spec)

    def _ruled(self, pattern: str, name: str, shape: Sequence[int]) -> Spec:
        spec = self._rules[pattern]
        if len(spec) > len(shape):
            raise ArgumentError(
                f"the rule for `{pattern}` has {len(spec)} axes, but `{name}` has {len(shape)}",
                hint="name an axis of the mesh, or `-`, for each axis of the tensor",
            )
        for axis, (axes, size) in enumerate(zip(spec, shape, strict=False)):
            if size % self.parts(axes):
                raise UnsupportedError(
                    f"axis {axis} of `{name}`: {self.parts(axes)} devices cannot shard {size} elements equally",
                    hint=f"shard another axis, or none: `{pattern}=-`",
                )
        return (*spec, *_whole(shape[len(spec) :]))


def read_mesh(text: str, devices: int) -> dict[str, int]:
    """Return the axes and sizes of `data=2,model=2`; an axis without a size takes the remaining devices."""
    mesh: dict[str, int | None] = {}
    for entry in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*(?:=\s*([1-9]\d{0,8})\s*)?", entry)
        if match is None:
            raise ArgumentError(f"cannot read `{entry}` in the mesh `{text}`", hint="`data=4,model=2`")
        axis, size = match.groups()
        if axis not in AXES:
            raise UnknownNameError(
                f"meshes have no axis `{axis}`", hint=suggest(axis, AXES) or f"axes: {', '.join(AXES)}"
            )
        if axis in mesh:
            raise ArgumentError(f"the mesh `{text}` has the axis `{axis}` twice", hint="name each axis once")
        mesh[axis] = int(size) if size is not None else None
    open_axes = [axis for axis, size in mesh.items() if size is None]
    if len(open_axes) > 1:
        raise ArgumentError(f"several axes of the mesh `{text}` have no size", hint="give all but one a size")
    fixed = math.prod(size for size in mesh.values() if size is not None)
    return {axis: size if size is not None else max(devices // fixed, 1) for axis, size in mesh.items()}


def _read_rule(pattern: str, rule: str | Sequence[str | None], mesh: Mapping[str, int]) -> Spec:
    columns = rule.split(",") if isinstance(rule, str) else rule
    spec = tuple(() if axes_of in (None, "", "-") else tuple(str(axes_of).split("+")) for axes_of in columns)
    used = [axis for axes in spec for axis in axes]
    if unknown := [axis for axis in used if axis not in mesh]:
        raise UnknownNameError(
            f"the mesh has no axis `{unknown[0]}` to shard `{pattern}`", hint=suggest_or_list(unknown[0], mesh)
        )
    if len(set(used)) < len(used):
        raise ArgumentError(f"an axis of the mesh shards `{pattern}` twice", hint="name each axis once")
    return spec


def _renamed(sharding: Sharding) -> Sharding:
    """Return the sharding of a file with Onward's names for its axes."""
    name = {axis: _IN_FILES.get(axis, axis) for axis in sharding.mesh}
    if unknown := [axis for axis in name.values() if axis not in AXES]:
        raise UnsupportedError(
            f"the mesh in the file has an axis `{unknown[0]}`",
            hint='choose another mesh: `mesh="data=4,model=2"` (`--mesh data=4,model=2`)',
        )
    tensors = {
        tensor: {axis: tuple(name[a] for a in mesh_axes) for axis, mesh_axes in axes.items()}
        for tensor, axes in sharding.tensors.items()
    }
    return Sharding(sharding.name, {name[axis]: size for axis, size in sharding.mesh.items()}, tensors)


def _shape(shape: object) -> tuple[int, ...] | None:
    sizes = tuple(shape) if isinstance(shape, Iterable) else None
    return sizes if sizes is not None and all(isinstance(size, int) for size in sizes) else None


def _whole(shape: Sequence[int]) -> Spec:
    return ((),) * len(shape)
