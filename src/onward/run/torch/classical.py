"""Operators of classical machine learning."""

from __future__ import annotations

import torch

from onward.run.framework import Operators
from onward.run.torch.types import on_numpy

operators = Operators()
operators.define("ai.onnx.ml.ArrayFeatureExtractor")(
    lambda x, places: x.reshape(-1, x.shape[-1]).index_select(1, places.long().reshape(-1))
)
operators.define("ai.onnx.ml.Binarizer")(lambda x, *, threshold: (x > threshold).to(x.dtype))


@operators.define("ai.onnx.ml.TreeEnsemble")
def tree_ensemble(
    x,
    *,
    aggregate_function,
    leaf_targetids,
    leaf_weights,
    membership_values,
    n_targets,
    nodes_falseleafs,
    nodes_falsenodeids,
    nodes_featureids,
    nodes_missing_value_tracks_true,
    nodes_modes,
    nodes_splits,
    nodes_trueleafs,
    nodes_truenodeids,
    post_transform,
    tree_roots,
):
    """Steps of a tree have no derivative."""
    return on_numpy("ai.onnx.ml.TreeEnsemble", x, **{name: value for name, value in locals().items() if name != "x"})
