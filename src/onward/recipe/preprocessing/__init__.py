"""Preprocessing of data, and augmentation during training.

    onward.train(..., preprocess="resize:size=32 scale normalize:preset=imagenet channels_first", augment="flip")

Both are standard ONNX operators. Preprocessing is the first part of the inference graph, so that
training and evaluation share it. Augmentation is part of the training step alone: see augment.py.
"""

from onward.recipe.preprocessing.augment import Augmentation, notes_on_moves, shared_axes
from onward.recipe.preprocessing.join import ModelInput, open_preprocessing, opset_of, put_before, with_preprocessing
from onward.recipe.preprocessing.pipeline import Pipeline, Raw, Single, by_input, pipelines

__all__ = [
    "Augmentation",
    "ModelInput",
    "Pipeline",
    "Raw",
    "Single",
    "by_input",
    "notes_on_moves",
    "open_preprocessing",
    "opset_of",
    "pipelines",
    "put_before",
    "shared_axes",
    "with_preprocessing",
]
