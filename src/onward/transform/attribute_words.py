"""Attributes that are words: what each may be. Any other word would be taken for another by one engine or another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from onnx import ModelProto

from onward.errors import InvalidModelError, list_names
from onward.model.protos import all_nodes

_PADDING = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
_REDUCTION = ("none", "sum", "mean")
_SCATTER = ("none", "add", "mul", "max", "min")
_DIRECTION = ("forward", "reverse", "bidirectional")
_ACTIVATIONS = ("Affine", "Elu", "HardSigmoid", "LeakyRelu", "Relu", "ScaledTanh", "Sigmoid", "Softplus", "Softsign",
                "Tanh", "ThresholdedRelu")  # fmt: skip
_RESIZE = {
    "mode": ("nearest", "linear", "cubic"),
    "coordinate_transformation_mode": (
        "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize",
        "tf_half_pixel_for_nn",
    ),
    "nearest_mode": ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    "keep_aspect_ratio_policy": ("stretch", "not_larger", "not_smaller"),
}  # fmt: skip

_SAME: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {
    ("Conv", "ConvInteger", "ConvTranspose", "QLinearConv", "AveragePool", "LpPool", "MaxPool"): {"auto_pad": _PADDING},
    ("LSTM", "GRU", "RNN"): {"direction": _DIRECTION, "activations": _ACTIVATIONS},
    ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"): {"reduction": _REDUCTION},
    ("ScatterElements", "ScatterND"): {"reduction": _SCATTER},
    ("Cast", "CastLike"): {"round_mode": ("up", "down", "nearest")},
    ("DepthToSpace", "SpaceToDepth"): {"mode": ("DCR", "CRD")},
    ("BitShift",): {"direction": ("LEFT", "RIGHT")},
    ("Gelu",): {"approximate": ("none", "tanh")},
    ("GridSample",): {"mode": ("linear", "nearest", "cubic"), "padding_mode": ("zeros", "border", "reflection")},
    ("Pad",): {"mode": ("constant", "reflect", "edge", "wrap")},
    ("Resize",): _RESIZE,
    ("RoiAlign",): {"mode": ("avg", "max"), "coordinate_transformation_mode": ("half_pixel", "output_half_pixel")},
    ("TensorScatter",): {"mode": ("linear", "circular")},
}
WORDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {name: words for names, words in _SAME.items() for name in names}
"""Operator -> attribute -> words."""
_EQUATION = re.compile(r"[A-Za-z ,.]*(->[A-Za-z ,.]*)?")


def check_words(operator: str, attributes: Mapping[str, Any], described: str) -> None:
    """Refuse attributes of a node that are none of the standard's words."""
    for name, allowed in WORDS.get(operator, {}).items():
        given = attributes.get(name)
        for word in given if isinstance(given, list) else [] if given is None else [given]:
            if word not in allowed:
                raise InvalidModelError(
                    f"`{name}` of {described} is {word!r}", hint=f"it is one of {list_names(allowed, len(allowed))}"
                )
    if operator == "Einsum":
        _check_equation(attributes["equation"], described)


def check_equations(proto: ModelProto) -> None:
    """Refuse equations that `onnx` would look at for ever when it infers shapes."""
    for node in all_nodes([*proto.graph.node, *(node for function in proto.functions for node in function.node)]):
        if node.op_type == "Einsum":
            for attribute in node.attribute:
                if attribute.name == "equation":
                    _check_equation(attribute.s.decode("utf-8", "replace"), f"`Einsum` (node `{node.name}`)")


def _check_equation(equation: str, described: str) -> None:
    if not _EQUATION.fullmatch(equation):
        raise InvalidModelError(
            f"`equation` of {described} is {equation!r}", hint="it is of letters, commas and dots, such as `ij,jk->ik`"
        )
