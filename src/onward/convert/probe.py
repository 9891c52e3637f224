"""The same steps on both sides of a conversion: what a carrier computes, and what its training model does.

Dropout is left out, since no two frameworks draw the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.engines import start
from onward.engines.engine import Arrays
from onward.errors import MismatchError
from onward.inspect import describe
from onward.model import Model
from onward.model.core import values

TOLERANCE = 1e-4
"""Of losses, and of weights as parts of their largest element."""

_FOLLOW_SIGNS = ("lion", "sign", "rprop")
"""Optimizers that make whole steps of rounding errors, where a gradient is almost zero: only one can be compared."""


def probe(
    model: Model,
    batches: Iterable[Arrays],
    step: Callable[[Arrays], float],
    weights: Callable[[], Mapping[str, np.ndarray]],
    *,
    carrier: str,
    engine: str | None = None,
) -> None:
    """Let both sides make the same steps, or say what differs first. The training model itself stays as it is.

    `step` is a step of the carrier, with its loss; `weights` are its parameters and statistics at that moment. Elements
    that are masked are not compared, and become the carrier's own: where Adam follows nothing but rounding errors, as
    in a bias before a normalization, the sides would part. `engine` is for types that ONNX Runtime does not compute.
    """
    groups = describe(model).steps[0].groups
    comparable = 1 if any(group.optimizer in _FOLLOW_SIGNS for group in groups) else None
    tolerance = _tolerance(model)

    def compare(what: str, found: np.ndarray, expected: np.ndarray, step: int) -> None:
        size = max(float(np.abs(np.ma.getdata(expected)).max(initial=0)), 1e-3)
        difference = float(np.ma.filled(np.abs(found.astype(np.float64) - expected), 0).max(initial=0))
        if not difference <= tolerance * size:
            raise MismatchError(
                f"after step {step} {what} is off by {difference:.3g} from that of {carrier}, "
                f"where it is {size:.3g} large",
                hint="the conversion is not exact: please report the model that it was",
            )

    options: dict[str, Any] = {"threads": 1} if engine is None else {"engine": engine}
    if engine == "torch":
        options["compile"] = False  # which takes longer than a few steps
    with start(model, **options) as running:
        for number, batch in enumerate(itertools.islice(batches, comparable), 1):
            used = {name: batch[name] for name in running.inputs}  # some may not matter to the loss
            found, expected = float(running.step(used)[running.loss]), step(batch)
            compare("the loss", np.asarray(found), np.asarray(expected), number)
            state, theirs = running.state(), weights()
            for name, array in theirs.items():
                compare(f"`{name}`", state.get(name, array), array, number)
            masked = {name: array for name, array in theirs.items() if name in state and np.ma.is_masked(array)}
            chosen = {n: np.where(np.ma.getmaskarray(x), np.ma.getdata(x), state[n]) for n, x in masked.items()}
            running.load_state({name: array.astype(state[name].dtype) for name, array in chosen.items()})


def _tolerance(model: Model) -> float:
    """Wider where numbers of 16 bits are computed, which everyone rounds at other places."""
    types = types_in(model)
    return max([TOLERANCE, *(4 * eps for dtype, eps in _NARROW.items() if dtype in types)])


def types_in(model: Model) -> set[ir.DataType | None]:
    """The types of numbers that a training model computes with."""
    graphs = [model.graph, *(step.algorithm for step in model.steps), *(f.graph for f in model.functions.values())]
    return {value.dtype for graph in graphs for value in values(graph)}


_NARROW = {ir.DataType.FLOAT16: 2.0**-10, ir.DataType.BFLOAT16: 2.0**-7}


def without_dropout(model: Model) -> Model:
    """A copy of an inference model without Dropout."""
    made = model.copy()
    for node in list(made.graph.all_nodes()):
        if node.op_type == "Dropout" and not node.domain:
            kept, source = node.outputs[0], node.inputs[0]
            assert source is not None and node.graph is not None
            identity = ir.node("Identity", [source])
            node.graph.insert_before(node, identity)
            identity.outputs[0].type, identity.outputs[0].shape = kept.type, kept.shape
            kept.replace_all_uses_with(identity.outputs[0], replace_graph_outputs=True)
            node.graph.remove(node)
            identity.outputs[0].name = kept.name
    return made
