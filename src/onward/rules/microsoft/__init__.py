"""Operators of ONNX Runtime, which exporters and its optimizers write into files, as standard operators.

Their documentation is `ContribOperators.md` in its repository. The defaults of attributes are here, since `onnx` does
not have these operators. Variants for some devices, or in place, are refused.
"""

from onward.rules.microsoft import activation, attention, domain, image, matrix, quantized

__all__ = ["activation", "attention", "domain", "image", "matrix", "quantized"]
