"""Nodes as their operators want them.

A model is read even if nodes have too few inputs or attributes of a wrong type, so that it can be looked at. Whatever
rewrites graphs takes for granted that they have not.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import onnx_ir as ir
from onnx import defs

from onward.errors import InvalidModelError
from onward.model.core import Model
from onward.standard import schema_domain

_VERSIONS = 2**31
_MORE = "`onward check` says all that is wrong"


class _Signature(NamedTuple):
    inputs: int
    """How many there are at least."""
    types: Mapping[str, ir.AttributeType]
    required: frozenset[str]


def check_signatures(model: Model) -> Model:
    """The model itself, unless it has a node of the standard that breaks the rules of its operator."""
    for value in (*model.inputs, *(value for step in model.steps for value in step.algorithm.inputs)):
        if problem := _problem_of_input(value):
            raise InvalidModelError(f"the input `{value.name}` {problem}", hint=_MORE)
    containers: list[ir.Graph | ir.Function] = [model.graph, *(step.algorithm for step in model.steps)]
    for container in (*containers, *model.functions.values()):
        imports = {**model.graph.opset_imports, **container.opset_imports}
        if unknown := [version for version in imports.values() if not 0 < version < _VERSIONS]:
            raise InvalidModelError(f"there is no operator set {unknown[0]}", hint=_MORE)
        for node in container.all_nodes():
            signature = _signature(node.op_type, node.domain, imports.get(node.domain, 1))
            if signature is not None and (problem := _problem(node, signature)):
                raise InvalidModelError(
                    f"the node `{node.name or node.outputs[0].name}` ({node.op_type}) {problem}",
                    hint=_MORE,
                )
    return model


@functools.cache
def _signature(operator: str, domain: str, version: int) -> _Signature | None:
    if not all(isinstance(name, str) and name.isascii() for name in (operator, domain)):
        return None  # nothing of the standard, nor a question that it could answer
    try:
        schema = defs.get_schema(operator, version, schema_domain(domain))
    except defs.SchemaError:
        return None
    enumerated: dict[str, Any] = {name: attribute.type for name, attribute in schema.attributes.items()}
    types = {name: ir.AttributeType(kind.value) for name, kind in enumerated.items()}
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
        wanted = signature.types.get(name, attribute.type)
        if attribute.type != wanted:
            return f"has an attribute `{name}` of type {attribute.type.name.lower()}, not {wanted.name.lower()}"
    missing = signature.required - node.attributes.keys()
    return f"has no attribute `{min(missing)}`" if missing else None
