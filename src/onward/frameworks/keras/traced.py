"""Calls of layers, operations and models without a row, traced by TensorFlow or JAX.

On TensorFlow, layers inside of the call that have a row become a call of a function each, and the row translates that.
If it refuses, the function is inlined. Of a model with its own `train_step` or `compute_loss`, each gradient that an
optimizer applies is a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import onnx_ir as ir
from keras.src.ops.operation import Operation
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.data_adapters.data_adapter_utils import pack_x_y_sample_weight

from onward.build import Builder, Expr
from onward.errors import Error, first_line
from onward.frameworks.formulas.graph_building import initializer
from onward.frameworks.keras.layers import Call, LayerTensor, accepted_arguments, find
from onward.frameworks.keras.optimizer import array_of
from onward.frameworks.randomness import refuse_random_draws
from onward.model import Model
from onward.model.core import TRAINING_DOMAIN
from onward.model.walk import ancestors
from onward.recipe.step_builder import in_training, take_apart
from onward.vocabulary.keras import Refused

Weight = Callable[[Any], Expr]


class TracedCall:
    """Call of a layer, an operation or a model, as a function of its tensors."""

    def __init__(self, operation: Any, arguments: Any):
        self.operation = operation
        self.arguments = arguments
        self.tensors = [x for x in keras.tree.flatten(arguments) if isinstance(x, LayerTensor)]
        self.structure: Any = None
        """Results, as numbers among those of the call."""
        self.count = 0
        """Number of results."""
        self.masked: list[int] = []
        """Results with a mask, which follows them."""

    def __call__(self, tensors: Sequence[Any], training: bool) -> list[Any]:
        """Return the results, then the masks of some, then the summands that layers add to the loss."""
        rest = iter(tensors)
        args, named = keras.tree.map_structure(
            lambda x: next(rest) if isinstance(x, LayerTensor) else x, self.arguments
        )
        layer = self.operation
        is_layer = isinstance(layer, keras.layers.Layer)
        if is_layer:
            layer._clear_losses()
        mode = {"training": training} if is_layer and layer._call_has_training_arg else {}
        outputs = layer(*args, **named, **mode)
        results = keras.tree.flatten(outputs)
        self.structure = keras.tree.pack_sequence_as(outputs, list(range(len(results))))
        inner = [*layer._flatten_layers(), layer] if is_layer else []
        added = [x for each in {id(each): each for each in inner}.values() for x in each._losses]
        masks = {i: keras.src.backend.get_keras_mask(x) for i, x in enumerate(results)}
        masks = {i: mask for i, mask in masks.items() if mask is not None}
        self.masked = list(masks)
        self.count = len(results)
        return [*map(keras.ops.convert_to_tensor, results), *masks.values(), *map(keras.ops.sum, added)]

    @property
    def has_modes(self) -> bool:
        layer = self.operation
        layers = layer._flatten_layers() if isinstance(layer, keras.layers.Layer) else ()
        return any(each._call_has_training_arg and find(each) is None for each in layers)


class Tracer:
    """Translator of calls into a graph, on the backend that Keras uses."""

    def __init__(self, op: Builder, weight: Weight, variables: Sequence[Any], is_frozen: bool):
        self._op = op
        self._weight = weight
        self._variables = variables
        self._is_frozen = is_frozen
        """True if calls are in inference mode in training, too: only the `train_step` trains."""

    def trace(self, call: TracedCall | TracedStep) -> tuple[list[LayerTensor], list[Expr]]:
        """Return the results of a call, and the summands that it adds to the loss."""
        op = self._op.scoped(getattr(call.operation, "name", "call"))
        is_frozen = self._is_frozen and isinstance(call, TracedCall)
        results = self._results(op, call, not is_frozen)
        if call.has_modes and not is_frozen:
            before = list(op.graph)
            inference = self._results(op, call, False)
            tensors = results[: call.count], inference[: call.count]
            if _is_same(*([x.plain.value for x in half] for half in tensors)):
                op.graph.remove([node for node in op.graph if node not in set(before)], safe=False)
            else:
                joined = [
                    LayerTensor(a.shape, plain=op.call(in_training, b.plain, a.plain).like(a.plain.value))
                    for a, b in zip(*tensors, strict=True)
                ]
                results = [*joined, *results[call.count :]]
        return results[: call.count], [x.plain for x in results[call.count :]]

    def _results(self, op: Builder, call: TracedCall | TracedStep, training: bool) -> list[LayerTensor]:
        backend = keras.backend.backend()
        trace = {"tensorflow": self._from_tensorflow, "jax": self._from_jax}.get(backend)
        if trace is None or (backend == "jax" and isinstance(call, TracedStep)):
            raise Refused(f"has Python code, which is not traced on {backend}, but on TensorFlow")
        try:
            return trace(op, call, training)
        except (Refused, Error):
            raise
        except Exception as error:  # of the backend, or of the layer
            raise Refused(f"cannot be traced: {first_line(error)}") from error

    def _from_jax(self, op: Builder, call: TracedCall | TracedStep, training: bool) -> list[LayerTensor]:
        """Return the results of a call without state. Random numbers are inputs of what is traced."""
        from onward.frameworks.jax.jaxpr import array_like, export, trace, with_free_size

        layer = call.operation
        is_layer = isinstance(layer, keras.layers.Layer)
        variables = [*layer.trainable_variables, *layer.non_trainable_variables] if is_layer else []
        variables = [v for v in variables if "seed_generator" not in v.path]
        if any(None in x.shape[1:] for x in call.tensors):
            raise Refused("has inputs of several dynamic sizes, which is not traced on JAX, but on TensorFlow")
        # Each axis that is as long as the batch becomes dynamic, so the batch has a size that no variable has.
        sizes = {size for variable in variables for size in variable.shape}
        samples = next(size for size in itertools.count(5) if size not in sizes)
        shapes: list[tuple[Any, Any]] = [((samples, *x.shape[1:]), x.dtype) for x in call.tensors]
        shapes += [(tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for v in variables]
        draws: list[tuple[Any, ...]] = []

        def function(_: Any, *arrays: Any) -> list[Any]:
            count, drawn = len(call.tensors), iter(arrays[len(shapes) :])

            def draw(seed: Any, operator: str, shape: Any, dtype: Any, *settings: Any) -> Any:
                if not isinstance(seed, keras.random.SeedGenerator | None):
                    raise Refused("draws random numbers with a seed of its own: every step would get the same")
                if len(arrays) > len(shapes):
                    return next(drawn)
                draws.append((operator, shape, dtype, *settings))
                return keras.ops.zeros(shape, dtype)

            pairs = list(zip(variables, arrays[count : len(shapes)], strict=True))
            with keras.StatelessScope(state_mapping=pairs, collect_losses=True) as scope, drawing(draw):
                results = call(arrays[:count], training)
            if scope.losses or any(scope.get_current_value(v) is not value for v, value in pairs):
                raise Refused("changes its state or adds to the loss, which is traced on TensorFlow")
            return results

        examples = with_free_size([array_like(*x) for x in shapes], "batch")
        trace(function, {}, examples)  # finds the random numbers
        graph = export(function, {}, *examples, *(array_like(*d[1:3]) for d in draws), batch=None)
        sources = [*(x.plain for x in call.tensors), *map(self._weight, variables)]
        sources += [_drawn(op, call.tensors[0].plain, *d) for d in draws]
        results = _place_graph(op, graph, sources, getattr(layer, "name", "call"))
        ranks = [[size if isinstance(size, int) else None for size in x.value.shape or ()] for x in results]
        return [LayerTensor(shape, plain=x) for x, shape in zip(results, ranks, strict=True)]

    def _from_tensorflow(self, op: Builder, call: TracedCall | TracedStep, training: bool) -> list[LayerTensor]:
        import tensorflow as tf

        from onward.frameworks.tensorflow.graph import Resource, Translator, unwrapped
        from onward.frameworks.tensorflow.running_averages import keep_averages

        calls: dict[str, Any] = {}
        keras.src.random.seed_generator.global_seed_generator()  # its first use draws from Python
        specs = [tf.TensorSpec(x.shape, x.dtype) for x in call.tensors]
        is_frozen = self._is_frozen and isinstance(call, TracedCall)
        with refuse_random_draws("the model"), _layers_as_functions(calls, self._weight, training, is_frozen):
            function = tf.function(lambda *tensors: call(tensors, training)).get_concrete_function(*specs)
        translator = Translator(calls | getattr(call, "derivatives", {}))
        by_handle = {id(v.value.handle): v for v in self._variables if hasattr(v.value, "handle")}
        others: dict[int, ir.Value] = {}
        captured: list[Any] = []
        for tensor in function.captured_inputs:
            if tensor.dtype != tf.resource:
                captured.append(op.constant(tensor.numpy()))
            elif (variable := by_handle.get(id(tensor))) is not None and "seed_generator" not in variable.path:
                captured.append(Resource(self._weight(variable).value))
            else:
                others[id(tensor)] = value = _other(op, function, tensor)
                captured.append(Resource(value))
        arguments = [LayerTensor(x.shape, plain=op(x.plain.value)) if x.rank == 0 else x for x in call.tensors]
        results = translator.inline(op, function.graph, [*arguments, *captured])
        plain = [unwrapped(x) for x in results]
        if obstacles := translator.obstacles(x.value for x in plain):
            raise Refused("; ".join(obstacles))
        for value in [value for value in translator.updates if value in others.values()]:
            del translator.updates[value]
        if translator.updates:
            keep_averages(op, translator)
        shapes = [
            theirs.shape.as_list() if theirs.shape.rank is not None else [None] * len(ours.value.shape or ())
            for theirs, ours in zip(function.outputs, plain, strict=True)
        ]
        tensors = []
        for x, shape in zip(results, shapes, strict=True):
            tensors.append(x if isinstance(x, LayerTensor) else LayerTensor(shape, plain=op(unwrapped(x).value)))
            tensors[-1].shape = tuple(shape)  # without names of sizes
        return tensors


def _drawn(op: Builder, x: Expr, operator: str, shape: Sequence[Any], dtype: Any, *settings: Any) -> Expr:
    """Draw numbers, as many as `shape` says, in which a symbol is the number of rows of `x`."""
    if any(not isinstance(n, int) and (axis or str(n) != "batch") for axis, n in enumerate(shape)):
        raise Refused("draws as many random numbers as a formula of the batch size says")
    rows = [op.Shape(x, start=0, end=1)] if shape and not isinstance(shape[0], int) else []
    fixed = op.constant(np.array(shape[len(rows) :], np.int64))
    number = op.constant(np.array(operator == "Dropout", dtype))
    return op.node("", operator, op.Expand(number, op.Concat(*rows, fixed, axis=0) if rows else fixed), *settings)


@contextlib.contextmanager
def drawing(draw: Callable[..., Any]) -> Iterator[None]:
    """Replace random numbers of Keras by `draw(seed, operator, shape, dtype, *inputs)`: operators on zeros, or ones."""
    floatx = keras.config.floatx

    def dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
        shape = [m if n is None else n for m, n in zip(inputs.shape, noise_shape or inputs.shape, strict=True)]
        return inputs * draw(seed, "Dropout", shape, inputs.dtype, np.float32(rate)) if rate else inputs

    def uniform(shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, seed: Any = None) -> Any:
        return minval + draw(seed, "RandomUniformLike", shape, dtype or floatx()) * (maxval - minval)

    def normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None) -> Any:
        return mean + draw(seed, "RandomNormalLike", shape, dtype or floatx()) * stddev

    def randint(shape: Any, minval: Any, maxval: Any, dtype: Any = "int32", seed: Any = None) -> Any:
        return minval + keras.ops.cast(
            keras.ops.floor(draw(seed, "RandomUniformLike", shape, floatx()) * (maxval - minval)), dtype
        )

    with contextlib.ExitStack() as stack:
        for replacement in (dropout, uniform, normal, randint):
            stack.enter_context(mock.patch.object(keras.src.backend.random, replacement.__name__, replacement))
        yield


def _other(op: Builder, function: Any, handle: Any) -> ir.Value:
    """Return an initializer for a variable that the model does not own."""
    variable = next(v for v in function.graph.variables if v.handle is handle)
    value = initializer(op.names.fresh(variable.name.partition(":")[0]), variable.numpy())
    op.graph.register_initializer(value)
    return value


_LOGITS = "_keras_logits"
"""Attribute of the result of a softmax or sigmoid: losses compute with it."""


@contextlib.contextmanager
def _layers_as_functions(calls: dict[str, Any], weight: Weight, training: bool, all_frozen: bool) -> Iterator[None]:
    """Trace the calls of layers with a row as separate functions; fill `calls` with the rows."""
    import tensorflow as tf

    plainly = Operation.__call__

    def call(layer: Any, *args: Any, **named: Any) -> Any:
        leaves = keras.tree.flatten((args, named))
        tensors = [x for x in leaves if tf.is_tensor(x)]
        if not isinstance(layer, keras.layers.Layer) or find(layer) is None or not tensors:
            return plainly(layer, *args, **named)

        modes = [x for x in args if isinstance(x, bool)]  # `training` as a positional argument
        is_frozen = training and layer._call_has_training_arg and not (named.get("training") or any(modes))
        is_frozen = is_frozen or all_frozen

        def refilled(values: Iterator[Any]) -> Any:
            return keras.tree.map_structure(lambda x: next(values) if tf.is_tensor(x) else x, (args, named))

        def body(*values: Any) -> Any:
            inner_args, inner_named = refilled(iter(values))
            result = plainly(layer, *inner_args, **inner_named)
            return result, getattr(result, _LOGITS, None)

        body.__name__ = f"row{len(calls)}of"
        calls[body.__name__] = functools.partial(_by_row, layer, refilled, len(tensors), weight, is_frozen)
        result, logits = tf.function(body, autograph=False)(*tensors)
        if logits is not None:
            setattr(result, _LOGITS, logits)
        return result

    loop = keras.src.backend.rnn

    def rnn(*args: Any, **named: Any) -> Any:
        """Keep the outputs of all times: a list that is overwritten has no counterpart, one that grows has."""
        return loop(*args, **{**named, "return_all_outputs": True})

    with mock.patch.object(Operation, "__call__", call), mock.patch.object(keras.src.backend, "rnn", rnn):
        yield


def _by_row(
    layer: Any,
    refilled: Callable[[Iterator[Any]], Any],
    count: int,
    weight: Weight,
    is_frozen: bool,
    op: Builder,
    inputs: Sequence[Any],
    node: Any,
) -> list[LayerTensor] | None:
    """Return the results of a layer by its row; None if the row refuses."""
    rows = _rows(op, inputs[0])
    tensors = [
        x if isinstance(x, LayerTensor) else LayerTensor(_with_rows(node.shape(i), rows), plain=x)
        for i, x in enumerate(inputs[:count])
    ]
    if any(x.shape.rank is None for x in node.operation.outputs):
        return None
    shapes = [_with_rows(x.shape.as_list(), rows) for x in node.operation.outputs]
    args, named = refilled(iter(tensors))
    args = [x for x in args if not isinstance(x, bool)]
    try:
        results = call_row(Call(op.scoped(layer.name), layer, tuple(shapes[0]), weight, is_frozen), args, named, shapes)
    except Refused:
        return None
    if len(results) == len(shapes):
        return results
    logits = results[0].logits
    return None if logits is None else [results[0], logits]


def _rows(op: Builder, x: LayerTensor | Expr) -> str:
    """Return the name of the size of the first axis: parts of a model may see more rows than a batch has."""
    value = x.plain.value if isinstance(x, LayerTensor) else x.value
    size = value.shape[0] if value.shape else None
    name = size.value if isinstance(size, ir.SymbolicDim) else None
    return name or op.names.fresh("rows")


def _with_rows(shape: Sequence[int | None], rows: str) -> Any:
    return [rows if i == 0 and size is None else size for i, size in enumerate(shape)]


def call_row(c: Call, args: Sequence[Any], named: dict[str, Any], shapes: Sequence[Sequence[int | None]]) -> Any:
    """Return the results of a layer by its row."""
    function = find(c.layer)
    assert function is not None
    named.pop("training", None)
    results = function(c, *args, **accepted_arguments(function, named))
    results = results if isinstance(results, list) else [results]
    return [
        x if isinstance(x, LayerTensor) else LayerTensor(shape, plain=x)
        for x, shape in zip(results, shapes, strict=False)  # the last of `shapes` may be that of the logits
    ]


def _is_same(xs: Sequence[ir.Value], ys: Sequence[ir.Value]) -> bool:
    """True if the same nodes compute both, except for dropout."""
    same: dict[ir.Value, ir.Value] = {}
    graph = next((x.producer().graph for x in xs if x.producer() is not None), None)  # type: ignore[union-attr]
    position = {node: i for i, node in enumerate(graph)} if graph is not None else {}

    def needed(values: Sequence[ir.Value]) -> list[ir.Node]:
        nodes, _ = ancestors(values)
        return sorted(nodes, key=lambda node: position.get(node, -1))

    first, second = needed(xs), needed(ys)
    common = set(first) & set(second)
    for a, b in itertools.zip_longest(
        (n for n in first if n not in common and n.op_type not in ("Dropout", "Identity")),
        (n for n in second if n not in common and n.op_type not in ("Dropout", "Identity")),
    ):
        if a is None or b is None or (a.domain, a.op_type) != (b.domain, b.op_type):
            return False
        if len(a.inputs) != len(b.inputs) or str(a.attributes) != str(b.attributes):
            return False
        for x, y in zip(a.inputs, b.inputs, strict=True):
            x, y = _source(x), _source(y)
            if same.get(x, x) is not y:  # type: ignore[arg-type]
                return False
        same |= dict(zip(a.outputs, b.outputs, strict=True))
    return all(same.get(x := _source(a), x) is _source(b) for a, b in zip(xs, ys, strict=True))  # type: ignore[arg-type]


def _source(value: ir.Value | None) -> ir.Value | None:
    node = None if value is None else value.producer()
    while node is not None and node.op_type in ("Dropout", "Identity"):
        value = node.inputs[0]
        node = None if value is None else value.producer()
    return value


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


# ---- steps -----------------------------------------------------------------------------------------------------------


def has_own_step(model: Any) -> bool:
    return any(getattr(type(model), name) is not getattr(keras.Model, name) for name in ("train_step", "compute_loss"))


@dataclasses.dataclass(frozen=True)
class TracedUpdate:
    """Update of variables by an optimizer, with the gradients of a loss."""

    optimizer: Any
    variables: Sequence[Any]
    loss: int
    """Index among the losses of the step."""


class TracedStep:
    """A `train_step`, as a function from a batch to the losses that it differentiates."""

    has_modes = False

    def __init__(self, model: Any, x: Any, y: Any):
        if keras.backend.backend() != "tensorflow":
            raise Refused("has a `train_step` of its own, which is traced on TensorFlow")
        self.operation = model
        self._data = x, y
        self.tensors = [t for t in keras.tree.flatten(self._data) if isinstance(t, LayerTensor)]
        self.updates: list[TracedUpdate] = []
        self.derivatives: dict[str, Any] = {}
        """Replacements of calls by the derivatives for which they stand."""
        self.count = 0

    def _derivative(self, y: Any, xs: Sequence[Any]) -> list[Any]:
        """Return zeros, as a call that becomes a Gradient."""
        import tensorflow as tf

        def body(y: Any, *tensors: Any) -> Any:
            return [tf.zeros_like(x) for x in tensors]

        body.__name__ = f"derivative{len(self.derivatives)}of"
        self.derivatives[body.__name__] = _place_gradient
        return list(tf.function(body, autograph=False)(y, *map(tf.convert_to_tensor, xs)))

    def __call__(self, tensors: Sequence[Any], training: bool) -> list[Any]:
        from tensorflow.python.eager.record import stop_recording

        rest = iter(tensors)
        x, y = keras.tree.map_structure(lambda t: next(rest) if isinstance(t, LayerTensor) else t, self._data)
        with stop_recording(), recorded(self._derivative) as records:  # tapes replace calls by other functions
            self.operation.train_step(pack_x_y_sample_weight(x, y))
        self.updates = records.updates
        self._refuse_stale(records)
        self.count = len(records.losses)
        return list(records.losses)

    def _refuse_stale(self, records: StepRecords) -> None:
        """Refuse a loss that was computed before an update that changes its weights."""
        for number, update in enumerate(records.updates):
            changed = {id(v.value.handle) for earlier in records.updates[:number] for v in earlier.variables}
            since = records.positions[number - 1] if number else 0
            loss = records.losses[update.loss]
            order = {operation: i for i, operation in enumerate(loss.graph.get_operations())}
            captured = {id(inner): id(outer) for outer, inner in loss.graph.captures}
            pending, seen = [loss.op], set()
            while pending:
                operation = pending.pop()
                if operation in seen:
                    continue
                seen.add(operation)
                pending += [t.op for t in operation.inputs]
                if order[operation] < since and any(captured.get(id(t)) in changed for t in operation.inputs):
                    raise Refused("computes a loss before an update that changes its weights")


@dataclasses.dataclass
class StepRecords:
    """Losses and updates of a traced `train_step`."""

    losses: list[Any] = dataclasses.field(default_factory=list)
    updates: list[TracedUpdate] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)
    """Numbers of operations of the graph before each update."""


def _place_gradient(op: Builder, inputs: Sequence[Any], node: Any) -> list[Expr]:
    """Return the derivatives of the first input by the others."""
    y, *xs = (x.plain if isinstance(x, LayerTensor) else x for x in inputs)
    op.imports.setdefault(TRAINING_DOMAIN, 1)
    settings = {"xs": [x.name for x in xs], "y": y.name}
    results = op.node(TRAINING_DOMAIN, "Gradient", *xs, outputs=len(xs), **settings)
    results = results if isinstance(results, tuple) else (results,)
    return [gradient.like(x.value) for gradient, x in zip(results, xs, strict=True)]


@contextlib.contextmanager
def recorded(derivative: Callable[[Any, Sequence[Any]], list[Any]]) -> Iterator[StepRecords]:
    """Record losses and updates instead of making them. Metrics are not computed.

    `derivative` stands for derivatives. If an optimizer gets gradients that were changed, the loss is replaced by one
    with these gradients, and the same value.
    """
    import tensorflow as tf

    records = StepRecords()
    owners: dict[int, tuple[Any, Any, Any]] = {}  # by the id of a gradient: loss, variable, and the gradient itself
    first: list[Any] = []

    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **named: Any) -> Any:
        flat = keras.tree.flatten(sources)
        loss = tf.add_n([tf.reduce_sum(x) for x in keras.tree.flatten(target)])
        results = derivative(loss, flat)
        if all(isinstance(x, keras.Variable | tf.Variable) for x in flat):
            first.append(loss)
            for result, variable in zip(results, flat, strict=True):
                owners[id(result)] = loss, variable, result
        return keras.tree.pack_sequence_as(sources, results)

    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
        variables = list(trainable_variables or optimizer._trainable_variables)
        pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
        sources = [owners.get(id(g), (None, None)) for g, _ in pairs]
        if any(update.optimizer is optimizer for update in records.updates):
            raise Refused("applies an optimizer more than once")
        loss = sources[0][0]
        if loss is None or any(
            owner[0] is not loss or owner[1] is not v for owner, (_, v) in zip(sources, pairs, strict=True)
        ):
            if not first:
                raise Refused("applies gradients that are not of `tf.GradientTape`")
            terms = [tf.reduce_sum(tf.stop_gradient(tf.convert_to_tensor(g)) * v) for g, v in pairs]
            total = tf.add_n(terms)
            loss = tf.stop_gradient(first[0] - total) + total
        first.clear()
        if not any(loss is other for other in records.losses):
            records.losses.append(loss)
        number = next(i for i, other in enumerate(records.losses) if loss is other)
        records.updates.append(TracedUpdate(optimizer, variables, number))
        graph = getattr(loss, "graph", None)
        records.positions.append(0 if graph is None else len(graph.get_operations()))

    with (
        mock.patch.object(tf.GradientTape, "gradient", gradient),
        mock.patch.object(BaseOptimizer, "apply", apply),
        mock.patch.object(keras.src.trainers.trainer.Trainer, "compute_metrics", lambda *_, **__: {}),
        _without_metrics(),
    ):
        yield records
    if not records.updates:
        raise Refused("applies no gradients of `tf.GradientTape`")


@contextlib.contextmanager
def _without_metrics() -> Iterator[None]:
    classes, pending = [], [keras.metrics.Metric]
    while pending:
        classes.append(pending.pop())
        pending += classes[-1].__subclasses__()
    with contextlib.ExitStack() as stack:
        for each in classes:
            for name, replacement in (("update_state", lambda *_, **__: None), ("result", lambda *_, **__: 0.0)):
                if name in vars(each):
                    stack.enter_context(mock.patch.object(each, name, replacement))
        yield


def as_tensors(data: Any) -> Any:
    """Return data as `fit` feeds them: Python's floats are of the default type."""

    def tensor(x: Any) -> Any:
        array = np.asarray(x)
        return keras.ops.convert_to_tensor(array.astype(keras.config.floatx()) if array.dtype == np.float64 else array)

    return keras.tree.map_structure(lambda x: None if x is None else tensor(x), data)


def build(model: Any, x: Any, y: Any) -> None:
    """Run a `train_step` without updates, which creates variables; undo its changes of state."""
    before = {id(v): array_of(v) for v in model.variables}
    with recorded(lambda _, xs: list(map(keras.ops.zeros_like, xs))):
        model.train_step(as_tensors(pack_x_y_sample_weight(x, y)))
    for variable in model.variables:
        if id(variable) in before:
            variable.assign(before[id(variable)])
        elif not variable.trainable and callable(initial := getattr(variable, "_initializer", None)):
            variable.assign(np.asarray(initial(variable.shape, dtype=variable.dtype)))
