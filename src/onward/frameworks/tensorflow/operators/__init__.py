"""Operations of TensorFlow as operators of ONNX, one file per family: see `onward.frameworks.tensorflow.graph`."""
