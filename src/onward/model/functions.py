"""The functions of a model, and which of them call which."""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import onnx_ir as ir

from onward.errors import InvalidModelError

_MOST = 8


def callees_first(functions: Mapping[ir.OperatorIdentifier, ir.Function]) -> list[ir.OperatorIdentifier]:
    """The functions in an order in which each comes after those that it calls; none may lead back to itself."""
    calls = {key: {node.op_identifier() for node in function.all_nodes()} for key, function in functions.items()}
    try:
        return [*TopologicalSorter({key: called & functions.keys() for key, called in calls.items()}).static_order()]
    except CycleError as error:
        circle = [f"`{domain}.{name}`" for domain, name, _ in reversed(error.args[1])]
        names = " -> ".join(circle if len(circle) < _MOST else [*circle[:_MOST], "..."])
        raise InvalidModelError(
            f"a function calls itself: {names}", hint="a model has no recursion: repeat what is done in a Loop"
        ) from None
