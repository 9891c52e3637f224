"""Training runs of PyTorch, Keras, TensorFlow and JAX as training models, and training models as theirs."""
