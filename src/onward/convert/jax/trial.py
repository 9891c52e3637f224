"""An optimizer of optax and the one of a recipe that it was read as, or made from, side by side."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx_ir as ir
import optax

from onward import engines
from onward.build import Builder
from onward.convert.jax.closures import Tree, named_leaves, path_name
from onward.convert.snapshot import Snapshot, assemble
from onward.errors import MismatchError
from onward.model import Model
from onward.model.state import states
from onward.recipe.optimizers import FunctionOptimizer
from onward.standard import COMMON_OPSET, IR_VERSION

TOLERANCE = 1e-5
"""Of updates, as parts of the largest: optax computes rates and some decays in float32."""


def try_updates(tx: Any, opt_state: Any, params: Tree, run: Snapshot) -> None:
    """Let both make a few updates with the same random gradients, in float64 if they can, and compare."""
    generator = np.random.default_rng(0)
    typed = any(isinstance(group.optimizer, FunctionOptimizer) for group in run.groups)
    accumulated = int(run.recipe.get("accumulate", 1))
    update = jax.jit(tx.update)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        theirs, state = (params, opt_state) if typed else (_double(params), _double_state(opt_state))
        start = {name: np.asarray(leaf) for name, leaf in named_leaves(theirs).items()}
        inputs = {name: f"gradient{i}" for i, name in enumerate(run.parameters)}
        with engines.start(_trainer(run, start, inputs), threads=1) as engine:
            for _ in range(3 * accumulated):
                gradients = {name: np.zeros_like(array) for name, array in start.items()}  # of what is not trained
                drawn = {name: random_gradient(generator, start[name].shape) for name in run.parameters}
                gradients |= {name: array.astype(start[name].dtype) for name, array in drawn.items()}
                engine.step({inputs[name]: gradients[name] for name in run.parameters})
                given = jax.tree_util.tree_map_with_path(lambda path, _: gradients[path_name(path)], theirs)  # noqa: B023
                changes, state = update(given, state, theirs)
                new = optax.apply_updates(theirs, changes)
                _compare(named_leaves(theirs), named_leaves(new), engine.state(), run)
                theirs = _follow(new, engine.state(), run)


def _compare(old: dict[str, Any], new: dict[str, Any], ours: dict[str, np.ndarray], run: Snapshot) -> None:
    for name in run.parameters:
        expected, found = np.asarray(new[name] - old[name]), ours[name] - np.asarray(old[name])
        size = float(np.abs(expected).max(initial=0))
        difference = float(np.abs(found - expected).max(initial=0))
        rounding = 4 * float(jnp.finfo(expected.dtype).eps) * float(np.abs(old[name]).max(initial=0))
        if not difference <= TOLERANCE * size + rounding + 1e-12:
            spec = next(group.optimizer for group in run.groups if name in group.parameters)
            raise MismatchError(
                f"an update of `{name}` by optax is off by {difference:.3g} from that of `{spec}`, "
                f"where it is {size:.3g} large",
                hint="the optimizer was not understood: please report its transformations",
            )


def _follow(theirs: Tree, ours: dict[str, np.ndarray], run: Snapshot) -> Tree:
    """Parameters with the bits of our side, so that differences do not add up."""
    own = set(run.parameters)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(ours[path_name(path)]) if path_name(path) in own else leaf, theirs
    )


def random_gradient(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Of very different sizes, so that it matters where an epsilon is."""
    return np.asarray(generator.normal(size=shape) * 10.0 ** generator.uniform(-6, 0, shape))


def _double(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _double_state(state: Any) -> Any:
    if isinstance(state, optax.MultiStepsState):  # whose accumulators have a type of their own
        return state._replace(inner_opt_state=_double(state.inner_opt_state))
    return _double(state)


def _trainer(run: Snapshot, start: dict[str, np.ndarray], inputs: dict[str, str]) -> Model:
    """A training model of the same parameters and optimizers whose gradients are what it is fed."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": COMMON_OPSET}, name="trial")
    op = Builder(graph, opset=COMMON_OPSET)
    terms = []
    for name in run.parameters:
        parameter = ir.Value(name=name, const_value=ir.Tensor(start[name], name=name))
        dtype = ir.DataType.from_numpy(start[name].dtype)
        parameter.type, parameter.shape = ir.TensorType(dtype), ir.Shape(start[name].shape)
        graph.register_initializer(parameter)
        gradient = ir.Value(name=inputs[name], type=parameter.type, shape=parameter.shape)
        graph.inputs.append(gradient)
        terms.append(op.Cast(op.ReduceSum(op(parameter) * op(gradient), keepdims=0), to=ir.DataType.DOUBLE))
    loss = op.Sum(*terms).named("loss")
    loss.value.type, loss.value.shape = ir.TensorType(ir.DataType.DOUBLE), ir.Shape(())
    graph.outputs.append(loss.value)
    model = Model(ir.Model(graph, ir_version=IR_VERSION))
    recipe = {key: run.recipe[key] for key in ("accumulate", "master_weights") if key in run.recipe}
    made = assemble(dataclasses.replace(run, model=model, loss="value:loss", state={}, recipe=recipe))
    for state in states(made):
        if state.role != "parameter" and state.name in run.state:
            made.set(state.name, np.asarray(run.state[state.name]).astype(state.array.dtype))
    return made
