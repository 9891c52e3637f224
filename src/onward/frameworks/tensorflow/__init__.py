"""TensorFlow functions and modules as training models, and training models as `tf.Module`."""

from onward.frameworks.tensorflow.capture import from_tensorflow
from onward.frameworks.tensorflow.forward import TrainingModule, to_tensorflow

__all__ = ["TrainingModule", "from_tensorflow", "to_tensorflow"]
