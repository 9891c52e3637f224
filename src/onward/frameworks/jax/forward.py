"""Training models as JAX: pure functions, parameters by name, and an optax optimizer. Inference models as functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from onward.arguments import checked
from onward.constants import HALVES
from onward.engines.engine import check_names
from onward.engines.jax import Jax
from onward.errors import UnsupportedError, list_names
from onward.frameworks.formulas.graph_building import open_initializers
from onward.frameworks.inference import open_parameters, try_outputs
from onward.frameworks.jax.capture import check_optimizer, is_train_state, nnx_of, read_updates, weights_of
from onward.frameworks.jax.closures import named_leaves, path_name, walk
from onward.frameworks.jax.jaxpr.builder import stored_type
from onward.frameworks.jax.optimizer import fill_state, make_optimizer, read_optimizer
from onward.frameworks.jax.probe import try_updates
from onward.frameworks.jax.traced_optimizer import fill_traced
from onward.frameworks.jax.updates import execute_by_jax
from onward.frameworks.run_files import TrainedResults
from onward.lowering.contract import Contract, contract_of
from onward.lowering.step import lower_for_framework
from onward.model import Model, Source, load
from onward.model.state import STEP, states
from onward.recipe.spec import Spec
from onward.run_state.standard_steps import adopt
from onward.run_state.state import RunState
from onward.run_state.training_models import from_training_model, one_step_of, step_names, step_of
from onward.transform.inline import inline
from onward.transform.opset import of_one_opset
from onward.transform.training import keep_only

Arrays = Mapping[str, Any]
Tree = dict[str, Any]

_RUN_ITSELF = 'run the training model itself: `onward.engines.start(model, engine="jax")`'

# Roles of the state of a training model -> keys of the state in JAX.
KEYS = {"parameter": "params", "statistics": "statistics", "rng": "random"}


Step = Callable[[Tree, Arrays], tuple[Tree, dict[str, Any]]]
Loss = Callable[[Arrays, Tree, Arrays], tuple[Any, tuple[dict[str, Any], Tree]]]


class JaxTraining(NamedTuple):
    """Training run in JAX. All functions are pure: use `jax.jit`, `jax.vmap` and `jax.grad` on them.

    For a training model with several steps, `step`, `loss` and `tx` are dictionaries by the name of the step.
    """

    step: Step | dict[str, Step]
    """(state, batch) -> (new state, metrics)"""
    state: Tree
    """`params`, `statistics`, `random` (the key of dropout), `opt_state`, `step`, and `ema` with averages.

    With several steps, all but `params` and `statistics` are by the name of the step.
    """
    apply: Callable[[Tree, Arrays], dict[str, Any]]
    """(state, inputs) -> outputs of the model, in inference mode"""
    loss: Loss | dict[str, Loss]
    """(params, state, batch) -> (loss, (metrics, changes of the state by the forward pass))"""
    tx: optax.GradientTransformation | dict[str, optax.GradientTransformation]
    training: Callable[[Tree], Model]
    """state -> the training model that continues from it"""


class JaxModel(NamedTuple):
    """Inference model in JAX: a pure function, for `jax.jit`, `jax.vmap` and `jax.grad`, and its parameters."""

    apply: Callable[[Arrays, Arrays], dict[str, Any]]
    """(params, inputs) -> outputs of the model by name, in inference mode"""
    params: dict[str, jax.Array]


@checked(types=False)
def to_jax(training: Source, *, step: int | None = None, probe: bool = True) -> Any:
    """Return the run of a training model as functions of JAX, or an inference model as a function.

        step, state = onward.to_jax("training.onnx")[:2]
        state, metrics = step(state, batch)
        apply, params = onward.to_jax("model.onnx")
        outputs = apply(params, {"image": images})

    A training model becomes a `JaxTraining`. JAX computes the gradients. The optimizer is a chain of
    optax if that computes the same, else a transformation of Onward. Several steps become functions
    by name that share one state: `step["generator"](state, batch)`. An inference model becomes a
    `JaxModel`.

    - `training`: a training model, or an inference model
    - `step`: index of the only step to convert; weights of the others stay constant (default: all)
    - `probe`: compare a few updates of both sides, or the outputs of an inference model with those
      of ONNX Runtime (default: True)
    """
    model = load(training)
    if not model.steps and step is None:
        return _model(model, probe)
    model = of_one_opset(model)
    if step is None and len(model.steps) > 1:
        return _several(model, probe)
    index = step_of(model, step)
    single, names = (model, None) if len(model.steps) == 1 else one_step_of(model, index)
    parts = TrainingParts(single)
    state, tx, loss, one_step = parts.objects(probe)

    def training_of(state: Tree) -> Model:
        after = parts.training(state, tx)
        return after if names is None else _with_step(model, index, names, after)

    return JaxTraining(one_step, state, parts.apply(), loss, tx, training_of)


def _several(model: Model, probe: bool) -> JaxTraining:
    """Return all steps by name, with one state."""
    steps = {name: one_step_of(model, index) for index, name in enumerate(step_names(model))}
    weights = {s.name: None for single, _ in steps.values() for s in states(single) if s.role in _WEIGHTS}
    parts = {name: TrainingParts(single, weights) for name, (single, _) in steps.items()}
    objects = {name: single.objects(probe) for name, single in parts.items()}
    state: Tree = {key: {} for key in _SHARED}
    for name, (own, *_) in objects.items():
        for key, value in own.items():
            state.setdefault(key, {}).update(value if key in _SHARED else {name: value})
    txs = {name: tx for name, (_, tx, _, _) in objects.items()}

    def training_of(state: Tree) -> Model:
        result = model
        for index, (name, (_, names)) in enumerate(steps.items()):
            after = parts[name].training(_state_of(state, name), txs[name])
            result = _with_step(result, index, names, after)
        return result

    return JaxTraining(
        {name: _sharing(name, one_step) for name, (*_, one_step) in objects.items()},
        state,
        next(iter(parts.values())).apply(),
        {name: _loss_sharing(name, loss) for name, (_, _, loss, _) in objects.items()},
        txs,
        training_of,
    )


def _with_step(model: Model, index: int, names: Mapping[str, str], after: Model) -> Model:
    """Return a copy with the state of a step that was converted alone."""
    result = model.copy()
    for entry in states(after):
        result.set(names.get(entry.name, entry.name), entry.array, index)
    return result


_WEIGHTS = ("parameter", "statistics")
_SHARED = tuple(KEYS[role] for role in _WEIGHTS)
"""Keys of a state that all steps read and change."""


def _state_of(state: Tree, name: str) -> Tree:
    """Return the state of one of several steps."""
    return {key: old if key in _SHARED else old[name] for key, old in state.items() if key in _SHARED or name in old}


def _sharing(name: str, one_step: Step) -> Step:
    """Return one of several steps as a function of the state of all."""

    def step(state: Tree, batch: Arrays) -> tuple[Tree, dict[str, Any]]:
        new, metrics = one_step(_state_of(state, name), batch)
        return {**state, **{k: x if k in _SHARED else {**state[k], name: x} for k, x in new.items()}}, metrics

    return step


def _loss_sharing(name: str, loss: Loss) -> Loss:
    return lambda params, state, batch: loss(params, _state_of(state, name), batch)


def _model(model: Model, probe: bool) -> JaxModel:
    framework = Jax("cuda" if jax.default_backend() == "gpu" else "cpu")
    opened, params = open_inference(model, framework)
    names = [value.name or "" for value in model.inputs]
    execute = execute_by_jax(opened, framework)

    def apply(params: Arrays, inputs: Arrays) -> dict[str, Any]:
        check_names(inputs, names)
        return execute({**inputs, **params})

    if probe:
        compute = jax.jit(apply)
        try_outputs(model, lambda inputs: jax.tree.map(np.asarray, compute(params, inputs)), "jax")
    return JaxModel(apply, params)


def open_inference(model: Model, framework: Jax) -> tuple[Model, dict[str, jax.Array]]:
    """Return an inference model with its parameters as inputs, and their values."""
    opened, names = open_parameters(model)
    opened = inline(opened)
    params = {name: framework.tensor(opened.array(name)) for name in names}
    open_initializers(opened.graph, names)
    return opened, params


def _check_rounding(run: RunState) -> None:
    """Refuse 16-bit updates that round as PyTorch does, and optax does not."""
    types = {name: value.dtype for name, value in run.model.graph.initializers.items()}
    clip = {"variant": "torch", **(run.clip or {"value": None})}
    clips = "value" not in clip and clip["variant"] == "torch" and {types[name] for name in run.parameters} <= {*HALVES}
    for group in run.groups:
        is_torch = isinstance(group.optimizer, Spec) and group.optimizer.options.get("variant") == "torch"
        if (is_torch or clips) and (narrow := [name for name in group.parameters if types[name] in HALVES]):
            raise UnsupportedError(
                f"{list_names(narrow, 5)} are updated in 16 bits as PyTorch rounds them, which optax does not",
                hint=_RUN_ITSELF,
            )


class TrainingParts:
    """Parts of a training model with one step for JAX."""

    def __init__(self, model: Model, others: Iterable[str] = ()):
        """Take the names of weights that steps of other models change, which are state, too."""
        model = adopt(model)
        index = step_of(model)
        self.model, self.index, self._states = model, index, states(model, index)
        self._stored = {*others, *(state.name for state in self._states if state.role in _WEIGHTS)}
        self.framework = Jax("cuda" if jax.default_backend() == "gpu" else "cpu")
        strange = [s.name for s in self._states if s.role in ("master", "state")]
        if strange:
            raise UnsupportedError(
                f"the training model has state that optax has no place for: {', '.join(strange)}", hint=_RUN_ITSELF
            )
        self.run = from_training_model(model, index, forward=False)
        _check_rounding(self.run)

    def arrays(self, role: str) -> dict[str, jax.Array]:
        """Return the state of a role by name; averages by parameter. No two arrays share memory."""
        slots = [state for state in self._states if state.role == role]
        names = [state.parameter or state.name if role == "ema" else state.name for state in slots]
        return {name: self.framework.tensor(state.array) for name, state in zip(names, slots, strict=True)}

    def state(self) -> tuple[Tree, optax.GradientTransformation]:
        """Return the state of the run, and its optimizer."""
        with self.framework.active():
            params = self.arrays("parameter")
            tx, opt_state = make_optimizer(self.run, params)
            state = {
                "params": params,
                "statistics": self.arrays("statistics"),
                "random": self.arrays("rng"),
                "opt_state": opt_state,
                "step": jnp.asarray(self.run.step, jnp.int32),
            }
            return (state | {"ema": self.arrays("ema")} if "ema" in self.run.recipe else state), tx

    def objects(self, probe: bool) -> tuple[Tree, optax.GradientTransformation, Loss, Step]:
        """Return the state, the optimizer, the loss and the step."""
        run, loss = self.run, self.loss()
        state, tx = self.state()
        if probe:
            try_updates(tx, state["opt_state"], state["params"], run)

        def one_step(state: Tree, batch: Arrays) -> tuple[Tree, dict[str, Any]]:
            with self.framework.active():
                own = {name: state["params"][name] for name in run.parameters}
                (_, (metrics, changed)), gradients = jax.value_and_grad(loss, has_aux=True)(own, state, batch)
                updates, opt_state = tx.update(gradients, state["opt_state"], own)
                params = {**state["params"], **optax.apply_updates(own, updates)}
                count = opt_state.gradient_step if isinstance(opt_state, optax.MultiStepsState) else state["step"] + 1
                new = {**state, **changed, "params": params, "opt_state": opt_state, "step": count}
                if "ema" in new:  # a batch that is only accumulated changes no average
                    decay, updated = float(run.recipe["ema"]), new["step"] > state["step"]
                    new["ema"] = {
                        name: jnp.where(updated, past * decay + params[name] * (1 - decay), past)
                        for name, past in state["ema"].items()
                    }
                return new, metrics

        return state, tx, loss, one_step

    def forward(self) -> tuple[Model, Contract]:
        """Return the forward pass of training, and its contract."""
        lowered = lower_for_framework(self.model, self.index, "gradients")
        open_initializers(lowered.graph, self._stored)
        contract = contract_of(lowered)
        keep_only(lowered, [value for value in lowered.outputs if value.name not in contract.gradients])
        return lowered, contract

    def inference(self) -> Model:
        """Return the model in inference mode, with its parameters and statistics as inputs."""
        inference = inline(self.run.model)
        open_initializers(inference.graph, self._stored)
        return inference

    @property
    def kinds(self) -> dict[str, str]:
        """Key of the state in JAX, by name."""
        return {s.name: KEYS[s.role] for s in self._states if s.role in KEYS}

    def loss(self) -> Loss:
        lowered, contract = self.forward()
        loss_name, keys = contract.loss, self.kinds
        assert loss_name is not None
        execute = execute_by_jax(lowered, self.framework)

        def loss(params: Arrays, state: Tree, batch: Arrays) -> tuple[Any, tuple[dict[str, Any], Tree]]:
            if not batch.keys() >= set(contract.batch):
                check_names(batch, contract.batch)
            stored = {**state["params"], **state["statistics"], **state["random"], **params, STEP: state["step"]}
            results = execute({**batch, **stored})
            changed: Tree = {key: dict(state[key]) for key in ("statistics", "random")}
            for name, output in contract.update.items():
                changed[keys[name]][name] = results[output]
            value = results[loss_name]
            metrics = {name: results[name] for name in contract.metrics if name != loss_name}
            return value, ({"loss": value, **metrics}, changed)

        return loss

    def apply(self) -> Callable[[Tree, Arrays], dict[str, Any]]:
        execute = execute_by_jax(self.inference(), self.framework)
        return lambda state, inputs: execute({**inputs, **state["statistics"], **state["params"]})

    def training(self, state: Tree, tx: optax.GradientTransformation) -> Model:
        """Return the training model with this state."""
        model, own = self.model.copy(), {name: state["params"][name] for name in self.run.parameters}
        optimization = read_optimizer(tx, state["opt_state"], own)
        averages = {f"ema/{name}": array for name, array in state.get("ema", {}).items()}
        if averages:
            before = model.array("ema/n_averaged", self.index)
            averages["ema/n_averaged"] = before + int(state["step"]) - self.run.step
        numbers = {**own, **state["statistics"], **state["random"], **averages, **optimization.state}
        for name, array in {**numbers, STEP: state["step"]}.items():
            model.set(name, np.asarray(array), self.index)
        return model


def load_into(target: Any, results: TrainedResults, *, optimizer: Any, statistics: Any) -> Any:
    """Return trees with the values of a training model; change a module of NNX in place."""
    if nnx := nnx_of(target):
        return _into_module(nnx, target, results, optimizer, statistics)
    if is_train_state(target):
        tx = target.tx if optimizer is None else optimizer
        params, opt_state, *more = _trees(target.params, results, tx, statistics)
        state = target.replace(params=params, opt_state=opt_state, step=results.run.step)
        return (state, *more) if more else state
    trees = _trees(target, results, optimizer, statistics)
    return trees[0] if len(trees) == 1 else tuple(trees)


def _into_module(nnx: Any, target: Any, results: TrainedResults, optimizer: Any, statistics: Any) -> Any:
    if statistics is not None:
        raise UnsupportedError("a module of NNX has its statistics inside", hint="leave out `statistics`")
    if optimizer is not None and not isinstance(optimizer, nnx.Optimizer):
        raise UnsupportedError(
            f"{type(optimizer).__name__} is not an `nnx.Optimizer`",
            hint="give `nnx.Optimizer(module, tx, wrt=nnx.Param)`",
        )
    wrt = optimizer.wrt if optimizer is not None else nnx.Param
    _, params, rest = nnx.split(target, wrt, ...)
    tx = None if optimizer is None else optimizer.tx
    new = _trees(nnx.as_pure(params), results, tx, nnx.as_pure(rest))
    nnx.update(target, new[0])
    nnx.update(target, new[-1])
    if optimizer is not None:
        nnx.update(optimizer.opt_state, nnx.state(new[1]))
        optimizer.step[...] = jnp.asarray(results.run.step, optimizer.step[...].dtype)
    return target


def _trees(params: Any, results: TrainedResults, tx: Any, statistics: Any) -> list[Any]:
    """Return the parameters, the state of the optimizer and the statistics that are given, with new values."""
    trees = [params] if statistics is None else [params, statistics]
    bare = statistics is not None and jax.tree_util.all_leaves([statistics])
    named = [named_leaves(params), {"statistics": statistics} if bare else named_leaves(statistics)]
    arrays = results.arrays(
        {
            name: stored_type(jnp.asarray(leaf)).shape
            for leaves in named
            for name, leaf in leaves.items()
            if hasattr(leaf, "dtype")
        }
    )
    filled = [_filled(tree, arrays, "statistics" if bare and i else "") for i, tree in enumerate(trees)]
    if tx is None:
        return filled
    return [filled[0], opt_state_of(tx, weights_of(filled[0]), results), *filled[1:]]


def _filled(tree: Any, arrays: dict[str, np.ndarray], name: str = "") -> Any:
    def leaf(path: Any, old: Any) -> Any:
        array = arrays.get(name or path_name(path))
        if array is None or not hasattr(old, "dtype"):
            return old
        if jax.dtypes.issubdtype(old.dtype, jax.dtypes.prng_key):
            key: Any = jax.random
            return key.wrap_key_data(jnp.asarray(array), impl=key.key_impl(old))
        return jnp.asarray(array, old.dtype)

    return jax.tree_util.tree_map_with_path(leaf, tree)


def opt_state_of(tx: Any, weights: Any, results: TrainedResults) -> Any:
    """Return the state of an optax optimizer that continues the run."""
    run = results.run
    check_optimizer(tx, None, weights)
    begin, idle = tx.init(weights), {name for name in named_leaves(weights) if name not in run.parameters}
    if any(group.is_function or group.operators for group in run.groups):
        state = fill_traced(tx, begin, weights, idle, run.state)
    elif "accumulate" in run.recipe:
        raise UnsupportedError(
            "the training model accumulates gradients, which are not loaded", hint="load weights only: no `optimizer`"
        )
    else:
        state = walk(tx.update, begin, weights, lambda t: fill_state(t, run.state, run.step))
    optimization, _ = read_updates(tx, state, weights, idle)
    step = optimization.step or run.step  # some optimizers count no updates
    results.confirm(dataclasses.replace(run, **{**optimization._asdict(), "step": step}))
    return state
