"""LSTM, GRU and RNN, which are differentiated as a Scan over the time steps.

All three have one structure around a cell. The matmuls of the inputs, which do not depend on the state, are computed
before the Scan, for all time steps at once. In the Scan, a cell multiplies the state by the recurrent weights; the rest
is elementwise. All matmuls are Gemm, which takes the weights as stored, a row for each unit of a gate. So their
gradients need no transposed copies either.

If sequences have lengths, the state does not change in the steps behind the end of a sequence. This works in both
directions: forward, the last state is the one at the end of the sequence; backward, the initial state is unchanged when
the Scan reaches the end of the sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.model.walk import attributes
from onward.rules.common import iota
from onward.rules.indexing import along, extent, fill, join_shape, reshape_to
from onward.rules.registry import rewrite

# ---- cells -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Cell:
    """The body of the Scan for one direction of a layer."""

    inputs: Sequence[tuple[Expr, Expr | None]]
    """Weights and biases of matmuls of the inputs; each gives an item per step."""
    step: Callable[..., Any]
    """`(op, *states, *items)` -> new states, the hidden state first."""


@rewrite("RNN")
def rnn(op, x, w, r, b, lengths, initial_h, *, node):
    """Ht = f(Xt W' + Ht-1 R' + Wb + Rb)."""

    def cell(direction, f):
        def step(op, hidden, item):
            return [f(op, _affine(op, hidden, direction.r, item))]

        return _Cell([(direction.w, both_biases(op, direction.b))], step)

    return _by_scan(op, node, cell, x, w, r, b, None, lengths, initial_h)


@rewrite("GRU")
def gru(op, x, w, r, b, lengths, initial_h, *, node, linear_before_reset):
    """Ht = (1 - zt) ht + zt Ht-1, with one matmul for the gates z and r, and one for the candidate h."""

    def cell(direction, f, g):
        sizes = direction.sizes.multiples(2, 1)
        w_gates, w_candidate = op.Split(direction.w, sizes, axis=0, outputs=2)
        r_gates, r_candidate = op.Split(direction.r, sizes, axis=0, outputs=2)
        b_gates = b_candidate = b_inner = None
        if direction.b is not None:
            b_gates, b_candidate, b_inner = gru_biases(op, direction)
            b_candidate = b_candidate if linear_before_reset else b_candidate + b_inner

        def step(op, hidden, gates, candidate):
            gates = f(op, _affine(op, hidden, r_gates, gates))
            update, reset = op.Split(gates, num_outputs=2, axis=-1, outputs=2)
            if linear_before_reset:
                candidate = candidate + reset * _affine(op, hidden, r_candidate, b_inner)
            else:
                candidate = _affine(op, reset * hidden, r_candidate, candidate)
            candidate = g(op, candidate)
            return [candidate + update * (hidden - candidate)]

        return _Cell([(w_gates, b_gates), (w_candidate, b_candidate)], step)

    return _by_scan(op, node, cell, x, w, r, b, None, lengths, initial_h)


@rewrite("LSTM")
def lstm(op, x, w, r, b, lengths, initial_h, initial_c, p, *, node, input_forget):
    """Ct = ft Ct-1 + it ct, Ht = ot h(Ct), with one matmul for the gates i, o, f and the candidate c."""

    def cell(direction, f, g, h):
        sizes, peephole = direction.sizes.multiples(3, 1), direction.p is not None
        if peephole:
            p_input, p_output, p_forget = op.Split(direction.p, num_outputs=3, axis=0, outputs=3)

        def step(op, hidden, memory, item):
            gates, candidate = op.Split(_affine(op, hidden, direction.r, item), sizes, axis=-1, outputs=2)
            gates = gates if peephole else f(op, gates)
            input_, output, forget = op.Split(gates, num_outputs=3, axis=-1, outputs=3)
            if peephole:
                input_, forget = f(op, input_ + memory * p_input), f(op, forget + memory * p_forget)
            forget = 1 - input_ if input_forget else forget
            memory = forget * memory + input_ * g(op, candidate)
            if peephole:
                output = f(op, output + memory * p_output)
            return [output * h(op, memory), memory]

        return _Cell([(direction.w, both_biases(op, direction.b))], step)

    return _by_scan(op, node, cell, x, w, r, b, p, lengths, initial_h, initial_c)


def _affine(op, x, weights, bias):
    return op.Gemm(x, weights, *(() if bias is None else (bias,)), transB=1)


def both_biases(op: Builder, b: Expr | None) -> Expr | None:
    """Return Wb + Rb."""
    if b is None:
        return None
    of_inputs, of_states = op.Split(b, num_outputs=2, axis=0, outputs=2)
    return of_inputs + of_states


def gru_biases(op: Builder, direction: Direction) -> tuple[Expr, Expr, Expr]:
    """Return Wb + Rb of the gates z and r, then Wb and Rb of the candidate."""
    sizes = direction.sizes.multiples(2, 1, 2, 1)
    w_gates, w_candidate, r_gates, r_candidate = op.Split(direction.b, sizes, axis=0, outputs=4)
    return w_gates + r_gates, w_candidate, r_candidate


# ---- activation functions --------------------------------------------------------------------------------------------

_ACTIVATIONS = {
    "Affine": ((1, 0), lambda op, x, alpha, beta: x * alpha + beta),
    "Elu": ((1,), lambda op, x, alpha: op.Elu(x, alpha=alpha)),
    "HardSigmoid": ((0.2, 0.5), lambda op, x, alpha, beta: op.HardSigmoid(x, alpha=alpha, beta=beta)),
    "LeakyRelu": ((0.01,), lambda op, x, alpha: op.LeakyRelu(x, alpha=alpha)),
    "Relu": ((), lambda op, x: op.Relu(x)),
    "ScaledTanh": ((1, 1), lambda op, x, alpha, beta: op.Tanh(x * beta) * alpha),
    "Sigmoid": ((), lambda op, x: op.Sigmoid(x)),
    "Softplus": ((), lambda op, x: op.Softplus(x)),
    "Softsign": ((), lambda op, x: op.Softsign(x)),
    "Tanh": ((), lambda op, x: op.Tanh(x)),
    "ThresholdedRelu": ((1,), lambda op, x, alpha: op.ThresholdedRelu(x, alpha=alpha)),
}
"""Activation -> defaults of alpha and beta, as far as it has them; function."""


def _activations(names, alphas, betas, clip):
    """Return functions `(op, x) -> y`; each takes its alpha and beta, if any, from the front of the lists."""
    numbers = [iter(alphas or ()), iter(betas or ())]

    def activation(name):
        defaults, function = _ACTIVATIONS[name]
        parameters = [float(next(values, default)) for values, default in zip(numbers, defaults, strict=False)]
        return lambda op, x: function(op, x if clip is None else op.Clip(x, -clip, clip), *parameters)

    return [activation(name) for name in names]


# ---- layers ----------------------------------------------------------------------------------------------------------

FUNCTIONS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
"""Layer -> default activation functions."""


@dataclasses.dataclass
class Direction:
    """One direction of a layer: its weights, initial states and sizes."""

    index: int
    backwards: bool
    w: Expr
    r: Expr
    b: Expr | None
    p: Expr | None
    states: Sequence[Expr]
    """Initial states."""
    sizes: SequenceSizes
    inside: Expr | None
    """Mask of the steps within each sequence; None if sequences have no lengths."""


def layer(
    op: Builder, node: ir.Node, run: Callable[[Direction], list[Expr | None]], *inputs: Expr | None
) -> list[Expr | None]:
    """Return the outputs of a layer: the hidden states after each step, or None if unused, and the last states.

    `run(direction)` returns the same for one direction.
    """
    settings = attributes(node, op.opset)
    x, w, r, b, p, lengths, *initial = inputs
    if settings["layout"] == 1:
        x, *initial = (None if value is None else op.Transpose(value, perm=[1, 0, 2]) for value in (x, *initial))
    backwards = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[settings["direction"]]
    inside = None
    if lengths is not None:
        steps = iota(op, op.Squeeze(op.Shape(x, start=0, end=1), [0]))
        inside = op.Unsqueeze(steps, [1, 2]) < op.Unsqueeze(op.Cast(lengths, to=ir.DataType.INT64), [0, 2])
        x = op.Where(inside, x, 0)  # behind the end it may be infinite, and infinity times a gradient of 0 is not 0
    operands = zip(*(_per_direction(op, value, len(backwards)) for value in (w, r, b, p, *initial)), strict=True)
    runs = []
    for i, (w_, r_, b_, p_, *states) in enumerate(operands):
        _declare_weights(node, settings["hidden_size"], x, w_, r_, b_)
        sizes = SequenceSizes(op, x, r_)
        states = [sizes.state(state) for state in states]
        runs.append(run(Direction(i, backwards[i], w_, r_, b_, p_, states, sizes, inside)))
    hidden, *last = zip(*runs, strict=True)
    if inside is not None and hidden[0] is not None:
        hidden = tuple(op.Where(inside, states, 0) for states in hidden)
    batch_first = settings["layout"] == 1
    return [
        None if hidden[0] is None else _side_by_side(op, hidden, 1, [2, 0, 1, 3] if batch_first else None),
        *(_side_by_side(op, states, 0, [1, 0, 2] if batch_first else None) for states in last),
    ]


def _by_scan(op, node, cell, *inputs):
    """Return the outputs of a layer that runs as a Scan."""
    settings = attributes(node, op.opset)
    functions = FUNCTIONS[node.op_type]
    alpha, beta = settings["activation_alpha"], settings["activation_beta"]
    chosen = _activations(settings["activations"] or functions * 2, alpha, beta, settings["clip"])

    def run(direction):
        functions_of_direction = chosen[direction.index * len(functions) :][: len(functions)]
        return _scan(op, direction, cell(direction, *functions_of_direction), stacked=bool(node.outputs[0].name))

    return layer(op, node, run, *inputs)


_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def _declare_weights(node, hidden, x, w, r, b):
    """Declare the shapes of weights from the hidden size: some exporters compute weights without declared sizes.

    With an unknown size, every gradient would look for broadcast axes in every step of the Scan.
    """
    if not hidden:
        return
    rows, inputs = _GATES[node.op_type] * hidden, None if x.value.shape is None else x.value.shape[-1]
    for value, shape in ((w, [rows, inputs]), (r, [rows, hidden]), (b, [2 * rows])):
        if value is not None and (value.value.shape is None or not value.value.shape.is_static()):
            _with_shape(value, *shape)


def _per_direction(op, value, count):
    """Split weights or states by direction."""
    if value is None:
        return [None] * count
    slices = op.Split(value, num_outputs=2, axis=0, outputs=2) if count == 2 else [value]
    return [op.Squeeze(x, [0]) for x in slices]


def _side_by_side(op, results, axis, order):
    """Stack the results of the directions along a new axis, then transpose."""
    unsqueezed = [op.Unsqueeze(result, [axis]) for result in results]
    whole = unsqueezed[0] if len(unsqueezed) == 1 else op.Concat(*unsqueezed, axis=axis)
    return whole if order is None else op.Transpose(whole, perm=order)


class SequenceSizes:
    """Sizes that the tensors of one direction share: numbers if known, else symbols."""

    def __init__(self, op, x, r):
        self.op, self.x, self.r = op, x, r
        self.steps, self.batch = self._size(x, 0, "steps"), self._size(x, 1, "batch")
        self.hidden = self._size(r, 1, "hidden")

    def _size(self, x, axis, name):
        size = None if x.value.shape is None else x.value.shape[axis]
        unnamed = size is None or (isinstance(size, ir.SymbolicDim) and size.value is None)
        return ir.SymbolicDim(self.op.names.fresh(name)) if unnamed else size

    def multiples(self, *factors):
        """Return multiples of the hidden size, for a Split."""
        if isinstance(self.hidden, int):
            return [n * self.hidden for n in factors]
        return self.op.Shape(self.r, start=1) * np.array(factors)

    def state(self, initial):
        """Return an initial state (default: zeros)."""
        if initial is None:
            shape = join_shape(self.op, extent(self.op, self.x, 1, 2), extent(self.op, self.r, 1, 2))
            initial = fill(self.op, shape, 0, self.x)
        return self.of_state(initial)

    def of_state(self, state: Expr) -> Expr:
        return _with_shape(state, self.batch, self.hidden)

    def of_states(self, states: Expr) -> Expr:
        return _with_shape(states, self.steps, self.batch, self.hidden)

    def items(self, weights: Expr, bias: Expr | None) -> Expr:
        """Return the matmul of the inputs of all steps and weights: (steps, batch, rows of the weights)."""
        op = self.op
        rows = op.Reshape(self.x, join_shape(op, [-1], along(op, weights, 1)))
        shape = join_shape(op, extent(op, self.x, 0, 2), along(op, weights, 0))
        result = reshape_to(op, _affine(op, rows, weights, bias), shape)
        width = weights.value.shape[0] if weights.value.shape is not None else None
        return _with_shape(result, self.steps, self.batch, width)


def _with_shape(x, *shape):
    x.value.shape = ir.Shape(shape)
    return x


def _scan(op, direction, cell, stacked):
    """Run all steps; return the hidden states after each if `stacked`, else None, and the last states."""
    sizes, states, inside = direction.sizes, direction.states, direction.inside
    items = [sizes.items(weights, bias) for weights, bias in cell.inputs]
    items += [] if inside is None else [inside]

    def step(op, *values):
        before, items = values[: len(states)], values[len(states) :]
        if inside is None:
            after = cell.step(op, *before, *items)
        else:
            after = cell.step(op, *before, *items[:-1])
            after = [op.Where(items[-1], new, old) for new, old in zip(after, before, strict=True)]
        after = [sizes.of_state(state) for state in after]
        return [*after, after[0]] if stacked else after

    entries = [ir.Value(name="state", type=state.value.type, shape=state.value.shape) for state in states]
    for item in items:
        shape = None if item.value.shape is None else ir.Shape(list(item.value.shape)[1:])
        entries.append(ir.Value(name="item", type=item.value.type, shape=shape))
    results = op.Scan(
        *states,
        *items,
        outputs=len(states) + stacked,
        body=op.subgraph(step, entries, name="cell"),
        num_scan_inputs=len(items),
        scan_input_directions=[1] * len(items) if direction.backwards else None,
        scan_output_directions=[1] if direction.backwards and stacked else None,
    )
    results = list(results) if isinstance(results, tuple) else [results]
    last = [sizes.of_state(state) for state in results[: len(states)]]
    if not stacked:
        return [None, *last]
    return [sizes.of_states(results[-1]), *last]
