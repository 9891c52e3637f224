"""TensorFlow's tables and Keras's files, without either."""
