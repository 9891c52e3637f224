"""Checking the gradients of a model against differences: `check_gradients`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Annotated

import numpy as np
import onnx_ir as ir

from onward.agreement.derivatives import TOLERANCE, Arrays, Runner, SteppedFunction, compare, in_float64
from onward.agreement.inputs import GIVE, Given, candidate_inputs, fit_inputs, generator
from onward.agreement.report import Culprit, GradientReport, GradientRow, Verdict
from onward.arguments import Count, Range, Seed, checked
from onward.build import Builder
from onward.constants import constant_tensor
from onward.differentiate import vjp
from onward.differentiate.gradients import lower_gradients
from onward.errors import Error, InvalidModelError, UnknownNameError, UnsupportedError, suggest_or_list
from onward.model import Model, Source, load
from onward.model.checks import check_signatures
from onward.model.core import link_gradients, string, strings, values
from onward.model.walk import ancestors, between, read_by
from onward.recipe.trainable import gradient_edges, judge
from onward.rules.registry import has_gradient
from onward.standard import OLDEST_OPSET
from onward.transform.context import Context
from onward.transform.extract import extract
from onward.transform.float_type import FLOATS
from onward.transform.inline import inline
from onward.transform.opset import of_one_opset
from onward.transform.training import keep_only
from onward.transform.types import fill_in_types


@checked()
def check_gradients(
    model: Source,
    y: str | None = None,
    xs: Sequence[str] | None = None,
    *,
    inputs: Given = None,
    directions: Count = 1,
    order: Annotated[int, Range(least=1, most=2)] = 1,
    seed: Seed = 0,
    tolerance: Annotated[float, Range(least=0)] | None = None,
    step: int = 0,
) -> GradientReport:
    """Compare the gradient of `y` by each of `xs` with central differences, along random directions.

        print(onward.check_gradients("digits.onnx", "logits", ["fc1.weight"]))

    All is computed in float64, by the engine `numpy`. Where a gradient is wrong, each operator on the way is checked
    alone, and the report names the first that is.

    - `model`: any model
    - `y`, `xs`: without them, what the Gradient of a training model names; else the output that is a single number, or
      the first, by all parameters and floating-point inputs on which it depends. A `y` of several elements is weighed
      by random numbers
    - `inputs`: a dict of arrays or the path of an .npz file: where to look; what it lacks is made up
    - `directions`: how many are tried for each x
    - `order`: 2 checks the gradient of the gradient as well
    - `seed`: directions, and what is made up, are drawn from it
    - `tolerance`: relative to the size of a gradient
    - `step`: which one, of a training model with several
    """
    what = subject(model, y, xs, step)
    settings = CheckSettings(directions, order, seed, tolerance)
    given = fit_inputs(inputs, {value.name or "": value for value in what.model.inputs}, what.spare)
    function = function_of(what)
    point = settle(function, ({**given, **rest} for rest in candidate_inputs(what.model, given, seed)))
    found = list(rows(what, function, point, settings))
    wrong = list(dict.fromkeys(row.x for row in found if row.verdict == "wrong"))
    blamed = culprit(what, wrong, point, settings) if wrong else None
    return GradientReport(
        y=what.y,
        rows=tuple(found),
        tolerance=TOLERANCE if tolerance is None else tolerance,
        seed=seed,
        made_up=tuple(name for name in point if name not in given),
        culprit=blamed,
    )


# ---- y and xs --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CheckedModel:
    """A model without training whose only output is y, and what it is differentiated by."""

    model: Model
    y: str
    xs: list[str]
    spare: frozenset[str] = frozenset()
    """Inputs of the whole model that y does not depend on."""


def subject(source: Source, y: str | None, xs: Sequence[str] | None, step: int) -> CheckedModel:
    """The part of a model that computes y. Of a training model, the forward pass of a step, differentiated as there."""
    model = check_signatures(load(source))
    if model.steps:
        node = next(reversed(model.step(step).gradients()), None)  # which no other one differentiates once more
        if node is not None and y is None:
            y, xs = string(node, "y"), strings(node, "xs") if xs is None else xs
        model = Model(model.combined(step), path=model.path)
    else:
        model = model.copy()
    model = of_one_opset(model, OLDEST_OPSET)
    link_gradients(model.graph)
    known = {value.name: value for value in values(model.graph) if value.name}
    fill_in_types(model, known.values())
    target = known[y] if y in known else _default_y(model) if y is None else _unknown([y], known)
    missing = [x for x in xs or () if x not in known]
    if missing:
        _unknown(missing, known)
    names = [x.name or "" for x in _default_xs(model, target)] if xs is None else list(xs)
    for name in (target.name or "", *names):
        _check_is_float(known[name])
    names = _on_which_it_depends(names, target, known)
    before = {value.name or "" for value in model.inputs}
    keep_only(model, [target])
    spare = before - {value.name for value in model.inputs}
    return CheckedModel(lower_gradients(Context(model)), target.name or "", names, frozenset(spare))


def _unknown(names: Sequence[str], known: Iterable[str]) -> ir.Value:
    listed = ", ".join(f"`{name}`" for name in names)
    raise UnknownNameError(f"there is no value {listed}", hint=suggest_or_list(names[0], known))


def _default_y(model: Model) -> ir.Value:
    """The output that looks like a loss: a single number, else the first of floats."""
    floats = [value for value in model.outputs if _is_float(value)]
    if not floats:
        raise UnsupportedError("the model has no floating-point output", hint="name what to differentiate as `y`")
    numbers = [value for value in floats if value.shape is not None and not value.shape.rank()]
    return numbers[0] if len(numbers) == 1 else floats[0]


def _default_xs(model: Model, y: ir.Value) -> list[ir.Value]:
    """The parameters, as `prepare` would choose them, and the inputs that a gradient reaches."""
    known = {value.name: value for value in values(model.graph)}
    parameters = [known[choice.name] for choice in judge(model, [y]) if choice.role == "parameter"]
    edges = gradient_edges([y])
    readers = {x: edges.get(x, ()) for x in model.inputs if _is_float(x)}
    inputs = [x for x, found in readers.items() if any(has_gradient(n.domain, n.op_type, i) for n, i in found)]
    if not parameters and not inputs:
        raise UnsupportedError(
            f"no gradient flows from `{y.name}` to a parameter or a floating-point input",
            hint="name by what to differentiate: `xs=`, `--wrt` on the command line",
        )
    return [*parameters, *inputs]


def _is_float(value: ir.Value) -> bool:
    return value.dtype in FLOATS


def _check_is_float(value: ir.Value) -> None:
    if not _is_float(value):
        kind = value.dtype.name.lower() if value.dtype is not None else "of an unknown type"
        raise UnsupportedError(f"`{value.name}` is {kind}: only floating-point values have derivatives")


def _on_which_it_depends(names: list[str], y: ir.Value, known: dict[str, ir.Value]) -> list[str]:
    _, read = ancestors([y])
    independent = [name for name in names if known[name] not in read]
    if independent:
        listed = ", ".join(f"`{name}`" for name in independent)
        raise UnsupportedError(f"`{y.name}` does not depend on {listed}", hint="leave it out of the xs")
    return names


# ---- derivatives of the first and second order -----------------------------------------------------------------------

_WORST_FIRST: tuple[Verdict, ...] = ("wrong", "not finite", "kink", "unclear", "ok")


@dataclasses.dataclass(frozen=True)
class CheckSettings:
    directions: int
    order: int
    seed: int
    tolerance: float | None


def function_of(subject: CheckedModel) -> SteppedFunction:
    inputs = [value.name or "" for value in subject.model.inputs if value.dtype in FLOATS]
    return SteppedFunction(in_float64(subject.model), subject.y, subject.xs, inputs)


def settle(function: SteppedFunction, candidates: Iterable[Arrays]) -> Arrays:
    """Put a function at the first of some points where it can be computed, at best to a finite result."""
    failure: Error | None = None
    usable: Arrays | None = None
    for inputs in candidates:
        try:
            function.at(inputs)
        except Error as error:
            failure = failure or error
            continue
        if function.y.size and np.all(np.isfinite(function.y)):
            break
        usable = usable or inputs
    else:
        if usable is None:
            assert failure is not None
            raise InvalidModelError(f"the model does not run: {failure.message}", hint=GIVE) from failure
        function.at(inputs := usable)
    if not np.array_equal(function.value({}), function.y, equal_nan=True):
        raise UnsupportedError(
            "the result is random: it differs from run to run", hint="leave random operators out, or give them a seed"
        )
    return inputs


def rows(
    subject: CheckedModel, function: SteppedFunction, inputs: Arrays, settings: CheckSettings
) -> Iterator[GradientRow]:
    """A row for each x, and each order."""
    rng = generator(settings.seed)
    yield from _rows(function, settings, rng, 1)
    if settings.order > 1:
        second = _second_order(subject, function, inputs, rng)
        if second is not None:
            yield from _rows(second, settings, rng, 2)


def _rows(
    function: SteppedFunction, settings: CheckSettings, rng: np.random.Generator, order: int
) -> Iterator[GradientRow]:
    found: dict[str, list[GradientRow]] = {x: [] for x in function.xs}
    for _ in range(settings.directions):
        dy = cotangent(function.y, rng)
        gradients = function.gradients(dy, {})
        tolerance = TOLERANCE if settings.tolerance is None else settings.tolerance
        for x in function.xs:
            with np.errstate(all="ignore"):  # what overflows is reported as such
                row = compare(function, x, dy, gradients[x], tolerance, rng)
            found[x].append(dataclasses.replace(row, order=order))
    for tried in found.values():
        yield min(tried, key=lambda row: (_WORST_FIRST.index(row.verdict), -row.difference))


def cotangent(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """What y is weighed by, to make it a number: 1 if it is one already."""
    return rng.standard_normal(y.shape) if y.size > 1 else np.ones(y.shape)


def _second_order(
    subject: CheckedModel, function: SteppedFunction, inputs: Arrays, rng: np.random.Generator
) -> SteppedFunction | None:
    """The derivative of y along a direction of all xs, as a function of xs; None if it is the same everywhere."""
    made = _along(subject.model, subject)
    known = {value.name for value in values(made.graph)}
    xs = [x for x in subject.xs if x in known]
    if not xs:
        return None
    dy = made.graph.inputs[-1 - len(subject.xs)].name or ""
    factors = {dy: cotangent(function.y, rng), **{_direction(x): function.random_step(x, rng) for x in subject.xs}}
    second = SteppedFunction(_along(in_float64(subject.model), subject), _SECOND, xs, [*function.movable, *factors])
    settle(second, [{**inputs, **factors}])
    return second


_SECOND = "derivative along a direction"


def _direction(x: str) -> str:
    return f"{x}/direction"


def _along(model: Model, subject: CheckedModel) -> Model:
    """A model that computes one number: the gradients of xs, times directions, which are inputs."""
    model = vjp(model, subject.y, subject.xs)
    graph = model.graph
    op = Builder(graph, opset=model.opset, names=model.names(), functions=model.functions)
    products = []
    for x, gradient in zip(subject.xs, list(graph.outputs), strict=True):
        direction = ir.Value(name=_direction(x), type=gradient.type, shape=gradient.shape)
        graph.inputs.append(direction)
        products.append(op.ReduceSum(op(gradient) * op(direction), keepdims=0))
    result = op.Sum(*products).value
    result.name, result.shape = _SECOND, ir.Shape(())
    graph.outputs.clear()
    graph.outputs.append(result)
    return model


# ---- the operator to blame -------------------------------------------------------------------------------------------


def culprit(subject: CheckedModel, wrong: Iterable[str], inputs: Arrays, settings: CheckSettings) -> Culprit | None:
    """The first operator on the way back from y to what is wrong whose own derivative is wrong."""
    known = {value.name: value for value in values(subject.model.graph)}
    sources = [known[x] for x in wrong]
    nodes = between(known[subject.y], sources)
    active = {*sources, *(output for node in nodes for output in node.outputs)}
    read = {node: _read_outside(node, known) for node in nodes}
    met = _values(subject.model, [value for values_read in read.values() for value in values_read], inputs)
    for node in reversed(nodes):
        names = [value.name or "" for value in read[node] if constant_tensor(value) is None]
        xs = [value.name or "" for value in read[node] if value in active and value.dtype in FLOATS]
        if xs and all(name in met for name in names):
            found = _blame(subject.model, node, xs, {name: met[name] for name in names}, settings)
            if found is not None:
                return found
    return None


def _read_outside(node: ir.Node, known: dict[str | None, ir.Value]) -> list[ir.Value]:
    """What a node, or a graph nested in it, reads of the graph that the node stands in."""
    return [value for value in dict.fromkeys(read_by(node)) if known.get(value.name) is value]


def _values(model: Model, wanted: list[ir.Value], inputs: Arrays) -> dict[str, np.ndarray]:
    """What the values were when the model ran."""
    tensors = [value for value in wanted if isinstance(value.type, ir.TensorType) and constant_tensor(value) is None]
    names = list(dict.fromkeys(value.name or "" for value in tensors))
    if not names:
        return {}
    made = in_float64(model)
    known = {value.name: value for value in values(made.graph)}
    keep_only(made, [known[name] for name in names])
    return Runner(made)(inputs)


def _blame(model: Model, node: ir.Node, xs: list[str], inputs: Arrays, settings: CheckSettings) -> Culprit | None:
    """Check a node alone: each of its outputs by each of its inputs. What cannot be checked alone is not blamed."""
    for output in node.outputs:
        if output.dtype not in FLOATS or not output.name:
            continue
        with suppress(Error):
            part = CheckedModel(extract(model, list(inputs), [output.name]), output.name, xs)
            function = function_of(part)
            settle(function, [inputs])
            wrong = [row for row in rows(part, function, inputs, settings) if row.verdict == "wrong"]
            if wrong:
                inner = _inside(part, node, [row.x for row in wrong], inputs, settings)
                return inner or Culprit(node.name or "", node.op_type, output.name, wrong[0])
    return None


def _inside(
    part: CheckedModel, node: ir.Node, wrong: list[str], inputs: Arrays, settings: CheckSettings
) -> Culprit | None:
    """Where the node calls a function of the model, the operator in there that is to blame."""
    if node.op_identifier() not in part.model.functions:
        return None
    model = inline(part.model)
    fill_in_types(model, values(model.graph))
    return culprit(CheckedModel(model, part.y, part.xs), wrong, inputs, settings)
