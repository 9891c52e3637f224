"""Types of values, as far as they are known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onnx import GraphProto, SparseTensorProto, TensorProto, TypeProto, ValueInfoProto

FLOATING = frozenset(
    getattr(TensorProto, name)
    for name in ("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "COMPLEX64", "COMPLEX128")
    + ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ")
)


def type_name(elem: int) -> str:
    known = elem in TensorProto.DataType.values()
    return TensorProto.DataType.Name(elem).lower() if known else f"type {elem}"


@dataclass(frozen=True, slots=True)
class TensorType:
    elem: int
    dims: tuple[int | None, ...] | None = None
    """None where the rank is unknown; a None in it where that dimension is symbolic or unknown."""

    def __str__(self) -> str:
        if self.dims is None:
            return type_name(self.elem)
        return f"{type_name(self.elem)}[{','.join('?' if d is None else str(d) for d in self.dims)}]"

    @property
    def is_floating(self) -> bool:
        return self.elem in FLOATING

    @property
    def is_scalar(self) -> bool | None:
        """Whether it has rank 0; None where that is unknown."""
        return None if self.dims is None else not self.dims

    @property
    def has_one_element(self) -> bool | None:
        return None if self.dims is None else all(d == 1 for d in self.dims)

    def fits(self, other: TensorType) -> bool:
        """Whether the shapes can be equal; what is unknown fits everything."""
        if self.dims is None or other.dims is None:
            return True
        pairs = zip(self.dims, other.dims, strict=False)
        return len(self.dims) == len(other.dims) and all(a is None or b is None or a == b for a, b in pairs)


def of_tensor(tensor: TensorProto) -> TensorType:
    return TensorType(tensor.data_type, tuple(tensor.dims))


def of_sparse(tensor: SparseTensorProto) -> TensorType:
    return TensorType(tensor.values.data_type, tuple(tensor.dims))


def of_type(proto: TypeProto) -> TensorType | None:
    """None for what is not a tensor, or has no element type."""
    if not proto.HasField("tensor_type") or not proto.tensor_type.elem_type:
        return None
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return TensorType(tensor.elem_type)
    dims = tuple(d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else None for d in tensor.shape.dim)
    return TensorType(tensor.elem_type, dims)


def of_values(values: Iterable[ValueInfoProto]) -> dict[str, TensorType]:
    types = ((value.name, of_type(value.type)) for value in values)
    return {name: known for name, known in types if known is not None}


def declared_types(graph: GraphProto) -> dict[str, TensorType]:
    """What a graph says about its values; an initializer knows best."""
    return {
        **of_values(graph.value_info),
        **of_values(graph.output),
        **of_values(graph.input),
        **{tensor.values.name: of_sparse(tensor) for tensor in graph.sparse_initializer},
        **{tensor.name: of_tensor(tensor) for tensor in graph.initializer},
    }


_UNCOUNTABLE = 1 << 64


def count(dims: Sequence[int]) -> int:
    """How many elements, up to more than any memory holds; -1 for dimensions that are impossible."""
    if any(d < 0 for d in dims):
        return -1
    total = 0 if 0 in dims else 1
    for d in dims:
        total *= d
        if total > _UNCOUNTABLE:
            return _UNCOUNTABLE
    return total
