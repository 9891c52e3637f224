"""Whole numbers in place of floats."""

from __future__ import annotations

from onward.engines.framework import Operators
from onward.engines.jax.elementwise import convert
from onward.engines.shared.quantization import quantization

operators = Operators()

operators(QuantizeLinear=quantization(convert))
