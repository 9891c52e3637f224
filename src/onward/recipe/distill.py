"""Distillation: the student's outputs approach those of another model, the teacher.

    onward.prepare("small.onnx", loss="cross_entropy", teacher="large.onnx", distill="kl:temperature=4,weight=0.5")

Only the training step contains the teacher's graph. It reads the same inputs, in inference mode and
without gradients. With weights w the loss is

    (1 - sum w) * loss + sum w * distance,   for `kl`: distance = T^2 KL(softmax(teacher / T), softmax(student / T))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.arguments import Range
from onward.build import Builder, Expr
from onward.errors import RecipeError, UnknownNameError, suggest
from onward.model import Model, Source, load
from onward.model.core import values
from onward.recipe.losses import functions
from onward.recipe.losses import loss as named_loss
from onward.recipe.spec import POSITIVE, Spec, check_options, checked_number, lookup, one_of, parse
from onward.recipe.step_builder import StepBuilder, embed
from onward.transform.extract import extract
from onward.transform.inline import inline
from onward.transform.merge import add_prefix
from onward.transform.opset import convert_opset
from onward.transform.training import strip
from onward.transform.types import fill_in_types

_PREFIX = "teacher/"
_KL = "kl"
_DISTANCES = dict.fromkeys((_KL, "mse", "l1", "mae", "huber", "smooth_l1", "cosine"))
_OWN_OPTIONS = {"student": None, "teacher": None, "weight": 0.5}
_KL_OPTIONS = {"temperature": 1.0, "axis": 1}


@dataclasses.dataclass(frozen=True)
class DistillTerm:
    """A distance between values of student and teacher (default: the output of the loss)."""

    spec: Spec
    student: str | None
    teacher: str | None
    weight: float

    def fact(self, student: str, teacher: str) -> dict[str, Any]:
        values = {"name": self.spec.name, "student": student, "teacher": teacher}
        return {**values, "options": dict(self.spec.options), "weight": self.weight}


class Distillation:
    """A teacher and the distances to it."""

    def __init__(self, teacher: Source, distill: Any, alone: bool):
        """Parse `distill`. `alone` means without another loss: then the default weight is 1."""
        if isinstance(teacher, int | float | Mapping | list | tuple):
            raise RecipeError(f"`teacher` is `{teacher!r}`, not a model", hint='write `teacher="large.onnx"`')
        specs = list(distill) if isinstance(distill, Sequence) and not isinstance(distill, str) else [distill]
        self.terms = [_term(parse(item), 1.0 if alone else 0.5) for item in specs]
        if not alone and (total := sum(term.weight for term in self.terms)) > 1:
            raise RecipeError(f"the weights of `distill` sum to {total:g}, more than 1", hint="lower `weight`")
        self.model = strip(inline(load(teacher)))

    @property
    def opset(self) -> int:
        return self.model.opset

    def students(self, model: Model, predictions: Sequence[ir.Value]) -> list[ir.Value]:
        """Return the student's value of each term: the named value, else the output of the loss."""
        default = predictions[0] if predictions else None
        students = [_find_value(model, term.student, "the model", default) for term in self.terms]
        fill_in_types(model, students)
        return students

    def add(
        self,
        builder: StepBuilder,
        hard: Expr | None,
        students: Sequence[ir.Value],
        trained: Mapping[ir.Value, ir.Value],
        inputs: Mapping[str, ir.Value],
    ) -> Expr:
        """Append the teacher and return the total loss; `trained` maps inference to training.

        `inputs` are the preprocessed inputs, which the teacher reads too.
        """
        targets = [_counterpart(self.model, term, value) for term, value in zip(self.terms, students, strict=True)]
        outputs = list(dict.fromkeys(targets))
        teacher_graph = extract(self.model, [value.name or "" for value in self.model.inputs], outputs)
        fill_in_types(teacher_graph, teacher_graph.outputs)
        teacher_graph = add_prefix(convert_opset(teacher_graph, builder.model.opset), _PREFIX)
        computed = dict(zip(outputs, teacher_graph.outputs, strict=True))
        read_values = [value for value in teacher_graph.inputs if value.uses()]
        fed = (*builder.model.inputs, *builder.step.algorithm.inputs)
        feeds = {value.name or "": value for value in fed} | dict(inputs)
        own = [inputs.get(value.name or "", value) for value in builder.model.inputs]
        only = own[0] if len(own) == len(read_values) == 1 else None
        sources = {value: _source(builder, value, feeds, only) for value in read_values}
        embed(builder, teacher_graph, sources)
        op = builder.op.scoped("distill")
        results = {name: op(value) for name, value in computed.items()}
        total, share, facts = None, None, []
        for i, (term, value, name) in enumerate(zip(self.terms, students, targets, strict=True)):
            teacher = results[name]
            if not _fit(value.shape, teacher.value.shape):
                raise RecipeError(
                    f"`{value.name}` is {value.shape}, but `{name}` of the teacher is {teacher.value.shape}",
                    hint="name values of one shape: `distill=kl:student=NAME,teacher=NAME`",
                )
            prefix = "distill" if len(self.terms) == 1 else f"distill/{i}"
            distance = _distance(builder, op, term, prefix, op(trained.get(value, value)), teacher)
            weight = builder.hyper(f"{prefix}/weight", term.weight)
            weighted = distance * op.CastLike(weight, distance)
            total = weighted if total is None else total + weighted
            share = op(weight.value) if share is None else share + weight
            facts.append(term.fact(value.name or "", name))
        assert total is not None and share is not None
        builder.fact("distill", facts)
        if hard is None:
            return total
        return op(hard.value) * op.CastLike(1.0 - share, hard) + total


def _term(spec: Spec, weight: float) -> DistillTerm:
    lookup("distillation loss", spec.name, _DISTANCES)
    options = dict(spec.options)
    own = {name: options.pop(name, None) for name in _OWN_OPTIONS}
    for name in ("student", "teacher"):
        if not isinstance(own[name], str | None):
            raise RecipeError(f"`{name}` of `{spec.name}` is `{own[name]}`, not the name of a value")
    weight = weight if own["weight"] is None else own["weight"]
    weight = checked_number(f"`weight` of `{spec}`", weight, Range(least=0, most=1))
    if spec.name == _KL:
        check_options("`kl`", options, {**_OWN_OPTIONS, **_KL_OPTIONS})
        options = {**_KL_OPTIONS, **options}
        checked_number("`temperature` of `kl`", options["temperature"], POSITIVE)
        one_of("`axis` of `kl`", options["axis"], 1, -1)
    return DistillTerm(Spec(spec.name, options), own["student"], own["teacher"], weight)


def _find_value(model: Model, name: str | None, whose: str, default: ir.Value | None) -> ir.Value:
    by_name = {value.name: value for value in values(model.graph) if value.name}
    if name is not None:
        if name not in by_name:
            raise UnknownNameError(f"{whose} has no value `{name}`", hint=suggest(name, by_name) or _outputs(model))
        return by_name[name]
    if default is not None:
        return default
    floating = [value for value in model.outputs if value.dtype is None or value.dtype.is_floating_point()]
    if len(floating) != 1:
        option = "teacher" if whose == "the teacher" else "student"
        hint = f"name one: `distill=kl:{option}=NAME`; {_outputs(model)}"
        raise RecipeError(f"{whose} has {len(floating)} floating-point outputs, and `distill` names none", hint=hint)
    return floating[0]


def _outputs(model: Model) -> str:
    return f"the outputs are {', '.join(value.name or '' for value in model.outputs)}"


def _counterpart(teacher: Model, term: DistillTerm, student: ir.Value) -> str:
    """Return the teacher's value for a term: by its or the student's name, or the only one."""
    same = next((value for value in teacher.outputs if value.name == student.name), None)
    return _find_value(teacher, term.teacher, "the teacher", same).name or ""


# ---- the teacher in the step -----------------------------------------------------------------------------------------


def _source(builder: StepBuilder, target: ir.Value, sources: Mapping[str, ir.Value], only: ir.Value | None) -> ir.Value:
    """Return the student's value for an input of the teacher: by name, or the only one."""
    name = (target.name or "").removeprefix(_PREFIX)
    source = sources.get(name, only)
    if source is None:
        hint = f"rename it (`onward rename`); the inputs are {', '.join(sources)}"
        raise RecipeError(f"the model lacks the teacher's input `{name}`", hint=hint)
    if not _fit(target.shape, source.shape):
        raise RecipeError(
            f"the teacher reads `{name}` of shape {target.shape}, but `{source.name}` has {source.shape}",
            hint="put a Resize before the teacher (`onward merge`)",
        )
    return _in_type(builder.op.scoped("distill")(source), target, f"the teacher's input `{name}`").value


def _in_type(expr: Expr, target: ir.Value, what: str) -> Expr:
    if expr.dtype is None or target.dtype is None or expr.dtype == target.dtype:
        return expr
    if not (expr.dtype.is_floating_point() and target.dtype.is_floating_point()):
        raise RecipeError(f"{what} is {target.dtype.name.lower()}, but `{expr.name}` is {expr.dtype.name.lower()}")
    return expr.op.Cast(expr, to=target.dtype)


def _fit(a: ir.Shape | None, b: ir.Shape | None) -> bool:
    if a is None or b is None:
        return True
    return len(a) == len(b) and all(
        x == y or not isinstance(x, int) or not isinstance(y, int) for x, y in zip(a, b, strict=True)
    )


def _distance(builder: StepBuilder, op: Builder, term: DistillTerm, prefix: str, student: Expr, teacher: Expr) -> Expr:
    target = _in_type(op(teacher.value), student.value, f"the teacher's `{teacher.name}`")
    options = dict(term.spec.options)
    if term.spec.name != _KL:
        return named_loss(term.spec.name).build(op, student, target, **options)
    temperature = op.CastLike(builder.hyper(f"{prefix}/temperature", float(options["temperature"])), student)
    softened = (op.LogSoftmax(scores / temperature, axis=options["axis"]) for scores in (student, target))
    divergence = op.call(functions.KLDivergenceOfLogs, *softened)
    rows = op.ReduceSum(divergence, np.asarray([options["axis"]], np.int64), keepdims=0)
    distance: Expr = op.ReduceMean(rows, keepdims=0) * (temperature * temperature)
    distance.value.shape = ir.Shape([])
    return distance
