"""Random numbers computed in the graph: the same on every engine, and the same after a resume.

Numbers are a function of a *key*, a uint32[2] tensor: the cipher Threefry-2x32 with 20 rounds
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) encrypts the positions 0, 1, 2
... with it. The arithmetic is on unsigned integers, and the results are JAX's, bit for bit:

    new_key(seed)                jax.random.key(seed)
    fold_in(op, key, data)       jax.random.fold_in(key, data)
    random_bits(op, key, shape)  jax.random.bits(key, shape, "uint32")
    uniform(op, key, shape)      jax.random.uniform(key, shape)

A key is used once. `fold_in` derives one for each update, `site_key` one for each site in the
model. `shape` is an int64 tensor, possibly known only at run time, of at most 2^32 elements in all.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr, Function, function
from onward.errors import RecipeError

FLOAT, DOUBLE, UINT32, BOOL = ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.UINT32, ir.DataType.BOOL

# ---- keys ------------------------------------------------------------------------------------------------------------


def new_key(seed: int) -> np.ndarray:
    """Return the key of a seed: its upper and its lower 32 bits."""
    if not 0 <= seed < 2**64:
        raise RecipeError(f"the seed {seed} does not fit into 64 bits", hint="pass a seed from 0 to 2^64 - 1")
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def fold_in(op: Builder, key: Expr, data: int | Expr) -> Expr:
    """Return the key number `data` (modulo 2^32, e.g. the step counter) that derives from `key`."""
    data = op.Cast(data, to=UINT32) if isinstance(data, Expr) else op.constant(np.uint32(data & 0xFFFFFFFF))
    return _call(op, _fold_in, UINT32, key, data)


def site_key(op: Builder, key: Expr, name: str) -> Expr:
    """Return a key for the site `name`: `key` xor the first 64 bits of the name's SHA-256.

    Adding a layer does not change the numbers of another one.
    """
    digest = hashlib.sha256(name.encode()).digest()
    return op.BitwiseXor(key, np.frombuffer(digest[:8], ">u4").astype(np.uint32))


# ---- bits ------------------------------------------------------------------------------------------------------------


def random_bits(op: Builder, key: Expr, shape: Expr) -> Expr:
    """Return a uint32 tensor of random bits."""
    return _call(op, _random_bits, UINT32, key, shape)


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


@function("word0", "word1")
def threefry2x32(op: Builder, key: Expr, counter0: Expr, counter1: Expr) -> tuple[Expr, Expr]:
    """The pair of words (counter0, counter1) encrypted with the key, all uint32: Threefry-2x32 with 20 rounds."""
    key0, key1 = op.Split(key, [1, 1], outputs=2)
    return encrypt(op, key0, key1, counter0, counter1)


def encrypt(op: Builder, key0: Expr, key1: Expr, counter0: Expr, counter1: Expr) -> tuple[Expr, Expr]:
    """Encrypt words with a key, whose words may be tensors: Threefry-2x32 with 20 rounds."""
    keys = (key0, key1, op.BitwiseXor(op.BitwiseXor(key0, key1), _PARITY))
    word0, word1 = counter0 + key0, counter1 + key1
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            word0 = word0 + word1
            word1 = op.BitwiseXor(_rotate_left(op, word1, distance), word0)
        word0 = word0 + keys[(group + 1) % 3]
        word1 = word1 + (keys[(group + 2) % 3] + np.uint32(group + 1))
    return word0, word1


def _rotate_left(op: Builder, word: Expr, distance: int) -> Expr:
    """Rotate bits by Mul and Add, which runtimes vectorize, unlike shift and Or."""
    return word * np.uint32(1 << distance) + op.BitShift(word, np.uint32(32 - distance), direction="RIGHT")


@function("folded", name="FoldIn")
def _fold_in(op: Builder, key: Expr, data: Expr) -> Expr:
    """A new key: the pair (0, data) encrypted with the key."""
    words = op.call(threefry2x32, key, np.zeros(1, np.uint32), op.Reshape(data, [1]))
    return op.Concat(*words, axis=0)


@function("bits", name="RandomBits")
def _random_bits(op: Builder, key: Expr, shape: Expr) -> Expr:
    """Random uint32: element i is the xor of the two words that the pair (0, i) is encrypted to."""
    return op.Reshape(op.BitwiseXor(*_blocks(op, key, shape)), shape, allowzero=1)


@function("bits", name="PairedRandomBits")
def _paired_bits(op: Builder, key: Expr, shape: Expr) -> Expr:
    """Random uint32, two from each encryption, for half the work: elements i and i + half are the words that the pair
    (i, i + half) is encrypted to, where half is half the number of elements, rounded up. If that number is odd, the
    last pair is (half - 1, 0), and its second word is left over."""
    size = op.ReduceProd(shape, keepdims=0)
    half = op.Div(size + np.int64(1), np.int64(2))
    missing = op.Reshape(half + half - size, [1])
    padding = op.ConstantOfShape(missing, value=np.zeros(1, np.int64))
    counters = _range(op, np.int64(0), half), op.Concat(_range(op, half, size), padding, axis=0)
    words = op.call(threefry2x32, key, *(op.Cast(counter, to=UINT32) for counter in counters))
    bits = op.Slice(op.Concat(*words, axis=0), [0], op.Reshape(size, [1]))
    return op.Reshape(bits, shape, allowzero=1)


def _blocks(op: Builder, key: Expr, shape: Expr) -> tuple[Expr, Expr]:
    """Return two random words for each element of a tensor of that shape, flat."""
    counter = op.Cast(_range(op, np.int64(0), op.ReduceProd(shape, keepdims=0)), to=UINT32)
    return op.call(threefry2x32, key, np.zeros(1, np.uint32), counter)


def _range(op: Builder, start: Expr | np.int64, limit: Expr) -> Expr:
    return op.Range(start, limit, np.int64(1))


# ---- distributions ---------------------------------------------------------------------------------------------------


def uniform(op: Builder, key: Expr, shape: Expr, dtype: ir.DataType = FLOAT) -> Expr:
    """Return uniform numbers in [0, 1): multiples of 2^-23 (float32) or 2^-52 (float64)."""
    return _call(op, _uniform_float if _check_dtype(dtype) == FLOAT else _uniform_double, dtype, key, shape)


def normal(op: Builder, key: Expr, shape: Expr, dtype: ir.DataType = FLOAT) -> Expr:
    """Return normal numbers with mean 0 and standard deviation 1: quantiles of uniform numbers.

    Equal to `jax.random.normal` but for rounding: quantiles are good to 1e-15 for any type.
    """
    smallest = 2.0**-25 if _check_dtype(dtype) == FLOAT else 2.0**-54
    return _quantiles(op, uniform(op, key, shape, dtype), smallest - 0.5, 1.0)


def truncated_normal(
    op: Builder, key: Expr, shape: Expr, dtype: ir.DataType = FLOAT, lower: float = -2.0, upper: float = 2.0
) -> Expr:
    """Return normal numbers between `lower` and `upper`, from one uniform number each."""
    low, high = (math.erf(bound / math.sqrt(2)) / 2 for bound in (lower, upper))
    return _quantiles(op, uniform(op, key, shape, _check_dtype(dtype)), low, high - low)


def bernoulli_mask(op: Builder, key: Expr, shape: Expr, p: float | Expr) -> Expr:
    """Return a bool tensor whose elements are true with probability `p`."""
    return _call(op, _bernoulli_mask, BOOL, key, shape, p if isinstance(p, Expr) else np.float32(p))


def dropout(op: Builder, x: Expr, ratio: float | Expr, key: Expr) -> Expr:
    """Set the share `ratio` of elements of `x` to zero and scale the others to keep the mean."""
    return op.call(_dropout, x, ratio if isinstance(ratio, Expr) else np.float32(ratio), key)


@function("numbers", name="UniformFloat")
def _uniform_float(op: Builder, key: Expr, shape: Expr) -> Expr:
    """Uniform float32 in [0, 1): the upper 23 of 32 random bits, times 2^-23."""
    return _unit_interval(op, op.call(_random_bits, key, shape))


@function("numbers", name="UniformDouble")
def _uniform_double(op: Builder, key: Expr, shape: Expr) -> Expr:
    """Uniform float64 in [0, 1): the upper 52 of 64 random bits, times 2^-52."""
    high, low = _blocks(op, key, shape)
    low = op.BitShift(low, np.uint32(12), direction="RIGHT")
    numbers = op.Cast(high, to=DOUBLE) * 2.0**-32 + op.Cast(low, to=DOUBLE) * 2.0**-52
    return op.Reshape(numbers, shape, allowzero=1)


@function("numbers")
def normal_quantile(op: Builder, uniform: Expr, low: Expr, width: Expr) -> Expr:
    """The x below which a standard normal number lies with probability 1/2 + q, where q = low + width * uniform; the
    result has the type of `uniform`. Computed in float64 with Wichura's algorithm AS 241 (Applied Statistics 37, 1988).
    """
    q = low + width * op.Cast(uniform, to=DOUBLE)
    size = op.Abs(q)
    central = q * _rational(op, 0.180625 - q * q, _CENTRAL)
    r = op.Sqrt(-op.Log(0.5 - size))
    tail = op.Sign(q) * op.Where(r <= 5.0, _rational(op, r - 1.6, _TAIL), _rational(op, r - 5.0, _FAR_TAIL))
    return op.CastLike(op.Where(size <= 0.425, central, tail), uniform)


@function("mask", name="BernoulliMask")
def _bernoulli_mask(op: Builder, key: Expr, shape: Expr, p: Expr) -> Expr:
    """True with probability p: where a uniform float32, made of PairedRandomBits, is less than p."""
    return _unit_interval(op, op.call(_paired_bits, key, shape)) < op.Cast(p, to=FLOAT)


@function("y", name="Dropout")
def _dropout(op: Builder, x: Expr, ratio: Expr, key: Expr) -> Expr:
    """y = x * (mask * scale), with mask = BernoulliMask(key, Shape(x), 1 - ratio) and scale = 1 / (1 - ratio), or 0
    where ratio is 1."""
    keep = 1.0 - ratio
    mask = op.call(_bernoulli_mask, key, op.Shape(x), keep)
    scale = op.Where(keep > 0.0, 1.0 / keep, 0.0)
    return x * (op.CastLike(mask, x) * op.CastLike(scale, x))


def _unit_interval(op: Builder, bits: Expr) -> Expr:
    return op.Cast(op.BitShift(bits, np.uint32(9), direction="RIGHT"), to=FLOAT) * 2.0**-23


def _quantiles(op: Builder, numbers: Expr, low: float, width: float) -> Expr:
    return op.call(normal_quantile, numbers, np.float64(low), np.float64(width))


def _call(op: Builder, function: Function, dtype: ir.DataType, *inputs: Any) -> Expr:
    result: Expr = op.call(function, *inputs)
    result.value.type = ir.TensorType(dtype)
    return result


def _check_dtype(dtype: ir.DataType) -> ir.DataType:
    if dtype not in (FLOAT, DOUBLE):
        raise RecipeError(f"random numbers cannot be {dtype}", hint="draw float32 and cast it")
    return dtype


def _rational(op: Builder, x: Expr, coefficients: tuple[tuple[float, ...], tuple[float, ...]]) -> Expr:
    """Return the quotient of two polynomials, highest power first."""
    numerator, denominator = (_polynomial(op, x, c) for c in coefficients)
    return numerator / denominator


def _polynomial(op: Builder, x: Expr, coefficients: tuple[float, ...]) -> Expr:
    result = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        result = result * x + coefficient
    return result


# fmt: off
_CENTRAL = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608),
    (5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867,
     5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0),
)
_TAIL = (
    (7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258,
     3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459,
     0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0),
)
_FAR_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386, 0.026532189526576123093,
     0.29656057182850489123, 1.7848265399172913358, 5.4637849111641143699, 6.6579046435011037772),
    (2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5, 7.868691311456132591e-4,
     0.0148753612908506148525, 0.13692988092273580531, 0.59983220655588793769, 1.0),
)
# fmt: on
