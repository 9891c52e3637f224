"""How Keras's layers are written with operators of ONNX."""

from onward.frameworks.keras.layers import activations, core, normalization, recurrent, spatial  # noqa: F401 (rows)
