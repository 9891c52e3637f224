"""Comparisons of JAX with training models: updates of an optimizer, steps of a run, predictions."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx_ir as ir
import optax

from onward import engines
from onward.agreement.steps import StepResult, Trial, compare_steps, compare_updates
from onward.agreement.tolerance import Arrays, Sides
from onward.build import Builder
from onward.errors import UnsupportedError, list_names
from onward.frameworks.formulas.graph_building import initializer, model_of
from onward.frameworks.jax.closures import Tree, named_leaves, path_name
from onward.frameworks.jax.jaxpr.builder import data_of
from onward.model import Model
from onward.model.state import states
from onward.recipe.optimizers import FunctionOptimizer
from onward.run_state.state import RunState
from onward.run_state.training_models import to_training_model
from onward.runtime.sessions import evaluate
from onward.standard import COMMON_OPSET


def try_updates(tx: Any, opt_state: Any, params: Tree, run: RunState) -> None:
    """Compare updates of both sides with the same random gradients, in float64 if possible."""
    typed = any(isinstance(group.optimizer, FunctionOptimizer) for group in run.groups)
    device = jax.devices("cpu")[0]
    with jax.enable_x64(True), jax.default_device(device):
        # On their device, as the results are: `jit` compiles again for arrays that lie on no certain one.
        sides = (params, opt_state) if typed else (_double(params), _double(opt_state))
        theirs, state = jax.device_put(sides, device)
        start = _arrays(theirs)
        inputs = {name: f"gradient{i}" for i, name in enumerate(run.parameters)}

        @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # it runs a few times
        def updated(gradients: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
            changes, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, changes), state

        with engines.start(_trainer(run, start, inputs), threads=1) as engine:

            def update(before: Arrays, trial: Trial) -> Arrays:
                engine.load_state({name: before[name] for name in run.parameters})
                engine.step({inputs[name]: gradient for name, gradient in trial.gradients.items()})
                return engine.state()

            def step(trial: Trial) -> Arrays:
                nonlocal theirs, state
                gradients = {**{name: np.zeros_like(array) for name, array in start.items()}, **trial.gradients}
                as_tree = jax.tree_util.tree_map_with_path(lambda path, _: gradients[path_name(path)], theirs)
                theirs, state = updated(as_tree, state, theirs)
                return {name: array for name, array in _arrays(theirs).items() if name in inputs}

            compare_updates(
                update,
                step,
                start,
                run.parameters,
                optimizer="optax",
                reference=f"that of {list_names([group.optimizer_name for group in run.groups], 5)}",
                hint="please report the transformations of the optimizer",
                repeats=int(run.recipe.get("accumulate", 1)),
            )


def _arrays(tree: Tree) -> dict[str, np.ndarray]:
    return {name: data_of(leaf) for name, leaf in named_leaves(tree).items()}


def _double(tree: Tree) -> Tree:
    if isinstance(tree, optax.MultiStepsState):  # whose accumulators keep their type
        return tree._replace(inner_opt_state=_double(tree.inner_opt_state))
    return jax.tree.map(lambda x: np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _trainer(run: RunState, start: dict[str, np.ndarray], inputs: dict[str, str]) -> Model:
    """Return a training model with these parameters and optimizers, and gradients as inputs."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": COMMON_OPSET}, name="trial")
    op = Builder(graph, opset=COMMON_OPSET)
    terms = []
    for name in run.parameters:
        parameter = initializer(name, start[name])
        graph.register_initializer(parameter)
        gradient = ir.Value(name=inputs[name], type=parameter.type, shape=parameter.shape)
        graph.inputs.append(gradient)
        terms.append(op.Cast(op.ReduceSum(op(parameter) * op(gradient), keepdims=0), to=ir.DataType.DOUBLE))
    loss = op.Sum(*terms).named("loss")
    loss.value.type, loss.value.shape = ir.TensorType(ir.DataType.DOUBLE), ir.Shape(())
    graph.outputs.append(loss.value)
    recipe = {key: run.recipe[key] for key in ("accumulate", "master_weights") if key in run.recipe}
    fed = dataclasses.replace(run, model=model_of(graph), loss="value:loss", state={}, updates={}, recipe=recipe)
    training = to_training_model(fed)
    for state in states(training):
        if state.role != "parameter" and state.name in run.state:
            training.set(state.name, np.asarray(run.state[state.name]).astype(state.array.dtype))
    return training


def probe_steps(training: Model, captured: Any, tx: optax.GradientTransformation, opt_state: Any) -> None:
    """Compare three steps of both sides; `captured` has the arguments of `from_jax`."""
    types = {value.name: value.dtype.numpy() for value in training.inputs if value.dtype}
    batch = {name: data_of(jnp.asarray(x)).astype(types[name]) for name, x in named_leaves(captured.batch).items()}
    sides = [captured.weights, captured.statistics, opt_state]

    def advance(weights: Tree, statistics: Tree, opt_state: Any) -> Any:
        def loss(weights: Tree) -> Any:
            result = captured(weights, statistics, captured.batch)
            return result if statistics is not None else (result, None)

        (value, following), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        updates, opt_state = tx.update(gradients, opt_state, weights)
        return value, gradients, optax.apply_updates(weights, updates), following, opt_state

    compiled = jax.jit(advance)

    def step(_: Any) -> StepResult:
        value, gradients, *sides[:] = compiled(*sides)
        weights = {name: leaf for tree in sides[:2] for name, leaf in _arrays(tree).items()}
        return StepResult(float(value), _arrays(gradients), weights)

    compare_steps(training, [batch] * 3, step, framework="JAX", engine="jax")


def compare_outputs(model: Model, captured: Any) -> None:
    """Compare the predictions of the model with those of the function."""
    if captured.statistics is not None:
        raise UnsupportedError(
            "predictions with statistics do not say how these change",
            hint="give the loss itself as the function: (params, statistics, batch) -> (scalar, new statistics)",
        )
    fed = zip(model.inputs, jax.tree.leaves(captured.batch), strict=True)
    feeds = {value.name or "": np.asarray(leaf, value.dtype.numpy()) for value, leaf in fed if value.dtype}
    expected = jax.tree.leaves(captured.function(captured.params, captured.batch))
    names = [value.name or "" for value in model.outputs]
    compare = Sides("what JAX computes", "the conversion is not exact: please report the function")
    compare(dict(zip(names, evaluate(model.copy(), feeds), strict=True)), dict(zip(names, expected, strict=True)))
