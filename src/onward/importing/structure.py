"""Matches between the weights of two graphs by what they compute, for names that do not fit.

All weights of both graphs are set to numbers that depend on their shapes alone. Two graphs of one architecture then
have equal outputs before anything is matched. Changing one weight shows its place: weights that belong together change
the outputs alike. A match counts only if outputs also agree for the real weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.agreement.inputs import inputs_of_type
from onward.checkpoint.exporting import weights_of
from onward.checkpoint.format import Checkpoint
from onward.errors import Error, MismatchError, UnsupportedError, list_names
from onward.importing.weight_pieces import Arrays, Piece, WeightedGraph, balance
from onward.model import Model
from onward.run_state.state import OptimizerState
from onward.run_state.tensors import ArrayTensor, Tensor

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


# ---- what is compared ------------------------------------------------------------------------------------------------


class _Wire(NamedTuple):
    """Input of the second graph, and the input of the first that has its axes in another order."""

    name: str
    other: Any
    axes: tuple[int, ...]


class _Pair:
    """Two graphs with inputs on which both run, and the inputs and outputs that belong together."""

    def __init__(self, a: WeightedGraph, b: WeightedGraph):
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
                self._outputs = [indices for _, indices in closest]
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
        names = [list_names([value.name or "" for value in side.model.inputs], 6) for side in (self.a, self.b)]
        if len(self.a.model.inputs) != len(self.b.model.inputs):
            raise MismatchError(
                f"the inputs of `{self.a.title}` are {names[0]}, and those of `{self.b.title}` {names[1]}",
                hint="give graphs with the same inputs; of a checkpoint with a configuration: `--inputs batch.npz`",
            )
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


def _match(pair: _Pair) -> tuple[dict[int, int], list[int]]:
    """Return which pieces belong together, and those of the second graph that changing a weight did not tell apart."""
    sides = [[piece.shape for piece in side.pieces] for side in (pair.a, pair.b)]
    matches: dict[int, int] = {}
    by_order: list[int] = []
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
            by_order += clear.values()
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

    def changed(side: WeightedGraph, piece: Piece) -> np.ndarray:
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
    title = like.path.name if like.path else "the model"
    a, b = WeightedGraph(source, checkpoint.path.name), WeightedGraph(like, title)
    balance(a, b)
    pair = _Pair(a, b)
    matches, by_order = _match(pair)
    moving = _Moving(pair, matches, checkpoint)
    moving.check(matches)
    notes = [f"{len(a.weights)} tensors are matched by structure; outputs are equal on {_BATCHES} batches"]
    if by_order:
        names = list_names([name for j in by_order for name in b.names_of(b.pieces[j].elements)], 4)
        notes.append(f"these do not differ in outputs, and are taken in the order of the graphs: {names}")
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
            for elements in theirs.parts:
                self._is_moved[elements] = True
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
