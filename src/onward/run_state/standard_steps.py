"""Steps of other tools in standard operators, read as runs and written as `prepare` writes them.

Such a file records no facts. It must compute one loss with a name, one Gradient of it, optimizers
of the standard and counters, and nothing else. Converters then find state under known names.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import onnx
import onnx_ir as ir

from onward.model import TRAINING_DOMAIN, Model
from onward.model.core import string, strings
from onward.recipe.optimizers import FunctionOptimizer
from onward.recipe.spec import Spec
from onward.run_state.reading import read_training
from onward.run_state.state import ParameterGroup, RunState
from onward.run_state.training_models import optimizer_of, to_training_model
from onward.transform.merge import rename
from onward.transform.training import without_steps

_Value = TypeVar("_Value")
_SLOTS = {"Adagrad": "sum", "Momentum": "momentum_buffer"}
"""Slot of a parameter. The standard's Adam is missing: it adds epsilon where no framework does."""


def adopt(model: Model) -> Model:
    """Return a step of other tools as `prepare` would write it, or the model itself."""
    if len(model.steps) != 1 or model.steps[0].fact("train.optimizer") is not None:
        return model
    try:
        step = _StandardStep(model)
    except _UnknownStep:
        return model
    rewritten = to_training_model(step.run)
    if _settings(rewritten) != _settings(model):
        return model
    (label,) = rewritten.steps[0].algorithm.inputs
    return rewritten if label.name == step.label else rename(rewritten, {label.name or "": step.label})


class _UnknownStep(Exception):
    """Raised if the step does something else or more."""


def _require(condition: object) -> None:
    if not condition:
        raise _UnknownStep


class _StandardStep:
    """Reader of an algorithm, which explains each node."""

    def __init__(self, model: Model):
        self._model, self._step = model, model.steps[0]
        self._explained: set[ir.Node] = set()
        self._new: dict[str, str] = {}  # state -> its new value
        self._state: dict[str, np.ndarray] = {}
        self._counts: set[int] = set()
        algorithm = self._step.algorithm
        self._values = {value.name: value for node in algorithm for value in node.outputs}
        _require(len(algorithm.inputs) == 1)
        self.label = algorithm.inputs[0].name or ""
        self._gradients, loss = self._read_gradient()
        self._loss = self._read_loss(loss)
        for node in _optimizers(model):
            self._read_optimizer(node)
        _require(self._new == self._step.update and len(self._counts) < 2)
        _require(self._explained == {node for node in algorithm if node.op_type != "Constant"})
        _require({value.name for value in algorithm.outputs} <= {loss.name, *self._step.update.values()})

    @property
    def run(self) -> RunState:
        read_groups = read_training(self._model, 0).groups
        groups = [ParameterGroup(self._optimizer(group), group.parameters) for group in read_groups]
        return RunState(without_steps(self._model), [self._loss], groups, self._state, max(self._counts, default=0))

    def _optimizer(self, group: ParameterGroup) -> Spec | FunctionOptimizer:
        spec = optimizer_of(self._model, 0, group)
        if isinstance(spec, Spec) and group.settings.get("mode") == "nesterov":
            return Spec("nesterov", spec.options)
        if isinstance(spec, Spec) and spec.name == "adagrad" and not any(self._counts):
            initial_values = {float(x) for name in group.parameters for x in np.unique(self._state[f"{name}/sum"])}
            if len(initial_values) == 1:  # the initial value, which no update changed
                return Spec(spec.name, {**spec.options, "initial_accumulator_value": initial_values.pop()})
        return spec

    def _read_gradient(self) -> tuple[dict[str, ir.Value], ir.Value]:
        """Return the gradient of each parameter, and the differentiated value."""
        gradients = self._step.gradients()
        _require(len(gradients) == 1)
        (node,) = gradients
        xs = strings(node, "xs")
        _require([value.name for value in node.inputs if value is not None] == [*xs, *strings(node, "zs")])
        loss = self._values.get(string(node, "y"))
        self._explained.add(node)
        return dict(zip(xs, node.outputs, strict=False)), _present(loss)

    def _read_loss(self, loss: ir.Value) -> dict[str, str]:
        """Return the output of the loss -> its name."""
        node = self._producer(loss)
        if node.op_type == "SoftmaxCrossEntropyLoss":
            _require(len(node.inputs) == 2 and len(node.outputs) == 1 and {*node.attributes} <= {"reduction"})
            _require((string(node, "reduction") or "mean") == "mean")
            output, label = node.inputs
            name = "cross_entropy"
        else:
            _require(node.op_type == "ReduceMean" and len(node.inputs) == 1)
            _require({name: attribute.value for name, attribute in node.attributes.items()} == {"keepdims": 0})
            squares = self._producer(node.inputs[0])
            _require(squares.op_type == "Mul" and squares.inputs[0] is squares.inputs[1])
            difference = self._producer(squares.inputs[0])
            _require(difference.op_type == "Sub")
            output, label = sorted(difference.inputs, key=lambda value: value is self._step.algorithm.inputs[0])
            _require(_present(output).shape is not None and _present(output).shape == _present(label).shape)
            name = "mse"
        _require(output in self._model.outputs and label is self._step.algorithm.inputs[0])
        return {_present(output).name or "": name}

    def _producer(self, value: ir.Value | None) -> ir.Node:
        node = _present(_present(value).producer())
        _require(node.graph is self._step.algorithm)
        self._explained.add(node)
        return node

    def _read_optimizer(self, node: ir.Node) -> None:
        parameters, values = _parameters(node), node.inputs[2:]
        count = len(parameters)
        _require(0 < len(values) == 3 * count and len(node.outputs) == 2 * count)
        rate, types = _present(node.inputs[0]), {_present(value).dtype for value in (node.inputs[0], *values[:count])}
        _require(np.isfinite(_number(rate)) and rate.name not in self._step.update and len(types) == 1)
        self._read_count(node)
        for i, parameter in enumerate(parameters):
            _require(values[count + i] is self._gradients.get(parameter))
            self._renew(parameter, node.outputs[i])
            slot = _present(values[2 * count + i])
            self._state[f"{parameter}/{_SLOTS[node.op_type]}"] = _constant(slot)
            self._renew(slot.name or "", node.outputs[count + i])
        self._explained.add(node)

    def _renew(self, name: str, new: ir.Value) -> None:
        _require(name not in self._new)
        self._new[name] = new.name or ""

    def _read_count(self, node: ir.Node) -> None:
        """Read the counter of updates, or a number without effect that need not count."""
        count = _present(node.inputs[1])
        begun = int(_number(count))
        if count.name not in self._step.update:
            settings = _attributes(node)
            _require(settings.get("decay_factor") == 0 or settings.get("beta") == 1)
            return
        added = self._producer(self._values.get(self._step.update[count.name]))
        others = [value for value in added.inputs if value is not count]
        _require(added.op_type == "Add" and len(others) == 1 and _number(others[0]) == 1 and begun >= 0)
        self._counts.add(begun)
        self._new[count.name] = self._step.update[count.name]


def _present(value: _Value | None) -> _Value:
    if value is None:
        raise _UnknownStep
    return value


def _constant(value: ir.Value | None) -> np.ndarray:
    """Return the value in the file."""
    return _present(ir.convenience.get_const_tensor(_present(value))).numpy()


def _number(value: ir.Value | None) -> float:
    array = _constant(value)
    _require(array.size == 1)
    return float(array.item())


def _optimizers(model: Model) -> list[ir.Node]:
    return [n for n in model.steps[0].algorithm if n.domain == TRAINING_DOMAIN and n.op_type in _SLOTS]


def _parameters(optimizer: ir.Node) -> list[str]:
    values = optimizer.inputs[2:]
    return [_present(value).name or "" for value in values[: len(values) // 3]]


def _settings(model: Model) -> dict[str, Any]:
    """Return the optimizer of each parameter, with numbers in float32."""
    return {name: _attributes(node) for node in _optimizers(model) for name in _parameters(node)}


def _attributes(optimizer: ir.Node) -> dict[str, Any]:
    """Return the attributes of an optimizer with defaults."""
    schema = onnx.defs.get_schema(optimizer.op_type, 1, TRAINING_DOMAIN)
    attributes = {name: onnx.helper.get_attribute_value(a.default_value) for name, a in schema.attributes.items()}
    attributes |= {name: attribute.value for name, attribute in optimizer.attributes.items()}
    numbers = {name: float(np.float32(value)) for name, value in attributes.items() if isinstance(value, float)}
    return {"": optimizer.op_type} | {name: str(value) for name, value in attributes.items()} | numbers
