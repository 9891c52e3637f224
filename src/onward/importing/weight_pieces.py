"""Weights of a graph in pieces that do not depend on the file: names and layouts are left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onward.checkpoint.exporting import weights_of
from onward.errors import UnsupportedError, list_names
from onward.frameworks.formulas.graph_building import open_initializers
from onward.model import Model
from onward.model.walk import attributes
from onward.run_state.tensors import Tensor
from onward.runtime.sessions import evaluate, explain_failures, open_session
from onward.transform.extract import extract
from onward.transform.inline import inline
from onward.transform.types import fill_in_types

_MOVES = {
    "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose",
    "Unsqueeze",
}  # fmt: skip
"""Operators that move elements of weights without computing."""
_CHANNELS_FIRST = {"AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "MaxPool"}
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}

Arrays = Mapping[str, np.ndarray]


class Piece(NamedTuple):
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


class WeightedGraph:
    """A graph that runs with any numbers in place of its weights."""

    def __init__(self, model: Model, title: str):
        self.model, self.title = inline(model), title
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

    def set(self, piece: Piece, numbers: np.ndarray) -> None:
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

    def _pieces(self) -> list[Piece]:
        """Return the pieces of all weights in the order in which the graph reads them."""
        pieces: list[Piece] = []
        seen = np.zeros(len(self.numbers), bool)
        reads = {(node, index): elements for node, index, elements in self._reads()}
        biases = self._find_norms(reads)
        absorbed = np.concatenate([np.zeros(0, np.int64), *biases.values()])
        for (node, index), elements in reads.items():
            if np.isin(elements, absorbed).all():
                continue
            if index == 3 and node in biases:
                candidates = [Piece(elements, biases[node], -1)]
            else:
                candidates = _in_shared_order(node, index, elements, self.model.opset)
                if node.op_type in ("Gemm", "MatMul") and index == 1:
                    candidates = [Piece(self._channels_first(node, candidates[0].elements))]
            for piece in self._divided(candidates):
                flat = np.concatenate([part.reshape(-1) for part in piece.parts])
                if not seen[flat].any() and len(np.unique(flat)) == len(flat):  # else it is tied, or repeated
                    pieces.append(piece)
                    seen[flat] = True
        for name, span in self.spans.items():
            if not seen[span].all():  # an operator reads only a part of it
                pieces = [piece for piece in pieces if name not in self.names_of(piece.elements)]
                pieces.append(Piece(_squeezed(np.arange(span.start, span.stop).reshape(self.weights[name].shape))))
        return pieces

    def _channels_first(self, node: ir.Node, matrix: np.ndarray) -> np.ndarray:
        """Return a matrix after a flattened image with its rows in the order of channels first."""
        flat = None if node.inputs[0] is None else node.inputs[0].producer()
        if flat is None or flat.op_type not in ("Flatten", "Reshape") or (image := flat.inputs[0]) is None:
            return matrix
        fill_in_types(self.model, [image])
        sizes = list(image.shape or ())[1:]
        order, source = tuple(range(len(sizes) + 1)), image.producer()
        while source is not None and source.op_type not in _CHANNELS_FIRST:
            if source.op_type == "Transpose" and len(perm := source.attributes["perm"].as_ints()) == len(order):
                order = tuple(perm[axis] for axis in order)
            computed = [value for value in source.inputs if value is not None and value.producer() is not None]
            source = computed[0].producer() if computed else None
        static = [size for size in sizes if isinstance(size, int)]
        if source is None or order[:1] != (0,) or len(static) < len(sizes) or math.prod(static) != len(matrix):
            return matrix
        axes = [axis - 1 for axis in sorted(range(1, len(order)), key=order.__getitem__)]
        return matrix.reshape(*static, -1).transpose(*axes, len(static)).reshape(matrix.shape)

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
        for shift in range(0, len(indices).bit_length(), 8):  # all types have the integers below 256
            for array, digit in zip(elements, passed(indices >> shift & 255), strict=True):
                array += np.where(array < 0, 0, digit.astype(np.int64) << shift)
        return elements

    def _divided(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
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
                        yield from (Piece(_squeezed(x)) for x in np.split(part, cuts, axis) if (x >= 0).all())
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


def _in_shared_order(node: ir.Node, index: int, elements: np.ndarray, opset: int) -> list[Piece]:
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
            return [Piece(gate.T) for direction in elements for gate in np.split(direction, _GATES[node.op_type])]
        case (("LSTM" | "GRU" | "RNN"), 3):
            biases = elements.reshape(len(elements), 2, _GATES[node.op_type], -1).swapaxes(1, 2)
            pairs = [(gate, *pair) for direction in biases for gate, pair in enumerate(direction)]
            apart = 2 if node.op_type == "GRU" and options.get("linear_before_reset") else None
            sums = [Piece(first, second) for gate, first, second in pairs if gate != apart]
            return [*sums, *(Piece(bias) for gate, *both in pairs if gate == apart for bias in both)]
    return [Piece(_squeezed(elements))]


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


def balance(a: WeightedGraph, b: WeightedGraph) -> None:
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
            side.pieces += map(Piece, parts) if len(parts) > 1 else [piece]
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
