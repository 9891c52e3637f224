"""Operators of classical machine learning; others of that domain are expressed by those of the standard."""

from __future__ import annotations

import numpy as np

from onward.run.framework import Operators
from onward.run.numpy.reference import from_reference

operators = Operators(
    {
        "ai.onnx.ml.ArrayFeatureExtractor": lambda x, indices: np.take(np.atleast_2d(x), indices.ravel(), -1),
        "ai.onnx.ml.Binarizer": lambda x, *, threshold: (x > threshold).astype(x.dtype),
        "ai.onnx.ml.LabelEncoder": from_reference("LabelEncoder", "ai.onnx.ml"),
        "ai.onnx.ml.TreeEnsemble": from_reference("TreeEnsemble", "ai.onnx.ml"),
    }
)
