"""Operators of ONNX Runtime, which exporters and its own optimisers put into files, as standard ones.

Their documentation is `ContribOperators.md` in its repository. Attributes have their defaults here, since `onnx` does
not know these operators; what an operator does only on some devices, or in place, is refused.
"""

from onward.rules.microsoft import activation, attention, domain, image, matrix, quantized

__all__ = ["activation", "attention", "domain", "image", "matrix", "quantized"]
