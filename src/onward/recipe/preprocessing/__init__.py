"""Preprocessing of data, and augmentation during training.

    onward.train(..., preprocess="resize:size=32 scale normalize:preset=imagenet channels_first", augment="flip")

Both are standard ONNX operators. Preprocessing is the first part of the inference graph, so that
training and evaluation share it. Augmentation is part of the training step alone: see augment.py.
"""
