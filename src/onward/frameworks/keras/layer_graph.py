"""Keras models as graphs: layers one after the other, whose initializers are the variables of the model."""

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
from onward.frameworks.keras.layers import Call, Tensor, accepted_arguments, activations, core, find, recurrent, spatial  # noqa: F401 (rows)
from onward.frameworks.keras.optimizer import array_of
from onward.model import Model
from onward.recipe.assembly import take_apart
from onward.standard import COMMON_OPSET
from onward.vocabulary.keras import Refused

REGULARIZATION = "regularization"


class LayerGraph:
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
        output_names = map(Names().fresh, functional_of(model).output_names)  # a layer may have several outputs
        self.outputs = [self._output(x, name) for x, name in zip(results, output_names, strict=True)]
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


def functional_of(model: Any) -> Any:
    """The graph of layers that a model is, also where it was given as a list of layers."""
    return getattr(model, "_functional", None) or model


# ---- layers that are not of Keras, by tracing what they compute ------------------------------------------------------


_SAMPLES = 3


def trace_layer(op: Builder, node: Any, arguments: Any, weight: Callable[[Any], Expr]) -> list[Expr]:
    """What a call of a layer computes, in the graph of `op`; `arguments` are those of the call, with our tensors."""
    layer = node.operation
    _check(layer)
    call = _Call(layer, arguments)
    try:
        model = _export(call)
    except Refused:
        raise
    except Exception as error:  # what the backend, or the layer, raises
        raise Refused(f"cannot be traced: {first_line(error)}") from error
    sources = [*(tensor.plain for tensor in call.tensors), *map(weight, call.variables)]
    return _place_graph(op, model, sources, layer.name)


def _check(layer: Any) -> None:
    """Refuse what tracing would lose."""
    if not isinstance(layer, keras.layers.Layer):
        raise Refused("is an operation without a counterpart")
    if any(inner._seed_generators for inner in layer._flatten_layers()):
        raise Refused("draws random numbers: let Keras's own Dropout do so, beside it")


class _Call:
    """A call of a layer as a function of tensors: those that it is given, and its variables."""

    def __init__(self, layer: Any, arguments: Any):
        self._layer = layer
        self._arguments = arguments
        self.tensors: list[Tensor] = [x for x in keras.tree.flatten(arguments) if isinstance(x, Tensor)]
        self.variables: list[Any] = [*layer.trainable_variables, *layer.non_trainable_variables]

    def __call__(self, *given: Any, training: bool = True) -> list[Any]:
        tensors, variables = iter(given[: len(self.tensors)]), given[len(self.tensors) :]
        args, named = keras.tree.map_structure(lambda x: next(tensors) if isinstance(x, Tensor) else x, self._arguments)
        count = len(self._layer.trainable_variables)
        mode = {"training": training} if self._layer._call_has_training_arg else {}
        results, _ = self._layer.stateless_call(variables[:count], variables[count:], *args, **named, **mode)
        return list(keras.tree.flatten(results))

    def examples(self, samples: int | None) -> Iterator[tuple[tuple[int | None, ...], str]]:
        """Shapes and types, for so many samples."""
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
        given = [*map(keras.ops.convert_to_tensor, drawn), *(variable.value for variable in self.variables)]
        both = ([keras.ops.convert_to_numpy(x) for x in self(*given, training=mode)] for mode in (True, False))
        return any(not np.array_equal(x, y, equal_nan=True) for x, y in zip(*both, strict=True))


def _export(call: _Call) -> Model:
    """The graph of a call, on the backend that Keras has."""
    if call.differs_in_training():
        raise Refused("computes something else in training")
    match keras.backend.backend():
        case "jax":
            return _by_jax(call)
        case "tensorflow":
            from onward.frameworks.tensorflow.capture import export_function

            return export_function(call, [keras.KerasTensor(*example) for example in call.examples(None)])
        case other:
            raise Refused(f"is a layer of one's own, which is not traced on {other}, but on JAX and TensorFlow")


def _by_jax(call: _Call) -> Model:
    from onward.frameworks.jax.jaxpr import export

    if any(None in tensor.shape[1:] for tensor in call.tensors):
        raise Refused("has inputs of more than one open size, which is not traced on JAX, but on TensorFlow")
    sizes = {size for variable in call.variables for size in variable.shape}
    free = next(size for size in itertools.count(_SAMPLES) if size not in sizes)
    examples = [np.zeros([size or 1 for size in shape], dtype) for shape, dtype in call.examples(free)]
    return export(lambda _, *given: call(*given), {}, *examples)


def _place_graph(op: Builder, model: Model, sources: Sequence[Expr], scope: str) -> list[Expr]:
    """Move the graph of a model, which is used up, into that of `op`."""
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
    op.functions.update(model.functions)  # where gradients end, their bodies do not say
    op.imports.update({domain: version for domain, version in model.graph.opset_imports.items() if domain})
    return [op(result) for result in results]
