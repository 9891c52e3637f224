"""Quantization ranges with their scales and zero points: stored, observed, learned, calibrated."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.constants import constant_tensor
from onward.errors import DataError, UnsupportedError
from onward.model import Model
from onward.model.state import with_tags
from onward.recipe.initialize import bind_initial_value
from onward.recipe.optimizers.definition import ConfiguredOptimizer
from onward.recipe.optimizers.groups import OptimizerGroup
from onward.recipe.quantize.settings import QuantizeSettings, levels, most_symmetric
from onward.recipe.step_builder import StepBuilder, moving_average, stop_gradient
from onward.runtime.sessions import explain_failures, open_session
from onward.transform.quantized import RANGE_KEY, STORED_KEY
from onward.transform.training import keep_only, without_steps

LEAST_SCALE = float(np.finfo(np.float32).eps)
"""The minimum of scales, as in PyTorch."""


def described(settings: QuantizeSettings, fixed: bool = False) -> str:
    """Return the metadata of a QuantizeLinear about its range, which may be fixed already."""
    facts: dict[str, Any] = {"ranges": settings.ranges}
    if settings.ranges == "moving":
        facts["momentum"] = settings.momentum
    if settings.percentile is not None:
        facts["percentile"] = settings.percentile
    if fixed:
        facts["known"] = True
    elif settings.calibrate:
        facts["calibrate"] = settings.calibrate
    return json.dumps(facts)


def tag_scale(tensor: ir.TensorProtocol, settings: QuantizeSettings, weight: str | None = None) -> ir.TensorProtocol:
    """Return a scale with the tag of its role in training."""
    role = "parameter" if settings.ranges == "lsq" else "statistics"
    return with_tags(tensor, role=role, param=weight, slot="scale")


@dataclasses.dataclass(frozen=True, eq=False)
class Rounding:
    """A QuantizeLinear whose scale changes in training."""

    node: ir.Node
    facts: Mapping[str, Any]

    @property
    def x(self) -> ir.Value:
        return self._input(0)

    @property
    def scale(self) -> ir.Value:
        return self._input(1)

    @property
    def zero(self) -> ir.Value:
        return self._input(2)

    @property
    def dtype(self) -> ir.DataType:
        tensor = constant_tensor(self.zero)
        assert tensor is not None
        return tensor.dtype

    @property
    def is_weight(self) -> bool:
        return STORED_KEY in self.node.metadata_props

    @property
    def is_learned(self) -> bool:
        return bool(self.facts["ranges"] == "lsq")

    @property
    def is_known(self) -> bool:
        """True if the file had the range from the beginning."""
        return bool(self.facts.get("known"))

    @property
    def limits(self) -> tuple[str, str]:
        """Names of the state that holds the range."""
        return f"{self.x.name}/min", f"{self.x.name}/max"

    def _input(self, index: int) -> ir.Value:
        value = self.node.inputs[index]
        assert value is not None
        return value


def roundings(graph: ir.Graph) -> Iterator[Rounding]:
    for node in graph:
        if is_observed(node):
            yield Rounding(node, json.loads(node.metadata_props[RANGE_KEY]))


def is_observed(node: ir.Node) -> bool:
    return RANGE_KEY in node.metadata_props and node.op_type == "QuantizeLinear"


# ---- scales ----------------------------------------------------------------------------------------------------------


def parameters_of(op: Builder, low: Expr, high: Expr, dtype: ir.DataType) -> tuple[Expr, Expr]:
    """Return scale and zero point of a range, extended to contain 0 as in PyTorch's observers."""
    first, last = levels(dtype)
    low, high = op.Min(low, 0.0), op.Max(high, 0.0)
    scale = op.Max((high - low) / (last - first), LEAST_SCALE)
    level = op.Min(op.Max(first - op.Round(low / scale), first), last)
    return scale, op.Cast(level, to=dtype)


def parameters_as_numbers(low: float, high: float, dtype: ir.DataType) -> tuple[np.ndarray, np.ndarray]:
    """Return scale and zero point of a range of numbers, without a graph."""
    first, last = (np.float32(level) for level in levels(dtype))
    below, above = np.float32(min(low, 0.0)), np.float32(max(high, 0.0))
    scale = np.asarray(np.maximum((above - below) / (last - first), np.float32(LEAST_SCALE)))
    level = np.clip(first - np.rint(below / scale), first, last)
    return scale, np.asarray(level, np.int32).astype(dtype.numpy())


def symmetric_scale(array: np.ndarray, dtype: ir.DataType, axis: int, block: int | None) -> np.ndarray:
    """Return the scale that maps the largest number of a channel or block to the type's."""
    size = np.abs(array)
    if block:
        starts = np.arange(0, array.shape[axis], block)
        largest = np.maximum.reduceat(size, starts, axis)
    else:
        largest = size.max(axis=tuple(i for i in range(array.ndim) if i != axis))
    scale: np.ndarray = np.maximum(largest / np.float32(most_symmetric(dtype)), np.float32(LEAST_SCALE))
    return scale.astype(np.float32)


# ---- observed in training --------------------------------------------------------------------------------------------

# Scales and zero points are state, which the inference graph reads. A step measures the range of an
# activation without a gradient, updates the state with it, and rounds with the new state. Without
# calibration, the first batch uses its own range.


BATCHES = "quantize/batches"
"""State that counts the batches whose ranges were measured."""


def observe(builder: StepBuilder, node: ir.Node, new: dict[ir.Value, ir.Value]) -> None:
    """Replace a QuantizeLinear by its training mode: the scale follows the range of the batch."""
    rounding = Rounding(node, json.loads(node.metadata_props[RANGE_KEY]))
    op = builder.op.scoped(f"train/{node.name or node.op_type}")
    x, scale, zero = (op(new.get(value, value)) for value in (rounding.x, rounding.scale, rounding.zero))
    is_first = op.Equal(_count(builder, rounding), np.int64(0))
    low, high = batch_range(op, op.call(stop_gradient, x).like(x.value), rounding.facts.get("percentile"))
    if rounding.facts["ranges"] == "moving":
        decay = op.constant(np.float64(rounding.facts["momentum"]))
        averages = []
        for name, number, initial in zip(rounding.limits, (low, high), _known_range(rounding), strict=True):
            start = ir.Tensor(np.asarray(initial, np.float32))
            state = builder.state(name, start, lambda op, start=start: op.constant(start), role="statistics")  # type: ignore[misc]
            old = op(state.value)
            average = op.Where(is_first, number, op.call(moving_average, old, number, decay).like(state.value))
            averages.append(average)
            builder.update(builder.values[name].name or "", average)
        low, high = averages[0], averages[1]
        scale, zero = parameters_of(op, low, high, rounding.dtype)
    else:
        first_scale, first_zero = parameters_of(op, low, high, rounding.dtype)
        scale, zero = op.Where(is_first, first_scale, scale), _where_integer(op, is_first, first_zero, zero)
    rounded = op.QuantizeLinear(x, scale, zero).named(f"train/{node.outputs[0].name}").like(node.outputs[0])
    new[node.outputs[0]] = rounded.value
    new[rounding.scale], new[rounding.zero] = scale.like(rounding.scale).value, zero.like(rounding.zero).value


def _count(builder: StepBuilder, rounding: Rounding) -> Expr:
    if BATCHES not in builder.values:
        zero = np.asarray(int(rounding.is_known), np.int64)
        count = builder.state(BATCHES, ir.Tensor(zero), lambda op: op.Identity(zero), role="counter")
        builder.update(BATCHES, count + 1)
    return builder.op(builder.values[BATCHES])


def batch_range(op: Builder, x: Expr, percentile: float | None) -> tuple[Expr, Expr]:
    """Return the minimum and maximum, or the percentiles at both ends."""
    if percentile is None:
        return op.ReduceMin(x, keepdims=0), op.ReduceMax(x, keepdims=0)
    flat = op.Reshape(x, np.asarray([-1], np.int64))
    last = op.Cast(op.Size(x) - 1, to=ir.DataType.DOUBLE)
    below = op.Cast(op.Floor(last * (percentile / 100)), to=ir.DataType.INT64)
    count = op.Reshape(op.Size(x) - below, np.asarray([1], np.int64))
    high, _ = op.TopK(flat, count, outputs=2, largest=1)
    low, _ = op.TopK(flat, count, outputs=2, largest=0)
    return op.ReduceMax(low, keepdims=0), op.ReduceMin(high, keepdims=0)


def _known_range(rounding: Rounding) -> tuple[float, float]:
    scale, zero = (constant_tensor(value) for value in (rounding.scale, rounding.zero))
    if not rounding.is_known or scale is None or zero is None:
        return 0.0, 0.0
    low, high = (level - float(zero.numpy().astype(np.float32)) for level in levels(rounding.dtype))
    return low * float(scale.numpy()), high * float(scale.numpy())


def _where_integer(op: Builder, condition: Expr, a: Expr, b: Expr) -> Expr:
    """Append Where through int32, for integer types that some runtimes lack."""
    wide = [op.Cast(expr, to=ir.DataType.INT32) for expr in (a, b)]
    return op.Cast(op.Where(condition, *wide), to=b.dtype)


# ---- scales of weights, and learned scales ---------------------------------------------------------------------------


def learned_scales(model: Model, parameters: Sequence[ir.Value]) -> list[ir.Value]:
    """Return the scales that are parameters: of activations, and of trained weights."""
    learned = (rounding for rounding in roundings(model.graph) if rounding.is_learned)
    return [rounding.scale for rounding in learned if not rounding.is_weight or rounding.x in parameters]


def bind_learned(builder: StepBuilder, scales: Sequence[ir.Value], init: str | Mapping[str, Any]) -> None:
    """Make learned scales state, with their initial values."""
    for rounding in roundings(builder.model.graph):
        if rounding.scale in scales and rounding.is_learned:
            _bind_initial_scale(builder, rounding, init)


def groups_of_scales(
    scales: Sequence[ir.Value], model: Model, like: OptimizerGroup, start: int
) -> list[OptimizerGroup]:
    """Return a parameter group per type for learned scales: without decay, at a suitable rate.

    Optimizers that divide by the size of gradients move scales and weights equally far. At the rate
    divided by the largest level, the end of the range (scale times level) moves so far.
    """
    optimizer = like.optimizer
    if not isinstance(optimizer, ConfiguredOptimizer):
        raise UnsupportedError(
            f"`ranges=lsq` does not work with the optimizer graph `{optimizer.name}`",
            hint="write `ranges=moving`, or choose an optimizer by name",
        )
    by_level: dict[float, list[ir.Value]] = {}
    for rounding in roundings(model.graph):
        if rounding.scale in scales:
            by_level.setdefault(levels(rounding.dtype)[1], []).append(rounding.scale)
    groups = []
    for i, (level, members) in enumerate(by_level.items()):
        rate = optimizer.values["lr"] / (level if optimizer.definition.is_scale_free else 1)
        decay = {"weight_decay": 0.0} if "weight_decay" in optimizer.values else {}
        own = dataclasses.replace(optimizer, values={**optimizer.values, "lr": rate, **decay})
        groups.append(OptimizerGroup(f"group{start + i}", own, members))
    return groups


def scale_gradients(
    builder: StepBuilder, gradients: dict[ir.Value, Expr], trained: Mapping[ir.Value, ir.Value]
) -> dict[ir.Value, Expr]:
    """Divide gradients of learned scales by the root of (count of numbers * largest level)."""
    changed = dict(gradients)
    for rounding in roundings(builder.model.graph):
        if rounding.scale in changed and rounding.is_learned:
            op = builder.op.scoped(f"{rounding.scale.name}/grad")
            numbers = op.Cast(op.Size(trained.get(rounding.x, rounding.x)), to=ir.DataType.FLOAT)
            factor = 1.0 / op.Sqrt(numbers * levels(rounding.dtype)[1])
            changed[rounding.scale] = (op(changed[rounding.scale].value) * factor).like(rounding.scale)
    return changed


def follow(builder: StepBuilder, trained: Mapping[ir.Value, ir.Value], init: str | Mapping[str, Any]) -> None:
    """Update the scales of weights for the new weights, and keep learned scales positive."""
    updated = builder.step.update
    for rounding in list(roundings(builder.model.graph)):
        if rounding.is_learned and rounding.scale.name in updated:
            _keep_positive(builder, rounding, trained)
        elif rounding.is_weight and rounding.x.name in updated:
            by_name = {value.name: value for value in builder.step.algorithm.outputs}
            new = builder.op(by_name[updated[rounding.x.name or ""]])
            builder.update(
                rounding.scale.name or "", _symmetric_scale(builder.op.scoped(rounding.scale.name or ""), rounding, new)
            )
            _bind_initial_scale(builder, rounding, init)


def _bind_initial_scale(builder: StepBuilder, rounding: Rounding, init: str | Mapping[str, Any]) -> None:
    """Bind the initial scale of a weight: the file's, or computed if the weight is drawn anew."""
    if init == "file" or not rounding.is_weight:
        bind_initial_value(builder, rounding.scale, "file")
    else:
        builder.reset(rounding.scale, lambda op: _symmetric_scale(op, rounding, builder.initial_value(rounding.x)))


def _keep_positive(builder: StepBuilder, rounding: Rounding, trained: Mapping[ir.Value, ir.Value]) -> None:
    name = rounding.scale.name or ""
    op = builder.op.scoped(name)

    def change(new: Expr) -> Expr:
        above: Expr = op.Max(op(new.value), LEAST_SCALE)
        if rounding.is_weight or rounding.scale not in trained:
            return above
        is_first = op.Equal(builder.op(builder.values[BATCHES]), np.int64(0))
        return op.Where(is_first, op(trained[rounding.scale]), above)

    builder.amend(name, change)


def _symmetric_scale(op: Builder, rounding: Rounding, weight: Expr) -> Expr:
    """Compute `symmetric_scale` in a graph: from the maximum of all, of a channel or of a block."""
    weight, shape = op(weight.value), _static(rounding.x)
    axis, block = rounding.node.attributes.get_int("axis", 1), rounding.node.attributes.get_int("block_size", 0)
    size, static_shape = op.Abs(weight), _static(rounding.scale)
    if block:
        missing = -shape[axis] % block
        pads = [0] * (2 * len(shape))
        pads[len(shape) + axis] = missing
        whole = op.Pad(size, np.asarray(pads, np.int64)) if missing else size
        parts = [*shape[:axis], -1, block, *shape[axis + 1 :]]
        size, axes = op.Reshape(whole, np.asarray(parts, np.int64)), [axis + 1]
    else:
        own = axis % len(shape)
        axes = [i for i in range(len(shape)) if i != own] if static_shape == (shape[own],) else []
    largest = op.ReduceMax(size, np.asarray(axes, np.int64) if axes else None, keepdims=0)
    scale = op.Max(largest / most_symmetric(rounding.dtype), LEAST_SCALE)
    return op.Reshape(scale, np.asarray(static_shape, np.int64)).like(rounding.scale)


def _static(value: ir.Value) -> tuple[int, ...]:
    tensor = constant_tensor(value)
    assert tensor is not None
    return tuple(tensor.shape.numpy())


# ---- calibration -----------------------------------------------------------------------------------------------------


def has_ranges(model: Model) -> bool:
    """True if training observes or learns ranges of activations."""
    return bool(_of_activations(model.graph))


def needs_calibration(model: Model) -> int:
    """Return the number of batches for calibration; 0 if a model needs none."""
    asked = [rounding.facts.get("calibrate", 0) for rounding in _of_activations(model.graph)]
    if not asked or BATCHES not in model.step().algorithm.initializers:
        return 0
    return max(asked) if int(model.array(BATCHES)) == 0 else 0


def calibrate(model: Model, batches: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Measure activation ranges over batches, with rounded weights, and set the scales."""
    targets = list(_of_activations(model.graph))
    measured = _measure(model, batches)
    state: dict[str, np.ndarray] = {}
    for rounding, (low, high) in zip(targets, measured, strict=True):
        scale, zero = parameters_as_numbers(low, high, rounding.dtype)
        state |= {rounding.scale.name or "": scale, rounding.zero.name or "": zero}
        if rounding.facts["ranges"] == "moving":
            state |= {name: np.asarray(x, np.float32) for name, x in zip(rounding.limits, (low, high), strict=True)}
    state[BATCHES] = np.asarray(1, np.int64)
    return state


def _of_activations(graph: ir.Graph) -> list[Rounding]:
    return [rounding for rounding in roundings(graph) if not rounding.is_weight]


def _measure(model: Model, batches: Iterable[Mapping[str, np.ndarray]]) -> list[tuple[float, float]]:
    session = open_session(_measuring(model))
    input_names = [value.name for value in session.get_inputs()]
    rows = []
    for batch in batches:
        with explain_failures(DataError, "could not compute anything from this batch"):
            rows.append(session.run(None, {name: batch[name] for name in input_names}))
    if not rows:
        raise DataError("no data to calibrate on", hint="leave calibration out: `quantize=int8:calibrate=0`")
    ends = np.asarray(rows, np.float64).reshape(len(rows), -1, 2)
    averaged = any(rounding.facts.get("percentile") for rounding in _of_activations(model.graph))
    low, high = (ends.mean(0) if averaged else np.stack([ends[..., 0].min(0), ends[..., 1].max(0)], -1)).T
    return [(float(a), float(b)) for a, b in zip(low, high, strict=True)]


def _measuring(model: Model) -> Model:
    """Return the inference graph with the ends of activation ranges as outputs, unrounded."""
    plain = without_steps(model)
    graph = plain.graph
    targets = _of_activations(graph)
    sources = [rounding.x for rounding in targets]
    scales = {rounding.scale for rounding in targets}
    for node in [node for node in graph if node.op_type == "QuantizeLinear" and node.inputs[1] in scales]:
        x = node.inputs[0]
        assert x is not None
        for use in list(node.outputs[0].uses()):
            if use.node.op_type == "DequantizeLinear":
                use.node.outputs[0].replace_all_uses_with(x, replace_graph_outputs=True)
                sources = [x if source is use.node.outputs[0] else source for source in sources]
    op = Builder(graph, opset=plain.opset, names=plain.names(), functions=plain.functions, scope="range")
    ends = [
        batch_range(op, op(x), rounding.facts.get("percentile")) for rounding, x in zip(targets, sources, strict=True)
    ]
    keep_only(plain, [end.value for both in ends for end in both])
    return plain
