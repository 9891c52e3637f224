"""Products divided among devices: which weights along which axis, and where devices must put their results together.

Values of the lowered step are followed in order, forward and back. Each is whole, divided along an axis, or a term of a
sum over the devices. A product of a whole value divides the columns of its weight; one of a divided value its rows, and
gives terms. Terms stay terms while they are only added up, so that they are summed once.
Where an operator cannot go on with what it is given, that is gathered first: always right, and it is counted.
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
"""The axis along which a value is divided, `TERM`, or None for one that is whole."""


@dataclasses.dataclass(frozen=True)
class Partition:
    """How the devices of a group divide a step."""

    weights: Mapping[str, int]
    """Name -> the axis along which it is divided."""
    shards: Mapping[ir.Value, int]
    """Into how many parts values are divided."""
    reduced: int
    """Bytes of activations and of gradients that are summed over the devices."""
    gathered: int
    flops_saved: int
    """What others compute in the place of a device."""

    def parts(self, weight: str, devices: int) -> int:
        return devices if weight in self.weights else 1


def divide(work: Workload, devices: int) -> Partition:
    """Divide the products of a step."""
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
        """Those of parameters that something has decided about."""
        self.reduced = self.gathered = self.flops_saved = 0
        self._parameters = {
            v for v in (*work.graph.inputs, *work.graph.initializers.values()) if v.name in work.weights
        }

    def follow(self, node: ir.Node) -> None:
        rule = _RULES.get(node.op_type)
        found = rule(self, node) if rule else NotImplemented
        if found is NotImplemented:
            for value in node.inputs:
                self.whole(value)
            found = None
        if found is not None:
            self.states.update(dict.fromkeys(node.outputs, found))
            self.flops_saved += flops(node) * (self.devices - 1) // self.devices if self._is_shared(node) else 0

    def finish(self, gradients: Sequence[ir.Value]) -> None:
        """Gradients of weights that are whole must be whole, and those of divided ones have their parts."""
        for value in gradients:
            if self.states.get(value) == TERM:
                self._sum(value)

    def state(self, value: ir.Value | None) -> State:
        return None if value is None else self.states.get(value, self.weights.get(value))

    def whole(self, value: ir.Value | None) -> None:
        """Make it whole for who comes; whoever comes later finds it so."""
        state = self.state(value)
        if value is None or state is None:
            return
        if state == TERM:
            self._sum(value)
        else:
            self.gathered += bytes_of(value)
            self.states[value] = None

    def summed(self, value: ir.Value | None) -> State:
        """Its state, once it is no term any more."""
        if value is not None and self.state(value) == TERM:
            self._sum(value)
        return self.state(value)

    def claim(self, value: ir.Value | None, axis: int) -> bool:
        """Divide a parameter that nobody has decided about, or the one that it is turned from, along an axis."""
        if value is None or self.state(value) is not None:
            return False
        turned = value.producer()
        if turned is not None and turned.op_type == "Transpose":
            claimed = self.claim(turned.inputs[0], _order_of(turned)[axis])
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


# ---- rules: the state of the outputs, or NotImplemented where inputs must be whole first -----------------------------


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
    """`of_a`: its axes of rows and of what is summed over; `of_b`: of what is summed over and of columns."""
    rank = len(dims_of(node.outputs[0]) or ())
    sa, sb = f.state(a), f.state(b)
    if TERM in (sa, sb):
        if sa == sb or isinstance(sa, int) or isinstance(sb, int):
            sa, sb = f.summed(a), f.summed(b)
        else:
            return TERM  # a sum of terms, times what is whole
    if sa is None and sb is None:
        return None
    if of_a[1] == sa or of_b[0] == sb:  # the other has its part at hand, or is whole and only a part of it is read
        return TERM if (sa in (None, of_a[1]) and sb in (None, of_b[0])) else NotImplemented
    ends = {of_a[0]: rank - 2}, {of_b[1]: rank - 1}
    places = [
        end.get(s, s + rank - len(dims_of(v) or ()))
        for s, v, end in zip((sa, sb), (a, b), ends, strict=True)
        if isinstance(s, int)
    ]
    return places[0] if len(set(places)) == 1 else NotImplemented


def _elementwise(f: _Follower, node: ir.Node) -> State:
    """Terms may be added to terms. They are not multiplied: what is read by several would be summed several times."""
    is_term = [f.state(value) == TERM for value in node.inputs]
    if any(is_term) and (len(is_term) == 1 or all(is_term)) and node.op_type in _LINEAR:
        return TERM
    output = dims_of(node.outputs[0])
    if output is None:
        return NotImplemented
    found: set[int] = set()
    for value in node.inputs:
        state, dims = f.summed(value), dims_of(value)
        if isinstance(state, int) and dims is not None:
            found.add(state + len(output) - len(dims))
    if len(found) > 1:
        return NotImplemented
    axis = next(iter(found), None)
    for value in node.inputs if axis is not None else ():  # a bias, or a factor for each column
        if value is not None and value in f._parameters and len(dims_of(value) or ()) == 1 and axis == len(output) - 1:
            f.claim(value, 0)
    return axis


def _reshape(f: _Follower, node: ir.Node) -> State:
    """Along an axis that is split, or that others are put behind, parts stay what they are."""
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
    """Operators that leave the axis alone, as lengths show: slices, paddings, expansions, splits."""
    state, dims = f.state(node.inputs[0]), dims_of(node.inputs[0])
    if not isinstance(state, int):
        return state if node.op_type in ("Slice", "Split", "Pad", "Expand") else f.summed(node.inputs[0])
    others = [dims_of(v) for v in node.outputs]
    if dims is None or any(other is None or len(other) != len(dims) or other[state] != dims[state] for other in others):
        return NotImplemented
    return state


def _along(f: _Follower, node: ir.Node) -> State:
    """Softmax and its kin need all of an axis."""
    state, rank = f.summed(node.inputs[0]), len(dims_of(node.inputs[0]) or ())
    return state if state is None or state != node.attributes.get_int("axis", -1) % rank else NotImplemented


def _reduce(f: _Follower, node: ir.Node) -> State:
    state, dims = f.state(node.inputs[0]), dims_of(node.inputs[0])
    is_linear = node.op_type in ("ReduceSum", "ReduceMean")
    if state is None or dims is None or (state == TERM and is_linear):
        return state
    if state == TERM:
        return f.summed(node.inputs[0])
    given = constant_ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    gone = {axis % len(dims) for axis in given} if given else set(range(len(dims)))
    if state in gone:
        return TERM if is_linear else NotImplemented
    assert isinstance(state, int)
    return state if node.attributes.get_int("keepdims", 1) else state - sum(axis < state for axis in gone)


def _concat(f: _Follower, node: ir.Node) -> State:
    states = {f.state(value) for value in node.inputs}
    rank = len(dims_of(node.outputs[0]) or ())
    state = states.pop() if len(states) == 1 else NotImplemented
    return (
        state
        if state is None or state == TERM or state != node.attributes.get_int("axis", 0) % rank
        else NotImplemented
    )


def _gather(f: _Follower, node: ir.Node) -> State:
    """Rows of a table, each of which one device has: the others give zeros."""
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
