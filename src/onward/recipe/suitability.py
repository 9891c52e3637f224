"""Losses on values that they are not for: what looks wrong though it can be computed, and the way out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onward.recipe.losses import LOSSES
from onward.recipe.objective import Term

_HANDED_ON = {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Cast", "Normalizer"}
_NOT_FOR_PROBABILITIES = {
    ("cross_entropy", "Softmax"): "cross_entropy",
    ("cross_entropy", "Sigmoid"): "bce_with_logits",
    ("bce_with_logits", "Sigmoid"): "bce_with_logits",
    ("bce_with_logits", "Softmax"): "cross_entropy",
    ("nll", "Softmax"): "cross_entropy",
}
"""A loss, the operator whose probabilities it is not for, and the loss for what that operator reads.

Cross-entropy of what LogSoftmax gives is right: the logarithms of probabilities are scores that give these.
"""
_GIVE_SCORES = {"Gemm", "MatMul", "Conv"}


def unsuitable(summands: Sequence[Term], predictions: Sequence[ir.Value]) -> Iterator[str]:
    """A sentence for each loss that looks at probabilities where it is for scores, or the other way round."""
    for term, value in zip(summands, predictions, strict=True):
        known = LOSSES.get(term.spec.name)
        made_by = _producer(value)
        if made_by is None or known is None or term.custom is not None:
            continue
        instead = _NOT_FOR_PROBABILITIES.get((known.name, made_by.op_type))
        if instead is not None and made_by.inputs and made_by.inputs[0] is not None:
            way_out = f"{made_by.inputs[0].name}={instead}"
            yield (
                f"the loss `{known.name}` is not for probabilities, and `{value.name}` comes out of a "
                f'{made_by.op_type}; look at what goes in: `loss="{way_out}"` (`--loss {way_out}`)'
            )
        elif known.name == "binary_cross_entropy" and made_by.op_type in _GIVE_SCORES:
            yield (
                f"the loss `{known.name}` is for probabilities, and `{value.name}` comes out of a {made_by.op_type}; "
                'for scores there is `loss="bce_with_logits"` (`--loss bce_with_logits`)'
            )


def _producer(value: ir.Value) -> ir.Node | None:
    """The operator that computes a value, looking through those that hand it on."""
    node = value.producer()
    while node is not None and node.op_type in _HANDED_ON and node.inputs and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node
