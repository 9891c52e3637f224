"""All xs of one y, at one point, to the first and second order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np
import onnx_ir as ir

from onward.agreement.gradcheck.compare import TOLERANCE, compare
from onward.agreement.gradcheck.evaluate import Arrays, Function, in_float64
from onward.agreement.gradcheck.inputs import GIVE, generator
from onward.agreement.gradcheck.report import Row, Verdict
from onward.agreement.gradcheck.subject import Subject
from onward.build import Builder
from onward.differentiate import vjp
from onward.errors import Error, InvalidModelError, UnsupportedError
from onward.model import Model
from onward.model.core import values
from onward.transform.float_type import FLOATS

_WORST_FIRST: tuple[Verdict, ...] = ("wrong", "not finite", "kink", "unclear", "ok")


@dataclasses.dataclass(frozen=True)
class Settings:
    directions: int
    order: int
    seed: int
    tolerance: float | None


def function_of(subject: Subject) -> Function:
    inputs = [value.name or "" for value in subject.model.inputs if value.dtype in FLOATS]
    return Function(in_float64(subject.model), subject.y, subject.xs, inputs)


def settle(function: Function, candidates: Iterable[Arrays]) -> Arrays:
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


def rows(subject: Subject, function: Function, inputs: Arrays, settings: Settings) -> Iterator[Row]:
    """A row for each x, and each order."""
    rng = generator(settings.seed)
    yield from _rows(function, settings, rng, 1)
    if settings.order > 1:
        second = _second_order(subject, function, inputs, rng)
        if second is not None:
            yield from _rows(second, settings, rng, 2)


def _rows(function: Function, settings: Settings, rng: np.random.Generator, order: int) -> Iterator[Row]:
    found: dict[str, list[Row]] = {x: [] for x in function.xs}
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


def _second_order(subject: Subject, function: Function, inputs: Arrays, rng: np.random.Generator) -> Function | None:
    """The derivative of y along a direction of all xs, as a function of xs; None if it is the same everywhere."""
    made = _along(subject.model, subject)
    known = {value.name for value in values(made.graph)}
    xs = [x for x in subject.xs if x in known]
    if not xs:
        return None
    dy = made.graph.inputs[-1 - len(subject.xs)].name or ""
    factors = {dy: cotangent(function.y, rng), **{_direction(x): function.random_step(x, rng) for x in subject.xs}}
    second = Function(_along(in_float64(subject.model), subject), _RESULT, xs, [*function.movable, *factors])
    settle(second, [{**inputs, **factors}])
    return second


_RESULT = "derivative along a direction"


def _direction(x: str) -> str:
    return f"{x}/direction"


def _along(model: Model, subject: Subject) -> Model:
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
    result.name, result.shape = _RESULT, ir.Shape(())
    graph.outputs.clear()
    graph.outputs.append(result)
    return model
