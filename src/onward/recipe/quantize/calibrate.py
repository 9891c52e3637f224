"""Ranges of activations, measured on data before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from onward.build import Builder
from onward.errors import DataError
from onward.model import Model
from onward.recipe.quantize.observe import BATCHES, batch_range
from onward.recipe.quantize.ranges import Rounding, parameters_as_numbers, roundings
from onward.runtime.sessions import explain_failures, open_session
from onward.transform.training import without_steps
from onward.transform.unused import keep_only


def has_ranges(model: Model) -> bool:
    """Whether training observes or learns ranges of activations."""
    return bool(_of_activations(model.graph))


def needs_calibration(model: Model) -> int:
    """How many batches a training model is to be calibrated on; 0 if it was, or has no ranges of activations."""
    asked = [one.facts.get("calibrate", 0) for one in _of_activations(model.graph)]
    if not asked or BATCHES not in model.step().algorithm.initializers:
        return 0
    return max(asked) if int(model.array(BATCHES)) == 0 else 0


def calibrate(model: Model, batches: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """State that a training model can begin with: ranges of activations over batches, while nothing but weights is
    rounded, and the scales and zero points that follow from them."""
    found = list(_of_activations(model.graph))
    measured = _measure(model, batches)
    state: dict[str, np.ndarray] = {}
    for one, (low, high) in zip(found, measured, strict=True):
        scale, zero = parameters_as_numbers(low, high, one.dtype)
        state |= {one.scale.name or "": scale, one.zero.name or "": zero}
        if one.facts["ranges"] == "moving":
            state |= {name: np.asarray(x, np.float32) for name, x in zip(one.limits, (low, high), strict=True)}
    state[BATCHES] = np.asarray(1, np.int64)
    return state


def _of_activations(graph: ir.Graph) -> list[Rounding]:
    return [one for one in roundings(graph) if not one.is_weight]


def _measure(model: Model, batches: Iterable[Mapping[str, np.ndarray]]) -> list[tuple[float, float]]:
    session = open_session(_measuring(model))
    wanted = [value.name for value in session.get_inputs()]
    rows = []
    for batch in batches:
        with explain_failures(DataError, "could not compute anything from this batch"):
            rows.append(session.run(None, {name: batch[name] for name in wanted}))
    if not rows:
        raise DataError("there are no data to calibrate on", hint="`quantize=int8:calibrate=0` begins without")
    ends = np.asarray(rows, np.float64).reshape(len(rows), -1, 2)
    averaged = any(one.facts.get("percentile") for one in _of_activations(model.graph))
    low, high = (ends.mean(0) if averaged else np.stack([ends[..., 0].min(0), ends[..., 1].max(0)], -1)).T
    return [(float(a), float(b)) for a, b in zip(low, high, strict=True)]


def _measuring(model: Model) -> Model:
    """The inference graph, in which activations are not rounded, with the ends of their ranges as outputs."""
    plain = without_steps(model)
    graph = plain.graph
    found = _of_activations(graph)
    sources = [one.x for one in found]
    scales = {one.scale for one in found}
    for node in [node for node in graph if node.op_type == "QuantizeLinear" and node.inputs[1] in scales]:
        x = node.inputs[0]
        assert x is not None
        for use in list(node.outputs[0].uses()):
            if use.node.op_type == "DequantizeLinear":
                use.node.outputs[0].replace_all_uses_with(x, replace_graph_outputs=True)
                sources = [x if source is use.node.outputs[0] else source for source in sources]
    op = Builder(graph, opset=plain.opset, names=plain.names(), functions=plain.functions, scope="range")
    ends = [batch_range(op, op(x), one.facts.get("percentile")) for one, x in zip(found, sources, strict=True)]
    keep_only(plain, [end.value for both in ends for end in both])
    return plain
