"""The learning rate of the next update: the schedule that a file records, run with the numbers that it holds now."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onward.build import DOMAIN, DOMAIN_VERSION, Builder
from onward.errors import Error
from onward.inspect.summary_fields import ScheduleSection
from onward.model import Model
from onward.recipe.schedules import Part, schedule, sequence
from onward.standard import COMMON_OPSET, IR_VERSION
from onward.transform.sessions import evaluate


def rate_now(sections: Sequence[ScheduleSection], lr: float, step: int) -> float | None:
    """The rate after `step` updates; None for a schedule that is not ours, or not complete."""
    imports = {"": COMMON_OPSET, DOMAIN: DOMAIN_VERSION}
    graph = ir.Graph([], [], nodes=[], opset_imports=imports, name="rate")
    functions: dict[ir.OperatorIdentifier, ir.Function] = {}
    op = Builder(graph, opset=COMMON_OPSET, functions=functions)
    try:
        parts = [_part(op, section) for section in sections]
        rate = sequence(op, op.constant(np.float64(lr)), op.constant(np.int64(step)), parts)
    except (Error, KeyError, TypeError, ValueError, AttributeError):
        return None
    graph.outputs.append(rate.value)
    (result,) = evaluate(Model(ir.Model(graph, ir_version=IR_VERSION, functions=list(functions.values()))))
    return float(result) if math.isfinite(result) else None


def _part(op: Builder, section: ScheduleSection) -> Part:
    numbers = {name: op.constant(np.asarray(number, np.float64)) for name, number in section.numbers.items()}
    until = numbers.pop("until", None)
    kind = schedule(section.name)
    choices = {name: section.choices.get(name, allowed[0]) for name, allowed in kind.choices.items()}
    return Part(kind, numbers, choices, until)
