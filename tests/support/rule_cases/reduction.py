"""Cases for reductions, cumulative sums and products, and selection by order."""

import numpy as np
from onnx import parser

_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")


def _model(signature, body, opset=21):
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {signature} {{ {body} }}')


def _values(*shape, seed=0):
    """Different positive numbers."""
    rng = np.random.default_rng(seed)
    return (0.4 + rng.permutation(int(np.prod(shape))) / 10).reshape(shape).astype(np.float32)


def _signed(*shape):
    values = _values(*shape)
    return np.where(np.arange(values.size).reshape(shape) % 3 == 1, -values, values)


def _data(name):
    return _values(2, 3, 4) if name in ("LogSum", "Prod") else _signed(2, 3, 4)


CASES = {}

for _name in _REDUCTIONS:
    CASES |= {
        f"{_name}_last_axis": (
            _model(
                "(float[2,3,4] x) => (float[2,3] y)",
                f"axes = Constant<value_ints=[-1]>() y = Reduce{_name}<keepdims=0>(x, axes)",
            ),
            {"x": _data(_name)},
        ),
        f"{_name}_axes_at_run_time": (
            _model("(float[2,3,4] x, int64[2] axes) => (float[N] y)", f"y = Reduce{_name}<keepdims=0>(x, axes)"),
            {"x": _data(_name), "axes": np.array([2, -3])},
        ),
        f"{_name}_of_everything": (
            _model("(float[2,3,4] x) => (float y)", f"y = Reduce{_name}<keepdims=0>(x)"),
            {"x": _data(_name)},
        ),
        f"{_name}_no_axes_at_run_time": (
            _model("(float[2,3,4] x, int64[0] axes) => (float[A,B,C] y)", f"y = Reduce{_name}(x, axes)"),
            {"x": _data(_name), "axes": np.array([], np.int64)},
        ),
        f"{_name}_over_no_axis": (
            _model("(float[2,3,4] x) => (float[2,3,4] y)", f"y = Reduce{_name}<keepdims=0, noop_with_empty_axes=1>(x)"),
            {"x": _data(_name)},
        ),
        f"{_name}_unknown_rank": (
            _model(
                "(float[24] flat, int64[R] shape, int64[1] axes) => (float[8] y)",
                f"""x = Reshape(flat, shape)
                    reduced = Reduce{_name}<keepdims=0>(x, axes)
                    all = Constant<value = int64[1] {{-1}}>()
                    y = Reshape(reduced, all)""",
                18,
            ),
            {"flat": _data(_name).reshape(-1), "shape": np.array([2, 3, 4]), "axes": np.array([1])},
        ),
    }

for _exclusive in (0, 1):
    for _reverse in (0, 1):
        _attributes = f"exclusive={_exclusive}, reverse={_reverse}"
        _suffix = "_exclusive" * _exclusive + "_reverse" * _reverse
        CASES |= {
            f"CumSum{_suffix}": (
                _model("(float[2,3,4] x, int64 axis) => (float[2,3,4] y)", f"y = CumSum<{_attributes}>(x, axis)"),
                {"x": _signed(2, 3, 4), "axis": np.array(-2)},
            ),
            f"CumProd_with_zeros{_suffix}": (
                _model("(float[2,4,2] x, int64 axis) => (float[2,4,2] y)", f"y = CumProd<{_attributes}>(x, axis)", 26),
                {"x": _signed(2, 4, 2) * np.array([[1, 0, 1, 0], [1, 1, 0, 1]], np.float32)[..., None],
                 "axis": np.array(-2)},
            ),
        }  # fmt: skip

CASES |= {
    "Prod_with_zeros": (
        _model("(float[4,4] x, int64[1] axes) => (float[4,1] y)", "y = ReduceProd(x, axes)"),
        {
            "x": np.array([[1, 2, -3, 2], [0, 2, -3, 1], [0, 2, 0, -1], [0, 0, 3, 0]], np.float32),
            "axes": np.array([1]),
        },
    ),
    "Prod_of_everything_with_zeros": (
        _model("(float[2,3] x) => (float y)", "y = ReduceProd<keepdims=0>(x)"),
        {"x": np.array([[2, 0, 3], [-1, 0.5, 0]], np.float32)},
    ),
    "Mean_of_half_precision": (
        _model("(float16[A,B] x, int64[1] axes) => (float16[A] y)", "y = ReduceMean<keepdims=0>(x, axes)"),
        {"x": _signed(3, 4).astype(np.float16), "axes": np.array([1])},
    ),
    "LogSumExp_of_large_numbers": (
        _model("(float[2,3] x, int64[1] axes) => (float[2] y)", "y = ReduceLogSumExp<keepdims=0>(x, axes)"),
        {"x": np.array([[100, 101, 99.5], [-100, -101, -100.5]], np.float32), "axes": np.array([1])},
    ),
    "TopK_smallest_of_first_axis": (
        _model(
            "(float[4,3] x, int64[1] k) => (float[K,3] y)",
            "values, indices = TopK<axis=0, largest=0>(x, k) y = Mul(values, values)",
        ),
        {"x": _signed(4, 3), "k": np.array([2])},
    ),
    "TopK_last_axis": (
        _model("(float[2,5] x, int64[1] k) => (float[2,K] y, int64[2,K] i)", "y, i = TopK<axis=-1>(x, k)"),
        {"x": _signed(2, 5), "k": np.array([3])},
    ),
}  # fmt: skip


def _edge(operator, x, expected):
    """The gradient at points where differences do not show it."""
    x = np.array(x, np.float32)
    model = _model(
        f"(float[{x.shape[0]},{x.shape[1]}] x) => (float[{x.shape[0]}] y)",
        f"axes = Constant<value = int64[1] {{1}}>() y = {operator}<keepdims=0>(x, axes)",
    )
    return model, {"x": x}, np.ones(len(x)), {"x": expected}


EDGES = {
    "Max_ties": _edge("ReduceMax", [[1, 3, 3], [2, 2, 2]], [[0, 0.5, 0.5], [1 / 3, 1 / 3, 1 / 3]]),
    "Min_ties": _edge("ReduceMin", [[1, 1, 3], [2, 4, 3]], [[0.5, 0.5, 0], [1, 0, 0]]),
    "L1_at_0": _edge("ReduceL1", [[0, -1]], [[0, -1]]),
    "L2_of_zeros": _edge("ReduceL2", [[0, 0], [3, 4]], [[0, 0], [0.6, 0.8]]),
    "LogSumExp_of_minus_infinity": _edge("ReduceLogSumExp", [[-np.inf, -np.inf], [-np.inf, 1]], [[0, 0], [0, 1]]),
}
"""name -> (model, inputs, gradient of y, gradients of the inputs)"""
