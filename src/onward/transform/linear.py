"""Linear models of `ai.onnx.ml`, whose weights are attributes, while they are trained: as a Gemm with initializers.

The Gemm carries what the operator was, so that what was given comes back: the same node, with other numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from onward.model import Model
from onward.transform.unused import remove_unused

DOMAIN = "ai.onnx.ml"
ORIGIN_KEY = "train.linear"
"""In the metadata of a Gemm: what it was, as JSON: operator, name, shape of coefficients, and all other attributes."""
PART_KEY = "train.linear.part"
"""In the metadata of nodes around it: `x` of what prepares its input, or the index of the output that they make."""


def tensor_of(value: ir.Value) -> ir.Value:
    """The value itself; or of a list of maps from labels, the tensor that it is made of."""
    node = value.producer()
    is_map = node is not None and (node.domain, node.op_type) == (DOMAIN, "ZipMap")
    return node.inputs[0] if is_map and node.inputs[0] is not None else value  # type: ignore[union-attr]


def put_back(model: Model) -> None:
    """Make the operators again of what was opened, in place; what has been changed meanwhile stays open."""
    opened = [node for node in model.graph if ORIGIN_KEY in node.metadata_props]
    for gemm in opened:
        origin, stored = json.loads(gemm.metadata_props[ORIGIN_KEY]), [v for v in gemm.inputs[1:] if v is not None]
        arrays = [value.const_value.numpy() for value in stored if value.const_value is not None]
        outputs = dict(_outputs(gemm))
        if len(arrays) < len(stored) or list(arrays[0].shape) != origin["shape"] or len(outputs) < origin["outputs"]:
            continue
        _replace(gemm, origin, [array.ravel().tolist() for array in arrays], outputs)
        model.ir.opset_imports[DOMAIN] = origin["version"]
        remove_unused(model.graph)
        for value in stored:
            if not value.uses() and not value.is_graph_output():
                model.graph.initializers.pop(value.name or "", None)


def _replace(gemm: ir.Node, origin: dict[str, Any], numbers: list[list[float]], outputs: dict[int, ir.Value]) -> None:
    weights = dict(zip(("coefficients", "intercepts"), numbers, strict=False))
    attributes = ir.convenience.convert_attributes({**origin["attributes"], **weights})
    node = ir.Node(DOMAIN, origin["operator"], [_entry(gemm)], attributes, num_outputs=len(outputs))
    node.name = origin["name"]
    gemm.append(node)
    for index, old in outputs.items():
        new, name, old.name = node.outputs[index], old.name, None
        new.type, new.shape = old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        new.name = name


def _outputs(gemm: ir.Node) -> Iterator[tuple[int, ir.Value]]:
    """What the operator gives, by index: computed of what the Gemm gives, or that itself."""
    pending, seen = [gemm], {gemm}
    while pending:
        node = pending.pop()
        part = node.metadata_props.get(PART_KEY, "")
        if part.isdecimal():
            yield int(part), node.outputs[0]
        if node is gemm or not (part or ORIGIN_KEY in node.metadata_props):
            fresh = [reader for output in node.outputs for reader in output.consumers() if reader not in seen]
            seen.update(fresh)
            pending += fresh


def _entry(gemm: ir.Node) -> ir.Value | None:
    value = gemm.inputs[0]
    while value is not None and (node := value.producer()) is not None and node.metadata_props.get(PART_KEY) == "x":
        value = node.inputs[0]
    return value
