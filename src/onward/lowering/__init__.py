"""From training models to plain ONNX."""

from onward.lowering.step import lower

__all__ = ["lower"]
