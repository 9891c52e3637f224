"""The state of a training run in words that no framework owns, from and to training models."""
