"""`check_gradients`: gradients of a model against finite differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
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
from onward.transform.bodies import lift_from_bodies
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

    All is computed in float64, on the engine `numpy`. If a gradient is wrong, each operator between is checked alone,
    and the report names the first wrong one.

    - `model`: any model
    - `y`, `xs`: names of values (default: those of the Gradient node of a training model; else the scalar output, or
      the first, by all parameters and floating-point inputs that it depends on). A `y` of several elements is
      multiplied by random numbers and summed
    - `inputs`: the point to check at: a dict of arrays or the path of an .npz file. Missing inputs are drawn
    - `directions`: number of random directions for each x
    - `order`: 2 also checks the gradient of the gradient
    - `seed`: for directions and missing inputs
    - `tolerance`: relative to the norm of a gradient (default: 1e-5)
    - `step`: index of the step in the training model
    """
    checked_model = subject(model, y, xs, step)
    settings = CheckSettings(directions, order, seed, tolerance)
    arrays = fit_inputs(inputs, {value.name or "": value for value in checked_model.model.inputs}, checked_model.spare)
    function = function_of(checked_model)
    point = settle(function, ({**arrays, **rest} for rest in candidate_inputs(checked_model.model, arrays, seed)))
    report_rows = list(rows(checked_model, function, point, settings))
    wrong = list(dict.fromkeys(row.x for row in report_rows if row.verdict == "wrong"))
    return GradientReport(
        y=checked_model.y,
        rows=tuple(report_rows),
        tolerance=TOLERANCE if tolerance is None else tolerance,
        seed=seed,
        made_up=tuple(name for name in point if name not in arrays),
        culprit=culprit(checked_model, wrong, point, settings) if wrong else None,
    )


# ---- y and xs --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model without training whose only output is y, and the values that y is differentiated by."""

    model: Model
    y: str
    xs: list[str]
    spare: frozenset[str] = frozenset()
    """Inputs of the original model that y does not depend on."""


def subject(source: Source, y: str | None, xs: Sequence[str] | None, step: int) -> Subject:
    """Return the subgraph that computes y; of a training model, with the y and xs of a step."""
    model = check_signatures(load(source))
    if model.steps:
        node = next(reversed(model.step(step).gradients()), None)  # no other Gradient differentiates the last one
        if node is not None and y is None:
            y, xs = string(node, "y"), strings(node, "xs") if xs is None else xs
        model = Model(model.combined(step), path=model.path)
    else:
        model = model.copy()
    model = of_one_opset(model, OLDEST_OPSET)
    lift_from_bodies(model)
    link_gradients(model.graph)
    by_name = {value.name: value for value in values(model.graph) if value.name}
    fill_in_types(model, by_name.values())
    target = by_name[y] if y in by_name else _default_y(model) if y is None else _unknown([y], by_name)
    missing = [x for x in xs or () if x not in by_name]
    if missing:
        _unknown(missing, by_name)
    names = [x.name or "" for x in _default_xs(model, target)] if xs is None else list(xs)
    for value in (target, *(by_name[name] for name in names)):
        if value.dtype not in FLOATS:
            dtype = value.dtype.name.lower() if value.dtype is not None else "of an unknown type"
            raise UnsupportedError(
                f"`{value.name}` is {dtype}: only floating-point values have derivatives",
                hint="choose a floating-point value",
            )
    _, read = ancestors([target])
    if independent := [name for name in names if by_name[name] not in read]:
        listed = ", ".join(f"`{name}`" for name in independent)
        raise UnsupportedError(f"`{target.name}` does not depend on {listed}", hint="remove it from `xs`")
    before = {value.name or "" for value in model.inputs}
    keep_only(model, [target])
    spare = before - {value.name for value in model.inputs}
    return Subject(lower_gradients(Context(model)), target.name or "", names, frozenset(spare))


def _unknown(names: Sequence[str], available: Iterable[str]) -> ir.Value:
    listed = ", ".join(f"`{name}`" for name in names)
    raise UnknownNameError(f"the model has no value {listed}", hint=suggest_or_list(names[0], available))


def _default_y(model: Model) -> ir.Value:
    """Return the output that looks like a loss: the only scalar, else the first floating-point output."""
    floats = [value for value in model.outputs if value.dtype in FLOATS]
    if not floats:
        raise UnsupportedError("the model has no floating-point output", hint="name a value to differentiate: `y=`")
    scalars = [value for value in floats if value.shape is not None and not value.shape.rank()]
    return scalars[0] if len(scalars) == 1 else floats[0]


def _default_xs(model: Model, y: ir.Value) -> list[ir.Value]:
    """Return the parameters, as `prepare` would choose them, and the inputs that a gradient reaches."""
    by_name = {value.name: value for value in values(model.graph)}
    parameters = [by_name[choice.name] for choice in judge(model, [y]) if choice.role == "parameter"]
    edges = gradient_edges([y])
    readers = {x: edges.get(x, ()) for x in model.inputs if x.dtype in FLOATS}
    inputs = [x for x, uses in readers.items() if any(has_gradient(n.domain, n.op_type, i) for n, i in uses)]
    if not parameters and not inputs:
        raise UnsupportedError(
            f"no gradient flows from `{y.name}` to a parameter or a floating-point input",
            hint="name the values to differentiate by: `xs=`, or `--wrt` on the command line",
        )
    return [*parameters, *inputs]


# ---- derivatives of the first and second order -----------------------------------------------------------------------

_WORST_FIRST: tuple[Verdict, ...] = ("wrong", "not finite", "kink", "unclear", "ok")


@dataclasses.dataclass(frozen=True)
class CheckSettings:
    directions: int
    order: int
    seed: int
    tolerance: float | None


def function_of(subject: Subject) -> SteppedFunction:
    inputs = [value.name or "" for value in subject.model.inputs if value.dtype in FLOATS]
    return SteppedFunction(in_float64(subject.model), subject.y, subject.xs, inputs)


def settle(function: SteppedFunction, candidates: Iterable[Arrays]) -> Arrays:
    """Move a function to the first point where it is finite, else to the first where it runs; return that point."""
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
            "the result differs from run to run", hint="remove random operators, or give each a `seed` attribute"
        )
    return inputs


def rows(subject: Subject, function: SteppedFunction, inputs: Arrays, settings: CheckSettings) -> Iterator[GradientRow]:
    """Yield a row for each x and each order."""
    rng = generator(settings.seed)
    yield from _rows(function, settings, rng, 1)
    if settings.order > 1:
        second = _second_order(subject, function, inputs, rng)
        if second is not None:
            yield from _rows(second, settings, rng, 2)


def _rows(
    function: SteppedFunction, settings: CheckSettings, rng: np.random.Generator, order: int
) -> Iterator[GradientRow]:
    rows_of: dict[str, list[GradientRow]] = {x: [] for x in function.xs}
    for _ in range(settings.directions):
        dy = cotangent(function.y, rng)
        gradients = function.gradients(dy, {})
        tolerance = TOLERANCE if settings.tolerance is None else settings.tolerance
        for x in function.xs:
            with np.errstate(all="ignore"):  # what overflows is reported as such
                row = compare(function, x, dy, gradients[x], tolerance, rng)
            rows_of[x].append(dataclasses.replace(row, order=order))
    for tried in rows_of.values():
        yield min(tried, key=lambda row: (_WORST_FIRST.index(row.verdict), -row.difference))


def cotangent(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return factors that make y a scalar: random numbers, or 1 for a scalar."""
    return rng.standard_normal(y.shape) if y.size > 1 else np.ones(y.shape)


def _second_order(
    subject: Subject, function: SteppedFunction, inputs: Arrays, rng: np.random.Generator
) -> SteppedFunction | None:
    """Return the derivative of y along a direction of all xs, as a function of xs; None if it is constant."""
    derivative = _along(subject.model, subject)
    names = {value.name for value in values(derivative.graph)}
    xs = [x for x in subject.xs if x in names]
    if not xs:
        return None
    dy = derivative.graph.inputs[-1 - len(subject.xs)].name or ""
    factors = {dy: cotangent(function.y, rng), **{_direction(x): function.random_step(x, rng) for x in subject.xs}}
    second = SteppedFunction(_along(in_float64(subject.model), subject), _SECOND, xs, [*function.movable, *factors])
    settle(second, [{**inputs, **factors}])
    return second


_SECOND = "derivative along a direction"


def _direction(x: str) -> str:
    return f"{x}/direction"


def _along(model: Model, subject: Subject) -> Model:
    """Return a model of one scalar: the gradients of xs times directions, which are inputs."""
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


def culprit(subject: Subject, wrong: Iterable[str], inputs: Arrays, settings: CheckSettings) -> Culprit | None:
    """Return the first operator, going back from y to the wrong xs, whose own derivative is wrong."""
    by_name = {value.name: value for value in values(subject.model.graph)}
    sources = [by_name[x] for x in wrong]
    nodes = between(by_name[subject.y], sources)
    active = {*sources, *(output for node in nodes for output in node.outputs)}
    read = {node: [v for v in dict.fromkeys(read_by(node)) if by_name.get(v.name) is v] for node in nodes}
    arrays = _compute(subject.model, chain.from_iterable(read.values()), inputs)
    for node in reversed(nodes):
        names = [value.name or "" for value in read[node] if constant_tensor(value) is None]
        xs = [value.name or "" for value in read[node] if value in active and value.dtype in FLOATS]
        if xs and all(name in arrays for name in names):
            blamed = _blame(subject.model, node, xs, {name: arrays[name] for name in names}, settings)
            if blamed is not None:
                return blamed
    return None


def _compute(model: Model, wanted: Iterable[ir.Value], inputs: Arrays) -> dict[str, np.ndarray]:
    """Return the tensors among some values of the model."""
    tensors = [value for value in wanted if isinstance(value.type, ir.TensorType) and constant_tensor(value) is None]
    names = list(dict.fromkeys(value.name or "" for value in tensors))
    if not names:
        return {}
    model = in_float64(model)
    by_name = {value.name: value for value in values(model.graph)}
    keep_only(model, [by_name[name] for name in names])
    return Runner(model)(inputs)


def _blame(model: Model, node: ir.Node, xs: list[str], inputs: Arrays, settings: CheckSettings) -> Culprit | None:
    """Check each output of a node by each of its inputs. A node that cannot be checked alone is not blamed."""
    for output in node.outputs:
        if output.dtype not in FLOATS or not output.name:
            continue
        with suppress(Error):
            alone = Subject(extract(model, list(inputs), [output.name]), output.name, xs)
            function = function_of(alone)
            settle(function, [inputs])
            wrong = [row for row in rows(alone, function, inputs, settings) if row.verdict == "wrong"]
            if not wrong:
                continue
            inner = None
            if node.op_identifier() in alone.model.functions:
                body = inline(alone.model)
                fill_in_types(body, values(body.graph))
                checked_body = Subject(body, alone.y, alone.xs)
                inner = culprit(checked_body, [row.x for row in wrong], inputs, settings)
            return inner or Culprit(node.name or "", node.op_type, output.name, wrong[0])
    return None
