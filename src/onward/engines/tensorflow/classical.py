"""Operators of classical machine learning."""

from __future__ import annotations

import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.tensorflow.tensors import on_host

operators = Operators()


@operators.define("ai.onnx.ml.ArrayFeatureExtractor")
def array_feature_extractor(x, places):
    return tf.gather(tf.reshape(x, [-1, x.shape[-1]]), tf.reshape(places, [-1]), axis=1)


operators.define("ai.onnx.ml.Binarizer")(lambda x, *, threshold: tf.cast(x > threshold, x.dtype))
operators.define("ai.onnx.ml.TreeEnsemble")(on_host("ai.onnx.ml.TreeEnsemble"))  # its steps have no derivative
