"""Reading and writing by position, where the node tests of `onnx` do not go."""

import numpy as np

from rule_cases.movement import case, numbers

_MOVES_THE_DEPTH = "moves the depth, a float, with the values"
EXCLUDED = {
    "test_onehot_with_axis": _MOVES_THE_DEPTH,
    "test_onehot_with_negative_axis": _MOVES_THE_DEPTH,
    "test_onehot_negative_indices": _MOVES_THE_DEPTH,
    "test_onehot_out_of_range_indices": _MOVES_THE_DEPTH,
    "test_scatter_with_axis": "the reference has no Scatter",
    "test_scatter_without_axis": "the reference has no Scatter",
    "test_scatternd_max": "has ties, where the derivative jumps",
    "test_scatternd_min": "has ties, where the derivative jumps",
}
"""Node tests that cannot be compared, and why."""

_TABLE = [[2, 0, -1], [2, 2, 1]]
_TUPLES = [[[0, 1], [-1, -1]], [[0, 1], [1, 0]]]


def _scatter(reduction, **inputs):
    return case(
        "(float[2, 3] x, int64[2, 3] i, float[2, 3] u) => (float[2, 3] y) "
        f'{{y = ScatterElements<axis = 1, reduction = "{reduction}">(x, i, u)}}',
        **{"x": numbers(2, 3), "i": [[0, 1, 1], [2, -1, 0]], "u": 2 * numbers(2, 3)[::-1], **inputs},
    )


def _scatter_tuples(reduction, i=_TUPLES, shape="", opset=21):
    return case(
        f"(float[{shape}] x, int64[] i, float[] u) => (float[] y) "
        f'{{y = ScatterND<reduction = "{reduction}">(x, i, u)}}',
        opset=opset, x=numbers(2, 3, 2), i=i, u=numbers(*np.shape(i)[:-1], 2),
    )  # fmt: skip


CASES = {
    "gather_embedding": case(
        "(float[5, 3] x, int64[2, 4] i) => (float[2, 4, 3] y) {g = Gather(x, i) y = Mul(g, g)}",
        x=numbers(5, 3), i=[[0, 4, 4, -1], [2, 2, 0, -5]],
    ),
    "gather_unknown_rank": case(
        "(float[] x, int64[] i) => (float[] y) {y = Gather<axis = 1>(x, i)}", x=numbers(2, 3, 4), i=_TABLE
    ),
    "gather_last_axis": case(
        "(float[n, m] x, int64[k] i) => (float[n, k] y) {y = Gather<axis = -1>(x, i)}", x=numbers(2, 3), i=[2, 0, 2, 1]
    ),
    "gather_scalar_at_run_time": case(
        "(float[2, n] x, int64 i) => (float[2] y) {y = Gather<axis = -1>(x, i)}", x=numbers(2, 3), i=np.int64(-2)
    ),
    "gather_one_of_known_size": case(
        "(float[2, 3] x) => (float[2] y) {i = Constant<value = int64 {-1}>() y = Gather<axis = 1>(x, i)}",
        x=numbers(2, 3),
    ),
    "gather_one_of_unknown_size": case(
        "(float[n, m] x) => (float[n] y) {i = Constant<value = int64 {1}>() j = Constant<value = int64 {-1}>() "
        "a = Gather<axis = 1>(x, i) b = Gather<axis = -1>(x, j) y = Mul(a, b)}", x=numbers(2, 3),
    ),
    "gather_one_keeping_its_axis": case(
        "(float[] x) => (float[] y) {i = Constant<value = int64[1] {1}>() y = Gather<axis = 1>(x, i)}",
        x=numbers(2, 3, 2),
    ),
    "gather_int32": case(
        "(float[4, 2] x, int32[3] i) => (float[3, 2] y) {y = Gather(x, i)}", x=numbers(4, 2), i=np.int32([1, 1, 3])
    ),
    "gather_elements": case(
        "(float[3, 3] x, int64[2, 3] i) => (float[2, 3] y) {g = GatherElements(x, i) y = Mul(g, g)}",
        x=numbers(3, 3), i=_TABLE,
    ),
    "gather_elements_unknown_rank": case(
        "(float[] x, int64[] i) => (float[] y) {y = GatherElements<axis = 1>(x, i)}", x=numbers(2, 3), i=_TABLE
    ),
    "gather_nd_rows": case(
        "(float[] x, int64[] i) => (float[] y) {g = GatherND(x, i) y = Mul(g, g)}", x=numbers(2, 3, 2), i=_TUPLES
    ),
    "gather_nd_elements": case(
        "(float[2, 2] x, int64[2, 2, 2] i) => (float[2, 2] y) {y = GatherND(x, i)}", x=numbers(2, 2), i=_TUPLES
    ),
    "gather_nd_batch": case(
        "(float[2, n, m] x, int64[2, 3, 1] i) => (float[2, 3, m] y) {y = GatherND<batch_dims = 1>(x, i)}",
        x=numbers(2, 3, 2), i=[[[0], [2], [2]], [[1], [-1], [1]]],
    ),
    "gather_nd_batch_unknown_rank": case(
        "(float[] x, int64[] i) => (float[] y) {y = GatherND<batch_dims = 2>(x, i)}",
        x=numbers(2, 2, 3), i=[[[0], [2]], [[1], [1]]],
    ),
    "compress_unknown_rank": case(
        "(float[] x, bool[] c) => (float[] y) {y = Compress<axis = 1>(x, c)}",
        x=numbers(2, 4), c=np.array([False, True, True]),
    ),
    "compress_flat": case(
        "(float[n, m] x, bool[k] c) => (float[j] y) {z = Compress(x, c) y = Mul(z, z)}",
        x=numbers(2, 3), c=np.array([True, False, True, False, True]),
    ),
    "one_hot_values": case(
        "(int64[] i, int64 d, float[2] v) => (float[] y) {o = OneHot<axis = 1>(i, d, v) y = Mul(o, o)}",
        i=[[0, -1, 7], [3, 2, -4]], d=np.int64(4), v=numbers(2),
    ),
    "one_hot_last_axis": case(
        "(int64[2] i, int64 d, float[2] v) => (float[2, 3] y) {y = OneHot(i, d, v)}",
        i=[2, 0], d=np.int64(3), v=numbers(2),
    ),
    "scatter_elements_none": _scatter("none", i=[[0, 1, 2], [2, 1, 0]]),
    "scatter_elements_add": _scatter("add"),
    "scatter_elements_mul": _scatter("mul"),
    "scatter_elements_mul_with_zeros": _scatter(
        "mul",
        i=[[0, 0, 1], [2, 0, 0]], x=np.array([[0, 2.0, 3], [4, 0, 5]], np.float32),
        u=np.array([[0, 3.0, 0], [0, 0.5, 2]], np.float32),
    ),
    "scatter_elements_mul_with_two_zeros": _scatter(
        "mul", i=[[0, 0, 0], [2, 0, 0]], u=np.array([[0, 3.0, 0], [0, 0.5, 2]], np.float32)
    ),
    "scatter_elements_max": _scatter("max"),
    "scatter_elements_min": _scatter("min"),
    "scatter_elements_unknown_rank": case(
        '(float[] x, int64[] i, float[] u) => (float[] y) {y = ScatterElements<axis = -1, reduction = "add">(x, i, u)}',
        x=numbers(2, 3), i=[[2, 0, 2], [1, 1, 0]], u=numbers(2, 3),
    ),
    "scatter_elements_of_a_vector": case(
        '(float[5] x, int64[4] i, float[4] u) => (float[5] y) {y = ScatterElements<reduction = "mul">(x, i, u)}',
        x=numbers(5), i=[4, 0, 4, -5], u=numbers(4),
    ),
    "scatter_nd_none": _scatter_tuples("none", i=[[[0, 1], [-1, -1]], [[0, 0], [1, 0]]]),
    "scatter_nd_add": _scatter_tuples("add"),
    "scatter_nd_add_known_shape": _scatter_tuples("add", shape="2, 3, 2"),
    "scatter_nd_mul": _scatter_tuples("mul", shape="2, n, m"),
    "scatter_nd_max": _scatter_tuples("max"),
    "scatter_nd_min": _scatter_tuples("min", opset=18),
}  # fmt: skip
