"""Plain TensorFlow, both ways: `tf.Module` and `tf.function` as training models, training models as `tf.Module`."""

from onward.frameworks.tensorflow.capture import from_tensorflow
from onward.frameworks.tensorflow.forward import TrainingModule, to_tensorflow

__all__ = ["TrainingModule", "from_tensorflow", "to_tensorflow"]
