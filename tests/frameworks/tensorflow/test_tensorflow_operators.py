"""Operations of TensorFlow as ONNX: values as TensorFlow has them, and gradients as `tf.GradientTape` has them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from extreme_numbers import NUMBERS, assert_equal_everywhere, pairs
from marks import needs

from onward.differentiate import vjp
from onward.engines import function

pytestmark = needs("tensorflow")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def positive(*shape):
    return np.random.default_rng(1).uniform(0.2, 0.9, shape).astype(np.float32)


X, Y, ROWS = normal(3, 4), normal(3, 4, seed=1), np.array([2, 0, 1])
IMAGE, KERNEL = normal(2, 7, 6, 3), normal(3, 2, 3, 4, seed=1)
SERIES = normal(2, 5, 4)


def tf():
    from onward.engines.tensorflow.quiet import tensorflow

    return tensorflow


def strided(x):
    t = tf()
    return t.concat([t.reshape(part, [-1]) for part in (x[1:, ..., None, 2], x[:, ::-2], x[-1], x[..., 1:3])], 0)


def collected(x):
    t = tf()
    rows = t.TensorArray(t.float32, size=t.shape(x)[0], element_shape=[4])
    for i in t.range(t.shape(x)[0]):
        rows = rows.write(i, t.tanh(x[i]) * t.cast(i, t.float32))
    return rows.stack()


def recurrent(x, w):
    """Neither the batch nor the length is known."""
    t = tf()
    state, states = t.zeros([t.shape(x)[0], 4]), t.TensorArray(t.float32, size=t.shape(x)[1])
    for i in t.range(t.shape(x)[1]):
        state = t.tanh(x[:, i] + state @ w)
        states = states.write(i, state)
    return t.transpose(states.stack(), [1, 0, 2])


def halved(x):
    t = tf()
    while t.reduce_sum(t.abs(x)) > 1.0:
        x = x * 0.5
    return x


def branched(x):
    t = tf()
    if t.reduce_sum(x) > 0:
        y = t.exp(x)
    else:
        y = x * x
    return y


def nested(x, y):
    t = tf()
    inner = t.function(lambda a, b, axis: t.concat([a, b * 2.0], axis))
    return t.function(lambda a, b: inner(a, b, t.constant(1)))(x, y)


UNARY = {
    "arithmetic": "abs negative sign square sqrt math.rsqrt math.reciprocal floor math.ceil math.rint identity",
    "functions": "exp math.log math.erf math.erfc math.expm1 math.log1p zeros_like ones_like",
    "angles": "sin cos tan asin acos atan sinh cosh tanh asinh atanh",
    "activations": "sigmoid nn.relu nn.relu6 nn.elu nn.selu nn.leaky_relu nn.softplus nn.softsign nn.gelu nn.silu",
    "softmax": "nn.softmax nn.log_softmax",
}
BINARY = {
    "of two": "add subtract multiply divide maximum minimum pow",
    "of two, in several steps": "math.squared_difference math.divide_no_nan math.floormod",
}
REDUCTIONS = ["sum", "mean", "max", "min", "prod", "euclidean_norm", "logsumexp", "variance", "std"]


def member(name):
    return functools.reduce(getattr, name.split("."), tf())


CASES = {
    **{
        name: (lambda *xs, fs=functions: tf().stack([member(f)(*xs) for f in fs.split()]), *arrays)
        for table, arrays in ((UNARY, [positive(3, 4)]), (BINARY, [positive(3, 4), positive(4)]))
        for name, functions in table.items()
    },
    **{
        f"reductions over {axes}": (
            lambda x, a=axes: tf().stack([member(f"math.reduce_{f}")(x, a, keepdims=a == 1) for f in REDUCTIONS]), X,
        )
        for axes in (None, 1, [0, -1])
    },
    "half of the squares": (lambda x: tf().nn.l2_loss(x), X),
    "clip": (lambda x: tf().clip_by_value(x, -0.5, 0.6), X),
    "addn": (lambda x, y: tf().add_n([x, y, x]), X, Y),
    "comparison": (lambda x, y: tf().where((x > y) & ~(x <= 0.0) | (y != 0.5), x, y), X, Y),
    "finite": (lambda x: tf().where(tf().math.is_finite(x / (x - x)), x, 2 * x), X),
    "all and any": (lambda x: tf().cast(tf().reduce_any(x > 1, 0) & ~tf().reduce_all(x > 0, 0), tf().float32), X),
    "old select": (lambda x, y: tf().raw_ops.Select(condition=x[:, 0] > 0, x=x, y=y), X, Y),
    "integers": (lambda x: tf().gather(x, (tf().range(7) // -2) % 3), X),
    "xlogy": (lambda x, y: tf().math.xlogy(tf().nn.relu(x), y), X, positive(3, 4)),
    # ---- movement
    "reshape": (lambda x: tf().reshape(x, [tf().shape(x)[0], 2, -1]), X),
    "reshape of all": (lambda x: tf().reshape(x, [-1]), X),
    "transpose": (lambda x: tf().transpose(x, [2, 0, 1]), SERIES),
    "expand and squeeze": (lambda x: tf().squeeze(tf().expand_dims(x, -2)[None], 0), X),
    "concat": (lambda x, y: tf().concat([x, y], -1), X, Y),
    "stack": (lambda x, y: tf().stack([x, y], 1), X, Y),
    "unstack": (lambda x: tf().unstack(x, axis=1)[1], X),
    "split": (lambda x: tf().split(x, 2, 1)[1], X),
    "split by sizes": (lambda x: tf().split(x, [1, -1], 1)[1], X),
    "slice": (lambda x: tf().slice(x, [0, 1], [-1, 2]), X),
    "strided slice": (strided, SERIES),
    "computed slice": (lambda x: x[tf().shape(x)[0] - 1 :, : tf().shape(x)[1] - 1], X),
    "computed element": (lambda x: x[tf().shape(x)[0] - 2], X),
    "pad": (lambda x: tf().pad(x, [[1, 0], [2, 1]]), X),
    "pad with a number": (lambda x: tf().pad(x, [[1, 0], [0, 1]], constant_values=2.0), X),
    "mirror": (lambda x: tf().pad(x, [[0, 0], [2, 1]], "REFLECT"), X),
    "tile": (lambda x: tf().tile(x, [2, 1]), X),
    "diagonal": (lambda x: tf().eye(tf().shape(x)[0]) @ x + tf().linalg.diag(x)[:, 0], X),
    "broadcast": (lambda x: tf().broadcast_to(x[:, None], [tf().shape(x)[0], 2, 4]), X),
    "fill": (lambda x: x * tf().fill([tf().shape(x)[0], 1], 3.0), X),
    "reverse": (lambda x: tf().reverse(x, [0, 1]), X),
    "band": (lambda x: tf().linalg.band_part(x, 1, 0) + tf().linalg.band_part(x, 0, -1), SERIES),
    "depth to space": (lambda x: tf().nn.depth_to_space(x, 2), normal(2, 3, 3, 8)),
    "space to depth": (lambda x: tf().nn.space_to_depth(x, 2), normal(2, 4, 4, 3)),
    "size and rank": (lambda x: x / tf().cast(tf().size(x) * tf().rank(x), tf().float32), X),
    # ---- indexing
    "gather": (lambda x, i: tf().gather(x, i), X, ROWS),
    "gather columns": (lambda x, i: tf().gather(x, i, axis=1), X, ROWS),
    "gather in batches": (lambda x, i: tf().gather(x, i, axis=1, batch_dims=1), X, ROWS),
    "gather_nd": (lambda x: tf().gather_nd(x, [[0, 1], [2, 3]]), X),
    "scatter_nd": (lambda x: tf().scatter_nd([[1], [3], [1]], x, [5, 4]), X),
    "scatter update": (lambda x, y: tf().tensor_scatter_nd_update(x, [[1]], y[:1]), X, Y),
    "scatter add": (lambda x, y: tf().tensor_scatter_nd_add(x, [[1], [1]], y[:2]), X, Y),
    "one hot": (lambda x, i: x[:, :3] * tf().one_hot(i - 1, 3, 0.9, 0.1), X, ROWS),
    "one hot, first": (lambda x, i: x[:3, :3] * tf().one_hot(i, 3, axis=0), X, ROWS),
    "segments of rows that are dropped": (lambda x: tf().math.unsorted_segment_sum(x, [1, -1, 1], 2), X),
    "scatter subtract": (lambda x, y: tf().tensor_scatter_nd_sub(x, [[1], [1]], y[:2]), X, Y),
    "stopped gradient": (lambda x, y: tf().stop_gradient(x * y) * x, X, Y),
    "angle": (lambda x, y: tf().atan2(x, y), X, Y),
    "remainder of two signs": (lambda x, y: tf().math.floormod(x, y), X, Y),
    "products that may be 0": (
        lambda x, y: tf().math.xlog1py(x, y) + tf().math.xdivy(x, y) + tf().math.multiply_no_nan(x, y),
        np.maximum(X, 0), positive(3, 4),
    ),
    "segments": (lambda x, i: tf().math.unsorted_segment_sum(x, i % 2, 3), X, ROWS),
    "sort": (lambda x: tf().math.top_k(x, 2)[0], X),
    "argmax": (lambda x: tf().cast(tf().argmax(x, 1), tf().float32) * x[:, 0], X),
    "cumsum": (lambda x: tf().cumsum(x, 1, exclusive=True, reverse=True), X),
    # ---- matrices
    "matmul": (lambda x, y: tf().matmul(x, y, transpose_b=True), X, Y),
    "matmul of transposed": (lambda x, y: tf().matmul(x, y, transpose_a=True), X, Y),
    "batched matmul": (lambda x, y: tf().matmul(x, y, transpose_b=True), SERIES, normal(2, 3, 4)),
    "einsum": (lambda x, y: tf().einsum("btd,de->bte", x, y), SERIES, normal(4, 3)),
    "tensordot": (lambda x, y: tf().tensordot(x, y, 1), SERIES, normal(4, 3)),
    # ---- images
    "conv same": (lambda x, w: tf().nn.conv2d(x, w, 2, "SAME"), IMAGE, KERNEL),
    "conv valid": (lambda x, w: tf().nn.conv2d(x, w, [1, 2], "VALID"), IMAGE, KERNEL),
    "conv explicit": (lambda x, w: tf().nn.conv2d(x, w, 1, [[0, 0], [2, 1], [0, 1], [0, 0]]), IMAGE, KERNEL),
    "conv dilated": (lambda x, w: tf().nn.conv2d(x, w, 1, "SAME", dilations=2), IMAGE, KERNEL),
    "conv 1d": (lambda x, w: tf().nn.conv1d(x, w, 1, "SAME"), SERIES, normal(3, 4, 2)),
    "conv 3d": (
        lambda x, w: tf().nn.conv3d(x, w, [1] * 5, "SAME"), normal(1, 3, 4, 3, 2), normal(2, 2, 2, 2, 3),
    ),
    "depthwise": (lambda x, w: tf().nn.depthwise_conv2d(x, w, [1, 2, 2, 1], "SAME"), IMAGE, normal(3, 3, 3, 2)),
    "separable": (
        lambda x, w, p: tf().nn.separable_conv2d(x, w, p, [1, 1, 1, 1], "VALID"),
        IMAGE, normal(3, 3, 3, 1), normal(1, 1, 3, 2),
    ),
    "conv transposed": (
        lambda x, w: tf().nn.conv2d_transpose(x, w, [2, 14, 12, 4], 2, "SAME"), IMAGE, normal(3, 3, 4, 3),
    ),
    "conv transposed valid": (
        lambda x, w: tf().nn.conv2d_transpose(x, w, [2, 9, 8, 4], 1, "VALID"), IMAGE, normal(3, 3, 4, 3),
    ),
    "conv transposed with gaps": (
        lambda x, w: tf().nn.conv2d_transpose(x, w, [2, 21, 18, 4], 3, "SAME"), IMAGE, normal(1, 1, 4, 3),
    ),
    "conv strided far": (lambda x, w: tf().nn.conv2d(x, w, 4, "SAME"), IMAGE, normal(1, 2, 3, 4)),
    "max pool": (lambda x: tf().nn.max_pool2d(x, 3, 2, "SAME"), IMAGE),
    "average pool": (lambda x: tf().nn.avg_pool2d(x, [2, 3], 1, "SAME"), IMAGE),
    "resized": (lambda x: tf().image.resize(x, [9, 4]), IMAGE),
    "resized to the nearest": (lambda x: tf().image.resize(x, [14, 9], "nearest"), IMAGE),
    "resized, corners aligned": (
        lambda x: tf().compat.v1.image.resize_bilinear(x, [11, 13], align_corners=True), IMAGE,
    ),
    "resized as of old": (lambda x: tf().compat.v1.image.resize_nearest_neighbor(x, [3, 9]), IMAGE),
    "bias": (lambda x, b: tf().nn.bias_add(x, b), IMAGE, normal(3)),
    "bias of channels first": (lambda x, b: tf().nn.bias_add(x, b, "NCHW"), IMAGE, normal(7)),
    "normalized by given statistics": (
        lambda x, s: tf().compat.v1.nn.fused_batch_norm(
            x, s[0], s[1], mean=normal(3), variance=positive(3), epsilon=1e-2, is_training=False
        )[0],
        IMAGE, normal(2, 3),
    ),
    "normalized by moments": (
        lambda x, s: tf().nn.batch_normalization(x, *tf().nn.moments(x, [1, 2], keepdims=True), s[0], s[1], 1e-3),
        IMAGE, normal(2, 3),
    ),
    # ---- losses
    "sparse cross entropy": (
        lambda x, i: tf().nn.sparse_softmax_cross_entropy_with_logits(i, 30 * x), X, ROWS,
    ),
    "cross entropy": (
        lambda x, y: tf().nn.softmax_cross_entropy_with_logits(tf().nn.softmax(y), x), X, Y,
    ),
    "binary cross entropy": (
        lambda x, y: tf().nn.sigmoid_cross_entropy_with_logits(tf().sigmoid(y), 90 * x), X, Y,
    ),
    # ---- control flow
    "a loop that collects": (collected, X),
    "a loop over time": (recurrent, SERIES, normal(4, 4)),
    "a loop that ends when the data say so": (halved, X),
    "a branch": (branched, np.abs(X)),
    "the other branch": (branched, -np.abs(X)),
    "functions in functions": (nested, X, Y),
    "map": (lambda x: tf().map_fn(lambda row: tf().reduce_sum(row) * row, x), X),
    "scan": (lambda x: tf().scan(lambda a, row: 0.5 * a + tf().tanh(row), x, tf().zeros([4])), X),
}  # fmt: skip

KERNELS = {"conv 3d", "conv dilated", "depthwise", "separable"}
FIRST_AXIS_KNOWN = {
    *KERNELS,
    "scatter_nd",
    "conv transposed",
    "conv transposed valid",
    "conv transposed with gaps",
    "conv strided far",
}
NO_GRADIENT_IN_TENSORFLOW = {"conv dilated"}


def as_specs(name, arrays):
    specs = [tf().TensorSpec(array.shape, array.dtype) for array in arrays]
    return specs if name in FIRST_AXIS_KNOWN else arrays


@pytest.mark.slow("gather_nd")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    from onward.frameworks.tensorflow.capture import export

    compute, *arrays = CASES[name]
    call = tf().function(compute)
    model = export(call, as_specs(name, arrays), owner=call).model
    tensors = [tf().constant(array) for array in arrays]
    floats = [x for x in tensors if x.dtype.is_floating]
    with tf().GradientTape() as tape:
        tape.watch(floats)
        expected = call(*tensors)
    given = dict(zip((value.name for value in model.inputs), arrays, strict=True))
    found = function(model, engine="onnxruntime")(given)[model.outputs[0].name]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    if name in NO_GRADIENT_IN_TENSORFLOW:
        return
    dy = np.random.default_rng(2).standard_normal(expected.shape).astype(np.float32)
    xs = [value.name for value in model.inputs if value.dtype.is_floating_point()]
    backward = vjp(model, model.outputs[0].name, xs)
    results = function(backward, engine="onnxruntime")({**given, backward.inputs[-1].name: dy})
    gradients = tape.gradient(expected, floats, dy, unconnected_gradients=tf().UnconnectedGradients.ZERO)
    for output, gradient in zip(list(results.values())[-len(xs) :], gradients, strict=True):
        np.testing.assert_allclose(output, tf().convert_to_tensor(gradient), rtol=1e-4, atol=1e-4)


EXTREMES = {
    "one": "abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc exp expm1 floor is_nan log log1p log_sigmoid "
    "reciprocal rint round rsqrt sign sin sinh sqrt square tan tanh",
    "activations": "elu gelu leaky_relu relu relu6 selu softplus softsign",
    "two": "atan2 divide divide_no_nan floordiv floormod maximum minimum multiply_no_nan pow squared_difference "
    "truncatemod xdivy xlog1py xlogy",
}
INEXACT = {  # which engine, or TensorFlow itself, differs there, and by how much
    "elu": "TensorFlow subtracts 1 from exp(x)",
    "selu": "TensorFlow subtracts 1 from exp(x)",
    "gelu": "1 + erf(x) of the operator rounds to 0",
    "floordiv": "TensorFlow flushes quotients below 1e-38 to 0",
}


@pytest.mark.parametrize("kind", EXTREMES)
def test_functions_at_extreme_arguments(kind):
    """Element by element, relative to each: sums and absolute tolerances hide what is lost near 0."""
    from onward.frameworks.tensorflow.capture import export

    arrays = pairs() if kind == "two" else (NUMBERS,)
    names = [name for name in EXTREMES[kind].split() if name not in INEXACT]
    functions = [getattr(tf().nn if kind == "activations" else tf() if name == "truncatemod" else tf().math, name)
                 for name in names]  # fmt: skip
    call = tf().function(lambda *xs: [tf().cast(f(*xs), tf().float32) for f in functions])
    model = export(call, [tf().TensorSpec(array.shape, array.dtype) for array in arrays], owner=call).model
    expected = call(*map(tf().constant, arrays))
    given = dict(zip((value.name for value in model.inputs), arrays, strict=True))
    for engine in ("numpy", "onnxruntime"):
        found = function(model, engine=engine)(given)
        for name, output, theirs in zip(names, model.outputs, expected, strict=True):
            assert_equal_everywhere(found[output.name], theirs, arrays, f"{name} on {engine}")
