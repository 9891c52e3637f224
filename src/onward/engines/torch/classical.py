"""Operators of classical machine learning."""

from __future__ import annotations

from onward.engines.framework import Operators
from onward.engines.torch.types import on_numpy

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
    membership_values=None,
    n_targets,
    nodes_falseleafs,
    nodes_falsenodeids,
    nodes_featureids,
    nodes_missing_value_tracks_true=None,
    nodes_modes,
    nodes_splits,
    nodes_trueleafs,
    nodes_truenodeids,
    post_transform,
    tree_roots,
    outputs,
):
    """The steps of a tree have no derivative."""
    attributes = {name: value for name, value in locals().items() if name != "x"}
    return on_numpy("ai.onnx.ml.TreeEnsemble", x, **attributes)
