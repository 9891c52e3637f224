"""Quantization-aware training: a model that rounds as integers do in training, and stores integers
afterwards.

Weights and activations go through QuantizeLinear and DequantizeLinear, one after the other. What is
trained are the floating-point weights before them, whose gradients pass straight through. Scales
and zero points are initializers, and state where they are observed or learned. `strip`, and what a
run writes, hold the integers.
"""

from onward.recipe.quantize.add import add
from onward.recipe.quantize.ranges import calibrate, has_ranges, needs_calibration

__all__ = ["add", "calibrate", "has_ranges", "needs_calibration"]
