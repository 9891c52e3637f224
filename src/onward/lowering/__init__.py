"""From training models to plain ONNX."""

from onward.lowering.api import lower

__all__ = ["lower"]
