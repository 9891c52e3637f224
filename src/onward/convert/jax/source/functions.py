"""Functions of a model, which a program has as functions, too."""

from __future__ import annotations

import functools
from typing import Any

import onnx_ir as ir

from onward.convert.jax.source.operators import rows
from onward.convert.program.names import docstring
from onward.engines.plan import Call
from onward.model import Model
from onward.standard import IR_VERSION
from onward.transform.inline import inline


class Functions:
    """Those of a model that the engine has no operator for."""

    def __init__(self, model: Model):
        self._model = model
        known = {f"{domain}.{name}": function for (domain, name, _), function in model.functions.items()}
        self._functions = {name: function for name, function in known.items() if name not in rows()}

    def __contains__(self, operator: str) -> bool:
        return operator in self._functions

    def rows(self) -> dict[str, Any]:
        """Rows of a table that ask for the attributes of the functions."""
        return {name: _row(list(function.attributes)) for name, function in self._functions.items()}

    def summary(self, call: Call) -> list[str]:
        """What a function says of itself, as a docstring."""
        text = (self._functions[call.operator].doc_string or "").strip().partition("\n")[0]
        return docstring(text).split("\n") if text else []

    def one_call(self, call: Call) -> tuple[Model, dict[str, ir.Value]]:
        """The body of a function with the types and attributes of a call, and its inputs, as those of the call."""
        function = self._functions[call.operator]
        named = zip(function.inputs, call.inputs, strict=False)
        given = {formal.name or "": value for formal, value in named if value is not None}
        inputs = {name: ir.Value(name=name, type=value.type, shape=value.shape) for name, value in given.items()}
        attributes = call.function.keywords if isinstance(call.function, functools.partial) else {}
        node = ir.node(
            function.name,
            [inputs.get(formal.name or "") for formal in function.inputs],
            {name: value for name, value in attributes.items() if value is not None},
            domain=function.domain,
            outputs=[ir.Value(name=output.name) for output in function.outputs[: len(call.outputs)]],
        )
        imports = {**self._model.ir.opset_imports, function.domain: 1}
        graph = ir.Graph(list(inputs.values()), node.outputs, nodes=[node], opset_imports=imports, name=function.name)
        clones = [each.clone() for each in self._model.functions.values()]
        model = Model(ir.Model(graph, ir_version=IR_VERSION, functions=clones))
        return inline(model, [call.operator]), given


def _row(attributes: list[str]) -> Any:
    def row(*inputs: Any, **given: Any) -> Any:
        raise NotImplementedError

    row.asks_for = attributes  # type: ignore[attr-defined]
    return row
