"""Finding the first value that two engines compute differently: one step again, with all values as outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onward.agreement.report import Difference
from onward.agreement.tolerance import Arrays, distance
from onward.engines import function
from onward.lowering.step import Manner, lower_for_engine
from onward.model import Model
from onward.model.core import values
from onward.transform.types import fill_in_types


class Way(NamedTuple):
    """An engine, and whether it takes our rules for the derivative."""

    engine: str
    rules: bool

    @property
    def derivative(self) -> str:
        return "rules" if self.rules else "own"


def first_difference(
    model: Model, index: int, way: Way, reference: Way, step: int, inputs: Arrays, tolerance: float
) -> Difference | None:
    """The first value of the step, from the same state and batch, in the order of the graph."""
    found, expected = (_values(model, index, which, inputs) for which in (way, reference))
    for name in found:
        if name in expected and (far := distance(found[name], expected[name])) > tolerance:
            magnitude, other = (float(np.abs(x[name].astype(np.float64)).max(initial=0)) for x in (found, expected))
            return Difference(name, step, way.engine, reference.engine, magnitude, other, far)
    return None


def _values(model: Model, index: int, way: Way, inputs: Arrays) -> dict[str, np.ndarray]:
    lowered = lower_for_engine(model, index, manner=Manner(differentiate=way.rules))
    graph = lowered.graph
    fill_in_types(lowered, values(graph))
    graph.outputs[:] = dict.fromkeys((*_tensors(graph), *graph.outputs))
    given = {value.name: inputs[value.name] for value in graph.inputs if value.name and value.name in inputs}
    results = function(lowered, engine=way.engine)(given)
    return {name: value for name, value in results.items() if isinstance(value, np.ndarray)}


def _tensors(graph: ir.Graph) -> Iterable[ir.Value]:
    produced = (value for node in graph for value in node.outputs if value.name)
    return (value for value in produced if isinstance(value.type, ir.TensorType))
