"""Parameters by what they do: `biases`, `norms` and the `head` of a model, whatever an exporter called them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import onnx_ir as ir

from onward.model import Model
from onward.model.walk import source_of
from onward.recipe.constants import stored_shape
from onward.recipe.layers import find_head
from onward.recipe.trainable import TRANSPARENT, candidates, gradient_edges, matching, readers_of

ROLES = {
    "biases": "what layers and normalizations add",
    "norms": "scales and biases of normalizations",
    "head": "weight and bias of the layer that gives the logits",
}

_WITH_BIAS = {"Conv": 2, "ConvTranspose": 2, "DeformConv": 3, "GRU": 3, "Gemm": 2, "LSTM": 3, "RNN": 3}
_PRODUCTS = {"Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul"}
_NORMALIZATION = "Normalization"
_HAND_ON = {"Cast", "Identity", "Reshape", "Transpose"}

Edges = Mapping[ir.Value, list[tuple[ir.Node, int]]]


def roles(model: Model, targets: Iterable[ir.Value], patterns: Iterable[str]) -> dict[str, set[str]]:
    """For each pattern that is the name of a role, and of no tensor, the names of the parameters that have it.

    So too for patterns of what tensors are called behind a Transpose, Cast or the like that hands one of them on.
    """
    known = dict(candidates(model.graph))
    patterns = list(patterns)
    aliases = _by_other_names([pattern for pattern in patterns if pattern not in ROLES], known)
    wanted = [pattern for pattern in dict.fromkeys(patterns) if pattern in ROLES and pattern not in known]
    if not wanted:
        return aliases
    edges = gradient_edges(targets)
    found: dict[str, set[str]] = dict(aliases)
    for role in wanted:
        if role == "head":
            found[role] = _head(model)
        else:
            belongs = _is_bias if role == "biases" else is_norm
            found[role] = {name for name, (value, _) in known.items() if _has(value, edges, belongs)}
    return found


def _by_other_names(patterns: Iterable[str], known: Mapping[str, tuple[ir.Value, str]]) -> dict[str, set[str]]:
    unknown = [pattern for pattern in patterns if not matching([pattern], known)]
    if not unknown:
        return {}
    called = {name: list(_later_names(value)) for name, (value, _) in known.items()}
    found = {p: {name for name, others in called.items() if matching([p], others)} for p in unknown}
    return {pattern: names for pattern, names in found.items() if names}


def _later_names(value: ir.Value) -> Iterator[str]:
    """What a tensor is called after nodes that do nothing but hand it on."""
    readers = value.consumers()
    while len(readers) == 1 and readers[0].op_type in _HAND_ON:
        value = readers[0].outputs[0]
        yield value.name or ""
        readers = value.consumers()


def _head(model: Model) -> set[str]:
    head = find_head(model)
    bias = head.bias()
    stored = (head.weight, *([bias[0]] if bias else []))
    return {value.name for value in stored if value.name}


def _has(value: ir.Value, edges: Edges, belongs: Callable[[ir.Node, int], bool]) -> bool:
    used = list(readers_of(value, edges))
    vector = _is_vector(value) or all(_takes_bias(node, i) for node, i in used)
    return bool(used) and vector and all(belongs(node, i) for node, i in used)


def _is_vector(value: ir.Value) -> bool:
    """Whether it differs along one axis at most, unlike the positions that are added to an embedding."""
    shape = stored_shape(value)
    return shape is not None and sum(size > 1 for size in shape) <= 1


def _takes_bias(node: ir.Node, index: int) -> bool:
    return _WITH_BIAS.get(node.op_type) == index


def _is_bias(node: ir.Node, index: int) -> bool:
    if _takes_bias(node, index):
        return True
    if node.op_type == "Add":
        source = _source(node.inputs[1 - index])
        return source is not None and (source.op_type in _PRODUCTS or _scales_a_norm(source))
    return is_norm(node, index) and index == _norm_inputs(node)[-1]


def is_norm(node: ir.Node, index: int) -> bool:
    """True if input `index` of a node is the scale or the bias of a normalization."""
    if node.op_type.endswith(_NORMALIZATION):
        return index in _norm_inputs(node)
    if node.op_type == "Mul":
        return _normalizes(_source(node.inputs[1 - index]))
    source = _source(node.inputs[1 - index]) if node.op_type == "Add" else None
    return source is not None and _scales_a_norm(source)


def _norm_inputs(node: ir.Node) -> tuple[int, int]:
    """Where an operator takes scale and bias."""
    return (2, 3) if node.op_type.startswith("Skip") else (1, 2)


def _scales_a_norm(node: ir.Node) -> bool:
    return node.op_type == "Mul" and any(_normalizes(_source(value)) for value in node.inputs)


def _normalizes(node: ir.Node | None) -> bool:
    """Whether a node divides by a root, as a normalization does that is written out, or is a normalization."""
    if node is None:
        return False
    if node.op_type.endswith(_NORMALIZATION):
        return True
    if node.op_type == "Div":
        return _is_root(_source(node.inputs[1]))
    inverse = (_source(value) for value in node.inputs) if node.op_type == "Mul" else ()
    return any(n is not None and n.op_type == "Reciprocal" and _is_root(_source(n.inputs[0])) for n in inverse)


def _is_root(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "Sqrt"


def _source(value: ir.Value | None) -> ir.Node | None:
    """What computes a value, looking through operators that only hand it on."""
    found = source_of(value, TRANSPARENT)
    return found.producer() if found is not None else None
