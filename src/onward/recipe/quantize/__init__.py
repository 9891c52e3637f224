"""Quantization-aware training: a model that rounds in training and stores integers afterwards.

Weights and activations go through QuantizeLinear and DequantizeLinear. The floating-point weights
before them are trained; gradients pass straight through. Scales and zero points are initializers,
or state if observed or learned. `strip`, and what a run writes, hold the integers.
"""

from onward.recipe.quantize.add import add
from onward.recipe.quantize.dequantize import dequantize, integer_weights
from onward.recipe.quantize.ranges import calibrate, has_ranges, needs_calibration

__all__ = ["add", "calibrate", "dequantize", "has_ranges", "integer_weights", "needs_calibration"]
