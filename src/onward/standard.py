"""The standard's own domain, and the versions of the standard that Onward reads, computes in and writes."""

from __future__ import annotations

from typing import Protocol

STANDARD = ("", "ai.onnx")
"""The two names of the standard's own domain."""

ML_DOMAIN = "ai.onnx.ml"
"""The domain of classical models, with some operators on text."""

KERNELS = "onward.kernels"
"""The domain of native kernels. Lowering adds their operators in memory; no file may call them."""

OLDEST_OPSET = 18
"""What is differentiated or trained is of this operator set or newer: reductions take their axes as inputs, the random
generator has its bitwise operators, and Resize what preprocessing needs of it."""
COMMON_OPSET = 21
"""What older models are converted to and what we build ourselves is written in: the newest operator set for which stock
ONNX Runtime has practically all kernels."""
OLDEST_INTERPRETED, NEWEST_INTERPRETED = 13, 28
"""The operator sets that the tables of engines implement; others are converted."""
OLDEST_LOADED = 7
"""ONNX Runtime lacks some operators of older sets."""

TRAINING_IR, FUNCTIONS_IR, METADATA_IR, DEVICES_IR = 7, 8, 10, 11
"""The first IR versions with training, with functions in a model, with metadata on tensors and graphs, where state is
tagged, and with devices."""
IR_VERSION = METADATA_IR
"""What we write: all that we need is in it, and stock ONNX Runtime loads it."""


class _Call(Protocol):
    """A node, in memory or in a file."""

    @property
    def domain(self) -> str: ...
    @property
    def op_type(self) -> str: ...


def is_standard(node: _Call) -> bool:
    """Whether a node calls an operator of the standard's own domain."""
    return node.domain in STANDARD


def domain_of(node: _Call) -> str:
    """The domain of a node's operator; that of the standard is empty, as in its schemas."""
    return schema_domain(node.domain)


def schema_domain(domain: str) -> str:
    """A domain as schemas name it: that of the standard is empty."""
    return "" if domain in STANDARD else domain


def operator_name(node: _Call) -> str:
    """How messages and tables name an operator: `Relu`, `com.microsoft.FusedConv`."""
    return node.op_type if is_standard(node) else f"{node.domain}.{node.op_type}"
