"""A training model with some features, on a target: it goes on as it should, or it is refused by name."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from arrival import features as every
from arrival.features import Draft, Feature, drafted
from arrival.targets import TARGETS, has_dropout, on_engine
from onward.errors import Error, MismatchError

TOLERANCE = 2e-4
"""Of losses in float32, over five steps."""


def tried(features: Sequence[Feature], target: str) -> str:
    """`arrived`, or what a refusal says; anything else is an error."""
    draft = drafted(*features)
    try:
        model = draft.model()
    except Error as error:  # some features do not go together
        return f"no recipe: {error}"
    batches = draft.batches(model)
    before = model.to_proto()
    try:
        losses = TARGETS[target][1](model, batches)
    except Error as refusal:
        said = f"{refusal} {refusal.hint}"
        assert not isinstance(refusal, MismatchError), said
        assert refusal.hint, said
        assert any(feature.words and re.search(feature.words, said) for feature in features), said
        return f"refused: {refusal}"
    assert model.to_proto() == before  # the target works on a copy
    np.testing.assert_allclose(losses, _expected(draft, target), rtol=TOLERANCE)
    return "arrived"


def _expected(draft: Draft, target: str) -> list[float]:
    """The losses on ONNX Runtime. PyTorch's own objects draw numbers of their own: there nothing is dropped."""
    model = draft.model()
    if target.startswith("torch ") and not target.endswith("engine") and has_dropout(model):
        draft.changes.remove(every.drop)
        model = draft.model()
    return on_engine("onnxruntime", threads=1)(model, draft.batches(model))
