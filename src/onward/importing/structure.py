"""Matches between the weights of two graphs by what they compute, for names that do not fit.

All weights of both graphs are set to numbers that depend on their shapes alone. Two graphs of one architecture then
have equal outputs before anything is matched. Changing one weight shows its place: weights that belong together change
the outputs alike. A match counts only if outputs also agree for the real weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.agreement.inputs import inputs_of_type
from onward.checkpoint.exporting import weights_of
from onward.checkpoint.format import Checkpoint
from onward.errors import Error, MismatchError, UnsupportedError, list_names
from onward.frameworks.formulas.graph_building import open_initializers
from onward.model import Model
from onward.model.walk import attributes
from onward.run_state.state import OptimizerState
from onward.run_state.tensors import ArrayTensor, Tensor
from onward.runtime.sessions import evaluate, explain_failures, open_session
from onward.transform.extract import extract
from onward.transform.inline import inline

_MOVES = {
    "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose",
    "Unsqueeze",
}  # fmt: skip
"""Operators that move elements of weights without computing."""
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_SCALES = (1.0, 0.01)
"""Sizes of the numbers that replace weights: an epsilon shows beside small ones."""
_EQUAL = 1e-5
"""Largest relative difference of equal outputs."""
_ALIKE = 1e-4
"""Largest relative difference of outputs with numbers in place of weights, which no training has kept in range."""
_APART = 5
"""A match is at least this many times closer than the next candidate."""
_BATCHES = 3
_MOST_WIRINGS = 48
_MOST_OUTPUTS = 4096
"""Output elements that are compared for each changed weight."""
_ALONE = "move the weights alone: save them without the optimizer"

Arrays = Mapping[str, np.ndarray]


class _Piece(NamedTuple):
    """A part of the weights that has one place in the computation: a matrix, a gate of an LSTM, a bias."""

    elements: np.ndarray
    """Index of each element among all weights of the graph. Its axes are inputs, outputs, window, in every file; those
    of size 1 are left out."""
    added: np.ndarray | None = None
    """Elements that matter only in a sum with these, such as the second bias of an LSTM."""
    sign: int = 1
    """-1 if the sum is a difference: the bias before a BatchNormalization, which subtracts a mean."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.elements.shape

    @property
    def parts(self) -> list[np.ndarray]:
        return [self.elements] if self.added is None else [self.elements, self.added]


class _Norm(NamedTuple):
    """A BatchNormalization after a convolution, into which exporters fold it: elements, output channels first."""

    scale: np.ndarray
    shift: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    epsilon: float


class _Graph:
    """A graph that runs with any numbers in place of its weights."""

    def __init__(self, model: Model):
        self.model = inline(model)
        self.title = model.path.name if model.path else "the model"
        self.weights = weights_of(self.model).tensors
        sizes = [math.prod(tensor.shape) for tensor in self.weights.values()]
        self._ends = np.cumsum(sizes)
        self.spans = {
            n: slice(int(end) - size, int(end)) for n, end, size in zip(self.weights, self._ends, sizes, strict=True)
        }
        self.numbers = np.zeros(sum(sizes), np.float32)
        """The numbers that replace all weights, one after another."""
        self.norms: list[_Norm] = []
        self.is_folded = False
        self.pieces = self._pieces()
        opened = self.model.copy()
        open_initializers(opened.graph, self.weights)
        self._session = open_session(opened)
        self._inputs = {value.name for value in self._session.get_inputs()}

    def __call__(self, inputs: Arrays) -> list[np.ndarray]:
        """Return the outputs with the current numbers as weights."""
        arrays = {**inputs, **self.split(self.numbers)}
        with explain_failures(UnsupportedError, "does not run this model"):
            outputs = self._session.run(None, {name: x for name, x in arrays.items() if name in self._inputs})
        return [np.asarray(output) for output in outputs]

    def split(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Return the numbers of each weight, in its shape and type."""
        return {
            name: numbers[self.spans[name]].reshape(tensor.shape).astype(tensor.dtype, copy=False)
            for name, tensor in self.weights.items()
        }

    def join(self, tensors: Mapping[str, Tensor]) -> np.ndarray:
        """Return the elements of all weights; those without a tensor are zero."""
        numbers = np.zeros(len(self.numbers), np.result_type(*(tensor.dtype for tensor in tensors.values())))
        for name, tensor in tensors.items():
            numbers[self.spans[name]] = tensor.array().reshape(-1)
        return numbers

    def set(self, piece: _Piece, numbers: np.ndarray) -> None:
        self.numbers[piece.elements] = numbers
        if piece.added is not None:
            self.numbers[piece.added] = 0

    def names_of(self, elements: np.ndarray) -> list[str]:
        """Return the weights that have these elements."""
        names = list(self.weights)
        return [names[i] for i in np.unique(self._owners(elements)) if i >= 0]

    def _owners(self, elements: np.ndarray) -> np.ndarray:
        return np.where(elements < 0, -1, np.searchsorted(self._ends, elements, side="right"))

    # ---- folded BatchNormalization ----

    def fold(self) -> None:
        """Replace BatchNormalization after convolutions by their shifts, as the other graph has them."""
        without = np.concatenate([part for norm in self.norms for part in (norm.scale, norm.mean, norm.variance)])
        self.pieces = [piece for piece in self.pieces if not np.isin(piece.elements, without).any()]
        self.is_folded = True
        self.numbers = self.folded(np.ones_like(self.numbers))

    def folded(self, numbers: np.ndarray) -> np.ndarray:
        """Return weights with the same outputs whose BatchNormalization only shift, if this graph is folded."""
        numbers = numbers.copy()
        for norm in self.norms if self.is_folded else ():
            factor = numbers[norm.scale] / np.sqrt(numbers[norm.variance] + norm.epsilon)
            mean = numbers[norm.mean] - (numbers[norm.bias] if norm.bias.size else 0)
            numbers[norm.weight] *= factor.reshape(-1, *[1] * (norm.weight.ndim - 1))
            numbers[norm.shift] -= factor * mean
            numbers[norm.scale], numbers[norm.variance] = math.sqrt(1 + norm.epsilon), 1
            numbers[norm.mean] = numbers[norm.bias] = 0
        return numbers

    def _find_norms(self, reads: Mapping[tuple[ir.Node, int], np.ndarray]) -> dict[ir.Node, np.ndarray]:
        """Note which BatchNormalization follow a convolution; return the biases between the two."""
        biases = {}
        for node in self.model.graph:
            if node.op_type != "BatchNormalization" or not all((node, i) in reads for i in range(1, 5)):
                continue
            source, bias = _only_source(node.inputs[0]), np.zeros(0, np.int64)
            if source is not None and source.op_type == "Add":
                index = next((i for i in (0, 1) if (source, i) in reads), None)
                bias = bias if index is None else reads[source, index].reshape(-1)
                source = None if index is None else _only_source(source.inputs[1 - index])
            elif source is not None and (source, 2) in reads:
                bias = reads[source, 2]
            if bias.size == reads[node, 3].size:
                biases[node] = bias
            if source is None or source.op_type not in ("Conv", "ConvTranspose") or (source, 1) not in reads:
                continue
            weight = reads[source, 1] if source.op_type == "Conv" else reads[source, 1].swapaxes(0, 1)
            if len(weight) == reads[node, 1].size:  # else groups of a ConvTranspose
                scale, shift, mean, variance = (reads[node, i] for i in range(1, 5))
                epsilon = attributes(node, self.model.opset)["epsilon"]
                self.norms.append(_Norm(scale, shift, mean, variance, weight, bias, epsilon))
        return biases

    # ---- pieces ----

    def _pieces(self) -> list[_Piece]:
        """Return the pieces of all weights in the order in which the graph reads them."""
        pieces: list[_Piece] = []
        seen = np.zeros(len(self.numbers), bool)
        reads = {(node, index): elements for node, index, elements in self._reads()}
        biases = self._find_norms(reads)
        absorbed = np.concatenate([np.zeros(0, np.int64), *biases.values()])
        for (node, index), elements in reads.items():
            if np.isin(elements, absorbed).all():
                continue
            if index == 3 and node in biases:
                candidates = [_Piece(elements, biases[node], -1)]
            else:
                candidates = _in_shared_order(node, index, elements, self.model.opset)
            for piece in self._divided(candidates):
                flat = np.concatenate([part.reshape(-1) for part in piece.parts])
                if not seen[flat].any() and len(np.unique(flat)) == len(flat):  # else it is tied, or repeated
                    pieces.append(piece)
                    seen[flat] = True
        for name, span in self.spans.items():
            if not seen[span].all():  # an operator reads only a part of it
                pieces = [piece for piece in pieces if name not in self.names_of(piece.elements)]
                pieces.append(_Piece(_squeezed(np.arange(span.start, span.stop).reshape(self.weights[name].shape))))
        return pieces

    def _reads(self) -> Iterator[tuple[ir.Node, int, np.ndarray]]:
        """Yield each operator that computes with a weight, the index of that input, and the elements in it."""
        moved: dict[ir.Value, np.ndarray | None] = {}
        constant = set()
        for name, value in self.model.graph.initializers.items():
            if (span := self.spans.get(name)) is None:
                constant.add(value)
            else:
                moved[value] = np.arange(span.start, span.stop).reshape(self.weights[name].shape)
        readers = []
        for node in self.model.graph:
            inputs = [value for value in node.inputs if value is not None]
            if not all(value in constant or value in moved for value in inputs):
                readers.append(node)
            elif node.op_type in ("Shape", "Size") or not any(value in moved for value in inputs):
                constant.update(node.outputs)
            elif node.op_type in _MOVES:
                moved |= dict.fromkeys(node.outputs)
            else:
                readers.append(node)
        reads = [(node, i, x) for node in readers for i, x in enumerate(node.inputs) if x in moved]
        computed = list(dict.fromkeys(value for _, _, value in reads if value is not None and moved[value] is None))
        moved |= dict(zip(computed, self._follow(computed), strict=True))
        for node, i, value in reads:
            if value is not None and (elements := moved[value]) is not None:
                yield node, i, elements

    def _follow(self, values: Sequence[ir.Value]) -> list[np.ndarray]:
        """Return the elements that values consist of, by passing their indices through the graph in digits."""
        if not values:
            return []
        probe = extract(self.model, [], [value.name or "" for value in values])

        def passed(numbers: np.ndarray) -> list[np.ndarray]:
            for name, array in self.split(numbers).items():
                if (value := probe.graph.initializers.get(name)) is not None:
                    value.const_value = ir.Tensor(array, name=name)
            return evaluate(probe)

        indices = np.arange(len(self.numbers))
        elements = [np.where(array == -1, 0, -1) for array in passed(np.full(len(indices), -1))]
        for place in range(0, len(indices).bit_length(), 8):  # all types have the integers below 256
            for array, digit in zip(elements, passed(indices >> place & 255), strict=True):
                array += np.where(array < 0, 0, digit.astype(np.int64) << place)
        return elements

    def _divided(self, pieces: Sequence[_Piece]) -> Iterator[_Piece]:
        """Yield pieces that are of one weight each, without constants."""
        for piece in pieces:
            parts = [part for part in piece.parts if (part >= 0).any()]
            if len(parts) == 2:
                yield piece
                continue
            for part in parts:
                owners = self._owners(part)
                for axis in range(part.ndim):
                    lines = np.moveaxis(owners, axis, 0).reshape(part.shape[axis], -1)
                    if (lines == lines[:, :1]).all():
                        cuts = np.flatnonzero(np.diff(lines[:, 0])) + 1
                        yield from (_Piece(_squeezed(x)) for x in np.split(part, cuts, axis) if (x >= 0).all())
                        break


def _only_source(value: ir.Value | None) -> ir.Node | None:
    """Return the node that computes a value for one reader, through changes of layout."""
    while value is not None and (source := value.producer()) is not None and len(value.uses()) == 1:
        if source.op_type not in ("Transpose", "Identity"):
            return source
        value = source.inputs[0]
    return None


def _squeezed(array: np.ndarray) -> np.ndarray:
    return array.reshape([size for size in array.shape if size != 1])


def _in_shared_order(node: ir.Node, index: int, elements: np.ndarray, opset: int) -> list[_Piece]:
    """Return the input of an operator with its axes in the order: inputs, outputs, window."""
    options = attributes(node, opset)
    match node.op_type, index:
        case "MatMul", 0:
            elements = elements.swapaxes(-1, -2) if elements.ndim > 1 else elements
        case "Gemm", (0 | 1):
            elements = elements if bool(options["transA" if index == 0 else "transB"]) == (index == 0) else elements.T
        case "Conv", 1:
            elements = elements.swapaxes(0, 1)
        case "Einsum", _:
            elements = _contracted_first(str(options["equation"]), index, elements)
        case (("LSTM" | "GRU" | "RNN"), (1 | 2)):
            return [_Piece(gate.T) for direction in elements for gate in np.split(direction, _GATES[node.op_type])]
        case (("LSTM" | "GRU" | "RNN"), 3):
            biases = elements.reshape(len(elements), 2, _GATES[node.op_type], -1).swapaxes(1, 2)
            pairs = [(gate, *pair) for direction in biases for gate, pair in enumerate(direction)]
            apart = 2 if node.op_type == "GRU" and options.get("linear_before_reset") else None
            sums = [_Piece(first, second) for gate, first, second in pairs if gate != apart]
            return [*sums, *(_Piece(bias) for gate, *both in pairs if gate == apart for bias in both)]
    return [_Piece(_squeezed(elements))]


def _contracted_first(equation: str, index: int, elements: np.ndarray) -> np.ndarray:
    """Return a factor of an Einsum as a matrix: contracted axes, then those of the result."""
    left, _, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    own, others = terms[index], "".join(terms[:index] + terms[index + 1 :])
    contracted = [axis for axis in others if axis in own and axis not in result]
    free = [axis for axis in result if axis in own and axis not in others]
    if len(contracted) + len(free) != len(own) or "." in own:
        return elements
    ordered = elements.transpose([own.index(axis) for axis in (*contracted, *free)])
    return ordered.reshape(math.prod(ordered.shape[: len(contracted)]), -1)


def _balance(a: _Graph, b: _Graph) -> None:
    """Bring two graphs to equal pieces: fold BatchNormalization, divide stacked matrices, if one side has them so.

    Raises:
        UnsupportedError: the graphs have different numbers of weights of a shape.
    """
    if bool(a.norms) != bool(b.norms):
        (a if a.norms else b).fold()
    shapes = [{piece.shape for piece in side.pieces} for side in (a, b)]
    for side, other_shapes in zip((a, b), shapes[::-1], strict=True):
        for i, piece in enumerate(side.pieces):  # biases of heads are a vector elsewhere
            if piece.shape not in other_shapes and (piece.elements.size,) in shapes[0] | shapes[1]:
                side.pieces[i] = piece._replace(elements=piece.elements.reshape(-1))
    for side, other in ((a, b), (b, a)):
        excess = Counter(piece.shape for piece in side.pieces)
        excess.subtract(Counter(piece.shape for piece in other.pieces))
        pieces, side.pieces = side.pieces, []
        for piece in pieces:
            axis = min(1, len(piece.shape) - 1)
            parts = [piece.elements]
            for count in range(2, 9) if excess[piece.shape] > 0 and piece.shape else ():
                candidate = np.array_split(piece.elements, count, axis)
                if not piece.shape[axis] % count and excess[candidate[0].shape] <= -count:
                    parts = candidate
            excess[piece.shape] -= 1 if len(parts) > 1 else 0
            excess[parts[0].shape] += len(parts) if len(parts) > 1 else 0
            side.pieces += map(_Piece, parts) if len(parts) > 1 else [piece]
    first, second = (Counter(piece.shape for piece in side.pieces) for side in (a, b))
    if shape := next((shape for shape in first | second if first[shape] != second[shape]), None):
        listed = [
            list_names([n for piece in side.pieces if piece.shape == shape for n in side.names_of(piece.elements)], 4)
            for side in (a, b)
        ]
        raise UnsupportedError(
            f"weights of {list(shape)}: {first[shape]} in `{a.title}`, {second[shape]} in `{b.title}`",
            hint=f"give graphs of one architecture; `{a.title}` has {listed[0] or 'none'}, and `{b.title}` "
            f"{listed[1] or 'none'}",
        )


# ---- what is compared ------------------------------------------------------------------------------------------------


class _Wire(NamedTuple):
    """Input of the second graph, or output of the first, with the axes that it has on the other side."""

    name: str
    other: Any
    axes: tuple[int, ...]


class _Pair:
    """Two graphs with inputs on which both run, and the inputs and outputs that belong together."""

    def __init__(self, a: _Graph, b: _Graph):
        self.a, self.b = a, b
        self._types = {value.name: value.dtype.numpy() for value in a.model.inputs if value.dtype is not None}
        self._inputs: tuple[_Wire, ...] = ()
        self._outputs: list[tuple[int, tuple[int, ...]]] = []
        self.example = self._wire()

    def of_first(self, inputs: Arrays) -> list[np.ndarray]:
        """Return the outputs of the first graph in the order and layout of the second."""
        results = self._results(inputs)
        return [results[i].transpose(axes) for i, axes in self._outputs]

    def _results(self, inputs: Arrays) -> list[np.ndarray]:
        return self.a({other: inputs[n].transpose(axes).astype(self._types[other]) for n, other, axes in self._inputs})

    def output_names(self) -> dict[str, str]:
        """Return outputs of the first graph -> those of the second."""
        pairs = zip(self._outputs, self.b.model.outputs, strict=True)
        return {self.a.model.outputs[i].name or "": value.name or "" for (i, _), value in pairs}

    def gap(self, inputs: Arrays) -> float:
        """Return the largest relative difference of outputs."""
        return max(map(_gap, self.of_first(inputs), self.b(inputs)), default=0.0)

    def batches(self) -> Iterator[Arrays]:
        """Yield inputs of the shapes of the example."""
        model = _with_shapes(self.b.model, {name: array.shape for name, array in self.example.items()})
        return (next(inputs_of_type(model, {}, seed)) for seed in range(1, _BATCHES + 1))

    def set_alike(self, matches: Mapping[int, int], scale: float = 1.0) -> None:
        """Give matched weights numbers by match, and all others numbers by shape."""
        own = [{i: i + 1 for i in matches}, {j: i + 1 for i, j in matches.items()}]
        for side, keys in zip((self.a, self.b), own, strict=True):
            for i, piece in enumerate(side.pieces):
                side.set(piece, _numbers(piece.shape, keys.get(i, 0), scale))

    def _wire(self) -> Arrays:
        """Find the inputs and outputs for which the graphs agree if weights depend on shapes alone."""
        least, failure = math.inf, None
        for wires, shapes in itertools.islice(_wires(self.a.model, self.b.model), _MOST_WIRINGS):
            self._inputs = wires
            for inputs in inputs_of_type(_with_shapes(self.b.model, shapes), {}, 0):
                self.set_alike({})
                try:
                    results, expected = self._results(inputs), self.b(inputs)
                except Error as error:
                    failure = error
                    continue
                if not all(np.isfinite(array).all() for array in (*results, *expected)):
                    continue
                closest = [_closest(array, results) for array in expected]
                self._outputs = [place for _, place in closest]
                gap = max((gap for gap, _ in closest), default=math.inf)
                for scale in _SCALES if gap <= _ALIKE else ():
                    self.set_alike({}, scale)
                    gap = max(gap, self.gap(inputs))
                if gap <= _ALIKE:
                    return inputs
                least = min(least, gap)
                break
        if failure is not None and least == math.inf:
            raise failure
        raise MismatchError(
            f"`{self.a.title}` and `{self.b.title}` compute different functions"
            + (f": outputs differ by {least:.1g}" if least < math.inf else ""),
            hint="give graphs with the same inputs, outputs, layers, activations and epsilons",
        )


def _numbers(shape: tuple[int, ...], key: int, scale: float = 1.0) -> np.ndarray:
    """Return numbers that depend on a shape and a key. Vectors are positive: one may be a variance."""
    rng = np.random.default_rng([key, *shape])
    if len(shape) < 2:
        return rng.uniform(0.5, 1.5, shape) * scale
    window = len(shape) == 3 and shape[1] == shape[2]  # of each channel
    return rng.standard_normal(shape) * scale / math.sqrt(math.prod(shape) / shape[0 if window else 1])


def _wires(a: Model, b: Model) -> Iterator[tuple[tuple[_Wire, ...], dict[str, Any]]]:
    """Yield inputs that may belong together, likely ones first, with the sizes that both sides take."""

    def choices(x: ir.Value, y: ir.Value) -> Iterator[tuple[_Wire, Any]]:
        if x.shape is None or y.shape is None or x.dtype is None or y.dtype is None:
            return
        if x.shape.rank() != y.shape.rank() or x.dtype.is_floating_point() != y.dtype.is_floating_point():
            return
        for axes in _orders(y.shape.rank()):
            sizes: list[Any] = list(y.shape)
            for axis, size in zip(axes, x.shape, strict=True):
                sizes[axis] = size if isinstance(size, int) and not isinstance(sizes[axis], int) else sizes[axis]
            if all(not isinstance(size, int) or sizes[axis] == size for axis, size in zip(axes, x.shape, strict=True)):
                yield _Wire(y.name or "", x.name or "", axes), sizes

    orders = itertools.islice(itertools.permutations(a.inputs), _MOST_WIRINGS) if len(a.inputs) == len(b.inputs) else ()
    for order in sorted(orders, key=lambda order: -sum(x.name == y.name for x, y in zip(order, b.inputs, strict=True))):
        for chosen in itertools.product(*(list(choices(x, y)) for x, y in zip(order, b.inputs, strict=True))):
            yield tuple(wire for wire, _ in chosen), {wire.name: sizes for wire, sizes in chosen}


def _orders(rank: int) -> list[tuple[int, ...]]:
    """Return orders of axes: the same, channels moved from the end, and to the end."""
    axes = tuple(range(rank))
    return [axes] if rank < 3 else [axes, (0, rank - 1, *axes[1:-1]), (0, *axes[2:], 1)]


def _with_shapes(model: Model, shapes: Mapping[str, Sequence[Any]]) -> Model:
    model = model.copy()
    for value in model.inputs:
        value.shape = ir.Shape(shapes[value.name or ""])
    return model


def _closest(array: np.ndarray, others: Sequence[np.ndarray]) -> tuple[float, tuple[int, tuple[int, ...]]]:
    """Return the smallest difference to one of the arrays, in any layout, and where that is."""
    candidates = [
        (_gap(moved, array), (i, axes))
        for i, other in enumerate(others)
        for axes in (_orders(other.ndim) if other.ndim == array.ndim else ())
        if (moved := other.transpose(axes)).shape == array.shape
    ]
    return min(candidates, default=(math.inf, (0, ())))


def _gap(x: np.ndarray, y: np.ndarray) -> float:
    """Return the largest difference relative to the largest number."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    gap = np.abs(x - y).max(initial=0) / max(np.abs(y).max(initial=0), np.finfo(np.float32).tiny)
    return float(gap) if np.isfinite(gap) else math.inf


# ---- matching --------------------------------------------------------------------------------------------------------


def _match(pair: _Pair) -> tuple[dict[int, int], int]:
    """Return which pieces belong together, and how many of them changing a weight did not tell apart."""
    sides = [[piece.shape for piece in side.pieces] for side in (pair.a, pair.b)]
    matches: dict[int, int] = {}
    by_order = 0
    while True:
        left = {
            shape: [[i for i, own in enumerate(shapes) if own == shape and i not in taken]
                    for shapes, taken in zip(sides, (matches, {*matches.values()}), strict=True)]
            for shape in dict.fromkeys(sides[0])
        }  # fmt: skip
        matches |= {ours[0]: theirs[0] for ours, theirs in left.values() if len(ours) == 1}
        unmatched = [(ours, theirs) for ours, theirs in left.values() if len(ours) > 1]
        if not unmatched:
            return matches, by_order
        pair.set_alike(matches)
        clear: dict[int, int] = {}
        unclear: dict[int, int] = {}
        idle: dict[int, int] = {}
        for ours, theirs in unmatched:
            gaps, effects = _gaps(pair, ours, theirs)
            for row, i in enumerate(ours):
                column = int(gaps[row].argmin())
                limit = max(_APART * gaps[row, column], _EQUAL)
                rivals = np.concatenate([np.delete(gaps[row], column), np.delete(gaps[:, column], row)])
                if gaps[row, column] <= _ALIKE and rivals.min() > limit:
                    clear[i] = theirs[column]
                elif gaps[row, column] <= _ALIKE and not unclear:
                    unclear[i] = theirs[int(np.flatnonzero(gaps[row] <= limit)[0])]
            rows = [i for row, i in enumerate(ours) if gaps[row, effects <= _EQUAL].min(initial=1) <= _EQUAL]
            columns = [j for column, j in enumerate(theirs) if effects[column] <= _EQUAL]
            idle |= dict(zip(rows, columns, strict=False))
        if not clear:  # equal branches, or a bias that a softmax cancels: the order of the graphs decides
            clear = idle or unclear
            by_order += len(clear)
        if not clear:
            raise UnsupportedError(
                f"no weight of `{pair.a.title}` changes the outputs as one of `{pair.b.title}` does",
                hint="give the pairs: `--names FILE` (JSON), or `names={...}`",
            )
        matches |= clear


def _gaps(pair: _Pair, ours: Sequence[int], theirs: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return how far apart outputs are if a weight of each graph changes, and how far those of the second move."""
    base = pair.b(pair.example)

    def flat(outputs: Sequence[np.ndarray]) -> np.ndarray:
        sizes = [max(np.abs(array).max(initial=0), np.finfo(np.float32).tiny) for array in base]
        joined = np.concatenate([array.reshape(-1) / size for array, size in zip(outputs, sizes, strict=True)])
        return joined[:: max(1, len(joined) // _MOST_OUTPUTS)]

    def changed(side: _Graph, piece: _Piece) -> np.ndarray:
        before = side.numbers[piece.elements]
        side.set(piece, _numbers(piece.shape, 0, 0.1)[::-1] if piece.shape else before * 0.1)
        outputs = flat(pair.of_first(pair.example) if side is pair.a else pair.b(pair.example))
        side.set(piece, before)
        return outputs

    first = [changed(pair.a, pair.a.pieces[i]) for i in ours]
    second = [changed(pair.b, pair.b.pieces[j]) for j in theirs]
    gaps = np.array([[np.abs(x - y).max(initial=0) for y in second] for x in first], np.float64)
    return gaps, np.array([np.abs(y - flat(base)).max(initial=0) for y in second])


# ---- moving ----------------------------------------------------------------------------------------------------------


def by_structure(checkpoint: Checkpoint, source: Model, like: Model) -> Checkpoint:
    """Return a checkpoint of the graph `source`, by its names, with the names and layouts of the graph `like`.

    Raises:
        MismatchError: the graphs compute different functions.
        UnsupportedError: weights or optimizer state have no counterpart.
    """
    a, b = _Graph(source), _Graph(like)
    _balance(a, b)
    pair = _Pair(a, b)
    matches, by_order = _match(pair)
    moving = _Moving(pair, matches, checkpoint)
    moving.check(matches)
    notes = [f"{len(a.weights)} tensors are matched by structure; outputs are equal on {_BATCHES} batches"]
    if by_order:
        notes.append(f"{by_order} of them do not differ in outputs, and are taken in the order of the graphs")
    return dataclasses.replace(
        checkpoint,
        tensors=moving.weights(),
        averages=moving.state(checkpoint.averages),
        optimizers=tuple(map(moving.optimizer, checkpoint.optimizers)),
        loss=_renamed(checkpoint.loss, pair.output_names()),
        remarks=(*checkpoint.remarks, *notes),
        tied={}, configuration={}, layout={}, trees={},
    )  # fmt: skip


def _renamed(loss: Any, outputs: Mapping[str, str]) -> Any:
    """Return a loss of a recipe with other names for the outputs."""
    if isinstance(loss, Mapping):
        return {outputs.get(name, name): _renamed(term, outputs) for name, term in loss.items()}
    return [_renamed(term, outputs) for term in loss] if isinstance(loss, list | tuple) else loss


class _Moving:
    """Moves what the first graph of a pair has to the names and layouts of the second."""

    def __init__(self, pair: _Pair, matches: Mapping[int, int], checkpoint: Checkpoint):
        self._pair, a, b = pair, pair.a, pair.b
        self._tensors = {name: checkpoint.tensors.get(name, tensor) for name, tensor in a.weights.items()}
        self._first = np.full(len(b.numbers), -1)
        """For each element of the second graph, its index in the first; -1: zero."""
        self._second, self._sign = self._first.copy(), np.ones(len(b.numbers), np.int8)
        """Elements that are added to these, and their sign."""
        self._is_moved = np.zeros(len(b.numbers), bool)
        for i, j in matches.items():
            ours, theirs = a.pieces[i], b.pieces[j]
            for part in theirs.parts:
                self._is_moved[part] = True
            self._first[theirs.elements] = ours.elements
            if theirs.added is None and ours.added is not None:
                self._second[theirs.elements], self._sign[theirs.elements] = ours.added, ours.sign
            elif theirs.added is not None and ours.added is not None:
                self._first[theirs.added] = ours.added
        self._sources = {name: a.names_of(self._first[span]) for name, span in b.spans.items()}
        """Weight of the second graph -> the weights of the first that it consists of."""

    def check(self, matches: Mapping[int, int]) -> None:
        """Raise an Error unless outputs are equal, for numbers in place of weights and for the real weights."""
        pair = self._pair
        for inputs, scale in itertools.product(pair.batches(), _SCALES):
            pair.set_alike(matches, scale)
            self._refuse(pair.gap(inputs), _ALIKE)
        pair.a.numbers = pair.a.folded(pair.a.join(self._tensors))
        pair.b.numbers = pair.b.join(self.weights())
        for inputs in pair.batches():
            self._refuse(pair.gap(inputs), _EQUAL)

    def _refuse(self, gap: float, limit: float) -> None:
        if gap > limit:
            raise MismatchError(
                f"matched by structure, outputs of `{self._pair.b.title}` differ by {gap:.1g}",
                hint="give the pairs: `--names FILE` (JSON), or `names={...}`",
            )

    def _moved(self, numbers: np.ndarray) -> np.ndarray:
        numbers = np.append(numbers, numbers.dtype.type(0))
        return numbers[self._first] + self._sign * numbers[self._second]

    def weights(self) -> dict[str, Tensor]:
        a, b = self._pair.a, self._pair.b
        numbers = np.where(self._is_moved, self._moved(a.folded(a.join(self._tensors))), b.folded(b.join(b.weights)))
        return {name: ArrayTensor(array) for name, array in b.split(numbers).items()}

    def state(self, tensors: Mapping[Any, Tensor]) -> dict[str, Tensor]:
        """Return tensors that belong to weights and have their shapes."""
        if not tensors:
            return {}
        b, numbers = self._pair.b, self._moved(self._pair.a.join(tensors))
        present = {name: sum(source in tensors for source in sources) for name, sources in self._sources.items()}
        self._refuse_mixed([name for name, count in present.items() if 0 < count < len(self._sources[name])])
        return {
            name: ArrayTensor(numbers[b.spans[name]].reshape(b.weights[name].shape))
            for name, count in present.items()
            if count
        }

    def optimizer(self, optimizer: OptimizerState) -> OptimizerState:
        """Return the state of an optimizer for the weights of the second graph."""
        if self._pair.a.is_folded or self._pair.b.is_folded:
            raise UnsupportedError("optimizer state of a folded BatchNormalization cannot be moved", hint=_ALONE)
        summed = (self._second >= 0) & (self._sign > 0)
        if names := self._pair.b.names_of(np.flatnonzero(summed)):
            raise UnsupportedError(
                f"optimizer state of the terms of {list_names(names, 3)} cannot be added", hint=_ALONE
            )
        slots: dict[str | int, dict[str, Any]] = {}
        for slot in dict.fromkeys(slot for values in optimizer.slots.values() for slot in values):
            values = {name: own[slot] for name, own in optimizer.slots.items() if slot in own}
            shaped = {
                name: value
                for name, value in values.items()
                if isinstance(value, Tensor) and name in self._tensors and value.shape == self._tensors[name].shape
            }
            for name, tensor in self.state(shaped).items():
                slots.setdefault(name, {})[slot] = tensor
            for name, sources in self._sources.items():
                others = [values[source] for source in sources if source in values and source not in shaped]
                if len({str(x.array() if isinstance(x, Tensor) else x) for x in others}) > 1:
                    self._refuse_mixed([name])
                if others:
                    slots.setdefault(name, {}).setdefault(slot, others[0])
        groups = []
        for group in optimizer.groups:
            own = {*group.parameters}
            members = [name for name, sources in self._sources.items() if own & {*sources}]
            self._refuse_mixed([name for name in members if not {*self._sources[name]} <= own])
            groups.append(dataclasses.replace(group, parameters=tuple(members)))
        return dataclasses.replace(optimizer, groups=tuple(groups), slots=slots)

    def _refuse_mixed(self, names: Sequence[str]) -> None:
        if names:
            sources = list_names(self._sources[names[0]], 4)
            raise UnsupportedError(f"optimizer state of {sources} differs, and `{names[0]}` joins them", hint=_ALONE)


def by_shape(tensors: Mapping[str, Tensor], model: Model) -> dict[str, str]:
    """Return names of a checkpoint without a graph -> names of a model, if every shape occurs once.

    Raises:
        UnsupportedError: several tensors have one shape, or none fits.
    """

    def by_sizes(tensors: Mapping[str, Tensor]) -> dict[tuple[int, ...], list[str]]:
        names: dict[tuple[int, ...], list[str]] = {}
        for name, tensor in tensors.items():
            names.setdefault(tuple(sorted(tensor.shape)), []).append(name)
        return names

    ours, theirs = by_sizes(weights_of(model).tensors), by_sizes(tensors)
    hint = "give the model of the checkpoint: `--module package.module:Class`; or pairs: `--names FILE` (JSON)"
    for sizes, names in ours.items():
        others = theirs.get(sizes, [])
        if len(names) != 1 or len(others) != 1:
            raise UnsupportedError(
                f"shapes do not tell {list_names(others, 4) or 'a tensor'} from others for {list_names(names, 4)}",
                hint=hint,
            )
        if len({*sizes}) < len(sizes) and len(sizes) > 1:
            raise UnsupportedError(f"the shape of {list_names(names, 1)} does not tell its layout", hint=hint)
    return {theirs[sizes][0]: names[0] for sizes, names in ours.items()}
