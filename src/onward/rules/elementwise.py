"""Elementwise operators.

At a kink the derivative is PyTorch's. An infinite derivative (Sqrt and Log at 0, Exp after an overflow) or an undefined
one (below 0) becomes a very large number: times the gradient 0 of a branch that a Where did not take, it is 0 and not
NaN.
"""

import functools
import math

from onward.build import DOMAIN
from onward.constants import is_relu6
from onward.rules.common import cast_like, finite, fixed_number, largest, least_root, never_zero, tiny
from onward.rules.registry import elementwise, gradient, no_gradient

no_gradient("the operator exists to stop gradients", "StopGradient", domain=DOMAIN)
no_gradient("its derivative is zero almost everywhere", "Ceil", "Floor", "Hardmax", "Round", "Sign")
no_gradient(
    "the result is a truth value",
    "And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor",
)  # fmt: skip
no_gradient(
    "it works on the bits of numbers",
    "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor",
)  # fmt: skip
no_gradient("the result is made of integers", "NonMaxSuppression", "NonZero", "Shape", "Size")
no_gradient(
    "the result is random; through a sample no gradient flows",
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
)  # fmt: skip
no_gradient(
    "the result is a table made from sizes and frequencies",
    "BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix",
)  # fmt: skip
no_gradient(
    "it works on text or encoded data",
    "ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer",
)  # fmt: skip

# ---- y = f(x) --------------------------------------------------------------------------------------------------------

elementwise(
    Abs=lambda op, x, y: op.Sign(x),
    Acos=lambda op, x, y: -1 / _side(op, x),
    Acosh=lambda op, x, y: 1 / op.Sinh(op.Where(x > 1, y, least_root(y))),
    Asin=lambda op, x, y: 1 / _side(op, x),
    Asinh=lambda op, x, y: 1 / op.Cosh(y),
    Atan=lambda op, x, y: 1 / (1 + x * x),
    Atanh=lambda op, x, y: 1 / op.Clip((1 - x) * (1 + x), tiny(x)),
    Cos=lambda op, x, y: -op.Sin(x),
    Cosh=lambda op, x, y: finite(op, op.Sinh(x)),
    Erf=lambda op, x, y: op.Exp(-(x * x)) * (2 / math.sqrt(math.pi)),
    Exp=lambda op, x, y: op.Clip(y, None, largest(y)),
    HardSigmoid=lambda op, x, y, *, alpha: op.Sign(y * (1 - y)) * alpha,
    Relu=lambda op, x, y: cast_like(op, y > 0, y),  # Sign runs on one thread in ONNX Runtime
    Sigmoid=lambda op, x, y: y * (1 - y),
    Sin=lambda op, x, y: op.Cos(x),
    Sinh=lambda op, x, y: op.Clip(op.Cosh(x), None, largest(x)),
    Softplus=lambda op, x, y: op.Sigmoid(x),
    Tan=lambda op, x, y: 1 + y * y,
    Tanh=lambda op, x, y: 1 - y * y,
)


def _side(op, x):
    """Return sqrt(1 - x^2), but not 0 at the ends of the domain."""
    return op.Sqrt(op.Clip((1 - x) * (1 + x), tiny(x)))


gradient("Identity")(lambda op, dy, x: dy)
gradient("Neg")(lambda op, dy, x: -dy)
gradient("Log")(lambda op, dy, x: dy / op.Clip(x, tiny(x)))
gradient("Sqrt")(lambda op, dy, x, *, y: dy * 0.5 / op.Where(x > 0, y, least_root(y)))
gradient("Celu")(lambda op, dy, x, *, y, alpha: op.Where(x > 0, dy, dy * (y / alpha + 1)))
gradient("Elu")(lambda op, dy, x, *, y, alpha: op.Where(x > 0, dy, dy * (y + alpha)))
gradient("Selu")(lambda op, dy, x, *, y, alpha, gamma: op.Where(x > 0, dy * gamma, dy * (y + gamma * alpha)))
gradient("LeakyRelu")(lambda op, dy, x, *, alpha: op.Where(x > 0, dy, dy * alpha))
gradient("ThresholdedRelu")(lambda op, dy, x, *, alpha: op.Where(x > alpha, dy, 0))
gradient("Shrink")(lambda op, dy, x, *, lambd: op.Where(op.Abs(x) > lambd, dy, 0))


@gradient("Reciprocal")
def reciprocal(op, dy, x, *, y):
    """dX = -dY Y^2."""
    y = finite(op, y)
    return -(dy * y * y)


@gradient("Softsign")
def softsign(op, dy, x):
    """dX = dY / (1 + |X|)^2."""
    below = 1 + op.Abs(x)
    return dy / below / below


@gradient("PRelu", broadcasts=True)
def prelu(op, dy, x, slope):
    """dX = dY where X > 0, else slope dY; dslope = X dY where X <= 0."""
    positive = x > 0
    return op.Where(positive, dy, dy * slope), op.Where(positive, 0, dy * x)


@gradient("HardSwish")
def hard_swish(op, dy, x):
    """Y = X h, h = X / 6 + 1/2 cut to 0..1: dX = dY (h + X / 6 where 0 < h < 1)."""
    h = op.Clip(x / 6 + 0.5, 0, 1)
    near = op.Clip(x, -3, 3)  # beyond, h does not change, and 0 times infinity is not 0
    return dy * (h + near * op.Sign(h * (1 - h)) / 6)


@gradient("Gelu")
def gelu(op, dy, x, *, approximate):
    """Y = X P(X): dX = dY (P + X P'), P the normal distribution or sigmoid(2c (X + 0.044715 X^3)), c = sqrt(2 / pi)."""
    if approximate != "tanh":
        density = op.Exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
        return dy * (0.5 * (1 + op.Erf(x * math.sqrt(0.5))) + x * density)
    near = op.Clip(x, -20, 20)  # beyond, P is 0 or 1, and X^3 might overflow
    square, scale = near * near, 2 * math.sqrt(2 / math.pi)
    p = op.Sigmoid(near * (square * (scale * 0.044715) + scale))
    slope = near * (square * (scale * 3 * 0.044715) + scale)
    return dy * (p * (1 + (1 - p) * slope))


@gradient("Mish")
def mish(op, dy, x):
    """Y = X t, t = tanh(softplus(X)): dX = dY (t + X (1 - t^2) sigmoid(X))."""
    t = op.Tanh(op.Softplus(x))
    return dy * (t + x * (1 - t * t) * op.Sigmoid(x))


@gradient("Swish")
def swish(op, dy, x, *, y, alpha):
    """Y = X s, s = sigmoid(alpha X): dX = dY (s + alpha Y (1 - s))."""
    return dy * _swish_slope(op.Sigmoid(x * alpha), y, alpha)


@gradient("SwiGLU")
def swiglu(op, dy, a, b, *, alpha):
    """Y = swish(A) B: dA = dY B swish'(A), dB = dY swish(A)."""
    s = op.Sigmoid(a * alpha)
    swished = a * s
    return dy * b * _swish_slope(s, swished, alpha), dy * swished


def _swish_slope(s, swished, alpha):
    return s + alpha * swished * (1 - s)


@gradient("Clip", broadcasts=(1, 2))
def clip(op, dy, x, low, high, *, wanted):
    """dX = dY within the bounds and at them; a bound gets dY where it clips, only the upper one if they cross.

    At the constant bounds 0 and 6, those of ReLU6, dX = 0.
    """
    if wanted == [0] and low is not None and high is not None and is_relu6(low.value, high.value):
        return op.Where(op.And(x > 0, x < 6), dy, 0)
    dlow = dhigh = None
    if high is not None:
        above = x > high if low is None else op.Or(x > high, low > high)
        dhigh = op.Where(above, dy, 0)
    if low is not None:
        below = x < low if high is None else op.And(x < low, low <= high)
        dlow = op.Where(below, dy, 0)
    bounds = [*([x >= low] if low is not None else []), *([x <= high] if high is not None else [])]
    # Not `Equal(x, y)`: ONNX Runtime may compute float16 in float32 and round only one of them.
    dx = op.Where(functools.reduce(op.And, bounds), dy, 0) if bounds else dy
    return dx, dlow, dhigh


# ---- arithmetic of several tensors -----------------------------------------------------------------------------------


gradient("Add", broadcasts=True)(lambda op, dy, a, b: (dy, dy))
gradient("Sub", broadcasts=True)(lambda op, dy, a, b: (dy, -dy))
gradient("Mul", broadcasts=True)(lambda op, dy, a, b: (dy * b, dy * a))
gradient("Sum", broadcasts=True)(lambda op, dy, *xs: [dy] * len(xs))
gradient("Mean", broadcasts=True)(lambda op, dy, *xs: [dy / len(xs)] * len(xs))


@gradient("Div", broadcasts=True)
def div(op, dy, a, b):
    """Y = A / B: dA = dY / B, dB = -dY A / B^2; for B = 0 as for the smallest number."""
    below = b if never_zero(b) else op.Where(op.Equal(b, 0), tiny(b), b)
    da = dy / below
    return da, -(da * a / below)


@gradient("Mod", broadcasts=True)
def mod(op, dy, a, b, *, y):
    """Y = A - n B with an integer n: dA = dY, dB = -n dY."""
    return dy, -dy * op.Round((a - y) / b)


@gradient("Pow", broadcasts=True)
def power(op, dy, x, exponent, *, y):
    """Y = X^p: dX = dY p X^(p-1), 0 for p = 0; dp = dY Y log X, 0 where X <= 0."""
    positive = x > 0
    dexponent = dy * (op.Where(positive, y, 0) * op.Log(op.Where(positive, x, 1)))
    number = fixed_number(exponent)
    if number is not None:
        return _fixed_power_slope(op, dy, x, number), dexponent
    exponent = cast_like(op, exponent, x)
    scaled = dy * exponent
    zero_times_infinity = op.And(op.And(op.Equal(x, 0), exponent < 1), op.Equal(scaled, 0))
    return scaled * op.Pow(op.Where(zero_times_infinity, 1, x), exponent - 1), dexponent


def _fixed_power_slope(op, dy, x, exponent):
    if exponent in (0, 1):
        return dy if exponent else None
    if exponent == 2:
        return dy * (x * 2)
    # If the slope is infinite (at 0) or undefined (below 0), take the largest finite one near it.
    steepest = max(tiny(x), (largest(x) / 2) ** (1 / (exponent - 1))) if exponent < 1 else 0
    if exponent != round(exponent):
        x = op.Clip(x, steepest)
    elif exponent < 1:
        x = op.Where(op.Equal(x, 0), steepest, x)
    return dy * exponent * op.Pow(x, exponent - 1)


@gradient("Max", "Min", broadcasts=True)
def extreme(op, dy, *xs, y):
    """dX = dY where X is the extreme; ties share it evenly."""
    if len(xs) == 1:
        return dy
    chosen = [op.Equal(x, y) for x in xs]
    share = dy / op.Sum(*(cast_like(op, mask, y) for mask in chosen))
    return [op.Where(mask, share, 0) for mask in chosen]


@gradient("Where", broadcasts=(1, 2))
def where(op, dy, condition, a, b):
    """dA = dY where the condition holds, dB = dY where it does not."""
    return None, op.Where(condition, dy, 0), op.Where(condition, 0, dy)
