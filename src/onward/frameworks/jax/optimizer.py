"""Optimizers of optax with their state, from and to those of a recipe.

An optimizer of a recipe becomes a chain of optax if that computes the same, else a transformation
of updates.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from onward.errors import UnsupportedError
from onward.frameworks.jax.closures import (
    Transformation,
    Tree,
    free_variables,
    named_leaves,
    origin,
    path_name,
    transformations,
    walk,
)
from onward.frameworks.jax.recognition import Recognized, number, recognize
from onward.frameworks.jax.schedule import make_schedule, read_schedule
from onward.frameworks.jax.updates import OBJECTS, Rate
from onward.recipe.optimizers import FunctionOptimizer, configure
from onward.recipe.spec import Spec
from onward.run_state.state import ParameterGroup, RunState
from onward.vocabulary.optax import reduced_axis, scale_rates
from onward.vocabulary.optimizers import OPTAX_ROWS, TRANSFORMATIONS
from onward.vocabulary.rows import OptaxCall, row_for

Arrays = dict[str, np.ndarray]

_CLIPS = ("clip", "clip_by_global_norm", "exact_clip")
_OF_GROUPS = "group"  # prefix of state that belongs to no parameter
_CHANGE_NOTHING = ("identity", "inject_hyperparams", "scale", "scale_by_schedule", *_CLIPS)


class Optimization(NamedTuple):
    """Fields of a `RunState` about updates."""

    groups: list[ParameterGroup]
    state: Arrays
    step: int
    schedule: list[Spec]
    clip: dict[str, Any] | None
    recipe: dict[str, Any]


def read_optimizer(tx: Any, opt_state: Any, params: Tree) -> Optimization:
    """Return the optimizers of a recipe for an optax transformation, with the state of a training
    model.

    Parameters are named by their path in the tree: `encoder/layers/0/kernel`.
    """
    tx, opt_state, recipe, state, steps = _accumulation(tx, opt_state)
    all_transformations = [(t, named_leaves(t.params).keys()) for t in transformations(tx, opt_state, params)]
    chains = {name: [t for t, names in all_transformations if name in names] for name in named_leaves(params)}
    acting = {name: [t.name for t in chain if t.name not in _CHANGE_NOTHING] for name, chain in chains.items()}
    trained = {name: chain for name, chain in chains.items() if acting[name][-1:] != ["set_to_zero"]}
    if not trained:
        raise UnsupportedError("the optimizer changes no parameter")
    problems: list[UnsupportedError] = []
    recognized, clip = _recognize_each(trained, problems)
    rates = _rates(recognized, problems)
    if problems:
        names = (f"`{t.name}`" for t, _ in all_transformations if t.name not in ("identity", "inject_hyperparams"))
        messages = dict.fromkeys(error.message for error in problems)
        raise UnsupportedError(
            f"the optimizer ({', '.join(dict.fromkeys(names))}) cannot be carried: {'; '.join(messages)}",
            hint="; ".join(dict.fromkeys(error.hint for error in problems if error.hint)) or None,
        )
    for t, _ in all_transformations:
        state |= read_slots(t)
        injected = getattr(t.state, "hyperparams_states", {}).values()
        steps += [int(s.count) for s in (t.state, *injected) if "count" in getattr(s, "_fields", ())]
    if len(set(steps)) > 1:
        listed = ", ".join(map(str, sorted(set(steps))))
        raise UnsupportedError(
            f"the counts of updates in the optimizer differ ({listed}), and a training model has one",
            hint="start all schedules and moments together",
        )
    state = _optimizer_state(state, recognized, {name: rate for name, (rate, _) in rates.items()})
    members: dict[Any, tuple[Any, list[str]]] = {}
    for name in trained:
        optimizer, lr = recognized[name].optimizer, rates[name][0]
        if isinstance(optimizer, FunctionOptimizer):
            key: Any = id(optimizer.update)
            optimizer = dataclasses.replace(optimizer, lr=lr)
        else:
            optimizer = Spec(optimizer.name, {"lr": lr, **optimizer.without("lr").options})
            key = str(optimizer)
        members.setdefault(key, (optimizer, []))[1].append(name)
    schedule = next(iter(rates.values()))[1]
    groups = [ParameterGroup(*member) for member in members.values()]
    return Optimization(groups, state, steps[0] if steps else 0, schedule, clip, recipe)


def _recognize_each(
    trained: Mapping[str, Sequence[Transformation]], problems: list[UnsupportedError]
) -> tuple[dict[str, Recognized], dict[str, Any] | None]:
    """Return the optimizer of each parameter, and the clipping of all gradients."""
    recognized: dict[str, Recognized] = {}
    clips: dict[str, dict[str, Any] | None] = {}
    for name, chain in trained.items():
        try:
            clip, rest = _take_clipping(chain, set(trained))
            clips[str(clip)] = clip
            recognized[name] = recognize(rest)
        except UnsupportedError as error:
            problems.append(error)
    if len(clips) > 1:
        problems.append(UnsupportedError("gradients are clipped in different ways, or some are not clipped"))
    return recognized, next(iter(clips.values()), None)


def _accumulation(tx: Any, opt_state: Any) -> tuple[Any, Any, dict[str, Any], Arrays, list[int]]:
    """Return optimizer and state inside `MultiSteps`, if there is one, and its options, state and count."""
    steps = tx if isinstance(tx, optax.MultiSteps) else getattr(tx.update, "__self__", None)
    if not isinstance(steps, optax.MultiSteps):
        return tx, opt_state, {}, {}, []
    every, skips = steps._every_k_schedule, steps._should_skip_update_fn
    if {origin(every), origin(skips)} != {"MultiSteps.__init__"} or not steps._use_grad_mean:
        raise UnsupportedError(
            "`MultiSteps` sums gradients, or accumulates a varying number of them",
            hint="use a number for `every_k_schedule`, and `use_grad_mean=True`",
        )
    inner, updates = (steps.inner_opt, opt_state.inner_opt_state), [int(opt_state.gradient_step)]
    accumulate, count = int(free_variables(every)["every_k_schedule"]), int(opt_state.mini_step)
    if accumulate == 1:
        return *inner, {}, {}, updates
    state = {f"accum/{name}": np.asarray(mean) * count for name, mean in named_leaves(opt_state.acc_grads).items()}
    return *inner, {"accumulate": accumulate}, {"micro_step": np.asarray(count, np.int64), **state}, updates


def _take_clipping(
    chain: Sequence[Transformation], trained: set[str]
) -> tuple[dict[str, Any] | None, Sequence[Transformation]]:
    """Return the clipping that comes first, and the transformations after it."""
    rest = [t for t in chain if t.name != "identity"]
    if not rest or rest[0].name not in _CLIPS:
        return None, rest
    first, name = rest[0], rest[0].name
    if name == "clip":
        return {"value": number(first.arguments, "max_delta")}, rest[1:]
    if named_leaves(first.params).keys() != trained:
        raise UnsupportedError(
            f"`{name}` does not clip the gradients of all trained parameters",
            hint="put it around all groups, and leave frozen parameters out of `params`",
        )
    if name == "exact_clip":
        arguments = first.arguments
        return {arguments["kind"]: arguments["limit"], "variant": arguments["variant"]}, rest[1:]
    return {"norm": number(first.arguments, "max_norm"), "variant": "optax"}, rest[1:]


def _rates(
    recognized: Mapping[str, Recognized], problems: list[UnsupportedError]
) -> dict[str, tuple[float, list[Spec]]]:
    """Return the base rate and the schedules of each parameter."""
    by_chain_rate: dict[Any, tuple[float, list[Spec]]] = {}
    for rate in {r.rate for r in recognized.values()}:
        try:
            read = read_schedule(rate.schedule, rate.factor) if rate.schedule else (rate.factor, [])
            by_chain_rate[rate] = (-read[0], [scale_rates(spec, -1.0) for spec in read[1]])
        except UnsupportedError as error:
            problems.append(error)
    rates = {name: by_chain_rate[r.rate] for name, r in recognized.items() if r.rate in by_chain_rate}
    if any(lr < 0 for lr, _ in rates.values()):
        problems.append(UnsupportedError("the learning rate is negative: updates go up the gradient"))
    if len({str(schedule) for _, schedule in rates.values()}) > 1:
        message = "schedules of groups differ by more than a factor, which a recipe cannot express"
        problems.append(UnsupportedError(message))
    if any(r.needs_constant_rate and rates.get(name, (0, []))[1] for name, r in recognized.items()):
        order = "RMSprop with momentum and a schedule in this order"
        problems.append(UnsupportedError(f"{order} has no counterpart in a recipe"))
    return rates


def _optimizer_state(state: Arrays, recognized: Mapping[str, Recognized], rates: Mapping[str, float]) -> Arrays:
    """Return the state of trained parameters, with the momentum of a recipe."""
    selected = {name: array for name, array in state.items() if name == "micro_step" or name.startswith(_OF_GROUPS)}
    for name, optimizer in recognized.items():
        for key in (key for key in state if key.rpartition("/")[0] == name or key == f"accum/{name}"):
            factor = optimizer.buffer_over_trace(rates[name]) if key.endswith("/momentum_buffer") else 1.0
            selected[key] = state[key] if factor == 1 else (state[key] * factor).astype(state[key].dtype)
    return selected


def make_optimizer(run: RunState, params: Mapping[str, Any]) -> tuple[optax.GradientTransformation, Any]:
    """Return the optimizer of a run, and its state. `params` are by name."""
    tx, slots = transformation(run, OBJECTS), dict(run.state)
    for group in run.groups:
        spec = group.optimizer
        is_rmsprop = isinstance(spec, Spec) and spec.name == "rmsprop" and spec.options.get("variant") != "torch"
        if is_rmsprop and is_native(group.spec):  # its momentum contains the rate with the sign of updates
            names = (f"{name}/momentum_buffer" for name in group.parameters)
            slots |= {name: -slots[name] for name in names if name in slots}
    with jax.enable_x64(True):  # `jit` for one compilation, not one for each shape
        state = walk(tx.update, jax.jit(tx.init)(params), params, lambda t: fill_state(t, slots, run.step))
        every = int(run.recipe.get("accumulate", 1))
        if every == 1:
            return tx, state
        steps = optax.MultiSteps(tx, every, accumulator_dtype=jnp.result_type(*params.values()))
        first, count = steps.init(params), int(run.state.get("micro_step", 0))
        means = {
            name: jnp.asarray(run.state[f"accum/{name}"] / max(count, 1), old.dtype)
            for name, old in first.acc_grads.items()
        }
        updates, mini = jnp.asarray(run.step, first.gradient_step.dtype), jnp.asarray(count, first.mini_step.dtype)
        filled = first._replace(mini_step=mini, gradient_step=updates, inner_opt_state=state, acc_grads=means)
        return steps.gradient_transformation(), filled


def is_native(spec: Spec) -> bool:
    """True if optax has this optimizer."""
    return _native_calls(spec, 1.0) is not None


def _native_calls(spec: Spec, rate: Rate) -> list[OptaxCall] | None:
    configured = configure(spec)
    row = row_for(OPTAX_ROWS, configured)
    return None if row is None or row.difference else row.calls(configured, lr=rate)


def transformation(run: RunState, ox: Any) -> Any:
    """Return the optimizer of a run, without accumulation, by functions of `ox`."""
    optimizers = []
    for i, group in enumerate(run.groups):
        rate = make_schedule(run.schedule, group.lr, ox)
        if isinstance(group.optimizer, FunctionOptimizer):
            optimizers.append(ox.function_optimizer(group.optimizer, f"group{i}", rate))
        elif (calls := _native_calls(group.spec, rate)) is not None:
            optimizers.append(ox.chain(*(getattr(ox, name)(**arguments) for name, arguments in calls)))
        else:
            optimizers.append(ox.recipe_optimizer(group, rate))
    tx = optimizers[0]
    if len(optimizers) > 1:
        labels = {name: f"group{i}" for i, group in enumerate(run.groups) for name in group.parameters}
        tx = ox.partition({f"group{i}": tx for i, tx in enumerate(optimizers)}, labels)
    return ox.chain(_clip(ox, run.clip), tx) if run.clip else tx


def _clip(ox: Any, clip: Mapping[str, Any]) -> Any:
    if "value" in clip:
        return ox.clip(clip["value"])
    norm_of = "norm" if "norm" in clip else "tensor_norm"
    variant = clip.get("variant", "torch")
    if norm_of == "norm" and variant != "torch":
        return ox.clip_by_global_norm(clip["norm"])
    return ox.exact_clip(norm_of, clip[norm_of], variant)


def _fields(t: Transformation) -> Mapping[str, str]:
    return TRANSFORMATIONS[t.name].slots if t.name in TRANSFORMATIONS else {}


def read_slots(t: Transformation) -> Arrays:
    """Return the state of a transformation, as `<parameter>/<slot>`."""
    if t.name == "joint":
        return {name: np.asarray(array) for name, array in t.state.state.items()}
    if t.name == "transformation":
        trees = t.state.slots
    else:
        trees = {slot: getattr(t.state, field) for field, slot in _fields(t).items()}
    params = named_leaves(t.params)
    slots: Arrays = {}
    for slot, tree in trees.items():
        for name, leaf in named_leaves(tree).items():
            array = _with_axis(np.asarray(leaf), t, slot, params[name].shape)
            slots |= {} if array is None else {f"{name}/{slot}": array}
    return slots


def fill_state(t: Transformation, slots: Mapping[str, np.ndarray], step: int) -> Any:
    """Return the state of a transformation with our slots, after `step` updates."""
    state = t.state
    if "count" in getattr(state, "_fields", ()):
        state = state._replace(count=jnp.asarray(step, state.count.dtype))
    if t.name == "joint":
        arrays = {name: jnp.array(slots.get(name, old), old.dtype) for name, old in state.state.items()}
        return state._replace(state=arrays)
    if t.name == "transformation":
        return state._replace(slots={slot: _with(tree, slot, slots) for slot, tree in state.slots.items()})
    for field, slot in _fields(t).items():
        state = state._replace(**{field: _with(getattr(state, field), slot, slots)})
    return state


def _with(tree: Any, slot: str, slots: Mapping[str, np.ndarray]) -> Any:
    def leaf(path: Any, old: jax.Array) -> jax.Array:
        new = slots.get(f"{path_name(path)}/{slot}")
        return old if new is None else jax.device_put(np.array(new, old.dtype).reshape(old.shape))

    return jax.tree_util.tree_map_with_path(leaf, tree)


def _with_axis(array: np.ndarray, t: Transformation, slot: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return a slot with the axis that a factor of Adafactor lacks; None for an unused slot."""
    if t.name != "scale_by_factored_rms":
        return array
    least = t.arguments["min_dim_size_to_factor"]
    is_factored = bool(t.arguments["factored"]) and len(shape) > 1 and sorted(shape)[-2] >= least
    if is_factored == (slot == "variance"):
        return None
    return np.expand_dims(array, reduced_axis(slot, shape)) if is_factored else array
