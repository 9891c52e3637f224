"""Graphs of Keras models, layer by layer. Initializers are the variables of the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr, Names
from onward.errors import first_line
from onward.frameworks.formulas.graph_building import initializer, model_of, put_out
from onward.frameworks.keras.layers import (
    Call,
    LayerTensor,
    accepted_arguments,
    activations,
    core,
    find,
    recurrent,
    spatial,
)
from onward.frameworks.keras.optimizer import array_of
from onward.model import Model
from onward.recipe.step_builder import take_apart
from onward.standard import COMMON_OPSET
from onward.vocabulary.keras import Refused

ROWS_OF_LAYERS = (activations, core, recurrent, spatial)
"""Files that register their rows when they are imported."""
REGULARIZATION = "regularization"


class LayerGraph:
    """Graph of a Keras model; `problems` lists what cannot be converted."""

    def __init__(self, model: Any):
        self.problems: list[str] = []
        self.graph = ir.Graph([], [], nodes=[], name=model.name, opset_imports={"": COMMON_OPSET})
        self.op = Builder(self.graph, opset=COMMON_OPSET, names=Names())
        self.names: dict[int, str] = {}  # by the id of a variable
        for variable in model.variables:
            self.names[id(variable)] = self.op.names.fresh(variable.path)  # nested models may repeat a path
            if getattr(variable, "constraint", None) is not None:
                self.problems.append(f"`{variable.path}` has a constraint")
        self._weights: dict[int, ir.Value] = {}
        self.inputs = [self._input(tensor) for tensor in model.inputs]
        results = self._functional(model, self.inputs)
        output_names = map(Names().fresh, functional_of(model).output_names)  # a layer may have several outputs
        self.outputs = [self._output(x, name) for x, name in zip(results, output_names, strict=True)]
        self.is_regularized = self._regularize(model.trainable_variables)

    def model(self) -> Model:
        return model_of(self.graph, self.op.functions.values())

    def _weight(self, variable: Any) -> Expr:
        if id(variable) not in self._weights:
            value = initializer(self.names[id(variable)], array_of(variable))
            self.graph.register_initializer(value)
            self._weights[id(variable)] = value
        return self.op(self._weights[id(variable)])

    def is_used(self, variable: Any) -> bool:
        return id(variable) in self._weights

    def _input(self, tensor: Any) -> LayerTensor:
        dtype = ir.DataType.from_numpy(np.dtype(tensor.dtype))
        value = ir.Value(name=self.op.names.fresh(tensor.name), type=ir.TensorType(dtype))
        self.graph.inputs.append(value)
        return LayerTensor(tensor.shape, plain=self.op(value))

    def _output(self, tensor: LayerTensor, name: str) -> LayerTensor:
        result = LayerTensor(tensor.shape, plain=put_out(self.op, tensor.plain, self.op.names.fresh(name)))
        result.logits = tensor.logits
        return result

    def _functional(self, model: Any, inputs: Sequence[Any]) -> list[LayerTensor]:
        functional = functional_of(model)
        tensors: dict[int, LayerTensor] = {id(x): y for x, y in zip(functional.inputs, inputs, strict=True)}
        for depth in sorted(functional._nodes_by_depth, reverse=True):
            for node in functional._nodes_by_depth[depth]:
                if not node.is_input:
                    arguments, named = node.arguments.fill_in(tensors)
                    results = self._call(node, list(arguments), dict(named))
                    tensors |= {id(x): y for x, y in zip(node.outputs, results, strict=True)}
        return [tensors[id(x)] for x in functional.outputs]

    def _call(self, node: Any, arguments: list[Any], named: dict[str, Any]) -> list[LayerTensor]:
        layer = node.operation
        named.pop("training", None)  # Keras replaces it by the argument of the whole model
        if isinstance(layer, keras.Model) and hasattr(functional_of(layer), "_nodes_by_depth"):
            return self._functional(layer, keras.tree.flatten(arguments))
        try:
            return self._layer(node, arguments, named)
        except Refused as reason:
            self.problems.append(f"{type(layer).__name__} `{layer.name}` {reason}")
            # Placeholders let the others be checked, so that all problems are reported at once.
            dtypes = [ir.DataType.from_numpy(np.dtype(x.dtype)) for x in node.outputs]
            values = [ir.Value(type=ir.TensorType(dtype)) for dtype in dtypes]
            return [LayerTensor(x.shape, plain=self.op(value)) for x, value in zip(node.outputs, values, strict=True)]

    def _layer(self, node: Any, arguments: list[Any], named: dict[str, Any]) -> list[LayerTensor]:
        layer, shapes = node.operation, [tuple(x.shape) for x in node.outputs]
        function, op = find(layer), self.op.scoped(layer.name)
        if getattr(layer, "activity_regularizer", None) is not None:
            raise Refused("adds to the loss what depends on its output")
        if function is None:
            results = trace_layer(op, node, (arguments, named), self._weight)
        else:
            call = Call(op, layer, shapes[0], self._weight)
            results = function(call, *arguments, **accepted_arguments(function, named))
        results = results if isinstance(results, list) else [results]
        return [
            x if isinstance(x, LayerTensor) else LayerTensor(shape, plain=x)
            for x, shape in zip(results, shapes, strict=True)
        ]

    def _regularize(self, variables: Sequence[Any]) -> bool:
        """Add the penalties of the variables, computed only in training. True if there are any."""
        op = self.op.scoped(REGULARIZATION)
        terms = [term for v in variables if v.regularizer is not None for term in self._penalties(op, v)]
        if terms:
            total = op.Identity(terms[0] if len(terms) == 1 else op.Sum(*terms)).named(REGULARIZATION)
            total.value.type, total.value.shape = ir.TensorType(terms[0].dtype or ir.DataType.FLOAT), ir.Shape([])
        return bool(terms)

    def _penalties(self, op: Builder, variable: Any) -> list[Expr]:
        name, x = type(variable.regularizer).__name__, op(self._weight(variable).value)
        if name not in ("L1", "L2", "L1L2"):
            self.problems.append(f"`{variable.path}` has the regularizer {name}")
            return []
        factors = {norm: float(getattr(variable.regularizer, norm, 0.0)) for norm in ("l1", "l2")}
        sums = {"l1": op.ReduceL1, "l2": op.ReduceSumSquare}
        return [sums[norm](x, keepdims=0) * factor for norm, factor in factors.items() if factor]


def functional_of(model: Any) -> Any:
    """Return the graph of layers of a model, which Sequential keeps in an attribute."""
    return getattr(model, "_functional", None) or model


_SAMPLES = 3  # in the example inputs of traced layers


def trace_layer(op: Builder, node: Any, arguments: Any, weight: Callable[[Any], Expr]) -> list[Expr]:
    """Return the results of a custom layer, traced on Keras's backend."""
    layer = node.operation
    if not isinstance(layer, keras.layers.Layer):
        raise Refused("is an operation without a counterpart in ONNX")
    if any(inner._seed_generators for inner in layer._flatten_layers()):
        raise Refused("draws random numbers: use a Dropout layer of Keras beside it")
    call = _LayerCall(layer, arguments)
    try:
        model = _export(call)
    except Refused:
        raise
    except Exception as error:  # of the backend, or of the layer
        raise Refused(f"cannot be traced: {first_line(error)}") from error
    sources = [*(tensor.plain for tensor in call.tensors), *map(weight, call.variables)]
    return _place_graph(op, model, sources, layer.name)


class _LayerCall:
    """Call of a layer as a function of its input tensors and its variables."""

    def __init__(self, layer: Any, arguments: Any):
        self._layer = layer
        self._arguments = arguments
        self.tensors: list[LayerTensor] = [x for x in keras.tree.flatten(arguments) if isinstance(x, LayerTensor)]
        self.variables: list[Any] = [*layer.trainable_variables, *layer.non_trainable_variables]

    def __call__(self, *arrays: Any, training: bool = True) -> list[Any]:
        tensors, variables = iter(arrays[: len(self.tensors)]), arrays[len(self.tensors) :]
        args, named = keras.tree.map_structure(
            lambda x: next(tensors) if isinstance(x, LayerTensor) else x, self._arguments
        )
        count = len(self._layer.trainable_variables)
        mode = {"training": training} if self._layer._call_has_training_arg else {}
        results, _ = self._layer.stateless_call(variables[:count], variables[count:], *args, **named, **mode)
        return list(keras.tree.flatten(results))

    def examples(self, samples: int | None) -> Iterator[tuple[tuple[int | None, ...], str]]:
        """Return shapes and types for a number of samples."""
        for tensor in self.tensors:
            dtype = tensor.plain.dtype
            assert dtype is not None
            yield (samples, *tensor.shape[1:]), str(dtype.numpy())
        for variable in self.variables:
            yield tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype)

    def differs_in_training(self) -> bool:
        if not self._layer._call_has_training_arg:
            return False
        rng = np.random.default_rng(0)
        drawn = [
            rng.standard_normal([size or 1 for size in shape]).astype(dtype)
            for shape, dtype in itertools.islice(self.examples(_SAMPLES), len(self.tensors))
        ]
        arrays = [*map(keras.ops.convert_to_tensor, drawn), *(variable.value for variable in self.variables)]
        both = ([keras.ops.convert_to_numpy(x) for x in self(*arrays, training=mode)] for mode in (True, False))
        return any(not np.array_equal(x, y, equal_nan=True) for x, y in zip(*both, strict=True))


def _export(call: _LayerCall) -> Model:
    """Return the graph of a call, on the backend that Keras uses."""
    if call.differs_in_training():
        raise Refused("computes something different in training")
    match keras.backend.backend():
        case "jax":
            from onward.frameworks.jax.jaxpr import export

            if any(None in tensor.shape[1:] for tensor in call.tensors):
                raise Refused("has inputs of several dynamic sizes, which is not traced on JAX, but on TensorFlow")
            # Each axis that is as long as the batch becomes dynamic, so the batch has a size that no variable has.
            sizes = {size for variable in call.variables for size in variable.shape}
            samples = next(size for size in itertools.count(_SAMPLES) if size not in sizes)
            examples = [np.zeros([size or 1 for size in shape], dtype) for shape, dtype in call.examples(samples)]
            return export(lambda _, *arrays: call(*arrays), {}, *examples)
        case "tensorflow":
            from onward.frameworks.tensorflow.capture import export_function

            return export_function(call, [keras.KerasTensor(*example) for example in call.examples(None)])
        case other:
            raise Refused(f"is a custom layer, which is not traced on {other}, but on JAX and TensorFlow")


def _place_graph(op: Builder, model: Model, sources: Sequence[Expr], scope: str) -> list[Expr]:
    """Move the nodes of a model into the graph of `op`, and return its outputs."""
    results = list(model.graph.outputs)
    for value, source in zip(list(model.graph.inputs), sources, strict=True):
        value.replace_all_uses_with(source.value)
    nodes, constants = take_apart(model.graph)
    for constant in constants:
        assert constant.const_value is not None
        constant.replace_all_uses_with(op.constant(constant.const_value).value)
    for node in nodes:
        node.name = op.names.fresh(f"{scope}/{node.op_type}")
        for output in node.outputs:
            output.name = op.names.fresh(f"{scope}/{output.name}") if output.name else output.name
    op.graph.extend(nodes)
    op.functions.update(model.functions)  # the body of stop_gradient does not say where gradients end
    op.imports.update({domain: version for domain, version in model.graph.opset_imports.items() if domain})
    return [op(result) for result in results]
