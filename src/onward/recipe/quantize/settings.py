"""Settings of quantization, such as `int8:weights=int4,block=32,ranges=lsq`, and the selected nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import onnx_ir as ir

from onward.arguments import coerce
from onward.constants import constant_tensor
from onward.errors import RecipeError, UnknownNameError, UnsupportedError, suggest_or_list
from onward.recipe.layers import Layer, layers, listing
from onward.recipe.spec import Spec, check_options, lookup, one_of, parse
from onward.recipe.trainable import matching
from onward.standard import is_standard

Ranges = Literal["moving", "lsq", "fixed"]

FIRST, LAST = "first", "last"
_INTEGERS = {name: ir.DataType[name.upper()] for name in ("int8", "uint8", "int16", "uint16", "int4", "uint4")}
_FLOATS = {
    "float8": ir.DataType.FLOAT8E4M3FN, "float8e4m3fn": ir.DataType.FLOAT8E4M3FN, "float8e5m2": ir.DataType.FLOAT8E5M2,
}  # fmt: skip
TYPES = {**_INTEGERS, **_FLOATS}
_ELSEWHERE = {
    "float4": "ONNX Runtime has no kernel that rounds to 4-bit floating-point numbers",
    "float8e4m3fnuz": "only ONNX Runtime's CPU has it; `float8e4m3fn` is similar",
    "float8e5m2fnuz": "only ONNX Runtime's CPU has it; `float8e5m2` is similar",
    "int2": "ONNX Runtime has no kernel that rounds to integers of 2 bits",
    "uint2": "ONNX Runtime has no kernel that rounds to integers of 2 bits",
    "int32": "QuantizeLinear does not round to integers of 32 bits",
}
"""Unsupported types, and the reason."""
_FOUR_BITS = (ir.DataType.INT4, ir.DataType.UINT4)
_OF_ACTIVATIONS = tuple(dtype for dtype in _INTEGERS.values() if dtype not in _FOUR_BITS)
_ONLY_NEWER = (*_FOUR_BITS, ir.DataType.INT16, ir.DataType.UINT16)

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators with weights, quantized by default."""
PLAIN = ("Add", "AveragePool", "Concat", "GlobalAveragePool", "MaxPool", "Mul", "Resize", "Sigmoid", "Softmax", "Sub")
"""Further operators that runtimes compute in integers, if named."""

_DEFAULTS: Mapping[str, Any] = {
    "weights": None, "activations": None, "block": None, "ranges": "moving", "percentile": None, "momentum": 0.99,
    "calibrate": 32, "keep": (), "targets": "*", "operators": WEIGHTED,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class QuantizeSettings:
    """Types to round to, and sources of the scales."""

    weights: ir.DataType
    activations: ir.DataType | None
    block: int | None
    ranges: Ranges
    percentile: float | None
    momentum: float
    """Share of the old value in the moving average."""
    calibrate: int
    """Number of batches to measure ranges on before training."""
    keep: tuple[str, ...]
    targets: tuple[str, ...]
    operators: tuple[str, ...]
    named: tuple[str, ...]
    """The options as passed."""

    @property
    def opset(self) -> int:
        """Operator set whose QuantizeLinear supports these settings."""
        types = (self.weights, self.activations)
        if self.block or any(dtype in _ONLY_NEWER for dtype in types):
            return 21
        return 19 if any(dtype in _FLOATS.values() for dtype in types) else 13


def settings_of(value: str | Mapping[str, Any] | Spec) -> QuantizeSettings:
    """Parse and check settings."""
    spec = parse(value)
    options = {**_DEFAULTS, **spec.options}
    check_options(f"`quantize={spec.name}`", spec.options, _DEFAULTS)
    weights = _type(options["weights"] or spec.name)
    assert weights is not None
    usual = None if weights in _FLOATS.values() else "uint8"
    activations = _type(options["activations"] if "activations" in spec.options else usual)
    if activations is not None and activations not in _OF_ACTIVATIONS:
        raise UnsupportedError(
            f"activations cannot be {activations.name.lower()}: ONNX Runtime has no such operators",
            hint="write `activations=uint8`, or `activations=none` for weights alone",
        )
    one_of("`ranges` of `quantize`", options["ranges"], *get_args(Ranges))
    if options["ranges"] == "lsq" and options["percentile"] is not None and activations is None:
        raise RecipeError("`percentile` needs quantized activations", hint="leave it out")
    operators = _words("operators", options["operators"])
    for name in operators:
        lookup("operator to quantize", name, dict.fromkeys((*WEIGHTED, *PLAIN)))
    return QuantizeSettings(
        weights,
        activations,
        _number("block", options["block"], 2, 2**20, whole=True),
        options["ranges"],
        _number("percentile", options["percentile"], 50, 100),
        _number("momentum", options["momentum"], 0, 1) or 0.0,
        int(_number("calibrate", options["calibrate"], 0, 2**31, whole=True) or 0),
        _words("keep", options["keep"]),
        _words("targets", options["targets"]),
        operators,
        tuple(spec.options),
    )


def _type(name: Any) -> ir.DataType | None:
    if name is None:
        return None
    if isinstance(name, str) and name in _ELSEWHERE:
        raise UnsupportedError(f"`{name}` is not supported: {_ELSEWHERE[name]}", hint=f"there are {', '.join(TYPES)}")
    return lookup("type to quantize to", str(name), TYPES)


def _words(name: str, value: Any) -> tuple[str, ...]:
    words = value.split("+") if isinstance(value, str) else coerce(f"`{name}` of `quantize`", value, Sequence[str])
    return tuple(word for word in words if word)


def _number(name: str, value: Any, least: float, most: float, whole: bool = False) -> Any:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not least <= value <= most:
        noun = "an integer" if whole else "a number"
        raise RecipeError(f"`{name}` of `quantize` is `{value}`, but must be {noun} from {least:g} to {most:g}")
    return value


def levels(dtype: ir.DataType) -> tuple[float, float]:
    """Return the smallest and the largest number of a type."""
    return float(dtype.min), float(dtype.max)


def middle(dtype: ir.DataType) -> int:
    """Return the zero point of a symmetric range."""
    low, high = levels(dtype)
    return 0 if low < 0 else int(high + 1) // 2


def most_symmetric(dtype: ir.DataType) -> float:
    """Return the largest distance from the middle on both sides: 127 for 8-bit integers."""
    return levels(dtype)[1] - middle(dtype)


# ---- selected nodes --------------------------------------------------------------------------------------------------


MOVES = frozenset(("Flatten", "Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"))
"""Operators that pass on their input; its scale holds for their results, too."""
_ACTIVATIONS = ("Relu", "Clip")
"""Activations that runtimes fuse into the operator before them."""
_ON_THE_WAY = ("Identity", "Transpose")


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedNode:
    """A node to compute with integers."""

    node: ir.Node
    names: tuple[str, ...]
    """Names of the node for patterns."""
    weight: ir.Value | None = None
    """The stored weight."""
    axis: int = 0
    """Axis of outputs in the weight."""

    @property
    def inputs(self) -> list[int]:
        """Indices of the inputs that are activations."""
        if self.weight is not None:
            return [0]
        return [i for i, value in enumerate(self.node.inputs) if value is not None and constant_tensor(value) is None]

    @property
    def rounds_result(self) -> bool:
        """True if the result is integers with a scale; matmuls may return floats, too."""
        return self.node.op_type not in ("Gemm", "MatMul")

    @property
    def result(self) -> ir.Value:
        """The result, after an activation that only the result goes into."""
        value = self.node.outputs[0]
        uses = tuple(value.uses())
        while len(uses) == 1 and not value.is_graph_output():
            node, index = uses[0]
            if node.op_type not in _ACTIVATIONS or index != 0:
                break
            value = node.outputs[0]
            uses = tuple(value.uses())
        return value


def quantized_nodes(graph: ir.Graph, settings: QuantizeSettings) -> list[QuantizedNode]:
    """Return the nodes that settings select, in order."""
    layer_of = {layer.node: layer for layer in layers(graph)}
    possible = {*WEIGHTED, *settings.operators}
    nodes = (node for node in graph if is_standard(node) and node.op_type in possible)
    candidates = [candidate for node in nodes if (candidate := _quantized_node(node, layer_of))]
    weighted = [candidate for candidate in candidates if candidate.weight is not None]
    excluded: list[QuantizedNode] = []
    for word in settings.keep:
        if word in (FIRST, LAST):
            excluded += weighted[:1] if word == FIRST else weighted[-1:]
        else:
            excluded += _matching((word,), candidates)
    targets = candidates if settings.targets == ("*",) else _matching(settings.targets, candidates)
    chosen = [candidate for candidate in candidates if candidate in targets and candidate not in excluded]
    chosen = [candidate for candidate in chosen if candidate.node.op_type in settings.operators]
    if not chosen:
        operators = ", ".join(settings.operators)
        hint = listing(layer_of.values())
        raise UnknownNameError(f"nothing is left to quantize among nodes of {operators}", hint=hint)
    return chosen


def _matching(patterns: Sequence[str], nodes: Iterable[QuantizedNode]) -> list[QuantizedNode]:
    nodes = list(nodes)
    for pattern in patterns:
        if not any(matching([pattern], candidate.names) for candidate in nodes):
            names = list(dict.fromkeys(candidate.names[0] for candidate in nodes))
            raise UnknownNameError(f"`{pattern}` matches no node to quantize", hint=suggest_or_list(pattern, names))
    return [candidate for candidate in nodes if matching(patterns, candidate.names)]


def _quantized_node(node: ir.Node, layer_of: dict[ir.Node, Layer]) -> QuantizedNode | None:
    own = tuple(name for name in (node.name, node.outputs[0].name if node.outputs else None) if name)
    if (layer := layer_of.get(node)) is not None:
        if any(step.op_type not in _ON_THE_WAY for step in layer.path):
            return None
        return QuantizedNode(node, layer.names, layer.weight, 0 if layer.units_first else len(layer.shape) - 1)
    if node.op_type == "ConvTranspose":
        weight = node.inputs[1]
        stored = constant_tensor(weight) is not None
        return QuantizedNode(node, (*own, weight.name or ""), weight, 1) if stored and weight is not None else None
    if node.op_type in WEIGHTED and (
        node.op_type != "MatMul" or any(constant_tensor(v) is not None for v in node.inputs)
    ):
        return None
    return QuantizedNode(node, own) if own else None
