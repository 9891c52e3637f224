"""Initializers by name, drawn from a key: a seed gives the same weights on every engine.

    kaiming = initializer("kaiming_normal")
    weight = kaiming.build(op, random.site_key(op, key, value.name), value, nonlinearity="relu")

The fans of a weight, the numbers of inputs and outputs of a unit, follow from its shape and layout:
`torch` for [out, in, *kernel], `keras` for [*kernel, in, out].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr, function
from onward.errors import RecipeError, UnknownNameError, suggest_or_list
from onward.model import Model
from onward.model.state import without_tags
from onward.recipe import random
from onward.recipe.spec import Spec, check_options, checked_number, lookup, one_of, parse, split_address
from onward.recipe.step_builder import StepBuilder, register
from onward.recipe.trainable import matching
from onward.runtime.sessions import evaluate
from onward.standard import COMMON_OPSET, IR_VERSION

FLOAT, DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE
LAYOUTS = ("torch", "keras")
_BLOCK = 16


class Draw(NamedTuple):
    """The key, shape and type that an initializer draws for. `dtype` is float64 or float32."""

    op: Builder
    key: Expr
    shape: tuple[int, ...]
    dtype: ir.DataType
    name: str

    def uniform(self, low: float, high: float) -> Expr:
        return random.uniform(self.op, self.key, self._dims(), self.dtype) * (high - low) + low

    def centered_uniform(self, std: float) -> Expr:
        return self.uniform(-math.sqrt(3) * std, math.sqrt(3) * std)

    def normal(self, mean: float, std: float) -> Expr:
        return random.normal(self.op, self.key, self._dims(), self.dtype) * std + mean

    def truncated_normal(self, mean: float, std: float) -> Expr:
        return random.truncated_normal(self.op, self.key, self._dims(), self.dtype) * std + mean

    def full(self, number: float) -> Expr:
        value = ir.Tensor(np.asarray([number], self.dtype.numpy()))
        return self.op.ConstantOfShape(self._dims(), value=value)

    def fans(self, layout: str) -> tuple[int, int]:
        """Return fan_in and fan_out as PyTorch (`torch`) or Keras (`keras`) computes them."""
        if len(self.shape) < 2:
            raise RecipeError(
                f"`{self.name}` has no fan_in: its shape {list(self.shape)} has fewer than two axes",
                hint=f"write `init={self.name}=zeros`",
            )
        shape = self.shape if layout == "torch" else (self.shape[-1], self.shape[-2], *self.shape[:-2])
        units_out, units_in, *kernel = (max(size, 1) for size in shape)
        return units_in * math.prod(kernel), units_out * math.prod(kernel)

    def _dims(self) -> Expr:
        return self.op.constant(np.asarray(self.shape, np.int64))


@dataclass(frozen=True)
class Initializer:
    """An initializer with its options and their defaults: numbers, except those in `choices`."""

    name: str
    summary: str
    options: Mapping[str, float | str]
    choices: Mapping[str, tuple[str, ...]]
    draw: Callable[..., Expr]

    def resolve(self, options: Mapping[str, Any]) -> dict[str, float | str]:
        """Return all options, with defaults, checked."""
        check_options(f"initializer `{self.name}`", options, self.options)
        return {name: self._option(name, value) for name, value in {**self.options, **options}.items()}

    def build(self, op: Builder, key: Expr, value: ir.Value, /, **options: Any) -> Expr:
        """Return an initial value for `value`; use a new key for every weight."""
        if value.shape is None or not value.shape.is_static() or value.dtype is None:
            raise RecipeError(f"`{value.name}` cannot be initialized: its shape or type is unknown")
        dtype = DOUBLE if value.dtype == DOUBLE else FLOAT
        site = Draw(op, key, tuple(value.shape.numpy()), dtype, value.name or "the weight")
        drawn = self.draw(site, **self.resolve(options))
        return (drawn if dtype == value.dtype else op.Cast(drawn, to=value.dtype)).like(value)

    def _option(self, name: str, value: Any) -> float | str:
        what = f"`{name}` of initializer `{self.name}`"
        return one_of(what, value, *self.choices[name]) if name in self.choices else checked_number(what, value)


INITIALIZERS: dict[str, Initializer] = {}


def initializer(name: str) -> Initializer:
    """Return the initializer named `name`."""
    return lookup("initializer", name, INITIALIZERS)


def _add(name: str, summary: str, draw: Callable[..., Expr], **options: Any) -> None:
    """Add an initializer to the table. An option is its default, or the tuple of its choices."""
    choices = {key: value for key, value in options.items() if isinstance(value, tuple)}
    defaults = {key: value[0] if key in choices else value for key, value in options.items()}
    INITIALIZERS[name] = Initializer(name, summary, defaults, choices, draw)


# ---- the table -------------------------------------------------------------------------------------------------------

_GAINS: dict[str, Callable[[float], float]] = {
    "leaky_relu": lambda a: math.sqrt(2 / (1 + a * a)),
    "relu": lambda a: math.sqrt(2),
    "linear": lambda a: 1.0,
    "sigmoid": lambda a: 1.0,
    "tanh": lambda a: 5 / 3,
    "selu": lambda a: 3 / 4,
}
_KAIMING = {"mode": ("fan_in", "fan_out"), "nonlinearity": tuple(_GAINS), "a": 0.0, "layout": LAYOUTS}

_STD_OF_TRUNCATED = 0.87962566103423978
"""The standard deviation of a standard normal distribution that is cut at -2 and 2."""


def _xavier_std(draw: Draw, gain: float, layout: str) -> float:
    return gain * math.sqrt(2 / sum(draw.fans(layout)))


def _kaiming_std(draw: Draw, mode: str, nonlinearity: str, a: float, layout: str) -> float:
    return _GAINS[nonlinearity](a) / math.sqrt(draw.fans(layout)[mode == "fan_out"])


def _lecun_normal(draw: Draw, layout: str) -> Expr:
    return draw.truncated_normal(0.0, 1 / math.sqrt(draw.fans(layout)[0]) / _STD_OF_TRUNCATED)


def _orthogonal(draw: Draw, gain: float, layout: str) -> Expr:
    """Draw the Q of a QR decomposition of normal numbers, with a positive diagonal of R."""
    draw.fans(layout)  # two axes are needed
    if 0 in draw.shape:
        return draw.full(0.0)
    op = draw.op
    split = 1 if layout == "torch" else -1
    rows, columns = math.prod(draw.shape[:split]), math.prod(draw.shape[split:])
    numbers = draw._replace(shape=(min(rows, columns), max(rows, columns))).normal(0.0, 1.0)
    matrix = op.call(orthonormal_rows, numbers) * gain
    return op.Reshape(op.Transpose(matrix, perm=[1, 0]) if rows > columns else matrix, list(draw.shape))


_add("zeros", "all 0", lambda draw: draw.full(0.0))
_add("ones", "all 1", lambda draw: draw.full(1.0))
_add("constant", "all `value`", lambda draw, value: draw.full(value), value=0.0)
_add("uniform", "uniform from low to high", Draw.uniform, low=0.0, high=1.0)
_add("normal", "normal, with this mean and std", Draw.normal, mean=0.0, std=1.0)
_add("truncated_normal", "normal, cut at mean - 2 std and mean + 2 std", Draw.truncated_normal, mean=0.0, std=1.0)
_add(
    "xavier_uniform",
    "uniform, with std = gain sqrt(2 / (fan_in + fan_out))",
    lambda draw, **options: draw.centered_uniform(_xavier_std(draw, **options)),
    gain=1.0,
    layout=LAYOUTS,
)
_add(
    "xavier_normal",
    "normal, with std = gain sqrt(2 / (fan_in + fan_out))",
    lambda draw, **options: draw.normal(0.0, _xavier_std(draw, **options)),
    gain=1.0,
    layout=LAYOUTS,
)
_add(
    "kaiming_uniform",
    "uniform, with std = gain of the nonlinearity / sqrt(fan)",
    lambda draw, **options: draw.centered_uniform(_kaiming_std(draw, **options)),
    **_KAIMING,
)
_add(
    "kaiming_normal",
    "normal, with std = gain of the nonlinearity / sqrt(fan)",
    lambda draw, **options: draw.normal(0.0, _kaiming_std(draw, **options)),
    **_KAIMING,
)
_add("lecun_normal", "normal, cut at 2 std, with std = 1 / sqrt(fan_in) after the cut", _lecun_normal, layout=LAYOUTS)
_add(
    "orthogonal", "a random matrix with orthonormal rows or columns, times gain", _orthogonal, gain=1.0, layout=LAYOUTS
)


# ---- orthonormal rows ------------------------------------------------------------------------------------------------


@function("rows")
def orthonormal_rows(op: Builder, matrix: Expr) -> Expr:
    """The rows of a matrix that is not taller than wide, made orthonormal from the first to the last: modified
    Gram-Schmidt in float64, of the rows in blocks of 16, and of the blocks in the matrix."""

    def next_row(op: Builder, i: Expr, block: Expr) -> tuple[Expr, Expr]:
        row = op.Unsqueeze(op.Gather(block, i, axis=0), [0])
        unit = row / op.Max(op.ReduceL2(row), 1e-300)  # rows that fill up the last block are zero
        return _without(op, block, unit), op.Squeeze(unit, [0])

    def next_block(op: Builder, i: Expr, rest: Expr) -> tuple[Expr, Expr]:
        start = op.Reshape(i * _BLOCK, [1])
        units = _repeat(op, op.constant(np.int64(_BLOCK)), next_row, op.Slice(rest, start, start + _BLOCK, [0]))
        return _without(op, rest, units), units

    rows = op.Slice(op.Shape(matrix), [0], [1])
    filling = op.Mod(-rows, np.int64(_BLOCK))
    padded = op.Pad(op.Cast(matrix, to=DOUBLE), op.Concat([0, 0], filling, [0], axis=0))
    blocks = op.Div(rows + filling, np.int64(_BLOCK))
    units = _repeat(op, op.Squeeze(blocks), next_block, padded)
    return op.CastLike(op.Slice(op.Reshape(units, op.Shape(padded)), [0], rows), matrix)


def _without(op: Builder, rows: Expr, units: Expr) -> Expr:
    """Return the rows less their projections onto orthonormal ones."""
    return rows - op.MatMul(op.MatMul(rows, op.Transpose(units, perm=[1, 0])), units)


def _repeat(op: Builder, times: Expr, body: Callable[[Builder, Expr, Expr], tuple[Expr, Expr]], start: Expr) -> Expr:
    """Stack the results of `state, result = body(op, i, state)` for i = 0, 1, ..."""
    i, going, state = (
        ir.Value(name=name, type=ir.TensorType(dtype), shape=shape)
        for name, dtype, shape in (
            ("i", ir.DataType.INT64, ir.Shape([])),
            ("going", ir.DataType.BOOL, ir.Shape([])),
            ("state", DOUBLE, None),
        )
    )
    loop = op.subgraph(lambda op, i, going, state: (going, *body(op, i, state)), [i, going, state])
    return op.Loop(times, True, start, outputs=2, body=loop)[1]


# ---- what parameters are reset to ------------------------------------------------------------------------------------


_FILE = "file"


def by_pattern(init: str | Sequence[str] | Mapping[str, Any]) -> str | Mapping[str, Any]:
    """Return an initializer for all parameters (`SPEC`), or a map by pattern (`PATTERN=SPEC`)."""
    if isinstance(init, Mapping):
        return init
    specs: dict[str, str] = {}
    for text in [init] if isinstance(init, str) else init:
        pattern, spec = split_address(text, INITIALIZERS)
        pattern = "*" if pattern is None else pattern
        if pattern in specs:
            raise RecipeError(f"`init` has the pattern `{pattern}` twice", hint="write it once")
        specs[pattern] = spec
    everything = specs.pop("*", _FILE)  # the first match counts, so `*` must be the last
    return {**specs, "*": everything} if specs else everything


def check_patterns(init: str | Mapping[str, Any], parameters: Sequence[ir.Value]) -> None:
    """Raise if a pattern of an initializer matches no trained parameter."""
    names = [value.name or "" for value in parameters]
    for pattern in init if isinstance(init, Mapping) and "name" not in init else ():
        if pattern != "*" and not matching([pattern], names):
            hint = suggest_or_list(pattern.strip("*"), names)
            raise UnknownNameError(f"`{pattern}` of `init` matches no trained parameter", hint=hint)


def bind_initial_value(builder: StepBuilder, value: ir.Value, init: str | Mapping[str, Any]) -> None:
    """Bind a state variable of the inference graph to its initial value.

    A map by pattern gives the initializer of the first match, or else the stored value.
    """
    if isinstance(init, Mapping) and "name" not in init:
        init = next((spec for pattern, spec in init.items() if matching([pattern], [value.name or ""])), _FILE)
    spec, stored = parse(init), value.const_value
    if spec.name != _FILE:
        key = builder.seed_key()
        builder.reset(value, lambda op: _fresh(op, value, spec, key))
        return
    assert stored is not None
    builder.reset(value, lambda op: op.Identity(op(register(op, value.name or "", without_tags(stored)))))


class Drawn(NamedTuple):
    """A parameter with a drawn initial value."""

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]
    init: str | Mapping[str, Any] | Spec


def draw_initial_values(parameters: Sequence[Drawn], seed: int) -> list[ir.Tensor]:
    """Return initial values as tensors, drawn in one session, since opening one is slow."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": COMMON_OPSET}, name="initialization")
    op = Builder(graph, opset=COMMON_OPSET)
    key = op.constant(random.new_key(seed))
    for name, dtype, shape, init in parameters:
        wide = ir.DataType.DOUBLE if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
        value = ir.Value(name=name, type=ir.TensorType(wide), shape=ir.Shape(shape))
        graph.outputs.append(_fresh(op, value, parse(init), key).value)
    drawn = evaluate(Model(ir.Model(graph, ir_version=IR_VERSION, functions=list(op.functions.values()))))
    return [
        ir.Tensor(numbers.astype(dtype.numpy()), dtype=dtype, name=name)
        for numbers, (name, dtype, _, _) in zip(drawn, parameters, strict=True)
    ]


def _fresh(op: Builder, value: ir.Value, spec: Spec, key: Expr) -> Expr:
    return initializer(spec.name).build(op, random.site_key(op, key, value.name or ""), value, **spec.options)
