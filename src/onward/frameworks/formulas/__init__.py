"""ONNX graphs for functions of frameworks, shared by all importers."""
