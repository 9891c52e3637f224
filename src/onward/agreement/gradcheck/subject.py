"""What is checked: a plain model that computes y, and the xs by which it is differentiated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onward.differentiate.gradients import lower_gradients
from onward.errors import UnknownNameError, UnsupportedError, near_or_first
from onward.model import Model, Source, load
from onward.model.checks import check_signatures
from onward.model.core import string, strings, tie, values
from onward.model.walk import ancestors
from onward.recipe.trainable import gradient_edges, judge
from onward.rules.registry import has_gradient
from onward.standard import OLDEST_OPSET
from onward.transform.context import Context
from onward.transform.float_type import FLOATS
from onward.transform.opset import of_one_opset
from onward.transform.training import keep_only
from onward.transform.types import fill_in_types


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model without training whose only output is y, and what it is differentiated by."""

    model: Model
    y: str
    xs: list[str]
    spare: frozenset[str] = frozenset()
    """Inputs of the whole model that y does not depend on."""


def subject(source: Source, y: str | None, xs: Sequence[str] | None, step: int) -> Subject:
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
    tie(model.graph)
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
    return Subject(lower_gradients(Context(model)), target.name or "", names, frozenset(spare))


def _unknown(names: Sequence[str], known: Iterable[str]) -> ir.Value:
    listed = ", ".join(f"`{name}`" for name in names)
    raise UnknownNameError(f"there is no value {listed}", hint=near_or_first(names[0], known))


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
