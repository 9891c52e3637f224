"""Where a graph is quantised: products with their weights, the values that they read, and those that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onward.constants import constant_tensor
from onward.errors import UnknownNameError
from onward.recipe.layers import Layer, layers, listing
from onward.recipe.quantize.settings import FIRST, LAST, WEIGHTED, Settings
from onward.recipe.trainable import matching
from onward.standard import is_standard

MOVES = frozenset(("Flatten", "Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"))
"""Operators that hand on what they read: its scale serves their results, too."""
_ACTIVATIONS = ("Relu", "Clip")
"""Operators that runtimes make part of the product before them."""
_ON_THE_WAY = ("Identity", "Transpose")


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """A node that is to compute with integers."""

    node: ir.Node
    names: tuple[str, ...]
    """What a person may call it."""
    weight: ir.Value | None = None
    """As it is stored."""
    axis: int = 0
    """Of the weight, along which outputs are."""

    @property
    def inputs(self) -> list[int]:
        """Which of its inputs are activations."""
        if self.weight is not None:
            return [0]
        return [i for i, value in enumerate(self.node.inputs) if value is not None and constant_tensor(value) is None]

    @property
    def rounds_result(self) -> bool:
        """Whether it makes integers, so that its result has a scale; matrix products can make floats, too."""
        return self.node.op_type not in ("Gemm", "MatMul")

    @property
    def result(self) -> ir.Value:
        """What it makes, after an activation that only this goes into."""
        value = self.node.outputs[0]
        uses = tuple(value.uses())
        while (
            len(uses) == 1 and not value.is_graph_output() and uses[0].node.op_type in _ACTIVATIONS and uses[0].idx == 0
        ):
            value = uses[0].node.outputs[0]
            uses = tuple(value.uses())
        return value


def places(graph: ir.Graph, settings: Settings) -> list[Place]:
    """The nodes that settings name, in order."""
    known = {layer.node: layer for layer in layers(graph)}
    possible = {*WEIGHTED, *settings.operators}
    nodes = (node for node in graph if is_standard(node) and node.op_type in possible)
    found = [place for node in nodes if (place := _place(node, known))]
    weighted = [place for place in found if place.weight is not None]
    kept: list[Place] = []
    for word in settings.keep:
        if word in (FIRST, LAST):
            kept += weighted[:1] if word == FIRST else weighted[-1:]
        else:
            kept += _matching((word,), found)
    wanted = found if settings.targets == ("*",) else _matching(settings.targets, found)
    chosen = [place for place in found if place in wanted and place not in kept]
    chosen = [place for place in chosen if place.node.op_type in settings.operators]
    if not chosen:
        raise UnknownNameError(
            "nothing is left to quantise: no node is named that is one of " + ", ".join(settings.operators),
            hint=listing(known.values()),
        )
    return chosen


def _matching(patterns: Sequence[str], found: Iterable[Place]) -> list[Place]:
    found = list(found)
    for pattern in patterns:
        if not any(matching([pattern], place.names) for place in found):
            names = ", ".join(dict.fromkeys(place.names[0] for place in found))
            raise UnknownNameError(f"`{pattern}` matches nothing that can be quantised", hint=f"there are {names}")
    return [place for place in found if matching(patterns, place.names)]


def _place(node: ir.Node, known: dict[ir.Node, Layer]) -> Place | None:
    own = tuple(name for name in (node.name, node.outputs[0].name if node.outputs else None) if name)
    if (layer := known.get(node)) is not None:
        if any(step.op_type not in _ON_THE_WAY for step in layer.path):
            return None
        return Place(node, layer.names, layer.weight, 0 if layer.units_first else len(layer.shape) - 1)
    if node.op_type == "ConvTranspose":
        weight = node.inputs[1]
        stored = constant_tensor(weight) is not None
        return Place(node, (*own, weight.name or ""), weight, 1) if stored and weight is not None else None
    if node.op_type in WEIGHTED and (
        node.op_type != "MatMul" or any(constant_tensor(v) is not None for v in node.inputs)
    ):
        return None
    return Place(node, own) if own else None
