"""Operators that nobody trains through are taken from the reference implementation of `onnx`, loaded on first use."""

from __future__ import annotations

import inspect

from onnx import defs

from onward.engines.framework import Function


def from_reference(name: str) -> Function:
    """The function of an operator as `onnx.reference` has it."""

    def compute(*inputs, outputs, **attributes):
        from onnx.reference.ops import load_op

        given = {key: value for key, value in attributes.items() if value is not None}
        return load_op("", name).eval(*inputs, n_outputs=outputs, **given)

    parameter = inspect.Parameter
    attributes = [*defs.get_schema(name).attributes, "outputs"]
    compute.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            parameter("inputs", parameter.VAR_POSITIONAL),
            *(parameter(key, parameter.KEYWORD_ONLY) for key in attributes),
        ]
    )
    return compute
