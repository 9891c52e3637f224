"""optax as optimizers of a recipe: transformation and state, read and tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import optax

from onward.errors import UnsupportedError
from onward.frameworks.jax.closures import Transformation, Tree, free_variables, named_leaves, origin, walk
from onward.frameworks.jax.recognize import Recognized, number, recognize
from onward.frameworks.jax.schedules import read_schedule, scale_rates
from onward.frameworks.jax.slots import Arrays, counts, read_slots
from onward.recipe.optimizers import FunctionOptimizer
from onward.recipe.optimizers.selection import Given
from onward.recipe.spec import Spec
from onward.run_state.state import ParameterGroup

_CLIPS = ("clip", "clip_by_global_norm", "exact_clip")
_OF_GROUPS = "group"
"""How the names of state begin that belongs to no parameter."""
_CHANGE_NOTHING = ("identity", "inject_hyperparams", "scale", "scale_by_schedule", *_CLIPS)


class Optimization(NamedTuple):
    """What a `RunState` says about updates."""

    groups: list[ParameterGroup]
    state: Arrays
    step: int
    schedule: list[Spec]
    clip: dict[str, Any] | None
    recipe: dict[str, Any]


def read_optimizer(tx: Any, opt_state: Any, params: Tree) -> Optimization:
    """The optimizers of a recipe that a transformation of optax is, with the state of a training model.

    Parameters are named after their place in the tree: `encoder/layers/0/kernel`.
    """
    tx, opt_state, recipe, state, steps = _accumulation(tx, opt_state)
    found = _transformations(tx, opt_state, params)
    seen = [named_leaves(t.params).keys() for t in found]
    chains = {name: [t for t, names in zip(found, seen, strict=True) if name in names] for name in named_leaves(params)}
    trained = {name: chain for name, chain in chains.items() if not _is_frozen(chain)}
    if not trained:
        raise UnsupportedError("the optimizer changes no parameter")
    problems: dict[str, UnsupportedError] = {}
    recognized, clip = _recognize_each(trained, problems)
    rates = _rates(recognized, problems)
    if problems:
        raise _refusal(problems, found)
    for t in found:
        state |= read_slots(t)
    step = _common([*steps, *(count for t in found for count in counts(t.state))])
    kept = _optimizer_state(state, recognized, {name: rate for name, (rate, _) in rates.items()})
    schedule = next(iter(rates.values()))[1]
    groups = _groups({name: _with_rate(recognized[name].optimizer, rates[name][0]) for name in trained})
    return Optimization(groups, kept, step, schedule, clip, recipe)


def _recognize_each(
    trained: Mapping[str, Sequence[Transformation]], problems: dict[str, UnsupportedError]
) -> tuple[dict[str, Recognized], dict[str, Any] | None]:
    """The optimizer of each parameter, and how all gradients are clipped."""
    recognized: dict[str, Recognized] = {}
    clips: dict[str, dict[str, Any] | None] = {}
    for name, chain in trained.items():
        try:
            clip, rest = _take_clipping(chain, set(trained))
            clips[str(clip)] = clip
            recognized[name] = recognize(rest)
        except UnsupportedError as error:
            problems.setdefault(error.message, error)
    if len(clips) > 1:
        _add(problems, "some gradients are clipped in another way than others, or not at all")
    return recognized, next(iter(clips.values()), None)


def _common(steps: Sequence[int]) -> int:
    """The number of updates; where nothing counts them it does not matter."""
    if len(set(steps)) > 1:
        listed = ", ".join(map(str, sorted(set(steps))))
        raise UnsupportedError(
            f"parts of the optimizer have made different numbers of updates ({listed}), and a training model has one",
            hint="start all schedules and moments together",
        )
    return steps[0] if steps else 0


def _transformations(tx: Any, opt_state: Any, params: Tree) -> list[Transformation]:
    found: list[Transformation] = []

    def visit(each: Transformation) -> Any:
        found.append(each)
        return each.state

    walk(tx.update, opt_state, params, visit)
    return found


def _accumulation(tx: Any, opt_state: Any) -> tuple[Any, Any, dict[str, Any], Arrays, list[int]]:
    """What is inside `MultiSteps`, if that is around; and what a training model has for it."""
    steps = tx if isinstance(tx, optax.MultiSteps) else getattr(tx.update, "__self__", None)
    if not isinstance(steps, optax.MultiSteps):
        return tx, opt_state, {}, {}, []
    every, skips = steps._every_k_schedule, steps._should_skip_update_fn
    if origin(every) != "MultiSteps.__init__" or origin(skips) != "MultiSteps.__init__" or not steps._use_grad_mean:
        raise UnsupportedError(
            "`MultiSteps` sums gradients, or decides at each update how many to accumulate",
            hint="use a number for `every_k_schedule`, and `use_grad_mean=True`",
        )
    count = int(opt_state.mini_step)
    state = {"micro_step": np.asarray(count, np.int64)}
    sums = {f"accum/{name}": np.asarray(mean) * count for name, mean in named_leaves(opt_state.acc_grads).items()}
    recipe = {"accumulate": int(free_variables(every)["every_k_schedule"])}
    if recipe["accumulate"] == 1:
        return steps.inner_opt, opt_state.inner_opt_state, {}, {}, [int(opt_state.gradient_step)]
    return steps.inner_opt, opt_state.inner_opt_state, recipe, {**state, **sums}, [int(opt_state.gradient_step)]


def _is_frozen(chain: Sequence[Transformation]) -> bool:
    """Whether its update is set to zero, and nothing changes that."""
    last = [t.name for t in chain if t.name not in _CHANGE_NOTHING][-1:]
    return last == ["set_to_zero"]


def _take_clipping(
    chain: Sequence[Transformation], trained: set[str]
) -> tuple[dict[str, Any] | None, Sequence[Transformation]]:
    """How gradients are clipped before everything else, and the rest."""
    rest = [t for t in chain if t.name != "identity"]
    if not rest or rest[0].name not in _CLIPS:
        return None, rest
    first, name = rest[0], rest[0].name
    if name == "clip":
        return {"value": number(first.arguments, "max_delta")}, rest[1:]
    if named_leaves(first.params).keys() != trained:
        raise UnsupportedError(
            f"`{name}` is about other gradients than those of what is trained",
            hint="put it around all groups, and leave what is frozen out of `params`",
        )
    if name == "exact_clip":
        arguments = first.arguments
        return {arguments["kind"]: arguments["limit"], "variant": arguments["variant"]}, rest[1:]
    return {"norm": number(first.arguments, "max_norm"), "variant": "optax"}, rest[1:]


def _rates(
    recognized: Mapping[str, Recognized], problems: dict[str, UnsupportedError]
) -> dict[str, tuple[float, list[Spec]]]:
    """The base rate and the schedule of each parameter."""
    known: dict[Any, tuple[float, list[Spec]]] = {}
    for rate in {each.rate for each in recognized.values()}:
        try:
            read = read_schedule(rate.schedule, rate.factor) if rate.schedule else (rate.factor, [])
            known[rate] = (-read[0], [scale_rates(spec, -1.0) for spec in read[1]])
        except UnsupportedError as error:
            problems.setdefault(error.message, error)
    rates = {name: known[each.rate] for name, each in recognized.items() if each.rate in known}
    if any(lr < 0 for lr, _ in rates.values()):
        _add(problems, "updates go up the gradient, not down")
    if len({str(schedule) for _, schedule in rates.values()}) > 1:
        _add(problems, "groups have different schedules, and in a recipe they differ only by a factor")
    if any(each.needs_constant_rate and rates.get(name, (0, []))[1] for name, each in recognized.items()):
        _add(problems, "momentum of RMSprop on this side of a changing learning rate has no counterpart in a recipe")
    return rates


def _add(problems: dict[str, UnsupportedError], text: str) -> None:
    problems.setdefault(text, UnsupportedError(text))


def _refusal(problems: Mapping[str, UnsupportedError], found: Sequence[Transformation]) -> UnsupportedError:
    names = ", ".join(dict.fromkeys(f"`{t.name}`" for t in found if t.name not in ("identity", "inject_hyperparams")))
    hints = dict.fromkeys(error.hint for error in problems.values() if error.hint)
    return UnsupportedError(
        f"the optimizer ({names}) cannot be carried: {'; '.join(problems)}", hint="; ".join(hints) or None
    )


def _optimizer_state(state: Arrays, recognized: Mapping[str, Recognized], rates: Mapping[str, float]) -> Arrays:
    """The state of what is trained, with momentum as a recipe has it."""
    kept = {name: array for name, array in state.items() if name == "micro_step" or name.startswith(_OF_GROUPS)}
    for name, found in recognized.items():
        for key in (key for key in state if key.rpartition("/")[0] == name or key == f"accum/{name}"):
            factor = found.buffer_over_trace(rates[name]) if key.endswith("/momentum_buffer") else 1.0
            kept[key] = state[key] if factor == 1 else (state[key] * factor).astype(state[key].dtype)
    return kept


def _with_rate(optimizer: Given, lr: float) -> Given:
    if isinstance(optimizer, FunctionOptimizer):
        return dataclasses.replace(optimizer, lr=lr)
    return Spec(optimizer.name, {"lr": lr, **optimizer.without("lr").options})


def _groups(optimizers: Mapping[str, Given]) -> list[ParameterGroup]:
    """Parameters with the same settings together."""
    members: dict[Any, list[str]] = {}
    for name, given in optimizers.items():
        key = id(given.update) if isinstance(given, FunctionOptimizer) else str(given)
        members.setdefault(key, []).append(name)
    return [ParameterGroup(optimizers[names[0]], names) for names in members.values()]
