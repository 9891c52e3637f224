"""Checks of a parsed model: recursion of functions, sizes of tensors, types of inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir
from onnx import ModelProto, defs

from onward.errors import InvalidModelError, UnsupportedError
from onward.model import storage
from onward.model.core import Model
from onward.standard import schema_domain

_MOST = 8


def callees_first(functions: Mapping[ir.OperatorIdentifier, ir.Function]) -> list[ir.OperatorIdentifier]:
    """Return functions ordered so that callees come first; raise if one calls itself."""
    calls = {key: {node.op_identifier() for node in function.all_nodes()} for key, function in functions.items()}
    try:
        return [*TopologicalSorter({key: called & functions.keys() for key, called in calls.items()}).static_order()]
    except CycleError as error:
        circle = [f"`{domain}.{name}`" for domain, name, _ in reversed(error.args[1])]
        names = " -> ".join(circle if len(circle) < _MOST else [*circle[:_MOST], "..."])
        raise InvalidModelError(f"a function calls itself: {names}", hint="replace the recursion by a Loop") from None


LIMIT = 10_000_000
"""Maximum number of nodes after all functions are expanded: a few calls within calls make billions."""


def check_expansion(model: Model) -> None:
    """Raise if the functions of a model expand to too many nodes."""
    sizes: dict[ir.OperatorIdentifier, int] = {}
    for identifier in callees_first(model.functions):
        calls = [node.op_identifier() for node in model.functions[identifier].all_nodes()]
        sizes[identifier] = sum(sizes.get(call, 1) for call in calls)
        if sizes[identifier] > LIMIT:
            raise UnsupportedError(
                f"the function `{identifier[0]}.{identifier[1]}` expands to {sizes[identifier]:.2g} nodes",
                hint="nested calls multiply: use the model only if you trust its source",
            )


# ---- tensors ---------------------------------------------------------------------------------------------------------


_MAX_RANK = 256
"""Maximum number of dimensions: hostile files claim millions, which take hours to multiply."""
_FIELDS: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float_data",
    onnx.TensorProto.COMPLEX64: "float_data",
    onnx.TensorProto.DOUBLE: "double_data",
    onnx.TensorProto.COMPLEX128: "double_data",
    onnx.TensorProto.INT64: "int64_data",
    onnx.TensorProto.UINT32: "uint64_data",
    onnx.TensorProto.UINT64: "uint64_data",
    onnx.TensorProto.STRING: "string_data",
}
DATA_FIELDS = (*dict.fromkeys(_FIELDS.values()), "int32_data")


def field_of(data_type: int) -> str:
    """Return the field that holds a tensor's numbers if they are not raw bytes."""
    return _FIELDS.get(data_type, "int32_data")


def check_tensors(proto: ModelProto) -> None:
    """Raise for tensors of excessive rank, and for data of a wrong size."""
    for tensor in storage.walk_tensors(proto):
        if len(tensor.dims) > _MAX_RANK:
            raise InvalidModelError(f"tensor `{tensor.name}` has {len(tensor.dims)} dimensions")
        if tensor.HasField("raw_data") and (problem := _misfit(tensor)):
            raise InvalidModelError(f"tensor `{tensor.name}` {problem}", hint="export it again: the file is damaged")
        for field in DATA_FIELDS[:-1]:
            if len(getattr(tensor, field)) and field_of(tensor.data_type) != field:
                dtype = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
                raise InvalidModelError(f"tensor `{tensor.name}` of type {dtype} has its data in `{field}`")


def _misfit(tensor: onnx.TensorProto) -> str | None:
    if tensor.data_type == onnx.TensorProto.UNDEFINED:
        return "has data, but no type"
    if (width := storage.bits_of(tensor)) is None:
        return None
    bits, there = width * math.prod(tensor.dims), len(tensor.raw_data)
    return None if there * 8 - 8 < bits <= there * 8 else f"has {there} bytes, and needs {-(-bits // 8)}"


# ---- signatures ------------------------------------------------------------------------------------------------------

# `load` reads a model even if nodes have too few inputs or attributes of a wrong type, so that it can be inspected.
# Code that rewrites graphs relies on this check.

_VERSIONS = 2**31
_MORE = "`onward check MODEL` lists all faults"


class _Signature(NamedTuple):
    inputs: int
    """The minimum number."""
    types: Mapping[str, ir.AttributeType]
    required: frozenset[str]


def check_signatures(model: Model) -> Model:
    """Return the model; raise if a node of the standard breaks the rules of its operator."""
    for value in (*model.inputs, *(value for step in model.steps for value in step.algorithm.inputs)):
        if problem := _problem_of_input(value):
            raise InvalidModelError(f"the input `{value.name}` {problem}", hint=_MORE)
    containers: list[ir.Graph | ir.Function] = [model.graph, *(step.algorithm for step in model.steps)]
    for container in (*containers, *model.functions.values()):
        imports = {**model.graph.opset_imports, **container.opset_imports}
        if unknown := [version for version in imports.values() if not 0 < version < _VERSIONS]:
            raise InvalidModelError(f"operator set {unknown[0]} does not exist", hint=_MORE)
        for node in container.all_nodes():
            signature = _signature(node.op_type, node.domain, imports.get(node.domain, 1))
            if signature is not None and (problem := _problem(node, signature)):
                name = node.name or node.outputs[0].name
                raise InvalidModelError(f"the node `{name}` ({node.op_type}) {problem}", hint=_MORE)
    return model


@functools.cache
def _signature(operator: str, domain: str, version: int) -> _Signature | None:
    if not all(isinstance(name, str) and name.isascii() for name in (operator, domain)):
        return None  # the standard has no such names, and `get_schema` fails on them
    try:
        schema = defs.get_schema(operator, version, schema_domain(domain))
    except defs.SchemaError:
        return None
    enumerated: dict[str, Any] = {name: attribute.type for name, attribute in schema.attributes.items()}
    types = {name: ir.AttributeType(enumeration.value) for name, enumeration in enumerated.items()}
    required = frozenset(name for name, attribute in schema.attributes.items() if attribute.required)
    return _Signature(schema.min_input, types, required)


def _problem_of_input(value: ir.Value) -> str | None:
    if value.type is None or value.dtype == ir.DataType.UNDEFINED:
        return "has no type"
    negative = [dim for dim in value.shape or () if isinstance(dim, int) and dim < 0]
    return f"has a size of {negative[0]}" if negative else None


def _problem(node: ir.Node, signature: _Signature) -> str | None:
    if len(node.inputs) < signature.inputs:
        return f"has {len(node.inputs)} inputs, and needs {signature.inputs}"
    for name, attribute in node.attributes.items():
        expected = signature.types.get(name, attribute.type)
        if attribute.type != expected:
            return f"has an attribute `{name}` of type {attribute.type.name.lower()}, not {expected.name.lower()}"
    missing = signature.required - node.attributes.keys()
    return f"has no attribute `{min(missing)}`" if missing else None
