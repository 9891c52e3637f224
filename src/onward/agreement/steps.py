"""The same steps of a framework and of the training model that was made of its run, or that it was made from.

Dropout is left out, since no two frameworks draw the same numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onward import engines
from onward.agreement.inputs import generator
from onward.agreement.tolerance import (
    ROUNDINGS,
    Arrays,
    Comparison,
    Tolerance,
    distance,
    epsilon_of,
    gradients_of,
    largest,
    noise_in,
)
from onward.engines import Engine, start
from onward.errors import MismatchError
from onward.inspect import describe
from onward.model import Model
from onward.model.core import values
from onward.recipe.optimizers import OPTIMIZERS, FunctionOptimizer
from onward.recipe.optimizers.graph_optimizer import COUNT, RATE, gradient_of

_FOLLOW_SIGNS = {"sign", "rprop", *(name for name, kind in OPTIMIZERS.items() if kind.follows_signs)}
"""Optimizers that make whole steps of rounding errors, where a gradient is almost zero: only one can be compared."""
_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
LOSS = "the loss"
_SHAKE = 1e-6
"""A change in the last digits of float32, as sums of many terms have it."""
_SENSITIVE = Tolerance.relative / 20
"""What such a change may lead to in values that are compared."""
_BEYOND_DOUBT = 10
"""How many times further apart than such a change makes them gradients must be, to be called different."""
_SHAKES = 12
"""How often it is tried: one unit of a ReLU that rounding switches on or off moves all gradients before it, by up to a
fifth in MobileNet with batches of 8, and a change switches it in some of the trials only."""
_INEXACT = "the conversion is not exact: please report the model that it was"


class StepResult(NamedTuple):
    """What a step of a framework has computed: its parts by the names of the model."""

    loss: float
    gradients: Arrays
    weights: Arrays
    """Parameters and statistics after it."""


def compare_steps(
    model: Model,
    batches: Iterable[Arrays],
    step: Callable[[Arrays], StepResult],
    *,
    framework: str,
    engine: str | None = None,
) -> None:
    """Let both sides make the same steps, or say what differs first. The training model itself stays as it is.

    Elements that follow rounding errors are not compared, and become those of the framework, or the sides would part.
    `engine` computes in place of ONNX Runtime where there is bfloat16, of which that has few kernels.
    """
    groups = describe(model).steps[0].groups
    comparable = 1 if any(group.optimizer in _FOLLOW_SIGNS for group in groups) else None
    types = types_in(model)
    compare = Comparison(f"that of {framework}", _INEXACT, Tolerance(epsilon=epsilon_in(types)), _describe)
    options: dict[str, Any] = {"threads": 1}
    if engine is not None and ir.DataType.BFLOAT16 in types:
        options = {"engine": engine, **({"compile": False} if engine == "torch" else {})}  # longer than a few steps
    noise: dict[str, np.ndarray] = {}
    done: list[Arrays] = []
    with start(model, **options) as running:
        for number, batch in enumerate(itertools.islice(batches, comparable), 1):
            done.append({name: batch[name] for name in running.inputs})  # some may not matter to the loss
            gradients = gradients_of(running, done[-1]) if number == 1 else {}
            loss, theirs = running.step(done[-1])[running.loss], step(batch)
            noise |= {name: noise.get(name, False) | new for name, new in noise_in(theirs.gradients).items()}
            found = {LOSS: np.asarray(loss), **running.state()}
            expected = {LOSS: np.asarray(theirs.loss), **theirs.weights}
            try:
                compare(found, expected, ignored=noise, when=f"after step {number} ")
            except MismatchError as error:
                mismatch = error
                for uncertain in _follow_last_digits(model, options, done, found):
                    if number > 1 and LOSS in uncertain:
                        return
                    certain = {name: x for name, x in expected.items() if name == LOSS or name not in uncertain}
                    try:
                        compare(found, certain, ignored=noise, when=f"after step {number} ")
                        break
                    except MismatchError as error:
                        mismatch = error
                else:
                    raise mismatch
            _compare_gradients(gradients, theirs.gradients, compare, model, options, done[0])
            shared = noise.keys() & found.keys() & expected.keys()
            running.load_state({n: np.where(noise[n], expected[n], found[n]).astype(found[n].dtype) for n in shared})


def _compare_gradients(
    ours: Arrays, theirs: Arrays, compare: Comparison, model: Model, options: dict[str, Any], batch: Arrays
) -> None:
    """Raise if gradients differ: a small learning rate, or an optimizer that scales them, hides that in the weights.

    Those in 16 bits are not compared: each side rounds sums where it likes.
    """
    if compare.tolerance.epsilon:
        return
    # Noise is not left out element by element: it may be on one side only, where the other ends the gradient.
    top = max((largest(x) for x in (*ours.values(), *theirs.values())), default=0.0)
    rounding = ROUNDINGS * max((epsilon_of(x.dtype) for x in theirs.values()), default=0.0) * top
    tolerance = dataclasses.replace(compare.tolerance, least=rounding / compare.tolerance.relative)
    compare = dataclasses.replace(compare, tolerance=tolerance, describe="the gradient of `{}`".format)
    try:
        compare(ours, theirs, when="in step 1 ")
    except MismatchError as error:
        mismatch = error
    else:
        return
    moved = dict.fromkeys(ours, 0.0)
    with start(model, **options) as running:
        for _ in _with_other_last_digits(running):
            others = running.gradients(batch)
            moved = {name: max(moved[name], distance(array, others[name])) for name, array in ours.items()}
            certain = {n: x for n, x in theirs.items() if n in ours and distance(ours[n], x) > _BEYOND_DOUBT * moved[n]}
            try:
                return compare(ours, certain, when="in step 1 ")
            except MismatchError as error:
                mismatch = error
    raise mismatch


def _follow_last_digits(
    model: Model, options: dict[str, Any], batches: Sequence[Arrays], found: Arrays
) -> Iterator[set[str]]:
    """Yield what changes when the weights change in their last digits: in deep networks differences grow.

    Each trial adds to what the trials before it have moved.
    """
    uncertain: set[str] = set()
    for other in steps_with_other_last_digits(model, options, batches):
        uncertain |= {name for name, array in found.items() if distance(array, other[name]) > _SENSITIVE}
        yield uncertain


def steps_with_other_last_digits(
    model: Model, options: Mapping[str, Any], batches: Sequence[Arrays]
) -> Iterator[Arrays]:
    """Yield the last loss and the state after steps that begin with weights which differ in their last digits."""
    with start(model, **options) as running:
        for _ in _with_other_last_digits(running):
            losses = [running.step(batch)[running.loss] for batch in batches]
            yield {LOSS: np.asarray(losses[-1]), **running.state()}


def _with_other_last_digits(running: Engine) -> Iterator[None]:
    """Change the last digits of all weights, in the state that an engine has now, some times, each time differently."""
    rng = generator(0)
    state = running.state()
    weights = {each.name: each.array for each in running.states() if each.role == "parameter"}
    for _ in range(_SHAKES):
        shaken = {name: x * (1 + _SHAKE * rng.uniform(-1, 1, x.shape)) for name, x in weights.items()}
        running.load_state(state | {name: array.astype(weights[name].dtype) for name, array in shaken.items()})
        yield


def _describe(name: str) -> str:
    return name if name == LOSS else f"`{name}`"


def epsilon_in(types: Iterable[ir.DataType | None]) -> float:
    """What the last digit of the narrowest of some types is worth, if that has 16 bits; else nothing."""
    return max((epsilon_of(dtype.numpy()) for dtype in types if dtype in _NARROW and dtype), default=0.0)


def types_in(model: Model) -> set[ir.DataType | None]:
    """The types of numbers that a model computes with."""
    graphs = [model.graph, *(step.algorithm for step in model.steps), *(f.graph for f in model.functions.values())]
    return {value.dtype for graph in graphs for value in values(graph)}


def without_dropout(model: Model) -> Model:
    """A copy of an inference model without Dropout."""
    made = model.copy()
    for node in list(made.graph.all_nodes()):
        if node.op_type == "Dropout" and not node.domain:
            kept, source = node.outputs[0], node.inputs[0]
            assert source is not None and node.graph is not None
            identity = ir.node("Identity", [source])
            node.graph.insert_before(node, identity)
            identity.outputs[0].type, identity.outputs[0].shape = kept.type, kept.shape
            kept.replace_all_uses_with(identity.outputs[0], replace_graph_outputs=True)
            node.graph.remove(node)
            identity.outputs[0].name = kept.name
    return made


# ---- updates of an optimizer -----------------------------------------------------------------------------------------

# The same updates of an optimizer and of what was read or traced of it, by random gradients.
#
# A number that was taken for a constant, and is none, shows here.

_TRIALS = ((1.0, 1.0), (0.4, 1e-3), (2.5, 30.0), (1.0, 0.1))
"""Updates: by what the learning rate is multiplied, and how large gradients are."""
_RELATIVE = 1e-5
"""Updates are made element by element, without sums in an order of one's own."""
_UNSEEN = "a step depends on what a trace does not see: random numbers, or something outside of the optimizer"


class Trial(NamedTuple):
    """An update."""

    number: int
    """The first is 1."""
    factor: float
    """By what the learning rate is multiplied."""
    gradients: Arrays


def compare_updates(
    ours: Callable[[Arrays, Trial], Arrays],
    theirs: Callable[[Trial], Arrays],
    start: Arrays,
    parameters: Iterable[str],
    *,
    optimizer: str,
    reference: str = "what was traced of it",
    hint: str = _UNSEEN,
    repeats: int = 1,
) -> None:
    """Let both make the same updates, each from the same parameters and state, or say what differs first.

    `start` is what the optimizer, `theirs`, begins with: parameters, and what else is to be compared. `ours` makes an
    update from where the optimizer was before.
    """
    called = "an update of `{}` by " + optimizer.replace("{", "{{").replace("}", "}}")
    compare = Comparison(reference, hint, Tolerance(_RELATIVE), called.format)
    before = dict(start)
    for trial in _trials({name: before[name] for name in parameters}, repeats):
        found, expected = ours(before, trial), theirs(trial)
        compare(found, expected, before=before)
        before |= expected


def update_by(function: FunctionOptimizer, engine: str = "onnxruntime") -> Callable[[Arrays, Trial], Arrays]:
    """Updates by the graph of an optimizer."""
    names = [*function.parameters, *(value.name or "" for value in function.state)]
    types = {value.name or "": value.dtype.numpy() for value in function.inputs if value.dtype is not None}
    compute = engines.function(function.update, engine=engine)

    def update(before: Arrays, trial: Trial) -> Arrays:
        gradients = {gradient_of(name): gradient for name, gradient in trial.gradients.items()}
        given = {**before, **gradients, RATE: function.lr * trial.factor, COUNT: trial.number}
        found = compute({name: np.asarray(given[name], dtype) for name, dtype in types.items()})
        return dict(zip(names, found.values(), strict=True))

    return update


def _trials(parameters: Arrays, repeats: int = 1) -> Iterator[Trial]:
    """Updates of these parameters, whose gradients have elements of very different sizes: it matters where an ε is."""
    rng = generator(0)
    for number, (factor, size) in enumerate(_TRIALS * repeats, 1):
        shapes = {name: array.shape for name, array in parameters.items()}
        drawn = {name: rng.normal(size=shape) * 10.0 ** rng.uniform(-6, 0, shape) for name, shape in shapes.items()}
        yield Trial(number, factor, {n: np.asarray(size * x, parameters[n].dtype) for n, x in drawn.items()})
