"""Convolutions: what the standard's node tests leave out."""

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx.reference.ops import op_causal_conv_with_state


class CausalConvWithState(op_causal_conv_with_state.CausalConvWithState):
    """The reference computes its activation in float32."""

    op_domain = ""

    def _run(self, x, weight, bias=None, past_state=None, activation="none"):
        y, state = super()._run(x, weight, bias, past_state, "none")
        return (y if activation == "none" else y / (1 + np.exp(-y))).astype(x.dtype), state


EVALUATORS = [CausalConvWithState]


def _case(operator, x, w, output, bias=True, opset=18, **attributes):
    rng = np.random.default_rng(0)
    channels = w[0] if operator == "Conv" else w[1] * attributes.get("group", 1)
    shapes = {"X": x, "W": w} | ({"B": (channels,)} if bias else {})
    inputs = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    node = helper.make_node(operator, list(inputs), ["Y"], **attributes)
    graph = helper.make_graph(
        [node],
        operator,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, output)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), inputs


CASES: dict[str, tuple[onnx.ModelProto, dict[str, np.ndarray]]] = {
    "conv_wide": _case("Conv", (1, 16, 5, 4), (2, 16, 3, 2), [1, 2, 5, 4], pads=[1, 0, 1, 1]),
    "conv_wide_dilated": _case("Conv", (1, 17, 6), (2, 17, 3), [1, 2, 4], dilations=[2], pads=[1, 1]),
    "conv_wide_padded_beyond_the_kernel": _case("Conv", (1, 16, 3), (2, 16, 2), [1, 2, 7], pads=[3, 2]),
    "conv_1d": _case("Conv", (2, 3, 7), (4, 3, 3), (2, 4, 4), strides=[2], pads=[1, 1]),
    "conv_1d_dilated": _case("Conv", (2, 3, 9), (4, 3, 3), (2, 4, 5), dilations=[2]),
    "conv_3d": _case("Conv", (1, 2, 4, 3, 5), (3, 2, 2, 2, 3), (1, 3, 3, 2, 3), kernel_shape=[2, 2, 3]),
    "conv_grouped": _case("Conv", (2, 4, 5, 5), (6, 2, 3, 3), (2, 6, 5, 5), group=2, pads=[1, 1, 1, 1]),
    "conv_depthwise": _case(
        "Conv", (2, 3, 5, 6), (6, 1, 3, 2), (2, 6, 2, 3), group=3, strides=[2, 2], pads=[0, 0, 1, 1],
    ),
    "conv_pointwise": _case("Conv", (2, 3, 4, 5), (4, 3, 1, 1), (2, 4, 4, 5)),
    "conv_pointwise_strided": _case("Conv", (2, 3, 4, 5), (4, 3, 1, 1), (2, 4, 2, 3), strides=[2, 2]),
    "conv_pointwise_padded": _case("Conv", (2, 3, 4, 5), (4, 3, 1, 1), (2, 4, 6, 7), pads=[1, 1, 1, 1]),
    "conv_everything": _case(
        "Conv", (2, 4, 9, 8), (4, 2, 3, 2), (2, 4, 4, 3), bias=False,
        group=2, strides=[2, 3], dilations=[2, 1], pads=[2, 0, 1, 1],
    ),
    "conv_input_not_used_up": _case("Conv", (1, 1, 8, 9), (1, 1, 2, 2), (1, 1, 2, 3), strides=[4, 3]),
    "conv_same_upper": _case("Conv", (1, 2, 5, 6), (3, 2, 2, 3), (1, 3, 3, 3), auto_pad="SAME_UPPER", strides=[2, 2]),
    "conv_same_lower": _case("Conv", (1, 2, 5, 6), (3, 2, 2, 3), (1, 3, 3, 3), auto_pad="SAME_LOWER", strides=[2, 2]),
    "conv_same_beyond_stride": _case(
        "Conv", (1, 1, 7, 7), (1, 1, 1, 2), (1, 1, 3, 2), auto_pad="SAME_UPPER", strides=[3, 4],
    ),
    "conv_valid": _case("Conv", (1, 2, 5, 6), (3, 2, 2, 3), (1, 3, 4, 4), auto_pad="VALID"),
    "conv_large_kernel": _case("Conv", (1, 1, 12, 12), (2, 1, 9, 9), (1, 2, 4, 4)),
    "conv_transpose_strided": _case("ConvTranspose", (2, 3, 3, 4), (3, 2, 3, 3), (2, 2, 7, 9), strides=[2, 2]),
    "conv_transpose_output_padding": _case(
        "ConvTranspose", (2, 3, 3, 4), (3, 2, 3, 3), (2, 2, 6, 8),
        strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1],
    ),
    "conv_transpose_output_padding_beyond_stride": _case(
        "ConvTranspose", (1, 2, 4), (2, 2, 2), (1, 2, 9), strides=[2], dilations=[3], output_padding=[2], pads=[1, 2],
    ),
    "conv_transpose_grouped": _case(
        "ConvTranspose", (2, 4, 3, 3), (4, 3, 2, 2), (2, 6, 6, 6), group=2, strides=[2, 2],
    ),
    "conv_transpose_dilated_1d": _case("ConvTranspose", (1, 2, 4), (2, 3, 3), (1, 3, 8), dilations=[2]),
    "conv_transpose_pointwise": _case("ConvTranspose", (1, 2, 4, 3), (2, 3, 1, 1), (1, 3, 4, 3)),
    "conv_transpose_3d": _case(
        "ConvTranspose", (1, 1, 2, 3, 2), (1, 2, 2, 2, 3), (1, 2, 3, 5, 4), strides=[1, 2, 1], pads=[0, 1, 0, 0, 0, 0],
    ),
    "conv_transpose_output_shape": _case(
        "ConvTranspose", (1, 1, 3, 3), (1, 2, 3, 3), (1, 2, 10, 8), strides=[3, 2], output_shape=[10, 8],
    ),
    "conv_transpose_smaller_output_shape": _case(
        "ConvTranspose", (1, 1, 3, 3), (1, 2, 3, 3), (1, 2, 6, 6), strides=[3, 2], output_shape=[6, 6],
    ),
    "conv_transpose_same_upper": _case(
        "ConvTranspose", (1, 2, 3, 4), (2, 1, 4, 3), (1, 1, 6, 8), strides=[2, 2], auto_pad="SAME_UPPER",
    ),
    "conv_transpose_same_lower": _case(
        "ConvTranspose", (1, 2, 3, 4), (2, 1, 4, 3), (1, 1, 6, 8), strides=[2, 2], auto_pad="SAME_LOWER",
    ),
}  # fmt: skip
