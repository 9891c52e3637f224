"""Graphs of Keras models, layer by layer. Initializers are the variables of the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr, Names
from onward.differentiate.gradients import lower_gradients
from onward.errors import UnsupportedError
from onward.frameworks.formulas.graph_building import initializer, model_of, put_out, value_of
from onward.frameworks.keras.layers import Call, LayerTensor, activations, core, find, recurrent, spatial
from onward.frameworks.keras.optimizer import array_of
from onward.frameworks.keras.traced import TracedCall, TracedStep, TracedUpdate, Tracer, call_row, has_own_step
from onward.model import Model
from onward.model.core import is_gradient, string, values
from onward.model.walk import ancestors, between, nodes_after
from onward.standard import COMMON_OPSET
from onward.transform.context import Context
from onward.transform.training import drop_unused_definitions
from onward.vocabulary.keras import Refused

ROWS_OF_LAYERS = (activations, core, recurrent, spatial)
"""Files that register their rows when they are imported."""
REGULARIZATION = "regularization"


class LayerGraph:
    """Graph of a Keras model; `problems` lists what cannot be converted.

    A functional model is translated layer by layer. Any other model, and one that carries masks, is
    traced as a whole with `example_inputs`.
    """

    def __init__(self, model: Any, example_inputs: Any = None, example_targets: Any = None):
        self.problems: list[str] = []
        self.graph = ir.Graph([], [], nodes=[], name=model.name, opset_imports={"": COMMON_OPSET})
        self.op = Builder(self.graph, opset=COMMON_OPSET, names=Names())
        self.names: dict[int, str] = {}  # by the id of a variable
        for variable in model.variables:
            self.names[id(variable)] = self.op.names.fresh(variable.path)  # nested models may repeat a path
            if getattr(variable, "constraint", None) is not None:
                self.problems.append(f"`{variable.path}` has a constraint")
        self._weights: dict[int, ir.Value] = {}
        self._is_frozen = has_own_step(model)  # its step computes all that is trained, from other nodes
        self._tracer = Tracer(self.op, self._weight, model.variables, self._is_frozen)
        self._added: list[Expr] = []  # summands of the loss
        self.ends: list[ir.Value] = []  # values that are needed, but no outputs
        self.targets: list[LayerTensor] = []
        """Inputs that only the losses of a `train_step` read."""
        self.masks: dict[int, Expr] = {}
        """Masks by the index of the output."""
        self.updates: Sequence[TracedUpdate] = ()
        """Updates of a `train_step` that is traced."""
        self.losses: list[str] = []
        """Names of the losses that it differentiates."""
        functional = functional_of(model)
        if not has_call(model):
            self.inputs = self._inputs(_argument_names(model, example_inputs), example_inputs)
            results, names, self.structure = [], [], []
        elif is_functional(model) and not _has_masks(functional):
            self.inputs = [self._input(x.name, x.shape, x.dtype) for x in model.inputs]
            results = self._functional(model, self.inputs)
            names, self.structure = functional.output_names, functional._outputs_struct
        else:
            example = functional._inputs_struct if is_functional(model) else example_inputs
            self.inputs, results, structure = self._whole(model, example)
            names = functional.output_names if is_functional(model) else _paths(structure)
            flat = [keras.KerasTensor(x.shape, str(x.dtype)) for x in results]
            self.structure = keras.tree.pack_sequence_as(structure, flat)
        self.output_names = list(names)
        unique = map(Names().fresh, names)  # a layer may have several outputs
        self.outputs = [self._output(x, name) for x, name in zip(results, unique, strict=True)]
        self.is_regularized = not has_own_step(model) and self._regularize(model.trainable_variables)
        if has_own_step(model):
            self._steps(model, example_inputs, example_targets)

    def _steps(self, model: Any, x: Any, y: Any) -> None:
        """Trace the `train_step` of a model. Its targets become inputs; losses are outputs if there are no others."""
        leaves = [leaf for leaf in keras.tree.flatten(y) if leaf is not None]
        names = ["target"] if len(leaves) == 1 else [f"target_{i}" for i in range(len(leaves))]
        self.targets = self._inputs(names, leaves)
        rest = iter(self.targets)
        targets = keras.tree.map_structure(lambda leaf: None if leaf is None else next(rest), y)
        step = TracedStep(model, keras.tree.pack_sequence_as(x, self.inputs), targets)
        try:
            results, _ = self._tracer.trace(step)
        except Refused as reason:
            self.problems.append(f"its `train_step` {reason}")
            return
        self.updates = step.updates
        self._check_derivatives()
        for number, result in enumerate(results):
            name = "loss" if len(results) == 1 else f"loss{number + 1}"
            if self.outputs:
                loss = self.op.Identity(result.plain).like(result.plain.value).named(name)
            else:
                loss = put_out(self.op, result.plain, self.op.names.fresh(name))
            self.ends.append(loss.value)
            self.losses.append(loss.name)

    def _whole(self, model: Any, example: Any) -> tuple[list[LayerTensor], list[LayerTensor], Any]:
        """Return the inputs and results of a traced model, and the structure of the results."""
        tensors = self._inputs(_argument_names(model, example), example)
        call = TracedCall(model, ((keras.tree.pack_sequence_as(example, tensors),), {}))
        try:
            results, added = self._tracer.trace(call)
        except Refused as reason:
            raise UnsupportedError(
                f"the model `{model.name}` cannot be carried exactly: {reason}",
                hint="compute with `keras.ops` and layers of Keras",
            ) from reason
        self.masks = dict(zip(call.masked, added, strict=False))
        self.ends += [mask.value for mask in self.masks.values()]
        self._added += added[len(self.masks) :]
        return tensors, results, call.structure

    def model(self) -> Model:
        """Return the model, without what neither an output nor a loss needs."""
        ends = [x.plain.name for x in self.outputs] + [value.name or "" for value in self.ends]
        model = lower_gradients(Context(model_of(self.graph, self.op.functions.values())))
        self.graph = model.graph
        known = {value.name: value for value in values(self.graph)}
        needed, read = ancestors([known[name] for name in ends])
        self.graph.remove([node for node in self.graph if node not in needed], safe=False)
        for name, value in list(self.graph.initializers.items()):
            if value not in read:
                del self.graph.initializers[name]
        drop_unused_definitions(model)
        return model

    def _check_derivatives(self) -> None:
        """Find what would be another forward pass in training; let dropout be a product, whose mask stays the same."""
        gradients = [node for node in self.graph if is_gradient(node)]
        for gradient in gradients:
            target = next(v for v in values(self.graph) if v.name == string(gradient, "y"))
            if any(n.op_type == "BatchNormalization" for n in between(target, [x for x in gradient.inputs if x])):
                self.problems.append("its `train_step` computes gradients through a BatchNormalization")
        for node in [node for node in self.graph if gradients and node.op_type == "Dropout"]:
            (x, ratio), result = (self.op(v) for v in node.inputs[:2] if v is not None), node.outputs[0]
            last = self.graph[-1]
            kept = self.op.Dropout(self.op.filled_like(x.value, 1), ratio)
            product = (x * kept).like(x.value)
            result.name, name = self.op.names.fresh("dropped"), result.name
            result.replace_all_uses_with(product.named(name or "").value, replace_graph_outputs=True)
            self.graph.remove(added := nodes_after(last, self.graph))
            self.graph.insert_before(node, added)
            self.graph.remove(node, safe=True)

    def _weight(self, variable: Any) -> Expr:
        if id(variable) not in self._weights:
            value = initializer(self.names[id(variable)], array_of(variable))
            self.graph.register_initializer(value)
            self._weights[id(variable)] = value
        return self.op(self._weights[id(variable)])

    def is_used(self, variable: Any) -> bool:
        weight = self._weights.get(id(variable))
        return weight is not None and weight.name in self.graph.initializers

    def _input(self, name: str, shape: Sequence[int | None], dtype: str) -> LayerTensor:
        value = ir.Value(name=self.op.names.fresh(name), type=ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype))))
        self.graph.inputs.append(value)
        return LayerTensor(shape, plain=self.op(value))

    def may_repeat(self, table: Any) -> bool:
        """True if a row of a table may be read twice: other indices than different constants."""
        weight = self._weights.get(id(table))
        for reader in () if weight is None else weight.consumers():
            indices = reader.inputs[1] if reader.op_type == "Gather" else None
            numbers = None if indices is None else value_of(self.op(indices))
            if numbers is None or len(np.unique(numbers)) < numbers.size:
                return True
        return False

    def _inputs(self, names: Sequence[str], example: Any) -> list[LayerTensor]:
        return [
            self._input(name, (None, *leaf.shape[1:]), _dtype(leaf))
            for name, leaf in zip(names, keras.tree.flatten(example), strict=True)
        ]

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
        layer, shapes = node.operation, [tuple(x.shape) for x in node.outputs]
        if isinstance(layer, keras.Model) and is_functional(layer):
            return self._functional(layer, keras.tree.flatten(arguments))
        named.pop("training", None)  # Keras replaces it by the argument of the whole model
        reason: Refused | None = None
        if find(layer) is not None and getattr(layer, "activity_regularizer", None) is None:
            try:
                c = Call(self.op.scoped(layer.name), layer, shapes[0], self._weight, self._is_frozen)
                return call_row(c, arguments, dict(named), shapes)
            except Refused as refusal:
                reason = refusal
        try:
            call = TracedCall(layer, (tuple(arguments), named))
            results, added = self._tracer.trace(call)
            self._added += added[len(call.masked) :]
            return results
        except Refused as refusal:
            self.problems.append(f"{type(layer).__name__} `{layer.name}` {reason or refusal}")
            # Placeholders let the others be checked, so that all problems are reported at once.
            dtypes = [ir.DataType.from_numpy(np.dtype(x.dtype)) for x in node.outputs]
            values = [ir.Value(type=ir.TensorType(dtype)) for dtype in dtypes]
            return [LayerTensor(x.shape, plain=self.op(value)) for x, value in zip(node.outputs, values, strict=True)]

    def _regularize(self, variables: Sequence[Any]) -> bool:
        """Add the penalties of the variables, computed only in training. True if there are any."""
        op = self.op.scoped(REGULARIZATION)
        terms = [term for v in variables if v.regularizer is not None for term in self._penalties(op, v)]
        terms += self._added
        if terms:
            total = op.Identity(terms[0] if len(terms) == 1 else op.Sum(*terms)).named(REGULARIZATION)
            total.value.type, total.value.shape = ir.TensorType(terms[0].dtype or ir.DataType.FLOAT), ir.Shape([])
            self.ends.append(total.value)
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


def is_functional(model: Any) -> bool:
    """True if a graph of layers says what the model computes."""
    functional = functional_of(model)
    own = type(model).call not in (keras.Sequential.call, type(functional).call, keras.Model.call)
    return hasattr(functional, "_nodes_by_depth") and model.built and not own


def has_call(model: Any) -> bool:
    return is_functional(model) or type(model).call is not keras.Model.call


def _dtype(leaf: Any) -> str:
    """Return the type in which Keras takes an array."""
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    return keras.config.floatx() if dtype == "float64" else dtype


def _has_masks(functional: Any) -> bool:
    """True if a layer gets or makes a mask."""
    nodes = [node for nodes in functional._nodes_by_depth.values() for node in nodes]
    tensors = [x for node in nodes for x in (*node.outputs, *node.input_tensors)]
    return any(keras.src.backend.get_keras_mask(x) is not None for x in tensors)


def _argument_names(model: Any, example: Any) -> list[str]:
    """Return a name for each input: that of the functional model, its key, or that of the argument."""
    if is_functional(model):
        return [x.name for x in model.inputs]
    if isinstance(example, Mapping):
        return [".".join(map(str, path)) for path, _ in keras.tree.flatten_with_path(example)]
    first = next(iter(inspect.signature(model.call).parameters), "inputs") if has_call(model) else "inputs"
    count = len(keras.tree.flatten(example))
    return [first] if count == 1 else [f"{first}_{i}" for i in range(count)]


def _paths(structure: Any) -> list[str]:
    paths = [".".join(map(str, path)) for path, _ in keras.tree.flatten_with_path(structure)]
    return ["output" if not path else f"output_{path}" if path[:1].isdigit() else path for path in paths]
