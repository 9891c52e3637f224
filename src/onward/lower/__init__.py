"""From training models to plain ONNX."""
