"""Comparison of a training model with the one that its run would become, node by node.

A converter carries only what it knows. This check detects anything else in a file: every binding
and metric, and all that they are computed by, must be the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.model import Model
from onward.model.core import is_gradient, string, strings
from onward.model.state import states

Digest = bytes

_OF_THE_FORWARD_PASS = ("statistics", "rng")
"""Roles of state that the forward pass changes."""


def differences(model: Model, index: int, again: Model, *, forward: bool) -> list[str]:
    """Return the state and metrics of a step that another model lacks or computes differently.

    Without `forward`, gradients are compared by their parameter, not by their computation.
    """
    ours, theirs = _Step(model, index, forward).results(), _Step(again, 0, forward).results()
    return [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]


class _Step:
    """Values of an algorithm as digests of their computation, without names."""

    def __init__(self, model: Model, index: int, forward: bool):
        self._model, self._index, self._forward = model, index, forward
        self._step = model.step(index)
        self._digests: dict[ir.Value, Digest] = {}
        self._functions: dict[ir.OperatorIdentifier, Digest] = {}
        self._names: dict[str, Digest] = {}

    def results(self) -> dict[str, Digest]:
        """Return digests of new state and metrics."""
        step, algorithm = self._step, self._step.algorithm
        bound = {**step.update, **step.reset}
        for index, value in enumerate(algorithm.inputs):
            self._record(value, _digest("input", index))
        for name, value in algorithm.initializers.items():
            self._record(value, _digest("state", name) if name in bound else _tensor(value.const_value))
        self._walk(algorithm)
        roles = {state.name: state.role for state in states(self._model, self._index)}
        updated = {n: new for n, new in step.update.items() if self._forward or roles[n] not in _OF_THE_FORWARD_PASS}
        new = set(step.update.values())
        reported = [v.name or "" for v in algorithm.outputs if v.name not in new] if self._forward else []
        results = {f"`{name}`": self._names[new] for name, new in updated.items()}
        return results | {f"the metric `{name}`": self._names[name] for name in reported}

    def _walk(self, graph: ir.Graph) -> None:
        for node in graph:
            for value, digest in zip(node.outputs, self._results(node), strict=True):
                self._record(value, digest)

    def _record(self, value: ir.Value, digest: Digest) -> None:
        self._digests[value] = self._names[value.name or ""] = digest

    def _of(self, value: ir.Value | None) -> Digest:
        """Return the digest of a value. Values of the inference graph go by name."""
        if value is None:
            return b""
        return self._digests[value] if value in self._digests else _digest("value", value.name)

    def _results(self, node: ir.Node) -> Iterator[Digest]:
        if is_gradient(node):
            y = string(node, "y")
            loss = self._names.get(y, _digest("value", y)) if self._forward else b""
            yield from (_digest("gradient", x, loss) for x in strings(node, "xs"))
            return
        attributes = [(name, *self._attribute(node.attributes[name])) for name in sorted(node.attributes)]
        inputs = [self._of(value) for value in node.inputs]
        while inputs and not inputs[-1]:
            inputs.pop()
        operator = self._function(node.op_identifier()) or (node.domain, node.op_type)
        yield from (_digest(operator, attributes, inputs, index) for index in range(len(node.outputs)))

    def _attribute(self, attribute: ir.Attr) -> Sequence[Any]:
        if attribute.is_ref():
            return "reference", attribute.ref_attr_name
        if attribute.type == ir.AttributeType.TENSOR:
            return ("tensor", _tensor(attribute.as_tensor()))
        if attribute.type == ir.AttributeType.GRAPH:
            return ("graph", *self._graph(attribute.as_graph()))
        if attribute.type in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS):
            return attribute.type, np.asarray(attribute.value, np.float32).tobytes()  # the precision of a file
        return attribute.type, str(attribute.value)

    def _graph(self, graph: ir.Graph) -> list[Digest]:
        """Return the digests of the outputs of a graph or function, with inputs by index."""
        for index, value in enumerate(graph.inputs):
            self._digests[value] = _digest("formal", index)
        for value in graph.initializers.values():
            self._digests[value] = _tensor(value.const_value)
        self._walk(graph)
        return [self._of(value) for value in graph.outputs]

    def _function(self, identifier: ir.OperatorIdentifier) -> Digest:
        functions: Mapping[ir.OperatorIdentifier, ir.Function] = self._model.functions
        if identifier not in functions:
            return b""
        if identifier not in self._functions:
            self._functions[identifier] = _digest(*self._graph(functions[identifier].graph))
        return self._functions[identifier]


def _tensor(tensor: ir.TensorProtocol | None) -> Digest:
    assert tensor is not None
    array = tensor.numpy()
    return _digest("tensor", str(tensor.dtype), array.shape, np.ascontiguousarray(array).tobytes())


def _digest(*parts: Any) -> Digest:
    return hashlib.sha256(repr(parts).encode()).digest()
