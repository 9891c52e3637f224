"""Operators on text and files, but for the plainest those of `onnx` itself."""

from __future__ import annotations

import re

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.reference import from_reference

operators = Operators()

operators(
    StringConcat=lambda x, y: np.asarray(x.astype(object) + y.astype(object), object),
    StringNormalizer=from_reference("StringNormalizer"),
    StringSplit=from_reference("StringSplit"),
)


@operators.define("RegexFullMatch")
def regex_full_match(x, *, pattern):
    matches = [re.fullmatch(pattern, text) is not None for text in x.ravel()]
    return np.array(matches, bool).reshape(x.shape)


operators(
    TfIdfVectorizer=from_reference("TfIdfVectorizer"),
    ImageDecoder=from_reference("ImageDecoder"),
)
