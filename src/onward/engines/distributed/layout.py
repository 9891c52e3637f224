"""Meshes of devices, and along which of their axes tensors are divided."""

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
"""Devices with other samples; the same that also divide parameters and what belongs to them; that divide products."""
FROM_FILE = "file"
"""In place of a mesh: the one that the file describes."""
_IN_FILES = {"replica": DATA, "shard": FSDP, "tensor": MODEL}
"""Axes as plans call them."""
_DIVIDED = ("parameter", "optimizer_state", "master", "ema", "accum")
"""What of the state is as large as parameters are."""

Spec = tuple[tuple[str, ...], ...]
"""For each axis of a tensor, the axes of the mesh that divide it."""
Rules = Mapping[str, str | Sequence[str | None]]
"""Pattern of names -> an axis of the mesh, or none, for each axis of the tensor."""


class MeshLayout:
    """Where the tensors of a training model are, on a mesh of so many devices."""

    def __init__(self, model: Model, step: int, mesh: str, devices: int, rules: Rules | None = None):
        file = _renamed(read_sharding(model)) if mesh == FROM_FILE else None
        self.mesh: dict[str, int] = dict(file.mesh) if file is not None else read_mesh(mesh, devices)
        """Axis -> devices along it, the outermost first."""
        self._file = file
        carried = carried_state(model, step)
        shapes = {value.name or "": _shape(value.shape) for value in model.graph.initializers.values()}
        self._owners = {
            s.name: s.parameter for s in carried if s.parameter and shapes.get(s.parameter) == s.array.shape
        }
        self.carried = [s.name for s in carried]
        self._parameters = {s.name for s in carried if s.role == "parameter"}
        self._whole = {s.name for s in carried if s.role not in _DIVIDED}
        self._products = divide_matmuls(model.graph, size) if (size := self.mesh.get(MODEL, 1)) > 1 and not file else {}
        self._rules = {pattern: _read_rule(pattern, rule, self.mesh) for pattern, rule in (rules or {}).items()}
        apart = {s.name for s in carried if s.parameter and s.name not in self._owners}
        self._chosen = self._choose([*shapes, *self.carried], apart)

    def _choose(self, names: Sequence[str], apart: Collection[str]) -> dict[str, str]:
        """The first pattern that matches a name; what is kept for a parameter in another shape has to be named."""
        chosen: dict[str, str] = {}
        for pattern in self._rules:
            found = matching([pattern], [name for name in names if "/" in pattern or name not in apart])
            if not found:
                raise UnknownNameError(
                    f"`{pattern}` matches no tensor", hint=suggest_or_list(pattern.strip("*"), names)
                )
            for name in found:
                chosen.setdefault(name, pattern)
        return chosen

    def spec(self, name: str, shape: Sequence[int]) -> Spec:
        """How a tensor is divided: as a rule says, or the file, or as is usual."""
        owner = self._owners.get(name, name)
        for each in (name, owner):
            if each in self._chosen:
                return self._ruled(self._chosen[each], name, shape)
        if self._file is not None:
            known = name if name in self._file.tensors else owner
            spec = self._file.spec(known, len(shape))
            return tuple(axes if not size % self.parts(axes) else () for axes, size in zip(spec, shape, strict=True))
        return _whole(shape) if name in self._whole else self._usual(owner, shape)

    def is_read_whole(self, name: str) -> bool:
        """Whether devices with other samples need all of a tensor, though each holds a part: those of the model."""
        return name in self._parameters or name not in self.carried

    def batch_axes(self, samples: int) -> tuple[str, ...]:
        """The axes of the mesh that divide a batch: as many as do so without a rest, which no sample may make up."""
        there = [axis for axis in (DATA, FSDP) if self.mesh.get(axis, 1) > 1]
        choices = [tuple(there), *((axis,) for axis in sorted(there, key=lambda axis: -self.mesh[axis]))]
        return next((axes for axes in choices if samples % self.parts(axes) == 0), ())

    def parts(self, axes: Iterable[str]) -> int:
        return math.prod(self.mesh[axis] for axis in axes)

    def _usual(self, owner: str, shape: Sequence[int]) -> Spec:
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
                f"`{pattern}` is divided along {len(spec)} axes, and `{name}` has {len(shape)}",
                hint="name an axis of the mesh for each axis of the tensor, or `-`",
            )
        for axis, (axes, size) in enumerate(zip(spec, shape, strict=False)):
            if size % self.parts(axes):
                raise UnsupportedError(
                    f"axis {axis} of `{name}` is {size} long, which {self.parts(axes)} devices cannot divide equally",
                    hint=f"divide it along another axis, or not: `{pattern}=-`",
                )
        return (*spec, *_whole(shape[len(spec) :]))


def read_mesh(text: str, devices: int) -> dict[str, int]:
    """Axes and their sizes in `data=2,model=2`; one without a size takes the devices that are left."""
    mesh: dict[str, int | None] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\w+)\s*(?:=\s*([1-9]\d{0,8})\s*)?", part)
        if found is None:
            raise ArgumentError(
                f"`{text}` is no mesh: `{part}` is no axis with a size", hint="such as `data=4,model=2`"
            )
        axis, size = found.groups()
        if axis not in AXES:
            raise UnknownNameError(
                f"meshes have no axis `{axis}`", hint=suggest(axis, AXES) or f"axes: {', '.join(AXES)}"
            )
        if axis in mesh:
            raise ArgumentError(f"the mesh `{text}` has the axis `{axis}` twice", hint="name each once")
        mesh[axis] = int(size) if size is not None else None
    open_axes = [axis for axis, size in mesh.items() if size is None]
    if len(open_axes) > 1:
        raise ArgumentError(f"the mesh `{text}` leaves the sizes of several axes open", hint="one may be open")
    known = math.prod(size for size in mesh.values() if size is not None)
    return {axis: size if size is not None else max(devices // known, 1) for axis, size in mesh.items()}


def _read_rule(pattern: str, rule: str | Sequence[str | None], mesh: Mapping[str, int]) -> Spec:
    parts = rule.split(",") if isinstance(rule, str) else rule
    spec = tuple(() if part in (None, "", "-") else tuple(str(part).split("+")) for part in parts)
    used = [axis for axes in spec for axis in axes]
    if unknown := [axis for axis in used if axis not in mesh]:
        raise UnknownNameError(
            f"the mesh has no axis `{unknown[0]}`, which divides `{pattern}`", hint=suggest_or_list(unknown[0], mesh)
        )
    if len(set(used)) < len(used):
        raise ArgumentError(f"an axis of the mesh divides `{pattern}` twice", hint="name each once")
    return spec


def _renamed(sharding: Sharding) -> Sharding:
    """What a file says, with our names for the axes of its mesh."""
    name = {axis: _IN_FILES.get(axis, axis) for axis in sharding.mesh}
    if unknown := [axis for axis in name.values() if axis not in AXES]:
        raise UnsupportedError(
            f"the mesh in the file has an axis `{unknown[0]}`",
            hint=f"give one with axes among {', '.join(AXES)}: `mesh=...` (`--mesh`)",
        )
    tensors = {
        tensor: {axis: tuple(name[each] for each in of_axis) for axis, of_axis in axes.items()}
        for tensor, axes in sharding.tensors.items()
    }
    return Sharding(sharding.name, {name[axis]: size for axis, size in sharding.mesh.items()}, tensors)


def _shape(shape: object) -> tuple[int, ...] | None:
    sizes = tuple(shape) if isinstance(shape, Iterable) else None
    return sizes if sizes is not None and all(isinstance(size, int) for size in sizes) else None


def _whole(shape: Sequence[int]) -> Spec:
    return ((),) * len(shape)
