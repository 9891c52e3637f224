"""The layers of a Keras model, one after the other, as an inference model whose initializers are its variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr, Names
from onward.frameworks.formulas.graph_building import initializer, model_of, put_out
from onward.frameworks.keras import layers  # noqa: F401 (the rows)
from onward.frameworks.keras.custom import trace_layer
from onward.frameworks.keras.layer_table import Call, accepted_arguments, find
from onward.frameworks.keras.optimizer import array_of
from onward.frameworks.keras.tensors import Tensor
from onward.model import Model
from onward.standard import COMMON_OPSET
from onward.vocabulary.keras import Refused

REGULARIZATION = "regularization"


class Walk:
    """What became of a model: its graph, and in `problems` what could not be written."""

    def __init__(self, model: Any):
        self.problems: list[str] = []
        self.graph = ir.Graph([], [], nodes=[], name=model.name, opset_imports={"": COMMON_OPSET})
        self.op = Builder(self.graph, opset=COMMON_OPSET, names=Names())
        self.names: dict[int, str] = {}
        """id of a variable -> its name, in the order of use."""
        self._by_id = self._named(model.variables)
        self._weights: dict[int, ir.Value] = {}
        self.inputs = [self._input(tensor) for tensor in model.inputs]
        results = self._model(model, self.inputs)
        self.outputs = [self._output(x, name) for x, name in zip(results, _output_names(model), strict=True)]
        self.is_regularized = self._regularize(model.trainable_variables)

    def model(self) -> Model:
        """The inference model."""
        return model_of(self.graph, self.op.functions.values())

    # ---- variables ---------------------------------------------------------------------------------------------------

    def _named(self, variables: Sequence[Any]) -> dict[int, Any]:
        """Paths are names; nested models may have the same path twice."""
        for variable in variables:
            self.names[id(variable)] = self.op.names.fresh(variable.path)
            if getattr(variable, "constraint", None) is not None:
                self.problems.append(f"`{variable.path}` has a constraint")
        return {id(variable): variable for variable in variables}

    def _weight(self, variable: Any) -> Expr:
        if id(variable) not in self._weights:
            value = initializer(self.names[id(variable)], array_of(variable))
            self.graph.register_initializer(value)
            self._weights[id(variable)] = value
        return self.op(self._weights[id(variable)])

    def is_used(self, variable: Any) -> bool:
        return id(variable) in self._weights

    # ---- layers ------------------------------------------------------------------------------------------------------

    def _input(self, tensor: Any) -> Tensor:
        dtype = ir.DataType.from_numpy(np.dtype(tensor.dtype))
        value = ir.Value(name=self.op.names.fresh(tensor.name), type=ir.TensorType(dtype))
        self.graph.inputs.append(value)
        return Tensor(tensor.shape, plain=self.op(value))

    def _output(self, tensor: Tensor, name: str) -> Tensor:
        result = Tensor(tensor.shape, plain=put_out(self.op, tensor.plain, self.op.names.fresh(name)))
        result.logits = tensor.logits
        return result

    def _model(self, model: Any, inputs: Sequence[Any]) -> list[Tensor]:
        functional = functional_of(model)
        known: dict[int, Tensor] = {id(x): y for x, y in zip(functional.inputs, inputs, strict=True)}
        for depth in sorted(functional._nodes_by_depth, reverse=True):
            for node in functional._nodes_by_depth[depth]:
                if not node.is_input:
                    arguments, named = node.arguments.fill_in(known)
                    results = self._call(node, list(arguments), dict(named))
                    known |= {id(x): y for x, y in zip(node.outputs, results, strict=True)}
        return [known[id(x)] for x in functional.outputs]

    def _call(self, node: Any, arguments: list[Any], named: dict[str, Any]) -> list[Tensor]:
        layer = node.operation
        named.pop("training", None)  # Keras puts in its place what the whole model is called with
        if isinstance(layer, keras.Model) and hasattr(functional_of(layer), "_nodes_by_depth"):
            return self._model(layer, keras.tree.flatten(arguments))
        try:
            return self._layer(node, arguments, named)
        except Refused as reason:
            self.problems.append(f"{type(layer).__name__} `{layer.name}` {reason}")
            return [self._stand_in(x) for x in node.outputs]

    def _layer(self, node: Any, arguments: list[Any], named: dict[str, Any]) -> list[Tensor]:
        layer, shapes = node.operation, [tuple(x.shape) for x in node.outputs]
        function, op = find(layer), self.op.scoped(layer.name)
        if getattr(layer, "activity_regularizer", None) is not None:
            raise Refused("adds to the loss what depends on its output")
        if function is None:
            made = trace_layer(op, node, (arguments, named), self._weight)
        else:
            call = Call(op, layer, shapes[0], self._weight)
            made = function(call, *arguments, **accepted_arguments(function, named))
        results = made if isinstance(made, list) else [made]
        return [
            x if isinstance(x, Tensor) else Tensor(shape, plain=x) for x, shape in zip(results, shapes, strict=True)
        ]

    def _stand_in(self, tensor: Any) -> Tensor:
        """Something in the place of what could not be written, so that everything can be told at once."""
        value = ir.Value(type=ir.TensorType(ir.DataType.from_numpy(np.dtype(tensor.dtype))))
        return Tensor(tensor.shape, plain=self.op(value))

    # ---- the loss that weights are -----------------------------------------------------------------------------------

    def _regularize(self, variables: Sequence[Any]) -> bool:
        """Add the sum of what regularizers make of the variables, which only training asks for."""
        op = self.op.scoped(REGULARIZATION)
        terms = [term for v in variables if v.regularizer is not None for term in self._penalties(op, v)]
        if terms:
            total = op.Identity(terms[0] if len(terms) == 1 else op.Sum(*terms)).named(REGULARIZATION)
            total.value.type, total.value.shape = ir.TensorType(terms[0].dtype or ir.DataType.FLOAT), ir.Shape([])
        return bool(terms)

    def _penalties(self, op: Builder, variable: Any) -> list[Expr]:
        kind, x = type(variable.regularizer).__name__, op(self._weight(variable).value)
        if kind not in ("L1", "L2", "L1L2"):
            self.problems.append(f"`{variable.path}` has the regularizer {kind}")
            return []
        numbers = {name: float(getattr(variable.regularizer, name, 0.0)) for name in ("l1", "l2")}
        sums = {"l1": op.ReduceL1, "l2": op.ReduceSumSquare}
        return [sums[name](x, keepdims=0) * number for name, number in numbers.items() if number]


def _output_names(model: Any) -> list[str]:
    """Those of the layers; of several outputs of one layer, the others have a number."""
    names = Names()
    return [names.fresh(name) for name in functional_of(model).output_names]


def functional_of(model: Any) -> Any:
    """The graph of layers that a model is, also where it was given as a list of layers."""
    return getattr(model, "_functional", None) or model
