"""Sessions of stock ONNX Runtime and its limits."""
