"""One directional derivative, by the gradient and by finite differences in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from operator import itemgetter

import numpy as np
import onnx_ir as ir

from onward import engines
from onward.agreement.report import GradientRow
from onward.differentiate import vjp
from onward.errors import Error, UnsupportedError
from onward.model import Model
from onward.model.core import values
from onward.transform.float_type import convert_floats
from onward.transform.training import keep_only

Arrays = Mapping[str, np.ndarray]


def in_float64(model: Model) -> Model:
    """Return a copy in float64, including operators that the standard does not define for it."""
    return convert_floats(model, ir.DataType.DOUBLE, settings=True)


class Runner:
    """A model as a function of arrays by name; floats are cast to float64, arrays that are no input are ignored."""

    def __init__(self, model: Model):
        self._inputs = [value.name or "" for value in model.inputs]
        self._compute = engines.function(model)

    def __call__(self, arrays: Arrays) -> dict[str, np.ndarray]:
        chosen = {name: arrays[name] for name in self._inputs}
        return self._compute({n: x if x.dtype.kind in "biuSUO" else x.astype(np.float64) for n, x in chosen.items()})


class SteppedFunction:
    """y and its gradients as a function of steps, which are added to xs and to float `inputs`."""

    def __init__(self, model: Model, y: str, xs: Sequence[str], inputs: Iterable[str]):
        """Add the steps to a model in float64."""
        self._name = y
        self.xs = list(xs)
        self.movable = list(dict.fromkeys([*xs, *inputs]))
        self._rest: dict[str, np.ndarray] = {_step(name): np.zeros(()) for name in self.movable}
        forward = model.copy()
        by_name = {value.name: value for value in values(forward.graph)}
        keep_only(forward, [by_name[name] for name in dict.fromkeys((y, *xs))])
        self._results = _add_steps(forward, self.movable)
        self._forward = Runner(forward)
        backward = vjp(model, y, xs)
        backward.graph.inputs[-1].name = _COTANGENT
        _add_steps(backward, self.movable)
        self._gradients = [value.name or "" for value in backward.graph.outputs]
        self._backward = Runner(backward)

    def at(self, inputs: Arrays) -> None:
        """Choose the point from which steps are made; raise what the engine raises there."""
        self._rest |= inputs
        results = self._forward(self._rest)
        self.y = results[self._results.get(self._name, self._name)]
        moved = {x: results[self._results[x]] for x in self.xs}
        self.point = {name: moved[name] if name in moved else inputs[name] for name in self.movable}

    def random_step(self, name: str, rng: np.random.Generator) -> np.ndarray:
        """Return a random direction, scaled to the root mean square of the value."""
        here = self.point[name]
        size = float(np.sqrt(np.mean(np.square(here.astype(np.float64))))) if here.size else 0.0
        return rng.standard_normal(here.shape) * (size if 0 < size < np.inf else 1.0)

    def value(self, steps: Arrays) -> np.ndarray:
        """Return y after some steps; NaN if it cannot be computed or has another shape."""
        with suppress(Error):
            y = self._forward(self._arrays(steps))[self._results.get(self._name, self._name)]
            if y.shape == self.y.shape:
                return y
        return np.full(self.y.shape, np.nan)

    def gradients(self, dy: np.ndarray, steps: Arrays) -> dict[str, np.ndarray]:
        try:
            results = self._backward({**self._arrays(steps), _COTANGENT: dy})
        except Error as error:
            raise UnsupportedError(
                f"the gradient of `{self._name}` does not run: {error.message}",
                hint="if the model itself runs, this is a bug in a rule: please report it",
            ) from error
        return {x: results[name] for x, name in zip(self.xs, self._gradients, strict=True)}

    def _arrays(self, steps: Arrays) -> dict[str, np.ndarray]:
        return {**self._rest, **{_step(name): step for name, step in steps.items()}}


_COTANGENT = "cotangent of y"


def _step(name: str) -> str:
    return f"{name}/step"


def _add_steps(model: Model, names: Iterable[str]) -> dict[str, str]:
    """Add an input for each value, a step that is added to it for all of its readers; return the names of the sums."""
    graph = model.graph
    by_name = {value.name: value for value in values(graph)}
    sums = {}
    for name in names:
        if name not in by_name:
            continue  # the gradient does not depend on it
        value = by_name[name]
        step = ir.Value(name=_step(name), type=value.type)  # of any shape: a scalar zero where nothing moves
        add = ir.Node("", "Add", [value, step])
        moved = add.outputs[0]
        moved.name, moved.type, moved.shape = f"{name}/moved", value.type, value.shape
        value.replace_all_uses_with(moved, replace_graph_outputs=True)
        add.replace_input_with(0, value)
        producer = value.producer()
        if producer is not None:
            producer.append(add)
        elif len(graph):
            graph.insert_before(graph[0], add)
        else:
            graph.append(add)
        graph.inputs.append(step)
        sums[name] = moved.name
    return sums


# ---- comparison ------------------------------------------------------------------------------------------------------

TOLERANCE = 1e-5
"""Allowed difference of derivatives, relative to the norm of the gradient."""
_STEPS = (1e-6, 1e-5, 1e-7, 1e-4)
"""Step sizes relative to x. The first is mostly best; a smaller one avoids a kink nearby, a larger one rounding."""
_BESIDE = 1e-3
"""Distance to look beside a kink: much more than a step, and little enough that smooth functions do not change."""


@dataclasses.dataclass(frozen=True)
class _Slope:
    """A directional derivative by the gradient and by differences."""

    ours: float
    numeric: float
    difference: float
    agrees: bool
    certain: bool = True
    """True if the differences are exact enough to prove a disagreement."""
    sides: tuple[float, float] = (0.0, 0.0)
    """The slopes to the left and to the right."""

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.ours) and np.isfinite(self.numeric))

    @property
    def has_sides(self) -> bool:
        left, right = self.sides
        return abs(right - left) > 0.1 * max(abs(left), abs(right))

    @property
    def is_between(self) -> bool:
        return self.has_sides and min(self.sides) <= self.ours <= max(self.sides)


def compare(
    function: SteppedFunction, x: str, dy: np.ndarray, gradient: np.ndarray, tolerance: float, rng: np.random.Generator
) -> GradientRow:
    """Compare the derivative of <dy, y> along a random direction of x with its gradient."""
    line = _Line(function, x, function.random_step(x, rng), dy, tolerance)
    here = line.slope(gradient, {})
    row = GradientRow(x, 1, here.ours, here.numeric, here.difference, "ok")
    if not here.finite:
        good = np.isfinite(here.numeric) and np.all(np.isfinite(function.y))
        return dataclasses.replace(row, verdict="not finite", note="the gradient" if good else "y")
    if here.agrees:
        return row
    if not here.certain:
        return dataclasses.replace(row, verdict="unclear", note="hidden by rounding, kinks or jumps nearby")
    if _is_kink(line, here, rng):
        left, right = here.sides
        sides = f"{left:.4g} from the left, {right:.4g} from the right"
        return dataclasses.replace(row, verdict="kink", note=sides if here.has_sides else "right beside this point")
    return dataclasses.replace(row, verdict="wrong")


def _is_kink(line: _Line, here: _Slope, rng: np.random.Generator) -> bool:
    """True if the gradient is right beside this point or, where kinks are everywhere, between the two slopes."""
    function = line.function
    beside = {name: _BESIDE * function.random_step(name, rng) for name in function.movable}
    there = line.slope(function.gradients(line.dy, beside)[line.x], beside)
    agrees = there.agrees and there.difference < 0.1 * here.difference  # a slightly wrong gradient may pass there
    return there.finite and (agrees or (here.is_between and there.is_between))


@dataclasses.dataclass(frozen=True)
class _Line:
    """<dy, y> as a function of the distance that x moves along a direction."""

    function: SteppedFunction
    x: str
    direction: np.ndarray
    dy: np.ndarray
    tolerance: float

    def change(self, start: float, end: float, at: Arrays) -> float:
        """Return the increase from `start` to `end`, after all values have moved by `at`."""
        before, after = (
            self.function.value({**at, self.x: at.get(self.x, 0.0) + far * self.direction}) for far in (start, end)
        )
        return float(np.sum(self.dy * (after - before)))

    def slope(self, gradient: np.ndarray, at: Arrays) -> _Slope:
        """Try steps until one agrees; if none does, use the two that agree best with each other."""
        ours = float(np.sum(gradient * self.direction))
        size = float(np.linalg.norm(gradient * self.direction))
        tried: dict[float, float] = {}
        for step in _STEPS:
            numeric = self.change(-step, step, at) / (2 * step)
            if not np.isfinite(numeric):
                continue
            if size <= 10 * self._rounding and abs(numeric) <= self._rounding / step:  # both are zero
                return _Slope(ours, numeric, 0.0, agrees=True)
            difference = _relative(ours, numeric, size)
            if difference <= self.tolerance:
                return _Slope(ours, numeric, difference, agrees=True)
            tried[step] = numeric
        if not tried:
            return _Slope(ours, np.nan, np.nan, agrees=False)
        ordered = sorted(tried.items())
        step, numeric, error = min(
            ((step, a, abs(a - b)) for (step, a), (_, b) in pairwise(ordered)),
            key=itemgetter(2),
            default=(*ordered[0], np.inf),
        )
        certain = abs(ours - numeric) > max(4 * error, self._rounding / step)
        sides = (self.change(-step, 0, at) / step, self.change(0, step, at) / step)
        return _Slope(ours, numeric, _relative(ours, numeric, size), False, certain, sides)

    @property
    def _rounding(self) -> float:
        """The rounding error of a result."""
        return 8 * float(np.finfo(np.float64).eps) * float(np.sum(np.abs(self.dy * self.function.y)))


def _relative(ours: float, numeric: float, size: float) -> float:
    scale = max(abs(ours), abs(numeric), size)
    return abs(ours - numeric) / scale if scale else 0.0
