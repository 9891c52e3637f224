"""Pools and resizing: what the standard's node tests leave out."""

import itertools

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference.op_run import OpRun


class MaxRoiPool(OpRun):
    """As ONNX Runtime computes it; the reference has none."""

    op_domain = ""

    def _run(self, x, rois, pooled_shape=None, spatial_scale=None):
        y = np.zeros((len(rois), x.shape[1], *pooled_shape), x.dtype)
        for r, (image, *corners) in enumerate(rois.astype(np.float32)):
            ends = np.array(corners, np.float32)[[1, 0, 3, 2]] * np.float32(spatial_scale)
            ends = np.trunc(ends + np.copysign(np.float32(0.5), ends)).reshape(2, 2)
            size = np.maximum(ends[1] - ends[0] + 1, np.float32(1)) / np.array(pooled_shape, np.float32)
            for bin_ in itertools.product(*map(range, pooled_shape)):
                begin = np.floor(np.array(bin_, np.float32) * size) + ends[0]
                end = np.ceil((np.array(bin_, np.float32) + 1) * size) + ends[0]
                (top, left), (bottom, right) = (np.clip(p, 0, x.shape[2:]).astype(int) for p in (begin, end))
                if top < bottom and left < right:
                    y[(r, slice(None), *bin_)] = x[int(image), :, top:bottom, left:right].max((1, 2))
        return (y,)


EVALUATORS = [MaxRoiPool]

_ROIS = np.array(
    [[1, 0.4, 1.2, 5.3, 6], [0, 2, 2, 2, 2], [1, -3, -2.5, 8, 4], [0, 5, 3, 1, 1], [0, 20, 20, 25, 25]], np.float32
)
"""Small and large ones, one that hangs over, one whose ends are swapped, one that lies outside."""


def _case(operator, x, output, opset=18, constants=None, scale=1, **attributes):
    inputs = {"X": (scale * np.random.default_rng(0).standard_normal(x)).astype(np.float32)}
    constants = constants or {}
    names = ["X", *(name if value is not None else "" for name, value in constants.items())]
    graph = helper.make_graph(
        [helper.make_node(operator, names, ["Y"], **attributes)],
        operator,
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, output)],
        [numpy_helper.from_array(value, name) for name, value in constants.items() if value is not None],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), inputs


def _resize(x, output, scales=None, sizes=None, roi=None, **attributes):
    numbers = [(roi, np.float32), (scales, np.float32), (sizes, np.int64)]
    names = ("roi", "scales", "sizes") if sizes is not None else ("roi", "scales")
    given = {name: None if n is None else np.array(n, t) for name, (n, t) in zip(names, numbers, strict=False)}
    return _case("Resize", x, output, constants=given, **attributes)


_PLACES = np.array([[[[5, 7], [13, 15]], [[16, 19], [24, 31]]]], np.int64)

CASES: dict[str, tuple[onnx.ModelProto, dict[str, np.ndarray]]] = {
    "max_pool_overlapping": _case("MaxPool", (2, 2, 5, 6), (2, 2, 2, 3), kernel_shape=[3, 2], strides=[2, 2]),
    "max_pool_tiles": _case("MaxPool", (2, 2, 4, 6), (2, 2, 2, 3), kernel_shape=[2, 2], strides=[2, 2]),
    "max_pool_tiles_opset_22": _case("MaxPool", (2, 2, 4), (2, 2, 2), opset=22, kernel_shape=[2], strides=[2]),
    "max_pool_column_major": _case(
        "MaxPool", (2, 2, 4, 6), (2, 2, 2, 3), kernel_shape=[2, 2], strides=[2, 2], storage_order=1,
    ),
    "max_pool_ceil_padded": _case(
        "MaxPool", (1, 2, 6, 5), (1, 2, 3, 2), kernel_shape=[3, 3], strides=[3, 2], ceil_mode=1, pads=[1, 0, 1, 0]
    ),
    "max_pool_dilated_1d": _case("MaxPool", (2, 1, 9), (2, 1, 3), kernel_shape=[3], strides=[2], dilations=[2]),
    "max_pool_same_lower": _case(
        "MaxPool", (1, 2, 5, 5), (1, 2, 3, 3), kernel_shape=[2, 2], strides=[2, 2], auto_pad="SAME_LOWER",
    ),
    "average_pool_1d": _case("AveragePool", (2, 3, 7), (2, 3, 3), kernel_shape=[3], strides=[2]),
    "average_pool_ceil": _case(
        "AveragePool", (1, 2, 6, 7), (1, 2, 3, 3), kernel_shape=[3, 3], strides=[2, 3], ceil_mode=1,
    ),
    "average_pool_ceil_include_pad": _case(
        "AveragePool", (1, 2, 6, 7), (1, 2, 4, 3),
        kernel_shape=[3, 4], strides=[2, 3], ceil_mode=1, pads=[1, 1, 1, 1], count_include_pad=1,
    ),
    "average_pool_dilated": _case(
        "AveragePool", (1, 2, 6, 7), (1, 2, 4, 4), opset=19,
        kernel_shape=[2, 3], dilations=[2, 2], pads=[0, 1, 0, 0],
    ),
    "average_pool_same_include_pad": _case(
        "AveragePool", (1, 2, 5, 5), (1, 2, 3, 3),
        kernel_shape=[2, 3], strides=[2, 2], auto_pad="SAME_UPPER", count_include_pad=1,
    ),
    "average_pool_input_not_used_up": _case("AveragePool", (1, 1, 8), (1, 1, 2), kernel_shape=[2], strides=[4]),
    "average_pool_3d": _case(
        "AveragePool", (1, 1, 4, 3, 4), (1, 1, 2, 2, 2), kernel_shape=[2, 2, 3], strides=[2, 1, 1],
    ),
    "global_average_pool_1d": _case("GlobalAveragePool", (2, 3, 4), (2, 3, 1)),
    "global_max_pool_3d": _case("GlobalMaxPool", (2, 3, 2, 3, 2), (2, 3, 1, 1, 1)),
    "global_lp_pool": _case("GlobalLpPool", (2, 3, 4, 2), (2, 3, 1, 1)),
    "global_lp_pool_3": _case("GlobalLpPool", (2, 3, 4, 2), (2, 3, 1, 1), p=3),
    "lp_pool_1": _case("LpPool", (1, 2, 5, 5), (1, 2, 2, 2), p=1, kernel_shape=[2, 2], strides=[2, 2]),
    "lp_pool_3": _case(
        "LpPool", (1, 2, 5, 5), (1, 2, 3, 3), p=3, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1],
    ),
    "lp_pool_ceil": _case("LpPool", (1, 2, 6), (1, 2, 3), p=2, kernel_shape=[3], strides=[2], ceil_mode=1),
    "max_roi_pool": _case(
        "MaxRoiPool", (2, 3, 7, 6), (5, 3, 2, 3), constants={"rois": _ROIS}, pooled_shape=[2, 3], spatial_scale=1.0
    ),
    "max_roi_pool_scaled": _case(
        "MaxRoiPool", (2, 3, 7, 6), (5, 3, 3, 2), constants={"rois": _ROIS}, pooled_shape=[3, 2], spatial_scale=0.75
    ),
    "max_unpool": _case(
        "MaxUnpool", (1, 2, 2, 2), (1, 2, 4, 4), constants={"I": _PLACES}, kernel_shape=[2, 2], strides=[2, 2]
    ),
    "resize_scales_nearest_whole": _resize(
        (2, 2, 3, 2), (2, 2, 6, 6), scales=[1, 1, 2, 3], mode="nearest",
        coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    ),
    "resize_scales_nearest": _resize((2, 2, 3, 4), (2, 2, 4, 6), scales=[1, 1, 1.5, 1.6], mode="nearest"),
    "resize_linear_3d": _resize((1, 2, 3, 2, 4), (1, 2, 5, 4, 3), sizes=[1, 2, 5, 4, 3], mode="linear"),
    "resize_linear_channels": _resize((2, 3, 4), (2, 5, 6), sizes=[2, 5, 6], mode="linear"),
    "resize_cubic_scales": _resize((1, 2, 4, 5), (1, 2, 6, 4), scales=[1, 1, 1.5, 0.9], mode="cubic"),
    "resize_one_axis": _resize((1, 2, 4, 5), (1, 2, 7, 5), sizes=[7], axes=[2], mode="linear"),
    "resize_first_axis": _resize((3, 2, 2), (5, 2, 2), sizes=[5, 2, 2], mode="nearest"),
    "resize_not_larger_linear": _resize(
        (1, 1, 2, 4), (1, 1, 4, 7), sizes=[7, 7], axes=[2, 3], mode="linear", keep_aspect_ratio_policy="not_larger"
    ),
    "resize_not_smaller_cubic": _resize(
        (1, 1, 3, 4), (1, 1, 5, 7), sizes=[5, 5], axes=[2, 3], mode="cubic", keep_aspect_ratio_policy="not_smaller"
    ),
    "resize_antialias": _resize((1, 2, 6, 7), (1, 2, 3, 4), sizes=[1, 2, 3, 4], mode="linear", antialias=1),
}  # fmt: skip

EDGES = {
    "max_roi_pool_ties": (
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 22]>
            g (float[1,1,2,3] x, float[1,5] rois) => (float[1,1,1,2] y) {
                y = MaxRoiPool <pooled_shape = [1, 2]> (x, rois)
            }"""),
        {"x": np.array([[[[1, 2, 2], [3, 2, 2]]]], np.float32), "rois": np.array([[0, 0, 0, 2, 1]], np.float32)},
        np.array([[[[5, 7]]]]),
        {"x": np.array([[[[0, 7, 0], [5, 0, 0]]]]), "rois": np.zeros((1, 5))},
    ),
}
"""Several largest pixels: the first has the gradient. Regions have none."""
