"""Quantisation, where the node tests of `onnx` do not go.

What straight-through estimators pass is not what differences show: here are the derivatives that are true ones.
"""

import numpy as np
from onnx import parser
from onnx.reference.op_run import OpRun

EXCLUDED = {
    "test_dequantizelinear_e5m2": "numpy takes the quantised input for a floating-point one",
    "test_dynamicquantizelinear_min_adjusted": "two elements tie for the maximum, which has a kink there",
}
"""Node tests that cannot be compared, and why."""


class DynamicQuantizeLinear(OpRun):
    """The reference computes the scale in float32."""

    def _run(self, x):
        high, low = max(0, x.max()), min(0, x.min())
        scale = (high - low) / 255 or 1 / 255
        zero = np.clip(np.rint(-low / scale), 0, 255)
        levels = np.clip(np.rint(x / scale) + zero, 0, 255)
        return levels.astype(np.uint8), np.asarray(scale, x.dtype), np.asarray(zero, np.uint8)


EVALUATORS = [DynamicQuantizeLinear]
"""Operators that the reference of `onnx` does not compute in float64."""


def _model(text, opset=21):
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')


def _levels(*shape):
    return np.random.default_rng(1).integers(-100, 100, shape).astype(np.int8)


def _scales(*shape):
    return np.random.default_rng(2).uniform(0.1, 1, shape).astype(np.float32)


def _dequantize(shape, scale_shape, attributes, *, zero_point=True, opset=21):
    listed, scales = (", ".join(map(str, dims)) for dims in (shape, scale_shape))
    given = {"q": _levels(*shape), "scale": _scales(*scale_shape)}
    typed = f"int8[{listed}] q, float[{scales}] scale"
    if zero_point:
        given["zero"] = np.asarray(_levels(*scale_shape) // 4)
        typed += f", int8[{scales}] zero"
    call = f"DequantizeLinear<{attributes}>({', '.join(given)})".replace("<>", "")
    typed = typed.replace("float[]", "float").replace("int8[]", "int8")
    return _model(f"g ({typed}) => (float[{listed}] y) {{ y = {call} }}", opset), given


def _unknown_rank(scale_shape, attributes):
    model = _model(
        "g (int8[L] q, int64[R] shape, float[S] scale, int8[S] zero) => (float[A, B, C] y) "
        f"{{ z = Reshape(q, shape) y = DequantizeLinear<{attributes}>(z, scale, zero) }}"
    )
    zero = _levels(*scale_shape) // 4
    return model, {"q": _levels(24), "shape": np.array([2, 4, 3]), "scale": _scales(*scale_shape), "zero": zero}


CASES = {
    "dequantize_tensor": _dequantize((2, 3, 4), (), ""),
    "dequantize_tensor_old_opset": _dequantize((2, 3, 4), (), "", opset=19),
    "dequantize_tensor_without_zero_point": _dequantize((2, 3, 4), (), "", zero_point=False),
    "dequantize_vector": _dequantize((5,), (), "axis = 0"),
    "dequantize_first_axis": _dequantize((2, 3, 4), (2,), "axis = 0"),
    "dequantize_last_axis": _dequantize((2, 3, 4), (4,), "axis = -1"),
    "dequantize_blocks": _dequantize((4, 3), (2, 3), "axis = 0, block_size = 2"),
    "dequantize_blocks_of_the_last_axis": _dequantize((2, 3, 6), (2, 3, 2), "axis = -1, block_size = 3"),
    "dequantize_blocks_inside": _dequantize((2, 6, 2), (2, 3, 2), "axis = 1, block_size = 2"),
    "dequantize_axis_unknown_rank": _unknown_rank((4,), "axis = 1"),
    "dequantize_negative_axis_unknown_rank": _unknown_rank((3,), "axis = -1"),
    "quantize_out_of_range": (  # where the estimate is the derivative
        _model(
            "g (float[2, 3] x, float[3] scale, int8[3] zero) => (float[2, 3] y) "
            "{ q = QuantizeLinear<axis = 1>(x, scale, zero) y = DequantizeLinear<axis = 1>(q, scale, zero) }"
        ),
        {
            "x": np.array([[900, -800, 700], [-600, 500, 999]], np.float32),
            "scale": _scales(3),
            "zero": np.array([-3, 0, 5], np.int8),
        },
    ),
    "dynamic_scale": (
        _model("g (float[6] x) => (float scale) { q, scale, zero = DynamicQuantizeLinear(x) }"),
        {"x": np.array([0.3, -1.4, 2.5, 0.0, 1.1, -0.2], np.float32)},
    ),
    "dynamic_scale_of_positive_values": (
        _model("g (float[4] x) => (float scale) { q, scale, zero = DynamicQuantizeLinear(x) }"),
        {"x": np.array([0.3, 1.4, 2.5, 1.1], np.float32)},
    ),
}

STRAIGHT_THROUGH = {
    # x / scale rounds from (2.4, -2.6) to (2, -3), and 2000 saturates at 127: learned step size quantisation
    "quantize_and_dequantize": (
        _model(
            "g (float[3] x, float scale, int8 zero) => (float[3] y) "
            "{ q = QuantizeLinear(x, scale, zero) y = DequantizeLinear(q, scale, zero) }"
        ),
        {
            "x": np.array([0.24, -0.26, 200], np.float32),
            "scale": np.array(0.1, np.float32),
            "zero": np.array(0, np.int8),
        },
        np.array([1, 2, 3]),
        {"x": np.array([1, 2, 0]), "scale": np.array(-0.4 - 0.8 + 3 * 127)},
    ),
    # in range, a quantised product has the gradient of the product with the weights 0.5 (W - 10)
    "quantised_matmul": (
        _model(
            "g (float[2, 3] x, uint8[3, 2] w) => (float[2, 2] y) "
            "<float s = {0.1}, uint8 z = {128}, float ws = {0.5}, uint8 wz = {10}, float ys = {0.2}> "
            "{ q = QuantizeLinear(x, s, z) p = QLinearMatMul(q, s, z, w, ws, wz, ys, z) "
            "y = DequantizeLinear(p, ys, z) }"
        ),
        {
            "x": np.array([[0.3, -1, 2], [1, 0.5, -0.7]], np.float32),
            "w": np.array([[9, 12], [8, 10], [11, 14]], np.uint8),
        },
        np.array([[1, 2], [3, -1]]),
        {"x": np.array([[1, 2], [3, -1]]) @ np.array([[-0.5, 1], [-1, 0], [0.5, 2]]).T},
    ),
    "integer_matmul": (  # a scale of 0.1 for X, and the weights W - 10
        _model(
            "g (float[2, 3] x, uint8[3, 2] w) => (float[2, 2] y) <float s = {0.1}, uint8 z = {128}, uint8 wz = {10}> "
            "{ q = QuantizeLinear(x, s, z) p = MatMulInteger(q, w, z, wz) c = Cast<to = 1>(p) y = Mul(c, s) }"
        ),
        {
            "x": np.array([[0.3, -1, 2], [1, 0.5, -0.7]], np.float32),
            "w": np.array([[9, 12], [8, 10], [11, 14]], np.uint8),
        },
        np.array([[1, 2], [3, -1]]),
        {"x": np.array([[1, 2], [3, -1]]) @ np.array([[-1, 2], [-2, 0], [1, 4]]).T},
    ),
    "integer_conv": (  # along the last axis, with the weights W - 10 = (-1, 2)
        _model(
            "g (float[1, 1, 4] x, uint8[1, 1, 2] w) => (float[1, 1, 3] y) "
            "<float s = {0.1}, uint8 z = {128}, uint8 wz = {10}> "
            "{ q = QuantizeLinear(x, s, z) p = ConvInteger(q, w, z, wz) c = Cast<to = 1>(p) y = Mul(c, s) }"
        ),
        {"x": np.array([[[0.3, -1, 2, 0.4]]], np.float32), "w": np.array([[[9, 12]]], np.uint8)},
        np.array([[[1, 2, 3]]]),
        {"x": np.convolve([1, 2, 3], [-1, 2]).reshape(1, 1, 4)},
    ),
    "moved_integers": (  # of (0.3, -1) and (2, 0.4) the larger one, the last first
        _model(
            "g (float[1, 1, 4] x) => (float[2, 1] y) <float s = {0.1}, uint8 z = {128}, int64[2] t = {2, 1}, "
            "int64[2] order = {1, 0}> { q = QuantizeLinear(x, s, z) m = MaxPool<kernel_shape = [2], strides = [2]>(q) "
            "r = Reshape(m, t) g = Gather(r, order) y = DequantizeLinear(g, s, z) }"
        ),
        {"x": np.array([[[0.3, -1, 2, 0.4]]], np.float32)},
        np.array([[5], [7]]),
        {"x": np.array([[[7, 0, 5, 0]]])},
    ),
    "quantised_conv": (  # along the last axis, with the weights 0.5 (W - 10) = (-0.5, 1)
        _model(
            "g (float[1, 1, 4] x, uint8[1, 1, 2] w) => (float[1, 1, 3] y) "
            "<float s = {0.1}, uint8 z = {128}, float ws = {0.5}, uint8 wz = {10}, float ys = {0.2}, int32[1] b = {7}> "
            "{ q = QuantizeLinear(x, s, z) p = QLinearConv(q, s, z, w, ws, wz, ys, z, b) "
            "y = DequantizeLinear(p, ys, z) }"
        ),
        {"x": np.array([[[0.3, -1, 2, 0.4]]], np.float32), "w": np.array([[[9, 12]]], np.uint8)},
        np.array([[[1, 2, 3]]]),
        {"x": np.convolve([1, 2, 3], [-0.5, 1]).reshape(1, 1, 4)},
    ),
}
"""As edges (model, inputs, dy, gradients): what estimators pass, where the true derivative is 0."""
