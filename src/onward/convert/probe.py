"""The same steps on both sides of a conversion: what a carrier computes, and what its training model does.

Dropout is left out, since no two frameworks draw the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import onnx_ir as ir

from onward.errors import MismatchError
from onward.inspect import describe
from onward.model import Model
from onward.run import load
from onward.run.engine import Arrays

TOLERANCE = 1e-4
"""Of losses, and of weights as parts of their largest element."""

_FOLLOW_SIGNS = ("lion",)
"""Optimizers that make whole steps of rounding errors, where a gradient is almost zero: only one can be compared."""


def probe(
    model: Model,
    batches: Iterable[Arrays],
    step: Callable[[Arrays], float],
    weights: Callable[[], Mapping[str, np.ndarray]],
    *,
    carrier: str,
) -> None:
    """Let both sides make the same steps, or say what differs first. The training model itself stays as it is.

    `step` is a step of the carrier, with its loss; `weights` are its parameters and statistics at that moment. Elements
    that are masked are not compared, and become the carrier's own: where Adam follows nothing but rounding errors, as
    in a bias before a normalization, the sides would part.
    """
    groups = describe(model).steps[0].groups
    comparable = 1 if any(group.optimizer in _FOLLOW_SIGNS for group in groups) else None
    with load(model, threads=1) as engine:
        for number, batch in enumerate(itertools.islice(batches, comparable), 1):
            used = {name: batch[name] for name in engine.inputs}  # some may not matter to the loss
            found, expected = float(engine.step(used)[engine.loss]), step(batch)
            _compare("the loss", np.asarray(found), np.asarray(expected), number, carrier)
            state, theirs = engine.state(), weights()
            for name, array in theirs.items():
                _compare(f"`{name}`", state.get(name, array), array, number, carrier)
            masked = {name: array for name, array in theirs.items() if name in state and np.ma.is_masked(array)}
            engine.load_state(
                {n: np.where(np.ma.getmaskarray(x), np.ma.getdata(x), state[n]) for n, x in masked.items()}
            )


def _compare(what: str, found: np.ndarray, expected: np.ndarray, step: int, carrier: str) -> None:
    size = max(float(np.abs(np.ma.getdata(expected)).max(initial=0)), 1e-3)
    difference = float(np.ma.filled(np.abs(found.astype(np.float64) - expected), 0).max(initial=0))
    if not difference <= TOLERANCE * size:
        raise MismatchError(
            f"after step {step} {what} is off by {difference:.3g} from that of {carrier}, where it is {size:.3g} large",
            hint="the conversion is not exact: please report the model that it was",
        )


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
