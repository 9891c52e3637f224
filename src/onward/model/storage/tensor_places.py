"""The places of an `onnx_ir` graph that hold tensors, and the tensors that they can hold: inside a file or outside."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.model.storage.files import PathLike
from onward.model.storage.open_files import DataFile, HeldTensor

Container = ir.Graph | ir.Function


@dataclass(eq=False)
class Place:
    """Where a graph holds a tensor: an initializer, or an attribute."""

    holder: ir.Value | ir.Node | ir.Function
    attribute: str = ""
    index: int | None = None  # in an attribute that holds several

    @property
    def name(self) -> str:
        return "/".join(str(part) for part in (self.holder.name, self.attribute, self.index) if part not in ("", None))

    @property
    def tensor(self) -> ir.TensorProtocol | None:
        if isinstance(self.holder, ir.Value):
            return self.holder.const_value
        value = self.holder.attributes[self.attribute].value
        return value if self.index is None else value[self.index]

    @tensor.setter
    def tensor(self, tensor: Any) -> None:
        if isinstance(self.holder, ir.Value):
            self.holder.const_value = tensor
            return
        old = self.holder.attributes[self.attribute]
        value = tensor if self.index is None else [*old.value[: self.index], tensor, *old.value[self.index + 1 :]]
        self.holder.attributes[old.name] = ir.Attr(old.name, old.type, value, doc_string=old.doc_string)


def places(*containers: Container) -> list[Place]:
    """Every place in these graphs and functions, and in the graphs nested in them, that holds a tensor."""
    return [place for container in containers for place in _places(container)]


def _places(container: Container) -> Iterator[Place]:
    top = container.graph if isinstance(container, ir.Function) else container
    for graph in (top, *top.subgraphs()):
        yield from (Place(value) for value in graph.initializers.values() if value.const_value is not None)
    holders: list[ir.Node | ir.Function] = [container] if isinstance(container, ir.Function) else []
    for holder in (*holders, *top.all_nodes()):
        for attribute in holder.attributes.values():
            if attribute.value is None:
                continue
            if attribute.type == ir.AttributeType.TENSOR:
                yield Place(holder, attribute.name)
            elif attribute.type == ir.AttributeType.TENSORS:
                yield from (Place(holder, attribute.name, index) for index in range(len(attribute.value)))


def hold_data(places: Iterable[Place], base_dir: PathLike, files: Mapping[Path, DataFile]) -> None:
    """Say where the external tensors in a model are, by the files that were opened for it."""
    folder = os.path.realpath(base_dir)  # must stay true when the working folder changes
    for place in places:
        if not is_external(tensor := place.tensor):
            continue
        assert isinstance(tensor, ir.ExternalTensor)
        tensor.base_dir = folder
        if (file := files.get(Path(os.path.realpath(tensor.path)))) is not None:
            place.tensor = in_file(tensor, file)


def in_file(tensor: ir.ExternalTensor, file: DataFile) -> HeldTensor:
    """The same tensor, in a file that is held open."""
    at = (tensor.location, tensor.offset, tensor.length, tensor.dtype)
    return HeldTensor(file, *at, base_dir=tensor.base_dir, **describe_tensor(tensor))


def is_external(tensor: object) -> bool:
    """Whether a tensor is in a file. A subclass may mean anything, and only its owner knows how to write it."""
    return type(tensor) in (ir.ExternalTensor, HeldTensor)


def _is_foreign(tensor: object) -> bool:
    return isinstance(tensor, ir.ExternalTensor) and not is_external(tensor)


def nbytes(tensor: ir.TensorProtocol) -> int:
    """How much could be outside the file; nothing of strings, and of what only its owner can write."""
    if tensor.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED) or _is_foreign(tensor):
        return 0
    return tensor.nbytes


def range_of(tensor: ir.TensorProtocol) -> tuple[Path, int, int] | None:
    """File, offset and length of an external tensor."""
    if not is_external(tensor):
        return None
    assert isinstance(tensor, ir.ExternalTensor)
    return Path(os.path.realpath(tensor.path)), tensor.offset or 0, tensor.nbytes


def is_in(tensor: ir.TensorProtocol | None, files: Set[Path]) -> bool:
    """Whether a tensor needs no file but these."""
    where = range_of(tensor) if tensor is not None else None
    return where is None or where[0] in files


def is_where_it_was_read(tensor: ir.TensorProtocol) -> bool:
    """Whether the file that an external tensor names is still the one that it is in."""
    return not isinstance(tensor, HeldTensor) or tensor.source.is_named()


def describe_tensor(tensor: ir.TensorProtocol) -> dict[str, Any]:
    """What a tensor keeps wherever its bytes are."""
    keys = {"name": tensor.name or "", "doc_string": tensor.doc_string, "shape": ir.Shape(tensor.shape.numpy())}
    return keys | {"metadata_props": dict(tensor.metadata_props)}


def inside(tensor: ir.TensorProtocol, numbers: np.ndarray | None = None) -> ir.TensorProtocol:
    """The same tensor, to be written into the model file."""
    return ir.Tensor(tensor.numpy() if numbers is None else numbers, tensor.dtype, **describe_tensor(tensor))


def outside(tensor: ir.TensorProtocol, folder: Path, file: Path, offset: int) -> ir.TensorProtocol:
    """The same tensor, as a reference to bytes in a data file."""
    location = file.relative_to(folder).as_posix()
    return ir.ExternalTensor(
        location, offset, tensor.nbytes, tensor.dtype, base_dir=str(folder), **describe_tensor(tensor)
    )
