"""Running a model, and its gradient, at points near one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.differentiate import vjp
from onward.errors import Error, UnsupportedError
from onward.gradcheck.standins import with_standins
from onward.lowering.runtime import for_onnxruntime
from onward.model import Model
from onward.model.core import values
from onward.transform.unused import keep_only

Arrays = Mapping[str, np.ndarray]
Maker = Callable[[ir.DataType], Model]
"""Makes a model in a given floating-point type."""


class Session:
    """A model on ONNX Runtime: arrays in by name, arrays out in order. Floats are fed in the type that it takes."""

    def __init__(self, model: Model):
        import onnxruntime

        proto = for_onnxruntime(model).to_proto()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            self._session = onnxruntime.InferenceSession(
                proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its own exceptions have no common base
            raise UnsupportedError(f"ONNX Runtime cannot load the model: {reason(error)}") from error
        self._types = {value.name: _numpy_type(value.type) for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]

    def __call__(self, arrays: Arrays, outputs: int | None = None) -> list[np.ndarray]:
        """The first of its outputs; all of them unless a number is given."""
        feeds = {name: np.asarray(arrays[name], dtype) for name, dtype in self._types.items()}
        return [np.asarray(result) for result in self._session.run(self._outputs[:outputs], feeds)]


class Runner:
    """What `make` makes, in float64 if ONNX Runtime can compute it so, with stand-ins if need be; else in float32.

    Which of them, the first run shows: some operators fail only then. Some are wrong in float64: with `verify`, results
    must be those of float32, too.
    """

    def __init__(self, make: Maker, *, verify: bool = False):
        self._make, self._verify = make, verify
        self._chosen: Session | None = None
        self.dtype = ir.DataType.FLOAT

    def __call__(self, arrays: Arrays, outputs: int | None = None) -> list[np.ndarray]:
        if self._chosen is None:
            self._choose(arrays)
        assert self._chosen is not None
        return self._chosen(arrays, outputs)

    def _choose(self, arrays: Arrays) -> None:
        expected = None
        if self._verify:
            with suppress(Exception):  # ONNX Runtime's own exceptions have no common base
                expected = Session(self._make(ir.DataType.FLOAT))(arrays)
        with suppress(Exception):
            model = self._make(ir.DataType.DOUBLE)
            for prepared in (lambda model: model, with_standins):
                with suppress(Exception):
                    session = Session(prepared(model))
                    if expected is None or _alike(session(arrays), expected):
                        self._chosen, self.dtype = session, ir.DataType.DOUBLE
                        return
        session = Session(self._make(ir.DataType.FLOAT))
        session(arrays)
        self._chosen = session


def reason(error: Exception) -> str:
    """What ONNX Runtime says, without the codes and places in its source that it says first."""
    return str(error).strip().splitlines()[0].split(" : ", 2)[-1]


def _alike(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> bool:
    """Whether results in float64 and in float32 mean the same; where one is not finite, who knows."""
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape:
            return False
        finite = np.isfinite(a) & np.isfinite(b)
        a, b = a[finite].astype(np.float64), b[finite].astype(np.float64)
        if a.size and np.max(np.abs(a - b)) > 1e-2 * np.max(np.abs(b)) + 1e-4:
            return False
    return True


class Function:
    """y and its gradients as a function of steps, which are added to xs and to `inputs`, which are floats."""

    def __init__(self, make: Maker, y: str, xs: Sequence[str], inputs: Iterable[str]):
        self._name = y
        self.xs = list(xs)

        def forward(dtype: ir.DataType) -> Model:
            model = make(dtype)
            known = {value.name: value for value in values(model.graph)}
            keep_only(model, [known[name] for name in dict.fromkeys((y, *xs))])
            return _with_steps(model, movable)

        def backward(dtype: ir.DataType) -> Model:
            model = vjp(make(dtype), y, xs)
            model.graph.inputs[-1].name = _COTANGENT
            return _with_steps(model, movable)

        movable = list(dict.fromkeys([*xs, *inputs]))
        self._positions = [list(dict.fromkeys((y, *xs))).index(x) for x in xs]
        self._rest: dict[str, np.ndarray] = {_step(name): np.zeros(()) for name in movable}
        self.movable = movable
        self._forward, self._backward = Runner(forward, verify=True), Runner(backward)

    @property
    def dtypes(self) -> tuple[ir.DataType, ir.DataType]:
        """In which types y and the gradient are computed."""
        return self._forward.dtype, self._backward.dtype

    def at(self, inputs: Arrays) -> None:
        """Choose the point from which steps are made; fails as ONNX Runtime does if it cannot run there."""
        self._rest |= inputs
        y, *_ = results = self._forward(self._rest)
        self.y = y.astype(np.float64)
        found = {x: results[i].astype(np.float64) for x, i in zip(self.xs, self._positions, strict=True)}
        self.point = {name: found[name] if name in found else inputs[name] for name in self.movable}

    def random_step(self, name: str, rng: np.random.Generator) -> np.ndarray:
        """A direction in which to move a value, about as long as the value itself."""
        here = self.point[name]
        size = float(np.sqrt(np.mean(np.square(here.astype(np.float64))))) if here.size else 0.0
        return rng.standard_normal(here.shape) * (size if 0 < size < np.inf else 1.0)

    def value(self, steps: Arrays) -> np.ndarray:
        """y after some steps; not a number where it cannot be computed, or has another shape."""
        with suppress(Exception):  # ONNX Runtime's own exceptions have no common base
            (y,) = self._forward(self._given(steps), outputs=1)
            if y.shape == self.y.shape:
                return y.astype(np.float64)
        return np.full(self.y.shape, np.nan)

    def gradients(self, dy: np.ndarray, steps: Arrays) -> dict[str, np.ndarray]:
        given = {**self._given(steps), _COTANGENT: dy}
        try:
            found = self._backward(given)
        except Error:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"ONNX Runtime cannot run the gradient of `{self._name}`: {reason(error)}",
                hint="where the model itself runs there, this is a mistake in a rule, and we should know",
            ) from error
        return {x: gradient.astype(np.float64) for x, gradient in zip(self.xs, found, strict=True)}

    def _given(self, steps: Arrays) -> dict[str, np.ndarray]:
        return {**self._rest, **{_step(name): step for name, step in steps.items()}}


_COTANGENT = "cotangent of y"


def _step(name: str) -> str:
    return f"{name}/step"


def _with_steps(model: Model, names: Iterable[str]) -> Model:
    """The model with one more input for each value, a step: what read the value reads the sum. In place."""
    graph = model.graph
    known = {value.name: value for value in values(graph)}
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
    return model


def _numpy_type(written: str) -> Any:
    """`tensor(float)` as numpy's type, where it is a float; None for what is fed as it is."""
    return {"tensor(float)": np.float32, "tensor(double)": np.float64}.get(written)
