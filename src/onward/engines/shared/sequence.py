"""Sequences and optionals. A sequence is a list, and an empty optional is None."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators

operators = Operators()

operators(
    SequenceConstruct=lambda *items: list(items),
    SequenceEmpty=lambda: [],
    SequenceLength=lambda sequence: np.array(len(sequence), np.int64),
    SequenceAt=lambda sequence, position: sequence[position.item()],
)


@operators.define("SequenceInsert")
def sequence_insert(sequence, item, position=None):
    index = len(sequence) if position is None else position.item()
    return [*sequence[:index], item, *sequence[index:]]


@operators.define("SequenceErase")
def sequence_erase(sequence, position=None):
    index = -1 if position is None else position.item()
    return [item for i, item in enumerate(sequence) if i != index % len(sequence)]


operators(
    Optional=lambda value=None: value,
    OptionalHasElement=lambda value=None: np.array(value is not None),
    OptionalGetElement=lambda value: value,
)
