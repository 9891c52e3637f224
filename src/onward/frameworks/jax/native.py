"""Optimizers of a recipe as optax: its own transformations where they compute the same, else ours (see exact.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from onward.frameworks.jax.closures import walk
from onward.frameworks.jax.exact import Rate
from onward.frameworks.jax.objects import OBJECTS
from onward.frameworks.jax.schedules import make_schedule
from onward.frameworks.jax.slots import fill_state
from onward.recipe.optimizers import FunctionOptimizer, configure
from onward.recipe.spec import Spec
from onward.run_state.state import ParameterGroup, RunState
from onward.vocabulary.optax import difference_from_optax

Settings = SimpleNamespace
Parts = Sequence[Any]


def make_optimizer(run: RunState, params: Mapping[str, Any]) -> tuple[optax.GradientTransformation, Any]:
    """The optimizer of a run, and its state. `params` are by name."""
    tx = transformation(run, OBJECTS)
    slots = {**run.state, **_traces(run)}
    with jax.enable_x64(True):
        state = walk(tx.update, tx.init(params), params, lambda found: fill_state(found, slots, run.step))
        every = int(run.recipe.get("accumulate", 1))
        if every == 1:
            return tx, state
        steps = optax.MultiSteps(tx, every, accumulator_dtype=jnp.result_type(*params.values()))
        return steps.gradient_transformation(), _accumulation_state(steps.init(params), state, run)


def is_native(spec: Spec) -> bool:
    """Whether optax itself has this optimizer."""
    return _native(OBJECTS, spec, 1.0) is not None


def transformation(run: RunState, ox: Any) -> Any:
    """The optimizer of a run, without accumulation: of the functions of `ox`, which makes objects or says which."""
    made = [_transformation(ox, group, f"group{i}", run) for i, group in enumerate(run.groups)]
    tx = made[0]
    if len(made) > 1:
        labels = {name: f"group{i}" for i, group in enumerate(run.groups) for name in group.parameters}
        tx = ox.partition({f"group{i}": tx for i, tx in enumerate(made)}, labels)
    return ox.chain(_clip(ox, run.clip), tx) if run.clip else tx


def _transformation(ox: Any, group: ParameterGroup, name: str, run: RunState) -> Any:
    rate = make_schedule(run.schedule, group.lr, ox)
    if isinstance(group.optimizer, FunctionOptimizer):
        return ox.executed(group.optimizer, name, rate)
    return _native(ox, group.spec, rate) or ox.exact(group, rate)


def _native(ox: Any, spec: Spec, rate: Rate) -> Any:
    settings = configure(spec).settings
    if difference_from_optax(spec.name, settings) is not None:
        return None
    return ox.chain(*_MAKERS[spec.name](ox, settings, rate))


def _clip(ox: Any, clip: Mapping[str, Any]) -> Any:
    if "value" in clip:
        return ox.clip(clip["value"])
    kind = "norm" if "norm" in clip else "tensor_norm"
    variant = clip.get("variant", "torch")
    if kind == "norm" and variant != "torch":
        return ox.clip_by_global_norm(clip["norm"])
    return ox.exact_clip(kind, clip[kind], variant)


# ---- state -----------------------------------------------------------------------------------------------------------


def _traces(run: RunState) -> dict[str, np.ndarray]:
    """Momentum that has the rate in it has the sign of updates in optax."""
    specs = {name: group.optimizer for group in run.groups for name in group.parameters}
    names = [name for name, spec in specs.items() if isinstance(spec, Spec) and _momentum_is_outer(spec)]
    slots = (f"{name}/momentum_buffer" for name in names)
    return {slot: -run.state[slot] for slot in slots if slot in run.state}


def _momentum_is_outer(spec: Spec) -> bool:
    return spec.name == "rmsprop" and spec.options.get("variant") != "torch" and is_native(spec)


def _accumulation_state(state: optax.MultiStepsState, inner: Any, run: RunState) -> optax.MultiStepsState:
    count = int(run.state.get("micro_step", 0))
    means = {
        name: jnp.asarray(run.state[f"accum/{name}"] / max(count, 1), old.dtype)
        for name, old in state.acc_grads.items()
    }
    step = jnp.asarray(run.step, state.gradient_step.dtype)
    mini = jnp.asarray(count, state.mini_step.dtype)
    return state._replace(mini_step=mini, gradient_step=step, inner_opt_state=inner, acc_grads=means)


# ---- the table -------------------------------------------------------------------------------------------------------


def _with_decay(ox: Any, s: Settings, direction: Parts, rate: Rate) -> Parts:
    """A direction with weight decay in the gradient, or beside it; Keras decouples every decay."""
    decay = [ox.add_decayed_weights(s.weight_decay)] if s.weight_decay else []
    decoupled = s.variant == "keras" or getattr(s, "decoupled_weight_decay", False)
    around = [*direction, *decay] if decoupled else [*decay, *direction]
    return [*around, ox.scale_by_learning_rate(rate)]


def _sgd(ox: Any, s: Settings, rate: Rate) -> Parts:
    return _with_decay(ox, s, [ox.trace(s.momentum, s.nesterov)] if s.momentum else [ox.identity()], rate)


def _sgdw(ox: Any, s: Settings, rate: Rate) -> Parts:
    return _sgd(ox, Settings(**{**vars(s), "decoupled_weight_decay": True}), rate)


def _adam(ox: Any, s: Settings, rate: Rate) -> Parts:
    scale = ox.scale_by_amsgrad if s.amsgrad else ox.scale_by_adam
    return _with_decay(ox, s, [scale(s.beta1, s.beta2, s.eps)], rate)


def _adamw(ox: Any, s: Settings, rate: Rate) -> Parts:
    return _adam(ox, Settings(**{**vars(s), "decoupled_weight_decay": True}), rate)


def _adagrad(ox: Any, s: Settings, rate: Rate) -> Parts:
    return _with_decay(ox, s, [ox.scale_by_rss(s.initial_accumulator_value, s.eps)], rate)


def _adamax(ox: Any, s: Settings, rate: Rate) -> Parts:
    return _with_decay(ox, s, [ox.scale_by_adamax(s.beta1, s.beta2, s.eps)], rate)


def _nadam(ox: Any, s: Settings, rate: Rate) -> Parts:
    return _with_decay(ox, s, [ox.scale_by_adam(s.beta1, s.beta2, s.eps, nesterov=True)], rate)


def _radam(ox: Any, s: Settings, rate: Rate) -> Parts:
    return _with_decay(ox, s, [ox.scale_by_radam(s.beta1, s.beta2, s.eps)], rate)


def _rmsprop(ox: Any, s: Settings, rate: Rate) -> Parts:
    scale = ox.scale_by_stddev if s.centered else ox.scale_by_rms
    inside = s.variant != "torch"
    direction = [scale(s.alpha, s.eps, eps_in_sqrt=inside)]
    momentum = [ox.trace(s.momentum)] if s.momentum else []
    if not inside:
        return _with_decay(ox, s, [*direction, *momentum], rate)
    return [*_with_decay(ox, s, direction, rate), *momentum]


def _adadelta(ox: Any, s: Settings, rate: Rate) -> Parts:
    return _with_decay(ox, s, [ox.scale_by_adadelta(s.rho, s.eps)], rate)


def _adafactor(ox: Any, s: Settings, rate: Rate) -> Parts:
    return [
        ox.scale_by_factored_rms(
            decay_rate=-s.beta2_decay, epsilon=s.eps1, min_dim_size_to_factor=s.min_dim_size_to_factor
        ),
        ox.clip_by_block_rms(s.d),
        ox.scale_by_learning_rate(rate, flip_sign=False),
        ox.scale_by_param_block_rms(s.eps2),
        ox.add_decayed_weights(s.weight_decay),
        ox.scale(-1),
    ]


def _lion(ox: Any, s: Settings, rate: Rate) -> Parts:
    direction = [ox.scale_by_lion(s.beta1, s.beta2), ox.add_decayed_weights(s.weight_decay)]
    return [*direction, ox.scale_by_learning_rate(rate)]


def _lamb(ox: Any, s: Settings, rate: Rate) -> Parts:
    direction = [ox.scale_by_adam(s.beta1, s.beta2, s.eps), ox.add_decayed_weights(s.weight_decay)]
    return [*direction, ox.scale_by_trust_ratio(), ox.scale_by_learning_rate(rate)]


_MAKERS: dict[str, Callable[[Any, Settings, Rate], Parts]] = {
    "sgd": _sgd,
    "momentum": _sgd,
    "nesterov": _sgd,
    "sgdw": _sgdw,
    "adagrad": _adagrad,
    "adam": _adam,
    "adamw": _adamw,
    "amsgrad": _adam,
    "adamax": _adamax,
    "nadam": _nadam,
    "radam": _radam,
    "rmsprop": _rmsprop,
    "adadelta": _adadelta,
    "adafactor": _adafactor,
    "lion": _lion,
    "lamb": _lamb,
}
