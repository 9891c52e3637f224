"""Running a model, and its gradient, at points near one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.checker.runtime import onnxruntime_limits
from onward.differentiate import vjp
from onward.errors import UnsupportedError
from onward.model import Model
from onward.model.core import values
from onward.numeric.precision import FLOATS
from onward.numeric.standins import with_standins
from onward.numeric.subject import keep_only
from onward.transform.opset import convert_opset

Arrays = Mapping[str, np.ndarray]
Maker = Callable[[ir.DataType], Model]
"""Makes a model in a given floating-point type."""


class Runner:
    """A model on ONNX Runtime: arrays in by name, arrays out in order. Floats are fed in the type that it takes."""

    def __init__(self, model: Model):
        import onnxruntime

        limits = onnxruntime_limits()
        model = convert_opset(model, limits.opset) if model.opset > limits.opset else model
        proto = model.to_proto()
        proto.ir_version = min(proto.ir_version, limits.ir)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._types = {value.name: _numpy_type(value.type) for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]

    def __call__(self, arrays: Arrays, outputs: int | None = None) -> list[np.ndarray]:
        """The first of its outputs; all of them unless a number is given."""
        feeds = {name: np.asarray(arrays[name], dtype) for name, dtype in self._types.items()}
        results = self._session.run(self._outputs[:outputs], feeds)
        return [np.asarray(result) for result in results]


def runner(make: Maker) -> tuple[Runner, ir.DataType]:
    """What `make` makes, in float64 if ONNX Runtime can compute it so, with stand-ins if need be; else in float32."""
    for dtype, prepared in ((ir.DataType.DOUBLE, None), (ir.DataType.DOUBLE, with_standins)):
        try:
            model = make(dtype)
            return Runner(prepared(model) if prepared else model), dtype
        except UnsupportedError:
            break
        except Exception:  # ONNX Runtime's own exceptions have no common base
            continue
    model = make(ir.DataType.FLOAT)
    try:
        return Runner(model), ir.DataType.FLOAT
    except Exception as error:
        raise UnsupportedError(f"ONNX Runtime cannot run the model: {reason(error)}") from error


def reason(error: Exception) -> str:
    """What ONNX Runtime says, without the codes and places in its source that it says first."""
    return str(error).strip().splitlines()[0].split(" : ", 2)[-1]


class Function:
    """y and its gradients as a function of steps, which are added to xs and to the inputs that are floats."""

    def __init__(self, make: Maker, y: str, xs: Sequence[str]):
        self.xs = list(xs)

        def forward(dtype: ir.DataType) -> Model:
            model = make(dtype)
            known = {value.name: value for value in values(model.graph)}
            keep_only(model, [known[name] for name in dict.fromkeys((y, *xs))])
            return _with_steps(model, movable)

        def backward(dtype: ir.DataType) -> Model:
            model = vjp(make(dtype), y, xs)
            self._cotangent = model.graph.inputs[-1].name or ""
            return _with_steps(model, movable)

        inputs = [value for value in make(ir.DataType.FLOAT).inputs if value.dtype in FLOATS]
        movable = list(dict.fromkeys([*xs, *(value.name or "" for value in inputs)]))
        self._positions = [list(dict.fromkeys((y, *xs))).index(x) for x in xs]
        self._rest: dict[str, np.ndarray] = {_step(name): np.zeros(()) for name in movable}
        self.movable = movable
        self._forward, self.dtype = runner(forward)
        self._backward, self.gradient_dtype = runner(backward)

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
        (y,) = self._forward(self._given(steps), outputs=1)
        return y.astype(np.float64)

    def gradients(self, dy: np.ndarray, steps: Arrays) -> dict[str, np.ndarray]:
        given = {**self._given(steps), self._cotangent: dy}
        found = self._backward(given)
        return {x: gradient.astype(np.float64) for x, gradient in zip(self.xs, found, strict=True)}

    def _given(self, steps: Arrays) -> dict[str, np.ndarray]:
        return {**self._rest, **{_step(name): step for name, step in steps.items()}}


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
