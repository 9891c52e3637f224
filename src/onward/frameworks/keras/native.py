"""Keras's own optimizers, schedules and losses, where they compute what a training model does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from onward.frameworks.keras.replicas import has_replicas
from onward.model import Model
from onward.recipe.optimizers import ConfiguredOptimizer, FunctionOptimizer, configure, optimizer
from onward.recipe.spec import Spec
from onward.run_state.state import RunState
from onward.vocabulary.keras import CLIPS, KINDS, Kind

_CLASSES = {
    **{kind.name: name for name, kind in KINDS.items()},
    **dict.fromkeys(("momentum", "nesterov", "sgdw"), "SGD"),
    "amsgrad": "Adam",
}
"""Our optimizer -> Keras's."""

# ---- optimizers ------------------------------------------------------------------------------------------------------


def native_optimizer(run: RunState, held: Mapping[str, Any]) -> Any | None:
    """Keras's optimizer with the state of a run, if there is one that computes the same."""
    has_masters = any(f"{name}/master" in run.state for name in run.parameters)  # which Keras would leave behind
    if has_masters or any(isinstance(group.optimizer, FunctionOptimizer) for group in run.groups):
        return None
    settings = [_comparable(group.spec) for group in run.groups]
    if run.clip is not None and has_replicas():  # Keras's own clip before gradients of replicas are summed up
        return None
    rate = _rate(run.groups[0].lr, run.schedule)
    other = run.recipe.keys() - {"seed"}  # accumulation, averages, scales: Keras counts and begins in other ways
    if rate is None or other or any(found != settings[0] for found in settings) or not _clips_alike(run):
        return None
    first = configure(run.groups[0].spec)
    name = _CLASSES.get(first.kind.name, "")
    if not name or not all(_is_same(configure(group.spec), name) for group in run.groups):
        return None
    decays = [float(group.spec.options.get("weight_decay", 0.0)) for group in run.groups]
    if len({decay for decay in decays if decay}) > 1:
        return None
    return _make_optimizer(name, first, rate, run, held, decays)


def _make_optimizer(
    name: str, first: ConfiguredOptimizer, rate: Any, run: RunState, held: Mapping[str, Any], decays: Sequence[float]
) -> Any:
    name = {"AdamW": "Adam"}.get(name, name) if not any(decays) else name
    kind = KINDS[name]
    numbers = {theirs: first.values[ours] for ours, theirs in kind.numbers.items()}
    flags = {flag: bool(first.options.get(flag, False)) for flag in kind.flags}
    clip = {theirs: run.clip[ours] for theirs, ours in CLIPS.items() if run.clip and ours in run.clip}
    made = getattr(keras.optimizers, name)(rate, **numbers, **flags, **clip, weight_decay=max(decays) or None)
    spared = [held[n] for group, decay in zip(run.groups, decays, strict=True) if not decay for n in group.parameters]
    if any(decays) and spared:
        made.exclude_from_weight_decay(var_list=spared)
    made.build([v for v in held.values() if v.trainable])
    made.iterations.assign(run.step)
    _fill(made, kind, run, held)
    return made


def _fill(made: Any, kind: Kind, run: RunState, held: Mapping[str, Any]) -> None:
    for name in run.parameters:
        index = made._get_variable_index(held[name])
        for ours, theirs in kind.slots.items():
            if (variables := getattr(made, theirs, None)) and f"{name}/{ours}" in run.state:
                variables[index].assign(run.state[f"{name}/{ours}"])
        if f"{name}/mu_product" in run.state:
            made._u_product.assign(run.state[f"{name}/mu_product"])


def _comparable(spec: Spec) -> Any:
    """What all parameters have in common in Keras: everything but the decay of weights."""
    return spec.name, dict(spec.without("weight_decay").options)


def _is_same(ours: ConfiguredOptimizer, name: str) -> bool:
    """Whether Keras's arithmetic is the same function, with no number that Keras has fixed to another value."""
    theirs = optimizer(KINDS[name].name)
    if "keras" not in theirs.variants or ours.options["maximize"]:
        return False
    options = {flag: ours.options.get(flag, False) for flag in theirs.options}
    keras_options = {**theirs.configure(variant="keras").options, **options}
    twin = ConfiguredOptimizer(theirs, {**theirs.hyper, **ours.values}, keras_options)
    fixed = {**theirs.hyper, **theirs.variants["keras"]}
    free = {"lr", "weight_decay", *KINDS[name].numbers}
    if any(ours.values[number] != fixed[number] for number in ours.effective - free):
        return False
    return _function(ours) == _function(twin)


def _function(configured: ConfiguredOptimizer) -> str:
    """The name of the update. A decay by nothing is none."""
    name = configured.kind.choose(configured.settings, None).function.name
    return name if configured.values.get("weight_decay") else name.removesuffix("W")


def _clips_alike(run: RunState) -> bool:
    return run.clip is None or run.clip.get("variant", "optax") in ("optax", "keras")


# ---- schedules -------------------------------------------------------------------------------------------------------


def _rate(lr: float, schedule: Sequence[Spec]) -> Any | None:
    """A number or a schedule of Keras; None where Keras has none that is the same."""
    if not schedule:
        return lr
    if len(schedule) > 1 or schedule[0].name not in _SCHEDULES:
        return None
    options = dict(schedule[0].options)
    if options.get("warmup") and schedule[0].name != "cosine":
        return None
    every = options.pop("every", 1)
    if every != 1:  # it counts epochs, say, and Keras counts updates
        stairs = {"exponential": 1, "step": options.get("size")}.get(schedule[0].name)
        return _stairs(lr, stairs * every, options["gamma"]) if stairs else None
    return _SCHEDULES[schedule[0].name](lr, options)


def _stairs(lr: float, size: float, gamma: float) -> Any:
    return keras.optimizers.schedules.ExponentialDecay(lr, size, gamma, staircase=True)


def _multistep(lr: float, n: dict[str, Any]) -> Any:
    """Keras's boundaries still have the value before them."""
    values = [lr * n["gamma"] ** i for i in range(len(n["milestones"]) + 1)]
    return keras.optimizers.schedules.PiecewiseConstantDecay([int(m) - 1 for m in n["milestones"]], values)


def _cosine(lr: float, n: dict[str, Any]) -> Any | None:
    if n.get("after", "floor") != "floor" or not lr:
        return None
    warmup, alpha = n.get("warmup") or 0, n["min"] / lr
    if not warmup:
        return keras.optimizers.schedules.CosineDecay(lr, n["steps"], alpha)
    start = lr * n.get("warmup_start", 0.0)
    rising = {"warmup_target": lr, "warmup_steps": warmup}
    return keras.optimizers.schedules.CosineDecay(start, n["steps"] - warmup, alpha, **rising)


def _polynomial(start: float, steps: float, end: float, power: float = 1.0) -> Any:
    return keras.optimizers.schedules.PolynomialDecay(start, steps, end, power)


_SCHEDULES: dict[str, Callable[[float, dict[str, Any]], Any | None]] = {
    "constant": lambda lr, n: lr,
    "exponential": lambda lr, n: keras.optimizers.schedules.ExponentialDecay(lr, 1, n["gamma"]),
    "step": lambda lr, n: _stairs(lr, n["size"], n["gamma"]),
    "multistep": _multistep,
    "linear": lambda lr, n: _polynomial(lr * n["start_factor"], n["steps"], lr * n["end_factor"]),
    "polynomial": lambda lr, n: _polynomial(lr, n["steps"], n["end"], n["power"]),
    "cosine": _cosine,
}


# ---- losses ----------------------------------------------------------------------------------------------------------


def native_losses(run: RunState, model: Model) -> dict[str, Any] | None:
    """What `compile` takes: Keras's losses of the outputs, if there is one for each that computes the same."""
    outputs = {value.name: value for value in model.outputs}
    terms = [item for term in run.loss for item in term.items()] if _are_mappings(run.loss) else []
    made = {}
    for output, spec in terms:
        options = dict(spec)
        name, scale = options.pop("name"), options.pop("scale", 1.0)
        row = _LOSSES.get(name)
        if row is None or output not in outputs or output in made or options.pop("reduction", "mean") != "mean":
            return None
        shape = outputs[output].shape
        loss = None if shape is None else row(options, len(shape))
        if loss is None:
            return None
        made[output] = (loss, float(scale))
    if not made or made.keys() != outputs.keys():
        return None
    if len(made) == 1:
        ((loss, weight),) = made.values()
        return {"loss": loss, **({} if weight == 1.0 else {"loss_weights": weight})}
    return {"loss": [made[name][0] for name in outputs], "loss_weights": [made[name][1] for name in outputs]}


def _are_mappings(loss: Any) -> bool:
    return isinstance(loss, list) and all(isinstance(term, Mapping) for term in loss)


def _cross_entropy(n: dict[str, Any], rank: int) -> Any | None:
    smoothing, ignored = n.get("label_smoothing", 0.0), n.get("ignore_index")
    if n.get("weight") is not None or (rank > 2 and n.get("axis", 1) != -1):
        return None
    if n.get("target", "indices") == "probabilities":
        return keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=smoothing)
    if smoothing:
        return None
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=ignored)


def _bce_with_logits(n: dict[str, Any], rank: int) -> Any | None:
    weighted = n.get("pos_weight") is not None or n.get("weight") is not None
    return None if weighted else keras.losses.BinaryCrossentropy(from_logits=True)


def _binary_cross_entropy(n: dict[str, Any], rank: int) -> Any | None:
    same = n.get("clip") == keras.config.epsilon() and n.get("weight") is None
    return keras.losses.BinaryCrossentropy() if same else None


def _poisson(n: dict[str, Any], rank: int) -> Any | None:
    same = not n.get("log_input", True) and not n.get("full") and n.get("eps") == keras.config.epsilon()
    return keras.losses.Poisson() if same else None


def _huber(n: dict[str, Any], rank: int) -> Any | None:
    """Only as it is by default: Keras leaves `delta` out of what it saves."""
    return keras.losses.Huber() if n.get("delta", 1.0) == 1.0 else None


_LOSSES: dict[str, Callable[[dict[str, Any], int], Any | None]] = {
    "mse": lambda n, rank: keras.losses.MeanSquaredError(),
    "l1": lambda n, rank: keras.losses.MeanAbsoluteError(),
    "mae": lambda n, rank: keras.losses.MeanAbsoluteError(),
    "huber": _huber,
    "cross_entropy": _cross_entropy,
    "bce_with_logits": _bce_with_logits,
    "binary_cross_entropy": _binary_cross_entropy,
    "poisson_nll": _poisson,
}
