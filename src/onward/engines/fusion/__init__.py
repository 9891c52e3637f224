"""Nodes that amount to one operator which the framework computes faster, or more exactly, than one by one.

They are found when a graph is planned, and looked at again when they are reached: then the shapes are known, and all
that follows from them. Where the nodes turn out to be something else, they are executed as they stand.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import onnx_ir as ir

from onward.engines.fusion.attention import attention
from onward.engines.fusion.linear import LINEAR, linear
from onward.engines.fusion.match import Match

__all__ = ["Match", "matches"]

_PATTERNS = {"Attention": attention, LINEAR: linear}


def matches(nodes: Sequence[ir.Node], kept: Container[ir.Value], operators: Container[str]) -> Iterator[Match]:
    """What amounts to one of the operators, among some nodes; what is `kept` is read by others."""
    left = set(nodes)
    for operator, pattern in _PATTERNS.items():
        for node in nodes if operator in operators else ():
            if node in left and (match := pattern(node, left, kept)) is not None:
                left -= set(match.nodes)
                yield match
