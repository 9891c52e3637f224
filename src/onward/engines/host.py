"""Which inputs of operators are read on the host, as numpy arrays: those that say how large, where or how often.

Shape arithmetic stays on the host. So a graph with dynamic shapes has only static ones by the time it is traced, and
one graph goes through `jax.jit` and `torch.compile` for each shape that comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ALL = range(16)

HOST_INPUTS: dict[str, range | tuple[int, ...]] = {
    "AffineGrid": (1,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "ConstantOfShape": _ALL,
    "CumProd": (1,),
    "CumSum": (1,),
    "DFT": (1, 2),
    "Dropout": (1, 2),
    "Expand": (1,),
    "MaxUnpool": (2,),
    "NonMaxSuppression": (2, 3, 4),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": _ALL,
    "ReduceL1": (1,),
    "ReduceL2": (1,),
    "ReduceLogSum": (1,),
    "ReduceLogSumExp": (1,),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceProd": (1,),
    "ReduceSum": (1,),
    "ReduceSumSquare": (1,),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "SequenceAt": (1,),
    "SequenceErase": (1,),
    "SequenceInsert": (2,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "SplitToSequence": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
    "onward.PairedRandomBits": (1,),
    "onward.RandomBits": (1,),
}

ONLY_ON_HOST = frozenset(
    {
        "BlackmanWindow",
        "HammingWindow",
        "HannWindow",
        "ImageDecoder",
        "MelWeightMatrix",
        "RegexFullMatch",
        "StringConcat",
        "StringNormalizer",
        "StringSplit",
        "TfIdfVectorizer",
        "ai.onnx.ml.LabelEncoder",
    }
)
"""Operators on text, files and sizes, which have no derivative, nor counterparts here: always computed by numpy."""

_MANY = 1 << 14


def counts_far(operator: str, inputs: Sequence[np.ndarray]) -> bool:
    """Whether a node makes so many numbers that they are better made on the device: those that random ones are of.

    What is dropped is drawn by the framework's own generator, however few numbers there are.
    """
    if operator == "Dropout":
        return True
    if operator != "Range":
        return False
    start, limit, step = (array.item() for array in inputs)
    return bool((limit - start) / step >= _MANY)
