"""Tensor parallelism: which weights are sharded along which axis, and where activations are reduced or gathered.

The values of the lowered step are visited in order, forward and backward. Each is replicated, sharded along an axis, or
a term of a sum over the devices. A matmul of a replicated value shards the columns of its weight; a matmul of a sharded
value shards the rows, and gives terms. Terms stay terms while they are only added, so that they are reduced once.
An operator that cannot compute on shards gathers its inputs first. That is always correct, and counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from onward.constants import constant_ints
from onward.planning.workload import Workload, bytes_of, dims_of, flops

TERM = "term"
State = int | str | None
"""The axis along which a value is sharded, `TERM`, or None if it is replicated."""


@dataclasses.dataclass(frozen=True)
class Partition:
    """The sharding of a step over a group of devices."""

    weights: Mapping[str, int]
    """Name of a weight -> the axis along which it is sharded."""
    shards: Mapping[ir.Value, int]
    """Number of shards of values."""
    reduced: int
    """Bytes of activations and gradients that are all-reduced."""
    gathered: int
    flops_saved: int
    """Operations that a device leaves to others."""

    def parts(self, weight: str, devices: int) -> int:
        return devices if weight in self.weights else 1


def divide(work: Workload, devices: int) -> Partition:
    """Shard the matmuls of a step."""
    follower = _Follower(work, devices)
    for node in work.schedule.nodes:
        follower.follow(node)
    follower.finish([value for value in work.graph.outputs if value.name in work.contract.gradients])
    states = follower.states
    shards = {value: devices for value, state in states.items() if isinstance(state, int)}
    weights = {v.name or "": s for v, s in follower.weights.items() if isinstance(s, int)}
    return Partition(weights, shards, follower.reduced, follower.gathered, follower.flops_saved)


class _Follower:
    def __init__(self, work: Workload, devices: int):
        self.devices = devices
        self.states: dict[ir.Value, State] = {}
        self.weights: dict[ir.Value, State] = {}
        """States of parameters, once they are decided."""
        self.reduced = self.gathered = self.flops_saved = 0
        self._parameters = {
            v for v in (*work.graph.inputs, *work.graph.initializers.values()) if v.name in work.weights
        }

    def follow(self, node: ir.Node) -> None:
        rule = _RULES.get(node.op_type)
        state = rule(self, node) if rule else NotImplemented
        if state is NotImplemented:
            for value in node.inputs:
                self.whole(value)
            state = None
        if state is not None:
            self.states.update(dict.fromkeys(node.outputs, state))
            self.flops_saved += flops(node) * (self.devices - 1) // self.devices if self._is_shared(node) else 0

    def finish(self, gradients: Sequence[ir.Value]) -> None:
        """Reduce gradients that are terms; the others are sharded or replicated like their weights."""
        for value in gradients:
            if self.states.get(value) == TERM:
                self._sum(value)

    def state(self, value: ir.Value | None) -> State:
        return None if value is None else self.states.get(value, self.weights.get(value))

    def whole(self, value: ir.Value | None) -> None:
        """Reduce or gather a value for all of its readers."""
        state = self.state(value)
        if value is None or state is None:
            return
        if state == TERM:
            self._sum(value)
        else:
            self.gathered += bytes_of(value)
            self.states[value] = None

    def summed(self, value: ir.Value | None) -> State:
        """Return the state of a value after reducing it if it is a term."""
        if value is not None and self.state(value) == TERM:
            self._sum(value)
        return self.state(value)

    def claim(self, value: ir.Value | None, axis: int) -> bool:
        """Shard an undecided parameter, or its transpose, along an axis; True if that is possible."""
        if value is None or self.state(value) is not None:
            return False
        producer = value.producer()
        if producer is not None and producer.op_type == "Transpose":
            claimed = self.claim(producer.inputs[0], _order_of(producer)[axis])
            self.states |= {value: axis} if claimed else {}
            return claimed
        dims = dims_of(value)
        if value not in self._parameters or not dims or dims[axis] % self.devices:
            return False
        self.weights[value] = axis
        return True

    def _sum(self, value: ir.Value) -> None:
        self.reduced += bytes_of(value)
        self.states[value] = None

    def _is_shared(self, node: ir.Node) -> bool:
        states = [self.state(value) for value in (*node.inputs, *node.outputs)]
        return any(isinstance(state, int) for state in states)


# ---- rules: the state of the outputs, or NotImplemented where inputs must be gathered first --------------------------


def _matmul(f: _Follower, node: ir.Node) -> State:
    a, b = node.inputs
    ra, rb = (len(dims_of(v) or ()) for v in (a, b))
    if ra < 2 or rb < 2:
        return NotImplemented
    if rb == 2 and f.state(a) != TERM:
        if f.state(a) is None:
            f.claim(b, 1)
        elif f.state(a) == ra - 1:
            f.claim(b, 0)
    return _product(f, node, a, b, (ra - 2, ra - 1), (rb - 2, rb - 1))


def _gemm(f: _Follower, node: ir.Node) -> State:
    a, b = node.inputs[:2]
    turned_a, turned_b = (node.attributes.get_int(name, 0) for name in ("transA", "transB"))
    columns = 0 if turned_b else 1
    if f.state(a) is None:
        f.claim(b, columns)
    elif f.state(a) == (0 if turned_a else 1):
        f.claim(b, 1 - columns)
    state = _product(f, node, a, b, (1, 0) if turned_a else (0, 1), (1, 0) if turned_b else (0, 1))
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if state == 1 and bias is not None:
        f.claim(bias, len(dims_of(bias) or (0,)) - 1)
    if state == TERM and bias is not None:
        f.reduced += bytes_of(node.outputs[0])
        return None
    return state


def _product(
    f: _Follower, node: ir.Node, a: ir.Value | None, b: ir.Value | None, of_a: tuple[int, int], of_b: tuple[int, int]
) -> State:
    """Return the state of a matmul; `of_a` are the axes of rows and of the sum, `of_b` of the sum and of columns."""
    rank = len(dims_of(node.outputs[0]) or ())
    sa, sb = f.state(a), f.state(b)
    if TERM in (sa, sb):
        if sa == sb or isinstance(sa, int) or isinstance(sb, int):
            sa, sb = f.summed(a), f.summed(b)
        else:
            return TERM  # a sum of terms, times a replicated value
    if sa is None and sb is None:
        return None
    if of_a[1] == sa or of_b[0] == sb:  # the other is sharded alike, or replicated: a device reads its slice
        return TERM if (sa in (None, of_a[1]) and sb in (None, of_b[0])) else NotImplemented
    ends = {of_a[0]: rank - 2}, {of_b[1]: rank - 1}
    places = [
        end.get(s, s + rank - len(dims_of(v) or ()))
        for s, v, end in zip((sa, sb), (a, b), ends, strict=True)
        if isinstance(s, int)
    ]
    return places[0] if len(set(places)) == 1 else NotImplemented


def _elementwise(f: _Follower, node: ir.Node) -> State:
    """Add terms to terms; others are reduced, since each reader would reduce them again."""
    is_term = [f.state(value) == TERM for value in node.inputs]
    if any(is_term) and (len(is_term) == 1 or all(is_term)) and node.op_type in _LINEAR:
        return TERM
    output = dims_of(node.outputs[0])
    if output is None:
        return NotImplemented
    axes: set[int] = set()
    for value in node.inputs:
        state, dims = f.summed(value), dims_of(value)
        if isinstance(state, int) and dims is not None:
            axes.add(state + len(output) - len(dims))
    if len(axes) > 1:
        return NotImplemented
    axis = next(iter(axes), None)
    for value in node.inputs if axis is not None else ():  # a bias, or a factor for each column
        if value is not None and value in f._parameters and len(dims_of(value) or ()) == 1 and axis == len(output) - 1:
            f.claim(value, 0)
    return axis


def _reshape(f: _Follower, node: ir.Node) -> State:
    """Keep shards if the axis is split, or merged with axes behind it."""
    state = f.state(node.inputs[0])
    before, after = dims_of(node.inputs[0]), dims_of(node.outputs[0])
    if not isinstance(state, int):
        return state
    if before is None or after is None:
        return NotImplemented
    lead, size = math.prod(before[:state]), before[state]
    for axis, new in enumerate(after):
        fits = new % f.devices == 0 and (new % size == 0 or size % new == 0)
        if math.prod(after[:axis]) == lead and fits:
            return axis
    return NotImplemented


def _transpose(f: _Follower, node: ir.Node) -> State:
    state, dims = f.state(node.inputs[0]), dims_of(node.inputs[0])
    if not isinstance(state, int) or dims is None:
        return state
    return _order_of(node).index(state)


def _order_of(node: ir.Node) -> list[int]:
    rank = len(dims_of(node.outputs[0]) or ())
    return list(node.attributes.get_ints("perm", tuple(reversed(range(rank)))))


def _same_axis(f: _Follower, node: ir.Node) -> State:
    """Keep shards if the length of the axis is unchanged: slices, padding, expansions, splits."""
    state, dims = f.state(node.inputs[0]), dims_of(node.inputs[0])
    if not isinstance(state, int):
        return state if node.op_type in ("Slice", "Split", "Pad", "Expand") else f.summed(node.inputs[0])
    others = [dims_of(v) for v in node.outputs]
    if dims is None or any(other is None or len(other) != len(dims) or other[state] != dims[state] for other in others):
        return NotImplemented
    return state


def _along(f: _Follower, node: ir.Node) -> State:
    """Keep shards, except along the axis of a softmax."""
    state, rank = f.summed(node.inputs[0]), len(dims_of(node.inputs[0]) or ())
    return state if state is None or state != node.attributes.get_int("axis", -1) % rank else NotImplemented


def _reduce(f: _Follower, node: ir.Node) -> State:
    state, dims = f.state(node.inputs[0]), dims_of(node.inputs[0])
    is_linear = node.op_type in ("ReduceSum", "ReduceMean")
    if state is None or dims is None or (state == TERM and is_linear):
        return state
    if state == TERM:
        return f.summed(node.inputs[0])
    axes = constant_ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    reduced = {axis % len(dims) for axis in axes} if axes else set(range(len(dims)))
    if state in reduced:
        return TERM if is_linear else NotImplemented
    assert isinstance(state, int)
    return state if node.attributes.get_int("keepdims", 1) else state - sum(axis < state for axis in reduced)


def _concat(f: _Follower, node: ir.Node) -> State:
    states = {f.state(value) for value in node.inputs}
    rank = len(dims_of(node.outputs[0]) or ())
    state = states.pop() if len(states) == 1 else NotImplemented
    return NotImplemented if isinstance(state, int) and state == node.attributes.get_int("axis", 0) % rank else state


def _gather(f: _Follower, node: ir.Node) -> State:
    """Shard the rows of an embedding: a device gives zeros for the rows of others."""
    table, index = node.inputs
    if f.state(index) is None and node.attributes.get_int("axis", 0) == 0 and len(dims_of(table) or ()) == 2:
        return TERM if f.claim(table, 0) or f.state(table) == 0 else NotImplemented
    return NotImplemented


_LINEAR = {"Add", "Cast", "Identity", "Neg", "Sub", "Sum"}
_SAME = (
    "Abs", "Add", "Cast", "Clip", "Div", "Elu", "Equal", "Erf", "Exp", "Gelu", "Greater", "HardSigmoid", "HardSwish",
    "Identity", "LeakyRelu", "Less", "Log", "Mul", "Neg", "Not", "Pow", "Reciprocal", "Relu", "Sigmoid", "Sign",
    "Softplus", "Sqrt", "Sub", "Sum", "Tanh", "Where",
)  # fmt: skip
_RULES: dict[str, Callable[[_Follower, ir.Node], State]] = {
    **dict.fromkeys(_SAME, _elementwise),
    **dict.fromkeys(("Slice", "Split", "Pad", "Expand"), _same_axis),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshape),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _along),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax"), _reduce),
    "Concat": _concat,
    "Gather": _gather,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Transpose": _transpose,
    "Shape": lambda f, node: None,
}
