"""The functions of a model: which of them call which, and how much they become where they are called."""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import onnx_ir as ir

from onward.errors import InvalidModelError, UnsupportedError
from onward.model.core import Model

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


# ---- how large a model becomes without functions ---------------------------------------------------------------------


LIMIT = 10_000_000


def check_expansion(model: Model) -> None:
    """Refuse a model whose functions expand to more nodes than anyone could use."""
    sizes: dict[ir.OperatorIdentifier, int] = {}
    for identifier in callees_first(model.functions):
        calls = [node.op_identifier() for node in model.functions[identifier].all_nodes()]
        sizes[identifier] = sum(sizes.get(call, 1) for call in calls)
        if sizes[identifier] > LIMIT:
            raise UnsupportedError(
                f"the function `{identifier[0]}.{identifier[1]}` expands to {sizes[identifier]:.2g} nodes",
                hint="its calls within calls multiply; the file is damaged, or was made to exhaust who opens it",
            )
