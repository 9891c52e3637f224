"""The standard's domain, and the versions of the standard that Onward reads, uses and writes."""

from __future__ import annotations

from typing import Protocol

STANDARD = ("", "ai.onnx")
"""The two names of the standard's domain."""

ML_DOMAIN = "ai.onnx.ml"
"""Domain of classical machine learning, with some operators on text."""

KERNELS = "onward.kernels"
"""Domain of native kernels. Lowering adds their operators in memory; no file may call them."""

OLDEST_OPSET = 18
"""The lowest operator set for training and gradients.

Reductions take axes as inputs, the random generator has bitwise operators, and Resize has the
options of preprocessing.
"""
COMMON_OPSET = 21
"""The operator set for new and converted models: the newest one with practically all kernels in
stock ONNX Runtime."""
OLDEST_INTERPRETED, NEWEST_INTERPRETED = 13, 28
"""Operator sets that the tables of engines implement; other models are converted."""
OLDEST_LOADED = 7
"""ONNX Runtime lacks some operators of older sets."""

TRAINING_IR, FUNCTIONS_IR, METADATA_IR, DEVICES_IR = 7, 8, 10, 11
"""First IR versions with training, functions, metadata on tensors and graphs, and devices."""
IR_VERSION = METADATA_IR
"""The IR version that Onward writes: it has all features used, and stock ONNX Runtime loads it."""


class _Call(Protocol):
    @property
    def domain(self) -> str: ...
    @property
    def op_type(self) -> str: ...


def is_standard(node: _Call) -> bool:
    """True if a node calls an operator of the standard's own domain."""
    return node.domain in STANDARD


def domain_of(node: _Call) -> str:
    """Return the domain of a node's operator; the standard's is empty, as in its schemas."""
    return schema_domain(node.domain)


def schema_domain(domain: str) -> str:
    """Return a domain as schemas name it: the standard's is empty."""
    return "" if domain in STANDARD else domain


def operator_name(node: _Call) -> str:
    """Return the name of an operator for messages and tables: `Relu`, `com.microsoft.FusedConv`."""
    return node.op_type if is_standard(node) else f"{node.domain}.{node.op_type}"
