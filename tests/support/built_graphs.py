"""Graphs that a function builds, checked, on ONNX Runtime and in the reference implementation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx.reference import ReferenceEvaluator
from representatives import chosen

from onward.build import Builder, Names

OPSETS = chosen(range(18, 27), (18, 26))
"""Those that ONNX Runtime loads; the first and the last are quick."""


class Graph:
    """The graph that `body(op, *inputs)` builds, for inputs of the types and ranks of `examples`, checked."""

    def __init__(self, body: Callable[..., Any], *examples: Any, opset: int = 21):
        arrays = [np.asarray(example) for example in examples]
        inputs = [
            ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType.from_numpy(a.dtype)), shape=ir.Shape([None] * a.ndim))
            for i, a in enumerate(arrays)
        ]
        graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": opset}, name="test")
        op = Builder(graph, opset=opset, names=Names(value.name or "" for value in inputs))
        outputs = body(op, *(op(value) for value in inputs))
        graph.outputs.extend(expr.value for expr in (outputs if isinstance(outputs, tuple) else (outputs,)))
        self.model = ir.Model(graph, ir_version=10, functions=list(op.functions.values()))
        self._session = onnxruntime.InferenceSession(ir.to_proto(self.model).SerializeToString(), _options())
        for value, found in zip(graph.outputs, self(*arrays, all_outputs=True), strict=True):
            assert value.dtype == ir.DataType.from_numpy(found.dtype), f"{value.name} is declared as {value.dtype}"
            value.shape = ir.Shape([None] * found.ndim)
        onnx.checker.check_model(ir.to_proto(self.model), full_check=True)

    def __call__(self, *inputs: Any, all_outputs: bool = False) -> Any:
        """What ONNX Runtime computes."""
        found = [np.asarray(y) for y in self._session.run(None, _feeds(inputs))]
        return found if all_outputs or len(found) > 1 else found[0]

    def reference(self, *inputs: Any) -> Any:
        """What the reference implementation in `onnx` computes."""
        found = self._evaluator.run(None, _feeds(inputs))
        return found if len(found) > 1 else found[0]

    @functools.cached_property
    def _evaluator(self) -> ReferenceEvaluator:
        return ReferenceEvaluator(ir.to_proto(self.model))


def _feeds(inputs: tuple[Any, ...]) -> dict[str, np.ndarray]:
    return {f"x{i}": np.asarray(value) for i, value in enumerate(inputs)}


def _options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    return options
