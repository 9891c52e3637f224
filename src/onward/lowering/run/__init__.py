"""Entire training as one plain ONNX model."""

from onward.lowering.run.whole import lower_run

__all__ = ["lower_run"]
