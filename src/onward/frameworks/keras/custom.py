"""Layers of one's own, by tracing what they compute on the backend that Keras has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from onward.build import Builder, Expr
from onward.errors import first_line
from onward.frameworks.keras.tensors import Tensor
from onward.model import Model
from onward.recipe.assembly import take_apart
from onward.vocabulary.keras import Refused

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
