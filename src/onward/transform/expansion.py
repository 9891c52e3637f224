"""How large a model becomes when its functions are replaced by their bodies: calls within calls can multiply."""

from __future__ import annotations

import onnx_ir as ir

from onward.errors import UnsupportedError
from onward.model import Model

LIMIT = 10_000_000


def check_expansion(model: Model) -> None:
    """Refuse a model whose functions expand to more nodes than anyone could use."""
    sizes: dict[ir.OperatorIdentifier, int] = {}
    for identifier in model.functions:
        size = _size(model, identifier, sizes, ())
        if size > LIMIT:
            raise UnsupportedError(
                f"the function `{identifier[0]}.{identifier[1]}` expands to {size:.2g} nodes",
                hint="its calls within calls multiply; the file is damaged, or was made to exhaust who opens it",
            )


def _size(
    model: Model,
    identifier: ir.OperatorIdentifier,
    sizes: dict[ir.OperatorIdentifier, int],
    callers: tuple[ir.OperatorIdentifier, ...],
) -> int:
    if identifier in callers:
        return 1  # a function that calls itself is refused elsewhere
    if identifier not in sizes:
        calls = [node.op_identifier() for node in model.functions[identifier].all_nodes()]
        inner = (_size(model, call, sizes, (*callers, identifier)) if call in model.functions else 1 for call in calls)
        sizes[identifier] = sum(inner)
    return sizes[identifier]
