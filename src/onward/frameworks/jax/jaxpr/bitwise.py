"""Logic, shifts, bit casts and random bits."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onward.build import function
from onward.engines.framework import Operators
from onward.errors import UnsupportedError
from onward.frameworks.formulas.graph_building import cast, dtype_of
from onward.frameworks.formulas.reduction import where
from onward.frameworks.jax.jaxpr.builder import FLOAT_BITS, reshape_to
from onward.frameworks.jax.jaxpr.movement import positions
from onward.recipe.random import encrypt

primitives = Operators()


def _logic(name):
    return lambda op, *xs: getattr(op, name if xs[0].dtype is ir.DataType.BOOL else f"Bitwise{name}")(*xs)


primitives(**{name.lower(): _logic(name) for name in ("And", "Or", "Xor", "Not")})


def _bits(dtype):
    return np.dtype(dtype).itemsize * 8


def _unsigned_type(dtype):
    return np.dtype(f"uint{_bits(dtype)}")


def _shift(op, x, by, direction):
    """Shift as uint32 or uint64, which ONNX Runtime supports. A shift by all bits or more gives 0."""
    wide = np.uint64 if _bits(x.dtype.numpy()) > 32 else np.uint32
    bits, count = (cast(op, cast(op, n, _unsigned_type(n.dtype.numpy())), wide) for n in (x, by))
    shifted = op.BitShift(bits, count, direction=direction)
    left = where(op, count < _bits(x.dtype.numpy()), shifted, op.scalar(0, shifted))
    return cast(op, cast(op, left, _unsigned_type(x.dtype.numpy())), x.dtype)


primitives(
    shift_left=lambda op, x, by: _shift(op, x, by, "LEFT"),
    shift_right_logical=lambda op, x, by: _shift(op, x, by, "RIGHT"),
)


@primitives.define("shift_right_arithmetic")
def shift_right_arithmetic(op, x, by):
    """Fill with the sign bit, by shifting the complement of negative numbers."""
    if not x.dtype.is_signed():
        return _shift(op, x, by, "RIGHT")
    negative = x < 0
    positive = _shift(op, where(op, negative, op.BitwiseNot(x), x), by, "RIGHT")
    return where(op, negative, op.BitwiseNot(positive), positive)


@primitives.define("population_count")
def population_count(op, x):
    bits, count = cast(op, x, _unsigned_type(x.dtype.numpy())), None
    for position in range(_bits(x.dtype.numpy())):
        bit = op.BitwiseAnd(_shift(op, bits, op.scalar(position, bits), "RIGHT"), op.scalar(1, bits))
        count = bit if count is None else count + bit
    return cast(op, count, x.dtype)


@primitives.define("bitcast_convert_type")
def bitcast(op, x, *, new_dtype):
    old, new = x.dtype.numpy(), np.dtype(new_dtype)
    if _bits(old) != _bits(new):
        raise UnsupportedError(f"{old} and {new} have different widths")
    if old.kind in "iu" and new.kind in "iu":
        return cast(op, x, new)
    if old.kind in "iu":
        return _float_of_bits(op, cast(op, x, _unsigned_type(old)), new)
    if new.kind in "iu":
        return cast(op, _bits_of_float(op, x), new)
    raise UnsupportedError(f"{old} cannot be read as {new}")


@primitives.define("nextafter")
def nextafter(op, x, towards):
    """Return the next float towards another: that with the next larger or smaller bits."""
    unsigned, signed = _unsigned_type(x.dtype.numpy()), np.dtype(f"int{_bits(x.dtype.numpy())}")
    bits = cast(op, _bits_of_float(op, x), signed)
    step = op.Where(op.Equal(towards > x, x > 0), op.scalar(1, bits), op.scalar(-1, bits))
    moved = _float_of_bits(op, cast(op, bits + step, unsigned), x.dtype.numpy())
    least = op.Sign(towards) * np.finfo(x.dtype.numpy()).smallest_subnormal
    near = op.Where(op.Equal(x, towards), towards, op.Where(op.Equal(x, 0), least, moved))
    return op.Where(op.Or(op.IsNaN(x), op.IsNaN(towards)), op.scalar(np.nan, x), near)


def _float_of_bits(op, bits, dtype):
    """Return the floats of bits, computed in float64 from sign, exponent and fraction."""
    exponent_bits, fraction_bits = FLOAT_BITS[dtype.name]
    bits = cast(op, bits, np.uint64 if exponent_bits > 8 else np.uint32)  # Keras has no uint64
    last, bias = 2**exponent_bits - 1, 2 ** (exponent_bits - 1) - 1

    def field(start, count):
        moved = op.BitShift(bits, op.scalar(start, bits), direction="RIGHT")
        return cast(op, op.BitwiseAnd(moved, op.scalar(2**count - 1, moved)), np.float64)

    fraction, exponent = field(0, fraction_bits), field(fraction_bits, exponent_bits)
    is_normal, is_special = exponent > 0, op.Equal(exponent, last)
    whole = fraction + op.Where(is_normal, np.float64(2**fraction_bits), np.float64(0))
    power = op.Where(is_special, np.float64(0), op.Max(exponent, 1)) - (bias + fraction_bits)
    value = op.Where(is_special, op.Where(fraction > 0, np.float64(np.nan), np.float64(np.inf)), whole * 2**power)
    return cast(op, op.Where(op.Equal(field(fraction_bits + exponent_bits, 1), 1), -value, value), dtype_of(dtype))


def _bits_of_float(op, x):
    """Return the bits of floats: the exponent by repeated halving, the fraction from the rest."""
    exponent_bits, fraction_bits = FLOAT_BITS[x.dtype.numpy().name]
    if exponent_bits > 8:
        raise UnsupportedError("the bits of a float64 cannot be read")
    bias, size = 2 ** (exponent_bits - 1) - 1, op.Abs(cast(op, x, np.float64))
    infinite, undefined = op.Equal(size, np.inf), op.IsNaN(size)
    size = op.Where(op.Or(infinite, undefined), np.float64(1), size)
    exponent = op.scalar(1, size)
    rest = size * np.float64(2.0 ** (bias - 1))  # at least 1 for normal numbers
    for step in (2**i for i in reversed(range(exponent_bits))):
        large = rest >= np.float64(2.0**step)
        exponent = op.Where(large, exponent + step, exponent)
        rest = op.Where(large, rest * np.float64(2.0**-step), rest)
    is_normal = rest >= 1
    fraction = op.Where(is_normal, rest - 1, rest) * np.float64(2**fraction_bits)
    bits = op.Where(is_normal, exponent, op.scalar(0, exponent)) * np.float64(2**fraction_bits) + fraction
    special = np.float64((2**exponent_bits - 1) * 2**fraction_bits)
    bits = op.Where(undefined, special + 2 ** (fraction_bits - 1), op.Where(infinite, special, bits))
    is_negative = op.Or(cast(op, x, np.float64) < 0, op.Equal(op.Reciprocal(cast(op, x, np.float64)), -np.inf))
    bits = op.Where(is_negative, bits + 2 ** (exponent_bits + fraction_bits), bits)
    return cast(op, cast(op, bits, np.int64), _unsigned_type(x.dtype.numpy()))


@function("y0", "y1", name="Threefry2x32OfManyKeys")
def threefry2x32(op, key0, key1, x0, x1):
    """Encrypt two uint32 with a key of two: Threefry-2x32 with 20 rounds."""
    return encrypt(op, key0, key1, x0, x1)


@primitives.define("threefry2x32")
def mix(op, key0, key1, x0, x1):
    results = op.call(threefry2x32, key0, key1, x0, x1)
    for result in results:
        result.value.dtype = ir.DataType.UINT32
    return results


def _halves(op, key):
    return tuple(op.Gather(key, op.constant(np.int64(i)), axis=-1) for i in (0, 1))


def _key(op, *halves):
    return op.Concat(*(op.Unsqueeze(half, [-1]) for half in halves), axis=-1)


def _mixed_counters(op, key, shape, eqn):
    """Return two uint32 for each key and each index in a shape: the index, encrypted with the key."""
    if not eqn.ctx.threefry_partitionable:
        raise UnsupportedError("it was traced with jax_threefry_partitionable=False")
    if isinstance(size := math.prod(shape), int) and size >= 2**32:
        raise UnsupportedError("it draws more than 2**32 numbers")
    numbers = reshape_to(op, cast(op, positions(op, size), np.uint32), shape)
    new = [-1 - i for i in range(len(shape))]
    halves = (op.Unsqueeze(half, new) if new else half for half in _halves(op, key))
    return mix(op, *halves, op.constant(np.uint32(0)), numbers)


primitives(
    random_wrap=lambda op, key: key,
    random_unwrap=lambda op, key: key,
    random_clone=lambda op, key: key,
    random_fold_in=lambda op, key, number: _key(
        op, *mix(op, *_halves(op, key), op.constant(np.uint32(0)), cast(op, number, np.uint32))
    ),
    random_split=lambda op, key, *, shape, eqn: _key(op, *_mixed_counters(op, key, shape, eqn)),
)


@primitives.define("random_seed")
def seed(op, number):
    low = cast(op, number, np.uint32)
    wide = cast(op, cast(op, number, np.int64), np.uint64)
    high = cast(op, op.BitShift(wide, op.scalar(32, wide), direction="RIGHT"), np.uint32)
    is_long = number.dtype.numpy().itemsize == 8
    return _key(op, high if is_long else op.filled_like(low.value, 0), low)


@primitives.define("random_bits")
def bits(op, key, *, bit_width, shape, eqn):
    high, low = _mixed_counters(op, key, shape, eqn)
    if bit_width == 64:
        wide = cast(op, high, np.uint64)
        return op.BitwiseOr(_shift(op, wide, op.scalar(32, wide), "LEFT"), cast(op, low, np.uint64))
    return cast(op, op.BitwiseXor(high, low), np.dtype(f"uint{bit_width}"))
