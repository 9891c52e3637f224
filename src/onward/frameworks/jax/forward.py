"""A training model as JAX: pure functions, parameters by name, and an optimizer of optax with its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from onward.arguments import checked
from onward.constants import HALVES
from onward.engines.framework_engine import interpreter
from onward.engines.jax import Jax
from onward.errors import UnsupportedError, list_names
from onward.frameworks.formulas.graph_building import open_initializers
from onward.frameworks.jax.optimizer import make_optimizer, read_optimizer
from onward.frameworks.jax.probe import try_updates
from onward.lowering.contract import Contract, contract_of
from onward.lowering.step import lower_for_framework
from onward.model import Model, Source, load
from onward.model.state import STEP, carried_state, states
from onward.recipe.spec import Spec
from onward.run_state.standard_steps import adopt
from onward.run_state.state import RunState
from onward.run_state.training_models import from_training_model, step_of
from onward.transform.inline import inline
from onward.transform.opset import of_one_opset
from onward.transform.training import keep_only

Arrays = Mapping[str, Any]
Tree = dict[str, Any]

PARTS = {"parameter": "params", "statistics": "statistics", "rng": "random"}
"""Roles of a training model's state, and where they are in that of a run."""


class JaxTraining(NamedTuple):
    """A training run of JAX. All functions are pure: they can be compiled, mapped and differentiated."""

    step: Callable[[Tree, Arrays], tuple[Tree, dict[str, Any]]]
    """(state, batch) -> (new state, metrics)"""
    state: Tree
    """`params`, `statistics`, `random` (the key of dropout), `opt_state`, `step`, and `ema` if there is one."""
    apply: Callable[[Tree, Arrays], dict[str, Any]]
    """(state, inputs) -> outputs of the model, as inference computes them"""
    loss: Callable[[Arrays, Tree, Arrays], tuple[Any, tuple[dict[str, Any], Tree]]]
    """(params, state, batch) -> (loss, (metrics, what the forward pass changes of the state))"""
    tx: optax.GradientTransformation
    training: Callable[[Tree], Model]
    """state -> the training model that goes on from there"""


@checked(types=False)
def to_jax(training: Source, *, step: int | None = None, probe: bool = True) -> JaxTraining:
    """The run that a training model holds as functions of JAX.

        step, state = onward.to_jax("training.onnx")[:2]
        state, metrics = step(state, batch)

    Gradients are JAX's own. The optimizer is a chain of optax's where that computes the same, else ours.

    - `training`: a training model
    - `step`: which one, of a training model with several
    - `probe`: make a few updates on both sides, and compare
    """
    parts = TrainingParts(of_one_opset(load(training)), step)
    run = parts.run
    state, tx = parts.state()
    if probe:
        try_updates(tx, state["opt_state"], state["params"], run)
    loss = parts.loss()

    def one_step(state: Tree, batch: Arrays) -> tuple[Tree, dict[str, Any]]:
        with parts.framework.active():
            (_, (metrics, changed)), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"], state, batch)
            updates, opt_state = tx.update(gradients, state["opt_state"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            count = opt_state.gradient_step if isinstance(opt_state, optax.MultiStepsState) else state["step"] + 1
            new = {**state, **changed, "params": params, "opt_state": opt_state, "step": count}
            return _average(new, state, run), metrics

    return JaxTraining(one_step, state, parts.apply(), loss, tx, lambda state: parts.training(state, tx))


def _average(new: Tree, old: Tree, run: RunState) -> Tree:
    """The averages of the parameters follow them where there was an update."""
    if "ema" not in new:
        return new
    decay, happened = float(run.recipe["ema"]), new["step"] > old["step"]

    def average(name: str, past: Any) -> Any:
        return jnp.where(happened, past * decay + new["params"][name] * (1 - decay), past)

    return {**new, "ema": {name: average(name, past) for name, past in old["ema"].items()}}


def _check_rounding(run: RunState) -> None:
    """Refuse updates in 16 bits that round where PyTorch does, and optax does not."""
    types = {name: value.dtype for name, value in run.model.graph.initializers.items()}
    clip = {"variant": "torch", **(run.clip or {"value": None})}
    clips = "value" not in clip and clip["variant"] == "torch" and {types[name] for name in run.parameters} <= {*HALVES}
    for group in run.groups:
        is_theirs = isinstance(group.optimizer, Spec) and group.optimizer.options.get("variant") == "torch"
        if (is_theirs or clips) and (narrow := [name for name in group.parameters if types[name] in HALVES]):
            raise UnsupportedError(
                f"{list_names(narrow, 5)} are updated in 16 bits as PyTorch rounds them, which optax does not",
                hint='train it as it is, on JAX too: `onward.engines.start(model, engine="jax")`',
            )


class TrainingParts:
    """What of a training model is what in JAX."""

    def __init__(self, model: Model, asked: int | None = None):
        model = adopt(model)
        index = step_of(model, asked)
        self.model, self.index, self._states = model, index, states(model, index)
        self.framework = Jax("cuda" if jax.default_backend() == "gpu" else "cpu")
        strange = [s.name for s in self._states if s.role in ("master", "state")]
        strange += [s.name for s in carried_state(model, index)[len(self._states) :]]  # which other steps change
        if strange:
            raise UnsupportedError(
                f"the training model has state that optax has no place for: {', '.join(strange)}",
                hint='train it as it is, on JAX too: `onward.engines.start(model, engine="jax")`',
            )
        self.run = from_training_model(model, index, forward=False)
        _check_rounding(self.run)

    def arrays(self, role: str) -> dict[str, jax.Array]:
        """State of a role by name, or by the parameter that an average is of. No two arrays share memory."""
        found = [state for state in self._states if state.role == role]
        names = [state.parameter or state.name if role == "ema" else state.name for state in found]
        return {name: self.framework.tensor(state.array) for name, state in zip(names, found, strict=True)}

    def state(self) -> tuple[Tree, optax.GradientTransformation]:
        """Where the run is, and its optimizer."""
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

    def forward(self) -> tuple[Model, Contract]:
        """The forward pass of training as a model, and what its inputs and outputs are."""
        lowered = lower_for_framework(self.model, self.index, "gradients")
        contract = contract_of(lowered)
        keep_only(lowered, [value for value in lowered.outputs if value.name not in contract.gradients])
        return lowered, contract

    def inference(self) -> Model:
        """The model as it predicts, with what is trained among its inputs."""
        inference = inline(self.run.model)
        open_initializers(inference.graph, [s.name for s in self._states if s.role in ("parameter", "statistics")])
        return inference

    @property
    def kinds(self) -> dict[str, str]:
        """By name: which part of the state has it."""
        return {s.name: PARTS[s.role] for s in self._states if s.role in PARTS}

    def loss(self) -> Callable[[Arrays, Tree, Arrays], tuple[Any, tuple[dict[str, Any], Tree]]]:
        """The forward pass of training."""
        lowered, contract = self.forward()
        loss_name = contract.loss
        assert loss_name is not None
        types, kinds = types_of(lowered), self.kinds
        execute = interpreter(lowered, self.framework)

        def loss(params: Arrays, state: Tree, batch: Arrays) -> tuple[Any, tuple[dict[str, Any], Tree]]:
            with self.framework.active():
                known = {**batch, **state["statistics"], **state["random"], **params, STEP: state["step"]}
                results = execute({name: jnp.asarray(known[name], dtype) for name, dtype in types.items()})
                changed: Tree = {kind: dict(state[kind]) for kind in ("statistics", "random")}
                for name, output in contract.update.items():
                    changed[kinds[name]][name] = results[output]
                value = results[loss_name]
                metrics = {name: results[name] for name in contract.metrics if name != loss_name}
                return value, ({"loss": value, **metrics}, changed)

        return loss

    def apply(self) -> Callable[[Tree, Arrays], dict[str, Any]]:
        inference = self.inference()
        types = types_of(inference)
        execute = interpreter(inference, self.framework)

        def apply(state: Tree, inputs: Arrays) -> dict[str, Any]:
            with self.framework.active():
                known = {**inputs, **state["statistics"], **state["params"]}
                return execute({name: jnp.asarray(known[name], dtype) for name, dtype in types.items()})

        return apply

    def training(self, state: Tree, tx: optax.GradientTransformation) -> Model:
        """The training model with other numbers."""
        made = self.model.copy()
        found = read_optimizer(tx, state["opt_state"], state["params"])
        averages = {f"ema/{name}": array for name, array in state.get("ema", {}).items()}
        if averages:
            before = made.array("ema/n_averaged", self.index)
            averages["ema/n_averaged"] = before + int(state["step"]) - self.run.step
        numbers = {**state["params"], **state["statistics"], **state["random"], **averages, **found.state}
        for name, array in {**numbers, STEP: state["step"]}.items():
            made.set(name, np.asarray(array), self.index)
        return made


def types_of(model: Model) -> dict[str, np.dtype]:
    return {value.name or "": value.dtype.numpy() for value in model.graph.inputs if value.dtype}
