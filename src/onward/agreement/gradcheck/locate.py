"""Finding the operator to blame: each is checked alone, on the numbers that it met."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import onnx_ir as ir

from onward.agreement.gradcheck.check import Settings, function_of, rows, settle
from onward.agreement.gradcheck.evaluate import Arrays, Runner, in_float64
from onward.agreement.gradcheck.report import Culprit
from onward.agreement.gradcheck.subject import Subject
from onward.constants import constant_tensor
from onward.errors import Error
from onward.model import Model
from onward.model.core import values
from onward.model.walk import between, read_by
from onward.transform.extract import extract
from onward.transform.float_type import FLOATS
from onward.transform.inline import inline
from onward.transform.training import keep_only
from onward.transform.types import fill_in_types


def culprit(subject: Subject, wrong: Iterable[str], inputs: Arrays, settings: Settings) -> Culprit | None:
    """The first operator on the way back from y to what is wrong whose own derivative is wrong."""
    known = {value.name: value for value in values(subject.model.graph)}
    sources = [known[x] for x in wrong]
    nodes = between(known[subject.y], sources)
    active = {*sources, *(output for node in nodes for output in node.outputs)}
    read = {node: _read(node, known) for node in nodes}
    met = _values(subject.model, [value for values_read in read.values() for value in values_read], inputs)
    for node in reversed(nodes):
        names = [value.name or "" for value in read[node] if constant_tensor(value) is None]
        xs = [value.name or "" for value in read[node] if value in active and value.dtype in FLOATS]
        if xs and all(name in met for name in names):
            found = _blame(subject.model, node, xs, {name: met[name] for name in names}, settings)
            if found is not None:
                return found
    return None


def _read(node: ir.Node, known: dict[str | None, ir.Value]) -> list[ir.Value]:
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


def _blame(model: Model, node: ir.Node, xs: list[str], inputs: Arrays, settings: Settings) -> Culprit | None:
    """Check a node alone: each of its outputs by each of its inputs. What cannot be checked alone is not blamed."""
    for output in node.outputs:
        if output.dtype not in FLOATS or not output.name:
            continue
        with suppress(Error):
            part = Subject(extract(model, list(inputs), [output.name]), output.name, xs)
            function = function_of(part)
            settle(function, [inputs])
            wrong = [row for row in rows(part, function, inputs, settings) if row.verdict == "wrong"]
            if wrong:
                inner = _inside(part, node, [row.x for row in wrong], inputs, settings)
                return inner or Culprit(node.name or "", node.op_type, output.name, wrong[0])
    return None


def _inside(part: Subject, node: ir.Node, wrong: list[str], inputs: Arrays, settings: Settings) -> Culprit | None:
    """Where the node calls a function of the model, the operator in there that is to blame."""
    if node.op_identifier() not in part.model.functions:
        return None
    model = inline(part.model)
    fill_in_types(model, values(model.graph))
    return culprit(Subject(model, part.y, part.xs), wrong, inputs, settings)
