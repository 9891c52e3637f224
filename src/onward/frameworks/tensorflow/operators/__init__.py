"""TensorFlow operations as ONNX operators, a file per family (see frameworks/tensorflow/graph.py)."""
