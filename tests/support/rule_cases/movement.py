"""Moving, repeating and leaving out elements, where the node tests of `onnx` do not go."""

import numpy as np
from onnx import TensorProto, helper, parser

EXCLUDED = {
    f"test_{operator}_{types}": "some of its numbers are not finite, or float8"
    for operator, form in (("cast", ""), ("castlike", ""), ("castlike", "_expanded"))
    for types in (
        f"FLOAT_to_FLOAT16{form}",
        f"FLOAT_to_DOUBLE{form}",
        f"FLOAT_to_BFLOAT16{form}",
        f"FLOAT16_to_FLOAT{form}",
        f"FLOAT16_to_DOUBLE{form}",
        f"DOUBLE_to_FLOAT{form}",
        f"DOUBLE_to_FLOAT16{form}",
        f"FLOAT8E5M2_to_FLOAT{form}",
        f"FLOAT8E5M2_to_FLOAT16{form}",
    )
}
"""Node tests that cannot be compared, and why."""


def case(text, opset=21, **inputs):
    """A model in the standard's text form, and its inputs, where lists are int64 tensors.

    Declared as `float[] x`, an input has a rank that is known only when the model runs, as has an output.
    """
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {text}')
    inputs = {name: np.asarray(x) for name, x in inputs.items()}
    for value in [v for v in model.graph.input if not v.type.tensor_type.HasField("shape")]:
        inputs |= _of_unknown_rank(model.graph, value, inputs[value.name])
    for value in [v for v in model.graph.output if not v.type.tensor_type.HasField("shape")]:
        _flattened(model.graph, value)
    return model, inputs


def _of_unknown_rank(graph, value, x):
    """Give an input its shape, and hide it from all nodes: they get it reshaped to what another input says."""
    hidden, shape = f"{value.name}_hidden", f"{value.name}_shape"
    for node in graph.node:
        node.input[:] = [hidden if name == value.name else name for name in node.input]
    graph.node.insert(0, helper.make_node("Reshape", [value.name, shape], [hidden]))
    kind = value.type.tensor_type.elem_type
    value.CopyFrom(helper.make_tensor_value_info(value.name, kind, x.shape))
    graph.input.append(helper.make_tensor_value_info(shape, TensorProto.INT64, [f"{value.name}_rank"]))
    return {shape: np.array(x.shape, np.int64)}


def _flattened(graph, value):
    """Make an output of unknown rank a vector: a model must say the rank of each."""
    for node in graph.node:
        node.output[:] = [f"{name}_hidden" if name == value.name else name for name in node.output]
    graph.node.append(helper.make_node("Constant", [], ["flat"], value_ints=[-1]))
    graph.node.append(helper.make_node("Reshape", [f"{value.name}_hidden", "flat"], [value.name]))
    value.CopyFrom(helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, [f"{value.name}_size"]))


def _left_out(given, output):
    """The same without a name for an output, which says that nobody needs it."""
    model, inputs = given
    for node in model.graph.node:
        node.output[:] = ["" if name == output else name for name in node.output]
    return model, inputs


def numbers(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


CASES = {
    "reshape_unknown_rank": case(
        "(float[] x, int64[] s) => (float[] y) {r = Reshape(x, s) y = Mul(r, r)}", x=numbers(2, 3, 4), s=[0, -1]
    ),
    "reshape_scalar": case(
        "(float x) => (float[1, 1] y) {s = Constant<value = int64[2] {1, 1}>() y = Reshape(x, s)}",
        x=numbers(),
    ),
    "flatten_unknown_rank": case("(float[] x) => (float[] y) {y = Flatten<axis = -1>(x)}", x=numbers(2, 3, 4)),
    "squeeze_all_unknown_rank": case("(float[] x) => (float[] y) {y = Squeeze(x)}", x=numbers(1, 3, 1)),
    "squeeze_negative_axes": case(
        "(float[] x, int64[2] a) => (float[] y) {y = Squeeze(x, a)}", x=numbers(1, 3, 1), a=[-1, 0]
    ),
    "unsqueeze_unsorted_axes": case(
        "(float[] x, int64[2] a) => (float[] y) {y = Unsqueeze(x, a)}", x=numbers(3, 2), a=[3, -4]
    ),
    "transpose_unknown_rank": case("(float[] x) => (float[] y) {y = Transpose(x)}", x=numbers(2, 3, 4)),
    "transpose_cycle": case(
        "(float[2, 3, 4] x) => (float[4, 2, 3] y) {y = Transpose<perm = [2, 0, 1]>(x)}",
        x=numbers(2, 3, 4),
    ),
    "cast_between_floats": case(
        "(float[2, 3] x) => (float[2, 3] y) {d = Cast<to = 11>(x) z = Mul(d, d) y = Cast<to = 1>(z)}", x=numbers(2, 3)
    ),
    "cast_to_integer_and_back": case(
        "(float[2, 3] x) => (float[2, 3] y) {i = Cast<to = 7>(x) z = Cast<to = 1>(i) y = Add(z, x)}", x=numbers(2, 3)
    ),
    "cast_like": case(
        "(float[2, 3] x, float[1] t) => (float[2, 3] y) {y = CastLike(x, t)}",
        x=numbers(2, 3), t=numbers(1),
    ),
    "concat_same_value_twice": case(
        "(float[2, n] x, float[2, m] z) => (float[2, k] y) {c = Concat<axis = -1>(x, z, x) y = Mul(c, c)}",
        x=numbers(2, 3), z=numbers(2, 2),
    ),
    "concat_unknown_rank": case(
        "(float[] x, float[] z) => (float[] y) {y = Concat<axis = -2>(x, z)}", x=numbers(2, 3, 4), z=numbers(2, 1, 4)
    ),
    "concat_with_empty": case(
        "(float[2, 3] x, float[2, 2] z) => (float[2, 5] y) "
        "{e = Constant<value = float[2, 0] {}>() y = Concat<axis = 1>(x, e, z)}", x=numbers(2, 3), z=numbers(2, 2),
    ),
    "concat_of_one": case("(float[2, 3] x) => (float[2, 3] y) {y = Concat<axis = 0>(x)}", x=numbers(2, 3)),
    "split_uneven_with_unused_output": case(
        "(float[2, 7] x) => (float[2, 3] y) {y, unused, z = Split<axis = 1, num_outputs = 3>(x)}", x=numbers(2, 7)
    ),
    "split_with_an_output_left_out": _left_out(
        case("(float[2, 7] x) => (float[2, 3] y) {y, u, z = Split<axis = 1, num_outputs = 3>(x)}", x=numbers(2, 7)),
        "u",
    ),
    "resize_unknown_rank": case(
        "(float[] x, float[3] s) => (float[] y) {y = Resize<mode = \"linear\">(x, , s)}",
        x=numbers(1, 3, 4), s=np.array([1, 2, 1.5], np.float32),
    ),
    "split_sizes_at_run_time": case(
        "(float[] x, int64[3] s) => (float[] y) {a, b, c = Split<axis = -1>(x, s) p = ReduceSum(a) y = Mul(b, p)}",
        x=numbers(2, 7), s=[2, 1, 4],
    ),
    "slice_known": case(
        "(float[5, 6] x) => (float[3, 5] y) {s = Constant<value = int64[2] {1, -5}>() "
        "e = Constant<value = int64[2] {4, 100}>() y = Slice(x, s, e)}", x=numbers(5, 6),
    ),
    "slice_known_start_of_unknown_size": case(
        "(float[n, m] x) => (float[n, k] y) {s = Constant<value = int64[1] {2}>() "
        "e = Constant<value = int64[1] {9223372036854775807}>() a = Constant<value = int64[1] {-1}>() "
        "y = Slice(x, s, e, a)}",
        x=numbers(3, 5),
    ),
    "slice_at_run_time": case(
        "(float[] x, int64[2] s, int64[2] e, int64[2] a) => (float[] y) {y = Slice(x, s, e, a)}",
        x=numbers(5, 6, 2), s=[-100, -3], e=[3, -1], a=[-2, 0],
    ),
    "slice_of_first_axes": case(
        "(float[n, m] x, int64[k] s, int64[k] e) => (float[] y) {y = Slice(x, s, e)}", x=numbers(5, 6), s=[1], e=[3],
    ),
    "slice_int32": case(
        "(float[n, m] x, int32[2] s, int32[2] e, int32[2] a) => (float[j, k] y) {y = Slice(x, s, e, a)}",
        x=numbers(5, 6), s=np.int32([1, -4]), e=np.int32([3, 6]), a=np.int32([1, 0]),
    ),
    "slice_backwards": case(
        "(float[5, 6] x) => (float[5, 3] y) {s = Constant<value = int64[1] {-1}>() "
        "e = Constant<value = int64[1] {-9223372036854775808}>() a = Constant<value = int64[1] {1}>() "
        "t = Constant<value = int64[1] {-2}>() y = Slice(x, s, e, a, t)}", x=numbers(5, 6),
    ),
    "slice_steps_at_run_time": case(
        "(float[] x, int64[2] s, int64[2] e, int64[2] a, int64[2] t) => (float[] y) {y = Slice(x, s, e, a, t)}",
        x=numbers(5, 6), s=[4, 0], e=[0, 6], a=[0, 1], t=[-2, 3],
    ),
    "slice_of_nothing": case(
        "(float[5, 6] x) => (float[5, 6] y) {s = Constant<value = int64[1] {4}>() e = Constant<value = int64[1] {2}>() "
        "n = Slice(x, s, e) y = Concat<axis = 0>(n, x)}", x=numbers(5, 6),
    ),
    "expand_both_ways": case(
        "(float[3, 1] x, int64[3] s) => (float[2, 3, 4] y) {e = Expand(x, s) y = Mul(e, e)}",
        x=numbers(3, 1), s=[2, 1, 4],
    ),
    "expand_unknown_rank": case(
        "(float[] x, int64[] s) => (float[] y) {y = Expand(x, s)}",
        x=numbers(3, 1), s=[2, 3, 4],
    ),
    "expand_scalar": case("(float x, int64[2] s) => (float[2, 2] y) {y = Expand(x, s)}", x=numbers(), s=[2, 2]),
    "tile_known": case(
        "(float[2, 3] x) => (float[6, 3] y) {r = Constant<value = int64[2] {3, 1}>() t = Tile(x, r) y = Mul(t, t)}",
        x=numbers(2, 3),
    ),
    "tile_unknown_rank": case(
        "(float[] x, int64[] r) => (float[] y) {y = Tile(x, r)}",
        x=numbers(2, 3, 1), r=[3, 1, 2],
    ),
    "pad_value": case(
        "(float[2, 3] x, float c) => (float[4, 6] y) {p = Constant<value = int64[4] {1, 0, 1, 3}>() z = Pad(x, p, c) "
        "y = Mul(z, z)}", x=numbers(2, 3), c=numbers(),
    ),
    "pad_axes_at_run_time": case(
        "(float[] x, int64[2] p, float c, int64[1] a) => (float[] y) {y = Pad(x, p, c, a)}",
        x=numbers(2, 3, 4), p=[1, 2], c=numbers(), a=[-2],
    ),
    "pad_without_value": case(
        "(float[n, m] x, int64[4] p) => (float[j, k] y) {y = Pad(x, p)}", x=numbers(2, 3), p=[1, 2, 0, 3]
    ),
    "pad_int32_axes": case(
        "(float[2, 3] x, int32[1] a) => (float[2, 6] y) {p = Constant<value = int64[2] {1, 2}>() y = Pad(x, p, , a)}",
        x=numbers(2, 3), a=np.int32([1]),
    ),
    "pad_edge_with_axes": case(
        '(float[] x, int64[2] p, int64[1] a) => (float[] y) {y = Pad<mode = "edge">(x, p, , a)}',
        x=numbers(2, 3, 2), p=[1, 2], a=[1],
    ),
    "pad_reflect": case(
        '(float[3, 4] x) => (float[6, 8] y) {p = Constant<value = int64[4] {2, 1, 1, 3}>() '
        'z = Pad<mode = "reflect">(x, p) y = Mul(z, z)}', x=numbers(3, 4),
    ),
    "pad_wrap": case(
        '(float[n, m] x, int64[4] p) => (float[j, k] y) {y = Pad<mode = "wrap">(x, p)}', x=numbers(3, 4), p=[2, 1, 1, 3]
    ),
    "depth_to_space_crd": case(
        '(float[n, c, h, w] x) => (float[n, d, i, j] y) {y = DepthToSpace<blocksize = 2, mode = "CRD">(x)}',
        x=numbers(2, 8, 2, 3),
    ),
    "depth_to_space_dcr": case(
        "(float[2, 8, 2, 3] x) => (float[2, 2, 4, 6] y) {y = DepthToSpace<blocksize = 2>(x)}", x=numbers(2, 8, 2, 3)
    ),
    "space_to_depth": case(
        "(float[2, 2, 4, 6] x) => (float[2, 8, 2, 3] y) {y = SpaceToDepth<blocksize = 2>(x)}", x=numbers(2, 2, 4, 6)
    ),
    "trilu_lower": case(
        "(float[2, 3, 4] x, int64 k) => (float[2, 3, 4] y) {y = Trilu<upper = 0>(x, k)}",
        x=numbers(2, 3, 4), k=np.int64(-1),
    ),
    "trilu_upper": case("(float[3, 4] x) => (float[3, 4] y) {y = Trilu(x)}", x=numbers(3, 4)),
    "reverse_sequence": case(
        "(float[2, 4] x, int64[2] n) => (float[2, 4] y) {y = ReverseSequence<batch_axis = 0, time_axis = 1>(x, n)}",
        x=numbers(2, 4), n=[3, 1],
    ),
    "center_crop_and_pad": case(
        "(float[5, 4, 2] x, int64[3] s) => (float[2, 7, 2] y) {y = CenterCropPad(x, s)}",
        x=numbers(5, 4, 2), s=[2, 7, 2],
    ),
    "center_crop_and_pad_axes": case(
        "(float[5, 4, 2] x, int64[2] s) => (float[5, 3, 5] y) {y = CenterCropPad<axes = [-1, 1]>(x, s)}",
        x=numbers(5, 4, 2), s=[5, 3],
    ),
}  # fmt: skip
