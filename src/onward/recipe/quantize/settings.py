"""What is asked for: `int8`, or `int8:weights=int4,block=32,keep=first+last,ranges=lsq`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import onnx_ir as ir

from onward.arguments import fitting
from onward.errors import RecipeError, UnsupportedError
from onward.recipe.spec import Spec, check_options, lookup, parse

Ranges = Literal["moving", "lsq", "fixed"]

FIRST, LAST = "first", "last"
_RANGES = ("moving", "lsq", "fixed")
_INTEGERS = {name: ir.DataType[name.upper()] for name in ("int8", "uint8", "int16", "uint16", "int4", "uint4")}
_FLOATS = {
    "float8": ir.DataType.FLOAT8E4M3FN, "float8e4m3fn": ir.DataType.FLOAT8E4M3FN, "float8e5m2": ir.DataType.FLOAT8E5M2,
}  # fmt: skip
TYPES = {**_INTEGERS, **_FLOATS}
_ELSEWHERE = {
    "float4": "ONNX Runtime has no kernel that rounds to 4-bit floating-point numbers",
    "float8e4m3fnuz": "ONNX Runtime's CPU has it, other devices do not; `float8e4m3fn` is alike",
    "float8e5m2fnuz": "ONNX Runtime's CPU has it, other devices do not; `float8e5m2` is alike",
    "int2": "ONNX Runtime has no kernel that rounds to integers of 2 bits",
    "uint2": "ONNX Runtime has no kernel that rounds to integers of 2 bits",
    "int32": "QuantizeLinear makes no integers of 32 bits",
}
"""Types that one may ask for, and why they are refused."""
_FOUR_BITS = (ir.DataType.INT4, ir.DataType.UINT4)
_OF_ACTIVATIONS = tuple(dtype for dtype in _INTEGERS.values() if dtype not in _FOUR_BITS)
_ONLY_NEWER = (*_FOUR_BITS, ir.DataType.INT16, ir.DataType.UINT16)

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators with weights: what is quantised unless others are named."""
PLAIN = ("Add", "AveragePool", "Concat", "GlobalAveragePool", "MaxPool", "Mul", "Resize", "Sigmoid", "Softmax", "Sub")
"""Others that runtimes compute in integers, where they are named."""

_DEFAULTS: Mapping[str, Any] = {
    "weights": None, "activations": None, "block": None, "ranges": "moving", "percentile": None, "momentum": 0.99,
    "calibrate": 32, "keep": (), "targets": "*", "operators": WEIGHTED,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is rounded to what, and where scales come from."""

    weights: ir.DataType
    activations: ir.DataType | None
    block: int | None
    ranges: Ranges
    percentile: float | None
    momentum: float
    """Of the moving average, the part of the old one."""
    calibrate: int
    """Batches on which ranges are measured before training."""
    keep: tuple[str, ...]
    targets: tuple[str, ...]
    operators: tuple[str, ...]
    named: tuple[str, ...]
    """The options that were given."""

    @property
    def opset(self) -> int:
        """The operator set in which QuantizeLinear knows all this."""
        types = (self.weights, self.activations)
        if self.block or any(dtype in _ONLY_NEWER for dtype in types):
            return 21
        return 19 if any(dtype in _FLOATS.values() for dtype in types) else 13


def settings_of(given: str | Mapping[str, Any] | Spec) -> Settings:
    """The settings that were asked for, checked."""
    spec = parse(given)
    options = {**_DEFAULTS, **spec.options}
    check_options(f"`quantize={spec.name}`", spec.options, _DEFAULTS)
    weights = _type(options["weights"] or spec.name)
    assert weights is not None
    usual = None if weights in _FLOATS.values() else "uint8"
    activations = _type(options["activations"] if "activations" in spec.options else usual)
    if activations is not None and activations not in _OF_ACTIVATIONS:
        raise UnsupportedError(
            f"activations cannot be {activations.name.lower()}: no operator of ONNX Runtime computes with such",
            hint="take `activations=uint8`, or `activations=none` for weights alone",
        )
    if options["ranges"] not in _RANGES:
        raise RecipeError(f"there are no ranges `{options['ranges']}`", hint=f"there are {', '.join(_RANGES)}")
    if options["ranges"] == "lsq" and options["percentile"] is not None and activations is None:
        raise RecipeError("`percentile` is for ranges of activations, and these are not quantised", hint="leave it out")
    operators = _words("operators", options["operators"])
    for name in operators:
        lookup("operator to quantise", name, dict.fromkeys((*WEIGHTED, *PLAIN)))
    return Settings(
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
    return lookup("type to quantise to", str(name), TYPES)


def _words(name: str, given: Any) -> tuple[str, ...]:
    """Return the parts of `first+last`."""
    words = given.split("+") if isinstance(given, str) else fitting(f"`{name}` of `quantize`", given, Sequence[str])
    return tuple(word for word in words if word)


def _number(name: str, given: Any, least: float, most: float, whole: bool = False) -> Any:
    if given is None:
        return None
    kinds = int if whole else (int, float)
    if isinstance(given, bool) or not isinstance(given, kinds) or not least <= given <= most:
        kind = "a whole number" if whole else "a number"
        raise RecipeError(f"`{name}` of `quantize` is `{given}`, but must be {kind} from {least:g} to {most:g}")
    return given


def levels(dtype: ir.DataType) -> tuple[float, float]:
    """The least and the largest number of a type."""
    return float(dtype.min), float(dtype.max)


def middle(dtype: ir.DataType) -> int:
    """The zero point of a symmetric range."""
    low, high = levels(dtype)
    return 0 if low < 0 else int(high + 1) // 2


def most_symmetric(dtype: ir.DataType) -> float:
    """The largest distance from that on both sides: 127 for integers of 8 bits."""
    return levels(dtype)[1] - middle(dtype)
