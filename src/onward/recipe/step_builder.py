"""A training step under construction: its graphs, its state and the bindings between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr, Names, function
from onward.constants import add_initializer
from onward.errors import RecipeError
from onward.model import Model, Step
from onward.model.state import with_tags
from onward.recipe import random
from onward.standard import METADATA_IR


class StepBuilder:
    """Builder of a step of `model`, in place. `op` builds the algorithm, `init` its initialization."""

    def __init__(self, model: Model, seed: int, name: str = "training"):
        self.model = model
        self.step = Step(_empty_graph(name), _empty_graph("initialization"))
        names = model.names()
        for step in model.steps:  # no step sees the metrics of another, and all may take the same data
            metrics = (v.name for v in step.algorithm.outputs if v.name and v.name not in step.update.values())
            names.release([*metrics, *(v.name for v in step.algorithm.inputs if v.name)])
        self.op = Builder(self.step.algorithm, opset=model.opset, names=names, functions=model.functions)
        self.init = Builder(self.step.initialization, opset=model.opset, names=Names(), functions=model.functions)  # type: ignore[arg-type]
        self.values: dict[str, ir.Value] = dict(model.graph.initializers)
        self._own: set[str] = set()
        """Names of the tensors that training itself adds."""
        self._initial: dict[ir.Value, Expr] = {}
        self._seed = ir.Tensor(random.new_key(seed))
        self._seed_key: Expr | None = None
        self._key: Expr | None = None

    def input(self, name: str, dtype: ir.DataType, shape: ir.Shape | None) -> Expr:
        """Add an input that exists in training only."""
        value = ir.Value(name=self.op.names.fresh(name), type=ir.TensorType(dtype), shape=shape)
        self.step.algorithm.inputs.append(value)
        return self.op(value)

    def hyper(self, name: str, number: float | list[float], group: str | None = None) -> Expr:
        """Return a number that can be edited in the file; one name gives one tensor."""
        if name not in self._own:
            tensor = ir.Tensor(np.asarray(number, np.float64))
            self._register(name, with_tags(tensor, role="hyper", group=group))
        return self.op(self.values[name])

    def state(
        self,
        name: str,
        tensor: ir.TensorProtocol,
        initial: Callable[[Builder], Expr],
        *,
        role: str,
        param: str | None = None,
        slot: str | None = None,
        group: str | None = None,
    ) -> Expr:
        """Add a state variable with the expression for its initial value."""
        value = self._register(name, with_tags(tensor, role=role, param=param, slot=slot, group=group))
        self.reset(value, initial)
        return self.op(value)

    def initial_value(self, value: ir.Value) -> Expr:
        """Return the initial value of a parameter, for state that starts as a copy of it."""
        return self._initial[value]

    def reset(self, value: ir.Value, initial: Callable[[Builder], Expr]) -> None:
        """Bind a state variable to its initial value."""
        assert value.name is not None and self.step.initialization is not None
        expr = initial(self.init)
        if expr.value.is_graph_output() or expr.value.producer() is None:
            expr = self.init.Identity(expr)
        output = expr.named(f"{value.name}/initial").like(value).value
        self.step.initialization.outputs.append(output)
        self.step.reset[value.name] = output.name or ""
        self._initial[value] = expr

    def update(self, name: str, new: Expr) -> None:
        """Bind a state variable to its new value."""
        value = self.values[name]
        if new.value.graph is not self.step.algorithm or new.value.is_graph_output() or new.value.producer() is None:
            new = self.op.Identity(new)
        assert value.name is not None
        self.step.algorithm.outputs.append(new.named(f"{value.name}/new").like(value).value)
        self.step.update[value.name] = new.name

    def amend(self, name: str, change: Callable[[Expr], Expr]) -> None:
        """Replace the new value of a state variable by `change` of it."""
        outputs = self.step.algorithm.outputs
        old = next(value for value in outputs if value.name == self.step.update[name])
        outputs.remove(old)
        self.op.names.release([old.name or ""])
        old.name = self.op.names.fresh(f"{name}/updated")
        self.update(name, change(self.op(old)))

    def metric(self, name: str, expr: Expr) -> Expr:
        """Add a scalar output that is reported and not bound."""
        if expr.value.producer() is None or expr.value.graph is not self.step.algorithm:
            expr = self.op.Identity(expr)
        expr.value.shape = ir.Shape([])
        self.step.algorithm.outputs.append(expr.named(name).value)
        return expr

    def random_key(self, site: str) -> Expr:
        """Return a key for random numbers at `site`, from a generator that is state."""
        if self._key is None:
            self._key = self.state("rng", self._seed, lambda op: op.Identity(self.seed_key()), role="rng")
            self.update("rng", random.fold_in(self.op, self._key, 0))
        return random.site_key(self.op, self._key, site)

    def seed_key(self) -> Expr:
        """Return the key of the seed, an initializer of the initialization that can be replaced."""
        if self._seed_key is None:
            self._seed_key = self.init(register(self.init, "seed", with_tags(self._seed, role="rng")))
        return self._seed_key

    def fact(self, key: str, value: Any) -> None:
        self.step.metadata[f"train.{key}"] = json.dumps(value)

    def finish(self) -> None:
        """Add the step to the model, with its operator sets and an IR version that has metadata."""
        for built in (self.op, self.init):
            for domain, version in built.imports.items():
                self.model.ir.opset_imports.setdefault(domain, version)
        self.model.ir.ir_version = max(self.model.ir.ir_version or 0, METADATA_IR)
        self.model.steps.append(self.step)

    def _register(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        self._own.add(name)
        if name in self.step.reset:
            raise RecipeError(
                f"the model trains a tensor `{name}`, a name that training uses itself",
                hint=f"rename it first: `onward rename MODEL {name}={name}_of_model`",
            )
        value = self.values[name] = register(self.op, name, tensor)
        tensor.name = value.name
        return value


def register(op: Builder, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Add a tensor as an initializer named `name`, or a fresh name like it."""
    return add_initializer(op.graph, op.names.fresh(name), tensor)


@function("average")
def moving_average(op: Builder, old: Expr, new: Expr, decay: Expr) -> Expr:
    """decay * old + (1 - decay) * new"""
    return old * op.CastLike(decay, old) + new * op.CastLike(1.0 - decay, old)


def full_tensor(number: float, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Tensor:
    """Return a tensor of one repeated number; it takes no memory until it is written."""
    return ir.Tensor(np.broadcast_to(np.asarray(number).astype(dtype.numpy()), shape), dtype=dtype)


def fill(op: Builder, number: float, dtype: ir.DataType, shape: tuple[int, ...]) -> Expr:
    """Return an expression for a tensor of one repeated number."""
    value = ir.Tensor(np.asarray([number]).astype(dtype.numpy()), dtype=dtype)
    return op.ConstantOfShape(np.asarray(shape, np.int64), value=value)


def _empty_graph(name: str) -> ir.Graph:
    return ir.Graph([], [], nodes=[], name=name)


# ---- graphs of other models: losses and teachers ---------------------------------------------------------------------


def embed(builder: StepBuilder, model: Model, sources: Mapping[ir.Value, ir.Value]) -> None:
    """Move a model into the algorithm, with its inputs replaced by `sources`; consumes the model."""
    for value, source in sources.items():
        value.replace_all_uses_with(source)
    nodes, constants = take_apart(model.graph)
    for constant in constants:
        constant.name = builder.op.names.fresh(constant.name or "constant")
        builder.step.algorithm.register_initializer(constant)
    for node in nodes:
        for output in node.outputs:
            output.name = builder.op.names.fresh(output.name) if output.name else output.name
    builder.step.algorithm.extend(nodes)
    builder.model.functions.update(model.functions)
    for domain, version in model.ir.opset_imports.items():
        builder.model.ir.opset_imports.setdefault(domain, version)


def take_apart(graph: ir.Graph) -> tuple[list[ir.Node], list[ir.Value]]:
    """Remove and return the nodes and constants of a graph, to put them into another one."""
    nodes, constants = list(graph), list(graph.initializers.values())
    graph.inputs.clear()
    graph.outputs.clear()
    graph.initializers.clear()
    graph.remove(nodes)
    return nodes, constants


@function("y")
def stop_gradient(op: Any, x: Expr) -> Any:
    """The same tensor, through which no gradient flows."""
    return op.Identity(x)


@function("y")
def in_training(op: Any, inference: Expr, training: Expr) -> Any:
    """The first tensor in inference, the second one in training."""
    return op.Identity(inference)
