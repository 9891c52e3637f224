"""Running a model, and its gradient, in float64 at points near one: on the numpy engine, which has all operators so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import numpy as np
import onnx_ir as ir

from onward import engines
from onward.differentiate import vjp
from onward.errors import Error, UnsupportedError
from onward.model import Model
from onward.model.core import values
from onward.transform.float_type import convert_floats
from onward.transform.training import keep_only

Arrays = Mapping[str, np.ndarray]


def in_float64(model: Model) -> Model:
    """A copy that computes in float64, also with operators that the standard does not have in it."""
    return convert_floats(model, ir.DataType.DOUBLE, settings=True)


class Runner:
    """A model as a function of arrays, of which it takes those that it has inputs for; floats are made float64."""

    def __init__(self, model: Model):
        self._inputs = [value.name or "" for value in model.inputs]
        self._compute = engines.function(model)

    def __call__(self, arrays: Arrays) -> dict[str, np.ndarray]:
        return self._compute({name: _wide(arrays[name]) for name in self._inputs})


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype.kind not in "biuSUO" else array


class Function:
    """y and its gradients as a function of steps, which are added to xs and to `inputs`, which are floats."""

    def __init__(self, model: Model, y: str, xs: Sequence[str], inputs: Iterable[str]):
        """The model computes in float64."""
        self._name = y
        self.xs = list(xs)
        self.movable = list(dict.fromkeys([*xs, *inputs]))
        self._rest: dict[str, np.ndarray] = {_step(name): np.zeros(()) for name in self.movable}
        forward = model.copy()
        known = {value.name: value for value in values(forward.graph)}
        keep_only(forward, [known[name] for name in dict.fromkeys((y, *xs))])
        self._results = _add_steps(forward, self.movable)
        self._forward = Runner(forward)
        backward = vjp(model, y, xs)
        backward.graph.inputs[-1].name = _COTANGENT
        _add_steps(backward, self.movable)
        self._gradients = [value.name or "" for value in backward.graph.outputs]
        self._backward = Runner(backward)

    def at(self, inputs: Arrays) -> None:
        """Choose the point from which steps are made; fails as the engine does if it cannot run there."""
        self._rest |= inputs
        results = self._forward(self._rest)
        self.y = results[self._results.get(self._name, self._name)]
        found = {x: results[self._results[x]] for x in self.xs}
        self.point = {name: found[name] if name in found else inputs[name] for name in self.movable}

    def random_step(self, name: str, rng: np.random.Generator) -> np.ndarray:
        """A direction in which to move a value, about as long as the value itself."""
        here = self.point[name]
        size = float(np.sqrt(np.mean(np.square(here.astype(np.float64))))) if here.size else 0.0
        return rng.standard_normal(here.shape) * (size if 0 < size < np.inf else 1.0)

    def value(self, steps: Arrays) -> np.ndarray:
        """y after some steps; not a number where it cannot be computed, or has another shape."""
        with suppress(Error):
            y = self._forward(self._given(steps))[self._results.get(self._name, self._name)]
            if y.shape == self.y.shape:
                return y
        return np.full(self.y.shape, np.nan)

    def gradients(self, dy: np.ndarray, steps: Arrays) -> dict[str, np.ndarray]:
        try:
            found = self._backward({**self._given(steps), _COTANGENT: dy})
        except Error as error:
            raise UnsupportedError(
                f"the gradient of `{self._name}` does not run: {error.message}",
                hint="where the model itself runs, this is a mistake in a rule, and we should know",
            ) from error
        return {x: found[name] for x, name in zip(self.xs, self._gradients, strict=True)}

    def _given(self, steps: Arrays) -> dict[str, np.ndarray]:
        return {**self._rest, **{_step(name): step for name, step in steps.items()}}


_COTANGENT = "cotangent of y"


def _step(name: str) -> str:
    return f"{name}/step"


def _add_steps(model: Model, names: Iterable[str]) -> dict[str, str]:
    """Give the model one more input for each value, a step: what read the value reads the sum. The sums by name."""
    graph = model.graph
    known = {value.name: value for value in values(graph)}
    sums = {}
    for name in names:
        if name not in known:
            continue  # the gradient does not depend on it
        value = known[name]
        step = ir.Value(name=_step(name), type=value.type)  # of any shape: a number where nothing moves
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
