"""Random numbers: Threefry, written out, so that they are JAX's own. A key is two numbers of 32 bits."""

from __future__ import annotations

import math

import numpy as np

from onward.build import function
from onward.engines.framework import Operators
from onward.errors import UnsupportedError
from onward.frameworks.formulas.graph_building import cast, dtype_of
from onward.frameworks.jax.jaxpr.bits import shift_left
from onward.frameworks.jax.jaxpr.movement import positions
from onward.frameworks.jax.jaxpr.values import reshape_to
from onward.recipe.random import encrypt

primitives = Operators()

_NUMBERS = dtype_of(np.uint32)


@function("y0", "y1", name="Threefry2x32OfManyKeys")
def threefry2x32(op, key0, key1, x0, x1):
    """Two numbers of 32 bits encrypted with a key of two such numbers: Threefry-2x32 with 20 rounds."""
    return encrypt(op, key0, key1, x0, x1)


@primitives.define("threefry2x32")
def mix(op, key0, key1, x0, x1):
    results = op.call(threefry2x32, key0, key1, x0, x1)
    for result in results:
        result.value.dtype = _NUMBERS
    return results


def _halves(op, key):
    return tuple(op.Gather(key, op.constant(np.int64(i)), axis=-1) for i in (0, 1))


def _key(op, *halves):
    return op.Concat(*(op.Unsqueeze(half, [-1]) for half in halves), axis=-1)


def _mixed_counters(op, key, shape, eqn):
    """For each key and each place in a shape, two numbers: the place itself, mixed with the key."""
    if not eqn.ctx.threefry_partitionable:
        raise UnsupportedError("it was traced with jax_threefry_partitionable=False")
    if isinstance(size := math.prod(shape), int) and size >= 2**32:
        raise UnsupportedError("there are more than 2**32 of them")
    numbers = reshape_to(op, cast(op, positions(op, size), np.uint32), shape)
    new = [-1 - i for i in range(len(shape))]
    halves = (op.Unsqueeze(half, new) if new else half for half in _halves(op, key))
    return mix(op, *halves, op.constant(np.uint32(0)), numbers)


primitives(
    random_wrap=lambda op, key: key,
    random_unwrap=lambda op, key: key,
    random_clone=lambda op, key: key,
    random_split=lambda op, key, *, shape, eqn: _key(op, *_mixed_counters(op, key, shape, eqn)),
)


@primitives.define("random_seed")
def seed(op, number):
    low = cast(op, number, np.uint32)
    wide = cast(op, cast(op, number, np.int64), np.uint64)
    high = cast(op, op.BitShift(wide, op.scalar(32, wide), direction="RIGHT"), np.uint32)
    is_long = number.dtype.numpy().itemsize == 8
    return _key(op, high if is_long else op.filled_like(low.value, 0), low)


@primitives.define("random_fold_in")
def fold_in(op, key, number):
    return _key(op, *mix(op, *_halves(op, key), op.constant(np.uint32(0)), cast(op, number, np.uint32)))


@primitives.define("random_bits")
def bits(op, key, *, bit_width, shape, eqn):
    high, low = _mixed_counters(op, key, shape, eqn)
    if bit_width == 64:
        wide = cast(op, high, np.uint64)
        return op.BitwiseOr(shift_left(op, wide, op.scalar(32, wide)), cast(op, low, np.uint64))
    return cast(op, op.BitwiseXor(high, low), np.dtype(f"uint{bit_width}"))
