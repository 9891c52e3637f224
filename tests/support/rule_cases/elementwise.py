"""Cases for operators that work on each element, and arithmetic."""

import numpy as np
from onnx import parser


def _model(signature, body, opset=21):
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {signature} {{ {body} }}')


def _values(*shape, seed=0, low=0.3, high=1.7):
    """Numbers of both signs that stay clear of zero."""
    rng = np.random.default_rng(seed)
    sign = rng.choice([-1, 1], shape)
    return np.asarray(sign * rng.uniform(low, high, shape), np.float32)


def _numbers(*values):
    return np.array(values, np.float32)


_FAR = _numbers(-200, -90, -30, -3.5, -0.7, 0.6, 2.3, 4.5, 30, 90, 200)
"""Where exponentials overflow, and between."""

_SAFE_FAR_OUT = {
    "Elu": "<alpha=1.3>",
    "HardSigmoid": "<alpha=0.3, beta=0.4>",
    "HardSwish": "",
    "LeakyRelu": "<alpha=0.2>",
    "Mish": "",
    "Selu": "<alpha=1.5, gamma=1.2>",
    "Shrink": "<lambd=1.5, bias=0.5>",
    "Sigmoid": "",
    "Softplus": "",
    "Softsign": "",
    "Tanh": "",
    "ThresholdedRelu": "<alpha=1.5>",
}

_BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum")

CASES = {}

for _name, _attributes in _SAFE_FAR_OUT.items():
    CASES[f"{_name}_far_out"] = (
        _model("(float[11] x) => (float[11] y)", f"y = {_name}{_attributes}(x)", 22),
        {"x": _FAR},
    )
CASES["Gelu_tanh_far_out"] = (
    _model('(float[11] x) => (float[11] y)', 'y = Gelu<approximate="tanh">(x)'), {"x": _FAR},
)  # fmt: skip
CASES["Swish_far_out"] = (_model("(float[11] x) => (float[11] y)", "y = Swish<alpha=0.8>(x)", 24), {"x": _FAR})

for _name in _BINARY:
    CASES[f"{_name}_broadcast_both_ways"] = (
        _model("(float[2,1,3] a, float[4,1] b) => (float[2,4,3] y)", f"y = {_name}(a, b)"),
        {"a": _values(2, 1, 3), "b": _values(4, 1, seed=1)},
    )
    CASES[f"{_name}_scalar"] = (
        _model("(float a, float[2,3] b) => (float[2,3] y)", f"y = {_name}(a, b)"),
        {"a": _values(), "b": _values(2, 3, seed=1)},
    )
    CASES[f"{_name}_unknown_rank"] = (
        _model(
            "(float[2,4,3] wide, float[12] flat, int64[R] shape) => (float[24] y)",
            f"""narrow = Reshape(flat, shape)
                result = {_name}(wide, narrow)
                all = Constant<value = int64[1] {{-1}}>()
                y = Reshape(result, all)""",
        ),
        {"wide": _values(2, 4, 3), "flat": _values(12, seed=1), "shape": np.array([4, 3])},
    )
for _name in ("Max", "Min", "Sum", "Mean"):
    CASES[f"{_name}_of_three"] = (
        _model("(float[2,3] a, float[3] b, float c) => (float[2,3] y)", f"y = {_name}(a, b, c)"),
        {"a": _values(2, 3), "b": _values(3, seed=1), "c": _values(seed=2)},
    )

CASES |= {
    "Mod_fmod": (
        _model("(float[2,4] a, float[4] b) => (float[2,4] y)", "y = Mod<fmod=1>(a, b)"),
        {"a": _values(2, 4, low=3.1, high=9), "b": _values(4, seed=1, low=1.1, high=2)},
    ),
    "PRelu_slope_per_channel": (
        _model("(float[2,3,4] x, float[3,1] slope) => (float[2,3,4] y)", "y = PRelu(x, slope)"),
        {"x": _values(2, 3, 4), "slope": _values(3, 1, seed=1)},
    ),
    "Where_broadcast": (
        _model("(bool[4,1] c, float[2,1,3] a, float b) => (float[2,4,3] y)", "y = Where(c, a, b)"),
        {"c": np.array([[True], [False], [True], [False]]), "a": _values(2, 1, 3), "b": _values()},
    ),
    "Where_hides_what_is_not_a_number": (
        _model(
            "(float[4] x) => (float[4] y)",
            """zero = Constant<value = float {0.0}>()
               one = Constant<value = float {1.0}>()
               positive = Greater(x, zero)
               log = Log(x)
               root = Sqrt(x)
               inverse = Reciprocal(x)
               quotient = Div(one, x)
               half = Constant<value = float {0.5}>()
               power = Pow(x, half)
               large = Constant<value = float {1000.0}>()
               larger = Mul(x, large)
               most = Neg(larger)
               growth = Exp(most)
               all = Sum(log, root, inverse, quotient, power, growth)
               y = Where(positive, all, x)""",
        ),
        {"x": _numbers(-2, -0.9, 0.5, 2)},
    ),
    "Div_by_a_constant": (
        _model("(float[2,3] x) => (float[2,3] y)", "two = Constant<value = float {2.5}>() y = Div(x, two)"),
        {"x": _values(2, 3)},
    ),
    "Clip_both_bounds": (
        _model("(float[6] x, float low, float high) => (float[6] y)", "y = Clip(x, low, high)"),
        {"x": _numbers(-2, -1, -0.4, 0.3, 1, 2), "low": np.array(-0.7, np.float32), "high": np.array(0.8, np.float32)},
    ),
    "Clip_below": (
        _model("(float[4] x, float low) => (float[4] y)", "y = Clip(x, low)"),
        {"x": _numbers(-2, -0.4, 0.3, 1), "low": np.array(-0.7, np.float32)},
    ),
    "Clip_above": (
        _model("(float[4] x, float high) => (float[4] y)", "y = Clip(x, , high)"),
        {"x": _numbers(-2, -0.4, 0.3, 1), "high": np.array(0.6, np.float32)},
    ),
    "Clip_bounds_crossed": (
        _model("(float[4] x, float low, float high) => (float[4] y)", "y = Clip(x, low, high)"),
        {"x": _numbers(-2, -0.4, 0.3, 1), "low": np.array(0.7, np.float32), "high": np.array(-0.8, np.float32)},
    ),
    "Pow_broadcast": (
        _model("(float[2,1,3] x, float[4,1] p) => (float[2,4,3] y)", "y = Pow(x, p)"),
        {"x": np.abs(_values(2, 1, 3)), "p": _values(4, 1, seed=1)},
    ),
    "Pow_integer_exponents_of_zero_and_negative": (
        _model("(float[3,1] x, int64[4] p) => (float[3,4] y)", "y = Pow(x, p)"),
        {"x": _numbers(0, -1.5, 0.7).reshape(3, 1), "p": np.array([0, 1, 2, 3])},
    ),
    "Relu_twice_used": (
        _model("(float[2,3] x) => (float[2,3] y)", "r = Relu(x) y = Mul(r, r)"),
        {"x": _values(2, 3)},
    ),
    "Exp_of_half_precision": (
        _model("(float16[5] x) => (float16[5] y)", "y = Exp(x)"),
        {"x": np.linspace(-2, 2, 5).astype(np.float16)},
    ),
}  # fmt: skip

for _exponent in (-2.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 2.5):
    CASES[f"Pow_to_the_{_exponent}".replace(".", "_").replace("-", "minus_")] = (
        _model("(float[2,3] x) => (float[2,3] y)", f"p = Constant<value = float {{{_exponent}}}>() y = Pow(x, p)"),
        {"x": np.abs(_values(2, 3))},
    )
for _exponent in (0.0, 1.0, 2.0, 3.0):
    CASES[f"Pow_of_zero_to_the_{_exponent:.0f}"] = (
        _model("(float[3] x) => (float[3] y)", f"p = Constant<value = float {{{_exponent}}}>() y = Pow(x, p)"),
        {"x": _numbers(0, -0.5, 2)},
    )


def _edge(operator, x, expected, dy=1.0, opset=22):
    """The gradient at points where differences do not show it: kinks, ties, infinite slopes under a gradient of 0."""
    body = f"y = {operator}(x)"
    n = len(x)
    return (
        _model(f"(float[{n}] x) => (float[{n}] y)", body, opset),
        {"x": _numbers(*x)},
        np.full(n, dy),
        {"x": expected},
    )


EDGES = {
    "Abs_at_0": _edge("Abs", [0], [0]),
    "Relu_at_0": _edge("Relu", [0], [0]),
    "LeakyRelu_at_0": _edge("LeakyRelu<alpha=0.25>", [0], [0.25]),
    "Elu_at_0": _edge("Elu<alpha=2.0>", [0], [2]),
    "HardSwish_at_its_kinks": _edge("HardSwish", [-3, 3], [0, 1]),
    "HardSigmoid_at_its_kinks": _edge("HardSigmoid<alpha=0.5>", [-1, 1], [0, 0]),
    "ThresholdedRelu_at_its_threshold": _edge("ThresholdedRelu", [1], [0]),
    "Shrink_at_its_kinks": _edge("Shrink", [-0.5, 0.5], [0, 0]),
    "Celu_far_out": _edge("Celu", [-200, 200], [0, 1]),
    **{
        f"{name}_under_a_gradient_of_0": _edge(name, [-300, -1, 0, 1, 300], [0] * 5, dy=0.0)
        for name in ("Acos", "Acosh", "Asin", "Atanh", "Cosh", "Exp", "Log", "Reciprocal", "Sinh", "Sqrt")
    },
    "Max_ties": (
        _model("(float[3] a, float[3] b, float[3] c) => (float[3] y)", "y = Max(a, b, c)"),
        {"a": _numbers(1, 2, 3), "b": _numbers(1, 3, 3), "c": _numbers(1, 0, 0)},
        np.array([3, 1, 1.0]),
        {"a": [1, 0, 0.5], "b": [1, 1, 0.5], "c": [1, 0, 0]},
    ),
    "Div_by_0_under_a_gradient_of_0": (
        _model("(float[2] a, float[2] b) => (float[2] y)", "y = Div(a, b)"),
        {"a": _numbers(0, 5), "b": _numbers(0, 0)},
        np.zeros(2),
        {"a": [0, 0], "b": [0, 0]},
    ),
    "Pow_of_0": (
        _model("(float[4] a, float[4] b) => (float[4] y)", "y = Pow(a, b)"),
        {"a": _numbers(0, 0, 0, 0), "b": _numbers(0, 1, 2, 0.5)},
        np.array([1, 1, 1, 0.0]),
        {"a": [0, 1, 0, 0], "b": [0, 0, 0, 0]},
    ),
    "Clip_at_its_bounds": (
        _model("(float[4] x, float low, float high) => (float[4] y)", "y = Clip(x, low, high)"),
        {"x": _numbers(-1, -0.5, 0.5, 1), "low": np.array(-0.5, np.float32), "high": np.array(0.5, np.float32)},
        np.ones(4),
        {"x": [0, 1, 1, 0], "low": 1, "high": 1},
    ),
}
"""name -> (model, inputs, gradient of y, gradients of the inputs)"""
