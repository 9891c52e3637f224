"""Recurrent layers: LSTM, GRU and RNN, which are differentiated as a Scan over the time steps.

All three are one skeleton around a cell. What does not depend on the state is computed before the Scan, for all time
steps at once: the products of the inputs with the weights. In the Scan, a cell multiplies the state with the recurrent
weights and does the rest element by element. Products are Gemm, which takes weights as they are stored, a row for each
unit of a gate, and whose gradients need no transposed copy of them either.

Where sequences have lengths of their own, a state stays as it is in the steps beyond a sequence's end. This serves both
directions: forward, the last state is that at the end of the sequence; backward, the first state is still there when
the end of the sequence is reached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.model.walk import attributes
from onward.rules.indexing import along, extent, fill, join_shape, reshape_to
from onward.rules.registry import rewrite

# ---- cells -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Cell:
    """One direction of a layer, ready for the Scan."""

    inputs: Sequence[tuple[Expr, Expr | None]]
    """Weights and bias of products of the inputs, each of which gives an item for every step."""
    step: Callable[..., Any]
    """`(op, *states, *items)` -> the new states, of which the first is the hidden one."""


@rewrite("RNN")
def rnn(op, x, w, r, b, lengths, initial_h, *, node):
    """Ht = f(Xt W' + Ht-1 R' + Wb + Rb)."""

    def cell(given, f):
        def step(op, hidden, item):
            return [f(op, _affine(op, hidden, given.r, item))]

        return _Cell([(given.w, both_biases(op, given.b))], step)

    return _by_scan(op, node, cell, x, w, r, b, None, lengths, initial_h)


@rewrite("GRU")
def gru(op, x, w, r, b, lengths, initial_h, *, node, linear_before_reset):
    """Ht = (1 - zt) ht + zt Ht-1, with the gates z and r in one product, and another one for the candidate h."""

    def cell(given, f, g):
        parts = given.sizes.parts
        w_gates, w_candidate = op.Split(given.w, parts(2, 1), axis=0, outputs=2)
        r_gates, r_candidate = op.Split(given.r, parts(2, 1), axis=0, outputs=2)
        b_gates = b_candidate = b_inner = None
        if given.b is not None:
            b_gates, b_candidate, b_inner = gru_biases(op, given)
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
    """Ct = ft Ct-1 + it ct, Ht = ot h(Ct), with the gates i, o, f and the candidate c in one product."""

    def cell(given, f, g, h):
        parts = given.sizes.parts(3, 1)
        if given.p is not None:
            p_input, p_output, p_forget = op.Split(given.p, num_outputs=3, axis=0, outputs=3)

        def step(op, hidden, memory, item):
            gates, candidate = op.Split(_affine(op, hidden, given.r, item), parts, axis=-1, outputs=2)
            gates = f(op, gates) if given.p is None else gates
            input_, output, forget = op.Split(gates, num_outputs=3, axis=-1, outputs=3)
            if given.p is not None:
                input_, forget = f(op, input_ + memory * p_input), f(op, forget + memory * p_forget)
            forget = 1 - input_ if input_forget else forget
            memory = forget * memory + input_ * g(op, candidate)
            if given.p is not None:
                output = f(op, output + memory * p_output)
            return [output * h(op, memory), memory]

        return _Cell([(given.w, both_biases(op, given.b))], step)

    return _by_scan(op, node, cell, x, w, r, b, p, lengths, initial_h, initial_c)


def _affine(op, x, weights, bias):
    """X W' + B."""
    return op.Gemm(x, weights, *(() if bias is None else (bias,)), transB=1)


def both_biases(op: Builder, b: Expr | None) -> Expr | None:
    """Wb + Rb."""
    if b is None:
        return None
    of_inputs, of_states = op.Split(b, num_outputs=2, axis=0, outputs=2)
    return of_inputs + of_states


def gru_biases(op: Builder, given: Direction) -> tuple[Expr, Expr, Expr]:
    """Wb + Rb of the gates z and r, then both of the candidate."""
    gates, candidate, more, inner = op.Split(given.b, given.sizes.parts(2, 1, 2, 1), axis=0, outputs=4)
    return gates + more, candidate, inner


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
"""The default of alpha, and that of beta, for functions that have them; and the function."""


def _activations(names, alphas, betas, clip):
    """The functions `(op, x) -> y`; those that have an alpha or a beta take the next one of the list, if there is."""
    numbers = [iter(alphas or ()), iter(betas or ())]

    def activation(name):
        defaults, function = _ACTIVATIONS[name]
        chosen = [float(next(given, default)) for given, default in zip(numbers, defaults, strict=False)]
        return lambda op, x: function(op, x if clip is None else op.Clip(x, -clip, clip), *chosen)

    return [activation(name) for name in names]


# ---- the skeleton ----------------------------------------------------------------------------------------------------

FUNCTIONS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
"""The activation functions that a layer has unless it names others."""


@dataclasses.dataclass
class Direction:
    """One direction of a layer: what it is computed with."""

    index: int
    backwards: bool
    w: Expr
    r: Expr
    b: Expr | None
    p: Expr | None
    states: Sequence[Expr]
    """To begin with."""
    sizes: SequenceSizes
    inside: Expr | None
    """Whether a step is inside a sequence, if these have lengths of their own."""


def layer(
    op: Builder, node: ir.Node, run: Callable[[Direction], list[Expr | None]], *inputs: Expr | None
) -> list[Expr | None]:
    """The outputs of a layer: the hidden states after all steps, if they are wanted, and the last states.

    `run(direction)` goes through all steps: the hidden states after each, or None, and the last states.
    """
    settings = attributes(node, op.opset)
    x, w, r, b, p, lengths, *initial = inputs
    if settings["layout"] == 1:
        x, *initial = (None if value is None else op.Transpose(value, perm=[1, 0, 2]) for value in (x, *initial))
    backwards = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[settings["direction"]]
    inside = None
    if lengths is not None:
        inside = _inside(op, x, lengths)
        x = op.Where(inside, x, 0)  # beyond the end it may be anything, and infinity times a gradient of 0 is not 0
    parts = zip(*(_per_direction(op, value, len(backwards)) for value in (w, r, b, p, *initial)), strict=True)
    runs = []
    for i, (w_, r_, b_, p_, *states) in enumerate(parts):
        _say_sizes(node, settings["hidden_size"], x, w_, r_, b_)
        sizes = SequenceSizes(op, x, r_)
        states = [sizes.state(state) for state in states]
        runs.append(run(Direction(i, backwards[i], w_, r_, b_, p_, states, sizes, inside)))
    every, *last = zip(*runs, strict=True)
    if inside is not None and every[0] is not None:
        every = tuple(op.Where(inside, states, 0) for states in every)
    batch_first = settings["layout"] == 1
    return [
        None if every[0] is None else _side_by_side(op, every, 1, [2, 0, 1, 3] if batch_first else None),
        *(_side_by_side(op, states, 0, [1, 0, 2] if batch_first else None) for states in last),
    ]


def _by_scan(op, node, cell, *inputs):
    """The outputs of a layer whose steps are those of a Scan."""
    settings = attributes(node, op.opset)
    functions = FUNCTIONS[node.op_type]
    chosen = _activations(
        settings["activations"] or functions * 2,
        settings["activation_alpha"],
        settings["activation_beta"],
        settings["clip"],
    )

    def run(given):
        made = cell(given, *chosen[given.index * len(functions) :][: len(functions)])
        return _scan(op, given, made, stacked=bool(node.outputs[0].name))

    return layer(op, node, run, *inputs)


_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def _say_sizes(node, hidden, x, w, r, b):
    """Give weights the shapes that follow from the hidden size: exporters compute weights, and leave open how large.

    Where a size is not known, every gradient looks in every step of the Scan for axes that were broadcast.
    """
    if not hidden:
        return
    rows, inputs = _GATES[node.op_type] * hidden, None if x.value.shape is None else x.value.shape[-1]
    for value, shape in ((w, [rows, inputs]), (r, [rows, hidden]), (b, [2 * rows])):
        if value is not None and (value.value.shape is None or not value.value.shape.is_static()):
            _shape_or_none(value, *shape)


def _inside(op, x, lengths):
    """Whether a step is inside a sequence: (steps, batch, 1)."""
    steps = op.Range(np.int64(0), op.Squeeze(op.Shape(x, start=0, end=1), [0]), np.int64(1))
    return op.Unsqueeze(steps, [1, 2]) < op.Unsqueeze(op.Cast(lengths, to=ir.DataType.INT64), [0, 2])


def _per_direction(op, value, count):
    """The parts of weights or states that belong to each direction."""
    if value is None:
        return [None] * count
    parts = op.Split(value, num_outputs=2, axis=0, outputs=2) if count == 2 else [value]
    return [op.Squeeze(part, [0]) for part in parts]


def _side_by_side(op, results, axis, order):
    """The results of the directions along a new axis, then the axes in another order."""
    parts = [op.Unsqueeze(result, [axis]) for result in results]
    whole = parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)
    return whole if order is None else op.Transpose(whole, perm=order)


class SequenceSizes:
    """The sizes that the tensors of one direction share: numbers where they are known, else symbols."""

    def __init__(self, op, x, r):
        self.op, self.x, self.r = op, x, r
        self.steps, self.batch = self._size(x, 0, "steps"), self._size(x, 1, "batch")
        self.hidden = self._size(r, 1, "hidden")

    def _size(self, x, axis, name):
        size = None if x.value.shape is None else x.value.shape[axis]
        unnamed = size is None or (isinstance(size, ir.SymbolicDim) and size.value is None)
        return ir.SymbolicDim(self.op.names.fresh(name)) if unnamed else size

    def parts(self, *multiples):
        """Multiples of the hidden size, for a Split."""
        if isinstance(self.hidden, int):
            return [n * self.hidden for n in multiples]
        return self.op.Shape(self.r, start=1) * np.array(multiples)

    def state(self, given):
        """A state to begin with, zeros if none is given."""
        if given is None:
            shape = join_shape(self.op, extent(self.op, self.x, 1, 2), extent(self.op, self.r, 1, 2))
            given = fill(self.op, shape, 0, self.x)
        return self.of_state(given)

    def of_state(self, state: Expr) -> Expr:
        return _shape_or_none(state, self.batch, self.hidden)

    def of_states(self, states: Expr) -> Expr:
        """Those after all steps."""
        return _shape_or_none(states, self.steps, self.batch, self.hidden)

    def items(self, weights: Expr, bias: Expr | None) -> Expr:
        """The product of the inputs of all steps with weights: (steps, batch, rows of the weights)."""
        op = self.op
        rows = op.Reshape(self.x, join_shape(op, [-1], along(op, weights, 1)))
        result = reshape_to(
            op, _affine(op, rows, weights, bias), join_shape(op, extent(op, self.x, 0, 2), along(op, weights, 0))
        )
        width = weights.value.shape[0] if weights.value.shape is not None else None
        return _shape_or_none(result, self.steps, self.batch, width)


def _shape_or_none(x, *shape):
    x.value.shape = ir.Shape(shape)
    return x


def _scan(op, given, cell, stacked):
    """Go through all steps: the hidden states after each, or None if they are not wanted; and the last states."""
    sizes, states, inside = given.sizes, given.states, given.inside
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
        scan_input_directions=[1] * len(items) if given.backwards else None,
        scan_output_directions=[1] if given.backwards and stacked else None,
    )
    results = list(results) if isinstance(results, tuple) else [results]
    last = [sizes.of_state(state) for state in results[: len(states)]]
    if not stacked:
        return [None, *last]
    return [sizes.of_states(results[-1]), *last]
