"""A graph as models that are executed one after another: the blocks that it repeats, and what is around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import onnx_ir as ir

from onward.analysis.blocks import Part
from onward.model import Model
from onward.standard import IR_VERSION


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """What a part of a graph reads and makes."""

    name: str
    is_block: bool
    reads: list[str]
    """In the order of the inputs of the model that computes it."""
    makes: list[str]
    """For others, in the order of the outputs of the model."""
    own: list[str]
    """What is held and no other piece reads."""
    last: list[str] = dataclasses.field(default_factory=list)
    """What nothing reads after it."""

    def hand_over(self, values: dict[str, Any], results: Iterable[Any]) -> None:
        """Put its results among the values at hand, and let go what nothing reads any more."""
        values.update(zip(self.makes, results, strict=True))
        for name in self.last:
            values.pop(name, None)


def make_pieces(model: Model, parts: Iterable[Part], held: Collection[str]) -> list[tuple[Piece, Model]]:
    """The parts of a graph, and models that compute them, which those of one kind share.

    What is held is an input of the models; other initializers they have themselves.
    """
    models: dict[int, Model] = {}
    pieces: list[tuple[Piece, Model]] = []
    for part in parts:
        given = [*part.inputs, *part.initializers]
        constants = [value for value in given if value.is_initializer() and value.name not in held]
        read = [value for value in given if value not in set(constants)]
        made = [value for value in part.outputs if value.name]
        inner = models.get(part.kind) if part.kind is not None else None
        if inner is None:
            inner = _model(model, part, read, made, constants)
        if part.kind is not None:
            models[part.kind] = inner
        own = [value.name or "" for value in part.initializers if value.name in held]
        names = [value.name or "" for value in read], [value.name or "" for value in made]
        pieces.append((Piece(part.name, part.kind is not None, *names, own), inner))
    needed = {value.name or "" for value in model.outputs}
    for piece, _ in reversed(pieces):
        piece.last.extend(name for name in dict.fromkeys((*piece.reads, *piece.makes)) if name not in needed)
        needed.update(piece.last)
    return pieces


def _model(model: Model, part: Part, read: list[ir.Value], made: list[ir.Value], constants: list[ir.Value]) -> Model:
    imports = dict(model.ir.opset_imports)
    view = ir.GraphView(read, made, nodes=part.nodes, initializers=constants, opset_imports=imports)
    functions = [function.clone() for function in model.functions.values()]
    return Model(ir.Model(view.clone(), ir_version=model.ir.ir_version or IR_VERSION, functions=functions))
