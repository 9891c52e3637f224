"""How large a model becomes when its functions are replaced by their bodies: calls within calls can multiply."""

from __future__ import annotations

import onnx_ir as ir

from onward.errors import UnsupportedError
from onward.model import Model
from onward.model.functions import callees_first

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
