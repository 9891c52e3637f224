"""Comparison of steps: a framework and the training model converted from it, or to it.

Dropout is removed, because no two frameworks draw the same numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onward import engines
from onward.agreement.inputs import generator
from onward.agreement.tolerance import (
    ROUNDINGS,
    Arrays,
    Sides,
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

_FOLLOW_SIGNS = {"sign", "rprop", *(name for name, optimizer in OPTIMIZERS.items() if optimizer.follows_signs)}
"""Optimizers that turn rounding errors of gradients near zero into full updates: only one step can be compared."""
_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
LOSS = "the loss"
_SHAKE = 1e-6
"""Relative perturbation of weights, as large as the rounding of float32 sums of many terms."""
_SENSITIVE = Tolerance.relative / 20
"""Relative change by a perturbation beyond which a value is not compared."""
_BEYOND_DOUBT = 10
"""Values differ if they are this many times further apart than a perturbation moves them."""
_OF_LOGARITHMS = 4 * float(np.finfo(np.float32).eps)
"""Rounding of a loss near 0, such as a cross entropy: a difference of numbers that are not small."""
_SHAKES = 12
"""Number of perturbations: a ReLU that rounding switches moves all gradients before it (by up to a fifth in MobileNet
with batches of 8), and only some perturbations switch it."""
_INEXACT = "the conversion is not exact: please report the model"


class StepResult(NamedTuple):
    """The results of a framework's step, by the names of the model."""

    loss: float
    gradients: Arrays
    weights: Arrays
    """Parameters and statistics after the step."""


def compare_steps(
    model: Model,
    batches: Iterable[Arrays],
    step: Callable[[Arrays], StepResult],
    *,
    framework: str,
    engine: str | None = None,
) -> None:
    """Run the same steps on both sides; raise at the first difference. The training model is not changed.

    Elements that follow rounding errors are not compared; they take the values of the framework, since the two sides
    would diverge. `engine` replaces ONNX Runtime for bfloat16, for which that has few kernels.
    """
    groups = describe(model).steps[0].groups
    comparable = 1 if any(group.optimizer in _FOLLOW_SIGNS for group in groups) else None
    types = types_in(model)
    compare = Sides(f"that of {framework}", _INEXACT, Tolerance(epsilon=epsilon_in(types)), _describe)
    options: dict[str, Any] = {"threads": 1}
    if engine is not None and ir.DataType.BFLOAT16 in types:
        options = {"engine": engine, **({"compile": False} if engine == "torch" else {})}  # slower than a few steps
    noise: dict[str, np.ndarray] = {}
    done: list[Arrays] = []
    with start(model, **options) as running:
        begin = running.state()
        for number, batch in enumerate(itertools.islice(batches, comparable), 1):
            done.append({name: batch[name] for name in running.inputs})  # the loss may not depend on all
            gradients = gradients_of(running, done[-1])
            loss, theirs = running.step(done[-1])[running.loss], step(batch)
            new_noise = noise_in(theirs.gradients, gradients)
            noise |= {name: noise.get(name, False) | new for name, new in new_noise.items()}
            if abs(theirs.loss - float(loss)) <= _OF_LOGARITHMS:
                theirs = theirs._replace(loss=float(loss))
            actual = {LOSS: np.asarray(loss), **running.state()}
            expected = {LOSS: np.asarray(theirs.loss), **theirs.weights}
            errors = _errors(compare, actual, expected, noise, f"after step {number} ")
            if errors:
                moved = dict.fromkeys([LOSS, *errors], 0.0)
                with contextlib.closing(_other_steps(running, begin, done)) as steps:
                    for other in steps:
                        moved = {name: max(far, distance(actual[name], other[name])) for name, far in moved.items()}
                        if number > 1 and moved[LOSS] > _SENSITIVE:
                            return
                        errors = {
                            name: error
                            for name, error in errors.items()
                            if _is_certain(actual[name], expected[name], moved[name], is_loss=name == LOSS)
                        }
                        if not errors:
                            break
            for error in errors.values():
                raise error
            if number == 1:
                _compare_gradients(gradients, theirs.gradients, compare, running, begin, done[0])
            shared = noise.keys() & actual.keys() & expected.keys()
            running.load_state({n: np.where(noise[n], expected[n], actual[n]).astype(actual[n].dtype) for n in shared})


def _errors(compare: Sides, ours: Arrays, theirs: Arrays, noise: Arrays, when: str) -> dict[str, MismatchError]:
    """Return the error of each tensor that differs."""
    errors = {}
    for name in theirs.keys() & ours.keys():
        try:
            compare(ours, {name: theirs[name]}, ignored=noise, when=when)
        except MismatchError as error:
            errors[name] = error
    return {name: errors[name] for name in theirs if name in errors}


def _compare_gradients(
    ours: Arrays, theirs: Arrays, compare: Sides, running: Engine, begin: Arrays, batch: Arrays
) -> None:
    """Raise if gradients differ: small learning rates and adaptive optimizers hide that in the weights.

    Gradients in 16 bits are not compared: each side rounds other partial sums.
    """
    if compare.tolerance.epsilon:
        return
    # Not masked by noise: it may be on one side only, if the other stops the gradient.
    top = max((largest(x) for x in (*ours.values(), *theirs.values())), default=0.0)
    rounding = ROUNDINGS * max((epsilon_of(x.dtype) for x in theirs.values()), default=0.0) * top
    tolerance = dataclasses.replace(compare.tolerance, least=rounding / compare.tolerance.relative)
    compare = dataclasses.replace(compare, tolerance=tolerance, describe="the gradient of `{}`".format)
    errors = _errors(compare, ours, theirs, {}, "in step 1 ")
    moved = dict.fromkeys(errors, 0.0)
    if errors:
        with contextlib.closing(_with_other_last_digits(running, begin, lambda: running.gradients(batch))) as shaken:
            for others in shaken:
                moved = {name: max(far, distance(ours[name], others[name])) for name, far in moved.items()}
                errors = {n: e for n, e in errors.items() if distance(ours[n], theirs[n]) > _BEYOND_DOUBT * moved[n]}
                if not errors:
                    return
    for error in errors.values():
        raise error


def _is_certain(ours: np.ndarray, theirs: np.ndarray, moved: float, *, is_loss: bool) -> bool:
    """True if a difference says something about a value that perturbed weights move so far."""
    return (is_loss or moved <= _SENSITIVE) and distance(ours, theirs) > _BEYOND_DOUBT * moved


def steps_with_other_last_digits(
    model: Model, options: Mapping[str, Any], batches: Sequence[Arrays]
) -> Iterator[Arrays]:
    """Yield the last loss and the state after steps from perturbed weights."""
    with start(model, **options) as running:
        yield from _other_steps(running, running.state(), batches)


def _other_steps(running: Engine, begin: Arrays, batches: Sequence[Arrays]) -> Generator[Arrays, None, None]:
    def steps() -> Arrays:
        losses = [running.step(batch)[running.loss] for batch in batches]
        return {LOSS: np.asarray(losses[-1]), **running.state()}

    return _with_other_last_digits(running, begin, steps)


def _with_other_last_digits(
    running: Engine, begin: Arrays, compute: Callable[[], Arrays]
) -> Generator[Arrays, None, None]:
    """Yield `_SHAKES` times what is computed from a state with perturbed weights; load the present one again."""
    rng, now = generator(0), running.state()
    weights = {entry.name: begin[entry.name] for entry in running.states() if entry.role == "parameter"}
    try:
        for _ in range(_SHAKES):
            shaken = {name: x * (1 + _SHAKE * rng.uniform(-1, 1, x.shape)) for name, x in weights.items()}
            running.load_state({**begin, **{name: array.astype(weights[name].dtype) for name, array in shaken.items()}})
            yield compute()
    finally:
        running.load_state(now)


def _describe(name: str) -> str:
    return name if name == LOSS else f"`{name}`"


def epsilon_in(types: Iterable[ir.DataType | None]) -> float:
    """Return the machine epsilon of the narrowest type if it has 16 bits, else 0."""
    return max((epsilon_of(dtype.numpy()) for dtype in types if dtype in _NARROW and dtype), default=0.0)


def types_in(model: Model) -> set[ir.DataType | None]:
    """Return the types of all values of a model."""
    graphs = [model.graph, *(step.algorithm for step in model.steps), *(f.graph for f in model.functions.values())]
    return {value.dtype for graph in graphs for value in values(graph)}


def without_dropout(model: Model) -> Model:
    """Return a copy of an inference model without Dropout, and with the mean of each random number."""
    copy = model.copy()
    names = copy.names()
    for node in list(copy.graph.all_nodes()):
        if node.op_type == "Dropout" and not node.domain:
            node.op_type = "Identity"
            node.attributes.clear()
            node.resize_inputs(1)
            node.resize_outputs(1)
        elif node.op_type in ("RandomNormalLike", "RandomUniformLike") and not node.domain:
            settings = dict.fromkeys(("low", "mean"), 0.0) | {"high": 1.0}
            settings |= {name: a.as_float() for name, a in node.attributes.items() if name in settings}
            mean = settings["mean"] if "Normal" in node.op_type else (settings["low"] + settings["high"]) / 2
            constant = ir.node("Constant", [], attributes={"value": ir.tensor(np.array(mean, np.float32))})
            shape = ir.node("Shape", [node.inputs[0]])
            assert node.graph is not None
            node.graph.insert_before(node, [constant, shape])
            node.op_type = "Expand"
            node.attributes.clear()
            node.resize_inputs(2)
            node.replace_input_with(0, constant.outputs[0])
            node.replace_input_with(1, shape.outputs[0])
            constant.outputs[0].name, shape.outputs[0].name = names.fresh("mean"), names.fresh("shape")
    return copy


FACTOR, OFFSET, MODULUS = 7919, 13, 10007
"""Numbers of the sequence that takes the place of random numbers: (7919 i + 13) mod 10007 / 10007."""


def with_fixed_draws(model: Model) -> Model:
    """Return a copy of an inference model in which each random operator returns the same sequence of numbers."""
    copy = model.copy()
    names = copy.names()
    for node in list(copy.graph.all_nodes()):
        if node.op_type not in ("RandomNormalLike", "RandomUniformLike") or node.domain:
            continue
        low = node.attributes.get_float("low", 0.0)
        scale, start = node.attributes.get_float("high", 1.0) - low, low
        if "Normal" in node.op_type:  # of the same variance
            scale = node.attributes.get_float("scale", 1.0) * math.sqrt(12)
            start = node.attributes.get_float("mean", 0.0) - scale / 2
        y = node.outputs[0]
        nodes: list[ir.Node] = []

        def add(op_type: str, *inputs: Any, nodes: list[ir.Node] = nodes, **attributes: Any) -> ir.Value:
            nodes.append(ir.node(op_type, inputs, attributes))
            nodes[-1].outputs[0].name = names.fresh("draw")
            return nodes[-1].outputs[0]

        def number(array: Any) -> ir.Value:
            return add("Constant", value=ir.tensor(array))

        shape = add("Shape", node.inputs[0])
        size = add("ReduceProd", shape, keepdims=0)
        index = add("Range", number(np.int64(0)), size, number(np.int64(1)))
        index = add("Add", add("Mul", index, number(np.int64(FACTOR))), number(np.int64(OFFSET)))
        drawn = add("Cast", add("Mod", index, number(np.int64(MODULUS))), to=int(ir.DataType.FLOAT))
        drawn = add("Div", drawn, number(np.float32(MODULUS)))
        drawn = add("Add", add("Mul", drawn, number(np.float32(scale))), number(np.float32(start)))
        drawn = add("Cast", add("Reshape", drawn, shape), to=int(y.dtype or ir.DataType.FLOAT))
        drawn.type, drawn.shape = y.type, y.shape
        assert node.graph is not None
        node.graph.insert_before(node, nodes)
        y.replace_all_uses_with(drawn, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)
    return copy


# ---- updates of an optimizer -----------------------------------------------------------------------------------------

# The optimizer and the graph that was read or traced from it make the same updates with random gradients. This shows
# whether a number was mistaken for a constant.

_TRIALS = ((1.0, 1.0), (0.4, 1e-3), (2.5, 30.0), (1.0, 0.1))
"""Factor of the learning rate, and scale of the gradients, of each update."""
_RELATIVE = 1e-5
"""Tolerance of updates, which are elementwise: no sums, so no other order of sums."""
_UNSEEN = "a step depends on something that a trace does not see: random numbers, or state outside the optimizer"


class Trial(NamedTuple):
    """An update."""

    number: int
    """The first is 1."""
    factor: float
    """Factor of the learning rate."""
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
    """Make the same updates on both sides, each from the same parameters and state; raise at the first difference.

    - `ours`: makes an update from the state that `theirs` had before
    - `theirs`: the optimizer
    - `start`: parameters and state of the optimizer that are compared
    """
    called = "an update of `{}` by " + optimizer.replace("{", "{{").replace("}", "}}")
    compare = Sides(reference, hint, Tolerance(_RELATIVE), called.format)
    before = dict(start)
    for trial in _trials({name: before[name] for name in parameters}, repeats):
        actual, expected = ours(before, trial), theirs(trial)
        compare(actual, expected, before=before)
        before |= expected


def update_by(function: FunctionOptimizer, engine: str = "onnxruntime") -> Callable[[Arrays, Trial], Arrays]:
    """Return a function that makes updates by the graph of an optimizer."""
    names = [*function.parameters, *(value.name or "" for value in function.state)]
    types = {value.name or "": value.dtype.numpy() for value in function.inputs if value.dtype is not None}
    compute = engines.function(function.update, engine=engine)

    def update(before: Arrays, trial: Trial) -> Arrays:
        gradients = {gradient_of(name): gradient for name, gradient in trial.gradients.items()}
        inputs = {**before, **gradients, RATE: function.lr * trial.factor, COUNT: trial.number}
        results = compute({name: np.asarray(inputs[name], dtype) for name, dtype in types.items()})
        return dict(zip(names, results.values(), strict=True))

    return update


def _trials(parameters: Arrays, repeats: int = 1) -> Iterator[Trial]:
    """Yield updates whose gradients span six orders of magnitude, which shows where an optimizer adds its epsilon."""
    rng = generator(0)
    for number, (factor, size) in enumerate(_TRIALS * repeats, 1):
        shapes = {name: array.shape for name, array in parameters.items()}
        drawn = {name: rng.normal(size=shape) * 10.0 ** rng.uniform(-6, 0, shape) for name, shape in shapes.items()}
        yield Trial(number, factor, {n: np.asarray(size * x, parameters[n].dtype) for n, x in drawn.items()})
