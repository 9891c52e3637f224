"""Windows, and weights of frequencies."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.engines.framework import Operators
from onward.engines.numpy.reference import from_reference

operators = Operators()


operators(MelWeightMatrix=from_reference("MelWeightMatrix"))


@operators.define("HannWindow")
def hann_window(size, *, output_datatype, periodic):
    return _window(size, [0.5, -0.5], output_datatype, periodic)


@operators.define("HammingWindow")
def hamming_window(size, *, output_datatype, periodic):
    return _window(size, [25 / 46, -21 / 46], output_datatype, periodic)


@operators.define("BlackmanWindow")
def blackman_window(size, *, output_datatype, periodic):
    return _window(size, [0.42, -0.5, 0.08], output_datatype, periodic)


def _window(size, coefficients, output_datatype, periodic):
    """A sum of cosines; a periodic window is one element longer, and lacks its last."""
    count = size.item()
    turn = 2 * np.pi * np.arange(count) / (count if periodic else count - 1)
    total = sum(c * np.cos(i * turn) for i, c in enumerate(coefficients))
    return np.asarray(total).astype(ir.DataType(output_datatype).numpy())
