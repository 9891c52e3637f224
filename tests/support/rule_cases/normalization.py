"""Softmax, normalisation and dropout, where the node tests of `onnx` do not go."""

import numpy as np
from onnx import parser
from onnx.reference.op_run import OpRun

EXCLUDED = {
    "test_l2normalization_axis_0": "has a zero vector, where the operator jumps",
    "test_l1normalization_axis_last": "has zeros, where the norm has a kink",
    "test_training_dropout_default": "moving the ratio is not differentiable, and engines draw different masks",
    "test_training_dropout_default_mask": "moving the ratio is not differentiable, and engines draw different masks",
    "test_training_dropout": "moving the ratio is not differentiable, and engines draw different masks",
    "test_training_dropout_mask": "moving the ratio is not differentiable, and engines draw different masks",
    "test_training_dropout_zero_ratio": "moving the ratio is not differentiable",
    "test_training_dropout_zero_ratio_mask": "moving the ratio is not differentiable",
}
"""Node tests that cannot be compared, and why."""


class LpNormalization(OpRun):
    """The reference takes no absolute value for p = 1."""

    def _run(self, x, axis=-1, p=2):
        norm = np.linalg.norm(x, ord=p, axis=axis, keepdims=True)
        return (np.where(norm == 0, 0, x / np.where(norm == 0, 1, norm)).astype(x.dtype),)


class MeanVarianceNormalization(OpRun):
    """The body in the standard is for float32 alone."""

    def _run(self, x, axes=(0, 2, 3)):
        axes = tuple(axes)
        return ((x - x.mean(axes, keepdims=True)) / (x.std(axes, keepdims=True) + 1e-9),)


class GroupNormalization(OpRun):
    """The body in the standard computes in float32."""

    def _run(self, x, scale, bias, num_groups=1, epsilon=1e-5, stash_type=1):
        grouped = x.reshape(x.shape[0], num_groups, -1)
        centred = grouped - grouped.mean(2, keepdims=True)
        normal = centred / np.sqrt((centred**2).mean(2, keepdims=True) + epsilon)
        if len(scale) == num_groups != x.shape[1]:
            scale, bias = (np.repeat(v, x.shape[1] // num_groups) for v in (scale, bias))
        scale, bias = (v.reshape(-1, *[1] * (x.ndim - 2)) for v in (scale, bias))
        return (normal.reshape(x.shape) * scale + bias,)


class LRN(OpRun):
    """The reference takes the batch for the channels."""

    def _run(self, x, alpha=1e-4, beta=0.75, bias=1.0, size=1):
        before, after = (size - 1) // 2, size // 2
        windows = [slice(max(0, c - before), c + after + 1) for c in range(x.shape[1])]
        total = np.stack([(x[:, window] ** 2).sum(1) for window in windows], axis=1)
        return (x / (bias + alpha / size * total) ** beta,)


class LogSoftmax(OpRun):
    """The reference takes the logarithm of 0."""

    def _run(self, x, axis=-1):
        shifted = x - x.max(axis, keepdims=True)
        return (shifted - np.log(np.exp(shifted).sum(axis, keepdims=True)),)


EVALUATORS = [LpNormalization, MeanVarianceNormalization, GroupNormalization, LRN, LogSoftmax]
"""Operators that the reference of `onnx` does not compute in float64, or gets wrong."""


def _random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _model(text, opset=21):
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')


def _unknown_rank(call, parameters="", outputs="float[N, C, A, B] y", opset=21, **arrays):
    """X is reshaped to a shape that is known only at run time, so that not even its rank is known."""
    text = f"g (float[L] x, int64[R] shape{parameters}) => ({outputs}) {{ z = Reshape(x, shape) {call} }}"
    inputs = {"x": _random(2 * 4 * 3 * 2, seed=5), "shape": np.array([2, 4, 3, 2]), **arrays}
    return _model(text, opset), inputs


_AFFINE = ", float[C] s, float[C] b"
_CHANNELS = {"s": _random(4, seed=1), "b": _random(4, seed=2)}
_STATISTICS = {"m": _random(4, seed=3), "v": np.abs(_random(4, seed=4)) + 0.5}
_BATCH = f"{_AFFINE}, float[C] m, float[C] v"
_RUNNING = "float[2, 4, 3, 2] y, float[4] rm, float[4] rv"


def _image(call, parameters=_AFFINE, outputs="float[2, 4, 3, 2] y", opset=21, **arrays):
    inputs = {"x": _random(2, 4, 3, 2, seed=5), **(_CHANNELS if parameters.startswith(_AFFINE) else {}), **arrays}
    return _model(f"g (float[2, 4, 3, 2] x{parameters}) => ({outputs}) {{ {call} }}", opset), inputs


def _rotary(kind, attributes, x, positions=None):
    rows = (2, 4) if positions is None else (5,)
    cache = f"float[{', '.join(map(str, rows))}, 3]"
    given = "" if positions is None else ", positions"
    typed = "" if positions is None else ", int64[2, 4] positions"
    text = f"y = RotaryEmbedding<{attributes}>(x, cos, sin{given})".replace("<>", "")
    arrays = {"x": x, "cos": _random(*rows, 3, seed=6), "sin": _random(*rows, 3, seed=7)}
    model = _model(f"g ({kind} x, {cache} cos, {cache} sin{typed}) => ({kind} y) {{ {text} }}", opset=23)
    return model, arrays | ({} if positions is None else {"positions": positions})


_MASKED = _random(3, 4)
_MASKED[1] = -np.inf
_MASKED[2, 1:3] = -np.inf


CASES = {
    "softmax_of_masked_rows": (
        _model(
            "g (float[3, 4] x) => (float[3, 4] y) "
            "{ p = Softmax(x) bad = IsNaN(p) zero = Constant<value = float {0.0}>() "
            "y = Where(bad, zero, p) }"
        ),
        {"x": _MASKED},
    ),
    "softmax_unknown_rank": _unknown_rank("y = Softmax<axis = 1>(z)"),
    "log_softmax_unknown_rank": _unknown_rank("y = LogSoftmax<axis = -2>(z)"),
    "log_softmax_of_large_logits": (
        _model("g (float[2, 3] x) => (float[2, 3] y) { y = LogSoftmax(x) }"),
        {"x": np.array([[1000, 999, -1000], [0, -500, 1]], np.float32)},
    ),
    "layer_normalization_all_outputs": (
        _model(
            "g (float[2, 3, 4] x, float[3, 4] s, float[4] b) => (float[2, 3, 4] y, float[2, 1, 1] m, float[2, 1, 1] i) "
            "{ y, m, i = LayerNormalization<axis = 1, epsilon = 0.01>(x, s, b) }"
        ),
        {"x": _random(2, 3, 4, seed=5), "s": _random(3, 4, seed=1), "b": _random(4, seed=2)},
    ),
    "layer_normalization_without_mean": (
        _model("g (float[2, 5] x, float[5] s) => (float[2, 5] y, float[2, 1] i) { y, , i = LayerNormalization(x, s) }"),
        {"x": _random(2, 5, seed=5), "s": _random(5, seed=1)},
    ),
    "layer_normalization_unknown_rank": _unknown_rank(
        "y = LayerNormalization<axis = 2>(z, s)", ", float[A, B] s", s=_random(3, 2, seed=1)
    ),
    "rms_normalization_unknown_rank": _unknown_rank(
        "y = RMSNormalization<axis = 1>(z, s)", ", float[A, B] s", opset=23, s=_random(3, 2, seed=1)
    ),
    "mean_variance_normalization": _image("y = MeanVarianceNormalization<axes = [1, -1]>(x)", ""),
    "l1_normalization": _image("y = LpNormalization<axis = 1, p = 1>(x)", ""),
    "l2_normalization": _image("y = LpNormalization<axis = -2, p = 2>(x)", ""),
    "instance_normalization": _image("y = InstanceNormalization(x, s, b)"),
    "instance_normalization_unknown_rank": _unknown_rank("y = InstanceNormalization(z, s, b)", _AFFINE, **_CHANNELS),
    "instance_normalization_3d": (
        _model(
            "g (float[2, 3, 5] x, float[3] s, float[3] b) => (float[2, 3, 5] y) { y = InstanceNormalization(x, s, b) }"
        ),
        {"x": _random(2, 3, 5, seed=5), "s": _random(3, seed=1), "b": _random(3, seed=2)},
    ),
    "group_normalization": _image("y = GroupNormalization<num_groups = 2>(x, s, b)"),
    "group_normalization_per_group": _image(
        "y = GroupNormalization<num_groups = 2>(x, s, b)",
        ", float[2] s, float[2] b",
        opset=18,
        s=_random(2, seed=1),
        b=_random(2, seed=2),
    ),
    "group_normalization_unknown_rank": _unknown_rank(
        "y = GroupNormalization<num_groups = 2>(z, s, b)", _AFFINE, **_CHANNELS
    ),
    "batch_normalization": _image("y = BatchNormalization(x, s, b, m, v)", _BATCH, **_STATISTICS),
    "batch_normalization_2d": (
        _model(
            f"g (float[5, 4] x{_BATCH.replace('C', '4')}) => (float[5, 4] y) {{y = BatchNormalization(x, s, b, m, v) }}"
        ),
        {"x": _random(5, 4, seed=5), **_CHANNELS, **_STATISTICS},
    ),
    "batch_normalization_unknown_rank": _unknown_rank(
        "y = BatchNormalization(z, s, b, m, v)", _BATCH, **_CHANNELS, **_STATISTICS
    ),
    "batch_normalization_in_training": _image(
        "y, rm, rv = BatchNormalization<training_mode = 1, momentum = 0.8>(x, s, b, m, v)",
        _BATCH,
        _RUNNING,
        **_STATISTICS,
    ),
    "batch_normalization_in_training_unknown_rank": _unknown_rank(
        "y, rm, rv = BatchNormalization<training_mode = 1>(z, s, b, m, v)",
        _BATCH,
        "float[N, C, A, B] y, float[C] rm, float[C] rv",
        **_CHANNELS,
        **_STATISTICS,
    ),
    "lrn_even_size": _image("y = LRN<size = 4, alpha = 0.5, beta = 0.6, bias = 1.5>(x)", ""),
    "lrn_wider_than_channels": _image("y = LRN<size = 11, alpha = 0.9>(x)", ""),
    "lrn_unknown_rank": _unknown_rank("y = LRN<size = 3, alpha = 0.7>(z)"),
    "dropout_in_training": _image(
        "r = Constant<value = float {0.0}>() t = Constant<value = bool {1}>() y = Dropout(x, r, t)", ""
    ),
    "dropout_not_in_training": _image("t = Constant<value = bool {0}>() y, mask = Dropout(x, , t)", ""),
    "dropout_in_training_or_not": _image("y = Dropout<seed = 3>(x, , t)", ", bool t", t=np.array(False)),
    "rotary_embedding": _rotary("float[2, 3, 4, 6]", "", _random(2, 3, 4, 6, seed=5)),
    "rotary_embedding_at_repeated_positions": _rotary(
        "float[2, 4, 18]", "num_heads = 3", _random(2, 4, 18, seed=5), np.array([[0, 1, 2, 2], [4, 2, 0, 4]])
    ),
    "rotary_embedding_interleaved": _rotary(
        "float[2, 3, 4, 8]",
        "interleaved = 1, rotary_embedding_dim = 6",
        _random(2, 3, 4, 8, seed=5),
        np.array([[0, 1, 2, 2], [4, 2, 0, 4]]),
    ),
}

_TWO_ROWS = np.array([[0, 0], [3, -4]], np.float32)

EDGES = {
    "l1_normalization_of_zeros": (
        _model("g (float[2, 2] x) => (float[2, 2] y) { y = LpNormalization<p = 1>(x) }"),
        {"x": _TWO_ROWS},
        np.array([[1, 2], [7, 0]]),
        {"x": np.array([[0, 0], [4 / 7, 3 / 7]])},
    ),
    "l2_normalization_of_zeros": (
        _model("g (float[2, 2] x) => (float[2, 2] y) { y = LpNormalization<p = 2>(x) }"),
        {"x": _TWO_ROWS},
        np.array([[1, 2], [125, 0]]),
        {"x": np.array([[0, 0], [16, 12]])},
    ),
    "dropout_of_everything": (
        _model(
            "g (float[2, 2] x) => (float[2, 2] y) "
            "{ r = Constant<value = float {0.9999999}>() t = Constant<value = bool {1}>() y = Dropout(x, r, t) }"
        ),
        {"x": _TWO_ROWS},
        np.array([[1, 2], [3, 4]]),
        {"x": np.zeros((2, 2))},
    ),
}
