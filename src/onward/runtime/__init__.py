"""Sessions of stock ONNX Runtime and what it can load."""
