"""The operators of ONNX Runtime: each rewrite computes what the kernel computes, and has its derivative."""

import kernelcheck
import numpy as np
import onnx
import pytest
import torch
from kernelcheck import case
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.errors import UnsupportedError
from onward.rules import RULES, Rewrite, Rule

RNG = np.random.default_rng(3)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values, dtype=np.int32):
    return np.array(values, dtype)


X, BIAS = normal(2, 3, 8), normal(8)

CASES = {
    "gelu": case("Gelu", {"x": X}),
    "bias_gelu": case("BiasGelu", {"x": X, "b": BIAS}),
    "fast_gelu": case("FastGelu", {"x": X}),
    "fast_gelu_bias": case("FastGelu", {"x": X, "b": BIAS}),
    "quick_gelu": case("QuickGelu", {"x": X}),
    "quick_gelu_alpha": case("QuickGelu", {"x": X}, alpha=1.1),
    "fused_matmul": case("FusedMatMul", {"a": normal(2, 3, 4), "b": normal(2, 4, 5)}, alpha=0.5),
    "fused_matmul_transposed": case("FusedMatMul", {"a": normal(2, 4, 3), "b": normal(2, 5, 4)}, transA=1, transB=1),
    "fused_matmul_batches": case(
        "FusedMatMul", {"a": normal(3, 2, 6, 4), "b": normal(5, 2, 6, 4)}, transBatchA=1, transBatchB=1, transB=1
    ),
    "fused_matmul_batches_turned": case(
        "FusedMatMul", {"a": normal(3, 2, 4), "b": normal(2, 3, 5)}, transBatchA=1, transA=1
    ),
    "fused_matmul_vector": case("FusedMatMul", {"a": normal(4), "b": normal(5, 4)}, transA=1, transB=1),
    "transpose_matmul": case("TransposeMatMul", {"a": normal(3, 4), "b": normal(3, 5)}, transA=1),
    "fused_gemm": case("FusedGemm", {"a": normal(3, 4), "b": normal(4, 5)}, activation="Relu"),
    "fused_gemm_leaky": case(
        "FusedGemm", {"a": normal(4, 3), "b": normal(5, 4), "c": normal(5)}, transA=1, transB=1, alpha=0.5, beta=2.0,
        activation="LeakyRelu", activation_alpha=0.2,
    ),
    "cdist": case("CDist", {"a": normal(3, 4), "b": normal(5, 4)}, metric="sqeuclidean"),
    "cdist_euclidean": case("CDist", {"a": normal(3, 4), "b": normal(5, 4)}, metric="euclidean"),
    "trilu": case("Trilu", {"x": normal(2, 4, 5)}),
    "trilu_lower": case("Trilu", {"x": normal(4, 5), "k": np.int64(1)}, upper=0),
    "pad": case("Pad", {"x": normal(2, 3), "pads": ints(0, 1, 2, 1, dtype=np.int64), "value": np.float32([0.5])}),
    "pad_reflect": case("Pad", {"x": normal(2, 3), "pads": ints(0, 1, 1, 2, dtype=np.int64)}, mode="reflect"),
    "expand_dims": case("ExpandDims", {"x": normal(2, 3), "axis": np.int32(-2)}),
    "gather_nd": case("GatherND", {"x": normal(2, 3, 4), "i": ints([0, 1], [1, 2])}),
    "grid_sample": case("GridSample", {"x": normal(1, 2, 4, 5), "g": normal(1, 3, 2, 2) * 0.4}),
    "grid_sample_nearest": case(
        "GridSample", {"x": normal(1, 2, 4, 5), "g": normal(1, 3, 2, 2) * 0.4}, mode="nearest", align_corners=1
    ),
    "fused_conv": case("FusedConv", {"x": normal(1, 2, 5, 6), "w": normal(3, 2, 3, 3)}, activation="Relu"),
    "fused_conv_residual": case(
        "FusedConv", {"x": normal(1, 2, 5, 6), "w": normal(4, 1, 3, 3), "b": normal(4), "z": normal(1, 4, 3, 3)},
        activation="Sigmoid", group=2, pads=[1, 1, 1, 1], strides=[2, 2],
    ),
    "fused_conv_leaky": case(
        "FusedConv", {"x": normal(1, 2, 6), "w": normal(3, 2, 3)}, activation="LeakyRelu", activation_params=[0.3]
    ),
    "fused_conv_clip": case(
        "FusedConv", {"x": normal(1, 2, 6), "w": normal(3, 2, 3)}, activation="Clip", activation_params=[-0.5, 1.0]
    ),
    "fused_conv_hard_sigmoid": case(
        "FusedConv", {"x": normal(1, 2, 6), "w": normal(3, 2, 3)}, activation="HardSigmoid",
        activation_params=[0.25, 0.4],
    ),
    "conv_transpose_with_dynamic_pads": case(
        "ConvTransposeWithDynamicPads",
        {"x": normal(1, 2, 4, 4), "w": normal(2, 3, 3, 3), "p": ints(1, 0, 0, 1, dtype=np.int64), "b": normal(3)},
        strides=[2, 2], kernel_shape=[3, 3],
    ),
    "crop_and_resize": case(
        "CropAndResize",
        {"x": normal(2, 3, 5, 6), "r": np.float32([[0.1, 0.23, 0.8, 0.7], [0.05, 0.3, 1.2, 0.93]]), "i": ints(1, 0),
         "s": ints(4, 3)},
        extrapolation_value=0.5,
    ),
    "crop_and_resize_nearest": case(
        "CropAndResize",
        {"x": normal(2, 3, 5, 6), "r": np.float32([[0.1, 0.2, 0.8, 0.7]]), "i": ints(1), "s": ints(1, 3)},
        mode="nearest",
    ),
    "simplified_layer_normalization": case(
        "SimplifiedLayerNormalization", {"x": X, "s": BIAS}, domain="", axis=-1, epsilon=1e-3
    ),
    "simplified_layer_normalization_of_two_axes": case(
        "SimplifiedLayerNormalization", {"x": X, "s": normal(3, 8)}, 2, domain="", axis=1
    ),
    "skip_simplified_layer_normalization": case(
        "SkipSimplifiedLayerNormalization", {"x": X, "skip": normal(2, 3, 8), "s": BIAS, "b": normal(8)},
        ("y", "", "", "sum"), epsilon=1e-5,
    ),
    "skip_layer_normalization": case(
        "SkipLayerNormalization",
        {"x": X, "skip": normal(2, 3, 8), "s": BIAS, "t": normal(8), "b": normal(8)}, ("y", "", "", "sum"),
        epsilon=1e-5,
    ),
    "skip_layer_normalization_broadcast": case(
        "SkipLayerNormalization", {"x": X, "skip": normal(3, 8), "s": BIAS}, epsilon=1e-5
    ),
    "embed_layer_normalization": case(
        "EmbedLayerNormalization",
        {"w": ints([1, 4, 2], [0, 0, 3]), "g": ints([0, 1, 1], [0, 0, 1]), "wt": normal(5, 8), "pt": normal(4, 8),
         "gt": normal(2, 8), "s": BIAS, "t": normal(8), "m": ints([1, 1, 0], [1, 1, 1])},
        3, types=(TensorProto.FLOAT, TensorProto.INT32, TensorProto.FLOAT), epsilon=1e-5,
    ),
    "embed_layer_normalization_positions": case(
        "EmbedLayerNormalization",
        {"w": ints([1, 4, 2], [0, 0, 3]), "g": None, "wt": normal(5, 8), "pt": normal(4, 8), "gt": None, "s": BIAS,
         "t": normal(8), "m": None, "p": ints([3, 0, 1])},
        2, types=(TensorProto.FLOAT, TensorProto.INT32), epsilon=1e-5,
    ),
}  # fmt: skip


def levels(bits, *shape):
    return RNG.integers(0, 256, shape).astype(np.uint8) if bits else None


def n_bits(bits, zeros=None, *, columns=40, bias=False, **attributes):
    """Weights of 5 rows in blocks of 16, of which the last is not full."""
    zero_points = {None: None, "packed": levels(8, 5 * -(-3 * bits // 8)), "float": normal(5 * 3) + 2 ** (bits - 1)}
    inputs = {
        "a": normal(2, 3, columns), "w": levels(8, 5, 3, 16 * bits // 8), "s": 0.1 * normal(5 * 3),
        "z": zero_points[zeros], "g": None, "b": normal(5) if bias else None,
    }  # fmt: skip
    constants = [name for name in ("w", "s", "z") if inputs[name] is not None]
    return case("MatMulNBits", inputs, constants=constants, K=columns, N=5, bits=bits, block_size=16, **attributes)


CASES |= {
    "matmul_4_bits": n_bits(4),
    "matmul_4_bits_zero_points": n_bits(4, "packed", bias=True),
    "matmul_4_bits_float_zero_points": n_bits(4, "float"),
    "matmul_8_bits": n_bits(8, "packed"),
    "matmul_2_bits": n_bits(2, "packed"),
    "matmul_float4": case(
        "MatMulBnb4", {"a": normal(3, 20), "w": levels(8, 50), "s": normal(7)}, constants=["w", "s"], K=20, N=5,
        block_size=16, quant_type=0,
    ),
    "matmul_normal_float4": case(
        "MatMulBnb4", {"a": normal(3, 16), "w": levels(8, 40), "s": normal(5)}, constants=["w", "s"], K=16, N=5,
        block_size=16, quant_type=1,
    ),
    "gated_add": case("GatedAdd", {"x": normal(2, 3, 4), "y": normal(2, 3, 4), "g": normal(2, 3, 1)}),
    "gated_rms_norm": case("GatedRMSNorm", {"x": normal(2, 3, 8), "s": normal(4), "g": normal(2, 3, 8)}, epsilon=1e-3),
}  # fmt: skip


# ---- attention -------------------------------------------------------------------------------------------------------


def attention(outputs=1, *, mask=None, past=None, scores_bias=None, sizes=None, **attributes):
    """Two sequences of three words, two heads of width 4."""
    width = sum(sizes) if sizes else 24
    inputs = {
        "x": normal(2, 3, 8), "w": 0.3 * normal(8, width), "b": normal(width), "m": mask,
        "past": past, "bias": scores_bias,
    }  # fmt: skip
    if sizes:
        attributes["qkv_hidden_sizes"] = sizes
    return case("Attention", inputs, outputs, num_heads=2, **attributes)


def multi_head(outputs=1, *, q=(2, 3, 8), k=(2, 5, 8), v=(2, 5, 8), **inputs):
    attributes = {name: inputs.pop(name) for name in ("scale", "unidirectional", "mask_filter_value") if name in inputs}
    given = {"q": normal(*q), "k": None if k is None else normal(*k), "v": None if v is None else normal(*v)}
    given |= {name: inputs.get(name) for name in ("b", "m", "bias", "past_k", "past_v")}
    return case("MultiHeadAttention", given, outputs, num_heads=2, **attributes)


def grouped(outputs=3, *, length=3, past=0, lengths=None, packed=False, buffer=None, rotary=None, batch=2, **given):
    """Sequences, four heads of width 16 that share two of keys and values."""
    total = length + past
    lengths = [total] * batch if lengths is None else lengths
    cache = buffer or past
    inputs = {
        "q": normal(batch, length, 128 if packed else 64),
        "k": None if packed else normal(batch, length, 32),
        "v": None if packed else normal(batch, length, 32),
        "past_k": normal(batch, 2, cache, 16) if cache else None,
        "past_v": normal(batch, 2, cache, 16) if cache else None,
        "last": ints(*(n - 1 for n in lengths)),
        "total": np.int32(total),
        "cos": normal(8, rotary) if rotary else None,
        "sin": normal(8, rotary) if rotary else None,
        "p": given.pop("p", None),
        "bias": given.pop("bias", None),
        "sink": given.pop("sink", None),
    }  # fmt: skip
    return case(
        "GroupQueryAttention", inputs, outputs, num_heads=4, kv_num_heads=2, do_rotary=int(bool(rotary)), **given
    )


CASES |= {
    "attention": attention(),
    "attention_scale": attention(scale=0.3),
    "attention_causal": attention(unidirectional=1),
    "attention_values_wider": attention(sizes=[8, 8, 12]),
    "attention_ends": attention(mask=ints(2, 3)),
    "attention_ends_and_begins": attention(mask=ints(3, 2, 1, 0)),
    "attention_mask": attention(mask=ints([1, 1, 0], [0, 1, 1]), mask_filter_value=-5.0),
    "attention_mask_causal": attention(mask=ints([1, 1, 0], [0, 1, 1]), unidirectional=1),
    "attention_mask_of_queries": attention(mask=RNG.integers(0, 2, (2, 3, 3)).astype(np.int32)),
    "attention_past": attention(2, past=normal(2, 2, 2, 4, 4), unidirectional=1),
    "attention_scores_bias": attention(scores_bias=normal(1, 2, 3, 3)),
    "multi_head": multi_head(),
    "multi_head_bias": multi_head(b=normal(24), scale=0.4),
    "multi_head_values_wider": multi_head(v=(2, 5, 12), b=normal(28)),
    "multi_head_mask": multi_head(m=ints([1, 1, 0, 1, 1], [1, 0, 0, 0, 1])),
    "multi_head_ends": multi_head(m=ints(4, 2)),
    "multi_head_mask_of_queries": multi_head(m=RNG.integers(0, 2, (2, 3, 5)).astype(np.int32)),
    "multi_head_scores_bias": multi_head(bias=normal(1, 1, 3, 5)),
    "multi_head_causal": multi_head(k=(2, 3, 8), v=(2, 3, 8), unidirectional=1),
    "multi_head_past": multi_head(
        3, k=(2, 3, 8), v=(2, 3, 8), past_k=normal(2, 2, 4, 4), past_v=normal(2, 2, 4, 4), unidirectional=1
    ),
    "multi_head_scores": multi_head(("y0", "", "", "qk"), m=ints([1, 1, 0, 1, 1], [1, 0, 0, 0, 1])),
    "multi_head_keys_by_head": multi_head(k=(2, 2, 5, 4), v=(2, 2, 5, 4)),
    "grouped": grouped(),
    "grouped_packed": grouped(packed=True, scale=0.4),
    "grouped_shorter": grouped(lengths=[2, 3]),
    "grouped_window": grouped(length=5, local_window_size=2),
    "grouped_capped": grouped(softcap=0.7, bias=normal(1, 4, 3, 3)),
    "grouped_past": grouped(length=1, past=4),
    "grouped_past_several": grouped(length=3, past=4, batch=1),
    "grouped_buffer": grouped(("y0", "_keys", "_values"), length=1, past=3, buffer=6, lengths=[4, 3]),
    "grouped_rotary": grouped(rotary=8),
    "grouped_rotary_interleaved": grouped(rotary=8, rotary_interleaved=1, packed=True),
    "grouped_rotary_past": grouped(length=1, past=4, rotary=8),
    "grouped_rotary_positions": grouped(rotary=8, p=ints([1, 2, 3], [0, 1, 2], dtype=np.int64)),
    "grouped_smooth": grouped(smooth_softmax=1),
    "grouped_sink": grouped(sink=normal(4)),
    "grouped_all_ways": grouped(causal=0),
    "rotary": case(
        "RotaryEmbedding",
        {"x": normal(2, 3, 8), "p": ints([0, 1, 4], [2, 3, 1], dtype=np.int64), "cos": normal(5, 2),
         "sin": normal(5, 2)},
    ),
    "rotary_interleaved": case(
        "RotaryEmbedding",
        {"x": normal(2, 2, 3, 4), "p": ints(1, dtype=np.int64), "cos": normal(5, 2), "sin": normal(5, 2)},
        interleaved=1,
    ),
    "rotary_partial": case(
        "RotaryEmbedding",
        {"x": normal(2, 3, 16), "p": ints(0, dtype=np.int64), "cos": normal(5, 2), "sin": normal(5, 2)},
        num_heads=2, rotary_embedding_dim=4,
    ),
}  # fmt: skip


# ---- quantised -------------------------------------------------------------------------------------------------------

UINT8, INT8 = TensorProto.UINT8, TensorProto.INT8


def q(*shape, dtype=np.uint8):
    return RNG.integers(0, 256, shape).astype(np.uint8).view(dtype)


def scale(value):
    return np.float32(value)


A = {"a": q(3, 4), "as": scale(0.02), "az": np.uint8(100)}
B = {"b": q(3, 4), "bs": scale(0.03), "bz": np.uint8(120)}
Y = {"ys": scale(0.05), "yz": np.uint8(128)}
ONE = {"x": q(1, 2, 6, 5), "xs": scale(0.02), "xz": np.uint8(100), "ys": scale(0.0117), "yz": np.uint8(90)}

QUANTISED = {
    "add": case("QLinearAdd", A | B | Y, types=[UINT8]),
    "add_without_zero_point": case(
        "QLinearAdd", {"a": q(3, 4, dtype=np.int8), "as": scale(0.02), "az": np.int8(3), "b": q(4, dtype=np.int8),
        "bs": scale(0.02), "bz": np.int8(-5), "ys": scale(0.05)}, types=[INT8],
    ),
    "mul": case("QLinearMul", A | B | Y, types=[UINT8]),
    "sigmoid": case("QLinearSigmoid", ONE, types=[UINT8]),
    "leaky_relu": case("QLinearLeakyRelu", ONE, types=[UINT8], alpha=0.2),
    "softmax": case("QLinearSoftmax", ONE, types=[UINT8], axis=-1, opset=13),
    "softmax_of_old": case("QLinearSoftmax", ONE, types=[UINT8], axis=2, opset=11),
    "average_pool": case(
        "QLinearAveragePool", ONE, types=[UINT8], kernel_shape=[3, 2], pads=[1, 0, 1, 0], strides=[2, 1]
    ),
    "average_pool_channels_last": case(
        "QLinearAveragePool", ONE, types=[UINT8], kernel_shape=[2, 2], channels_last=1
    ),
    "global_average_pool": case("QLinearGlobalAveragePool", ONE, types=[UINT8]),
    "global_average_pool_channels_last": case("QLinearGlobalAveragePool", ONE, types=[UINT8], channels_last=1),
    "conv_channels_last": case(
        "QLinearConv", {"x": q(1, 5, 6, 2), "xs": scale(0.02), "xz": np.uint8(100), "w": q(3, 2, 3, 3),
        "ws": scale(0.03), "wz": np.uint8(128), "ys": scale(0.1), "yz": np.uint8(128), "b": ints(500, -300, 80)},
        types=[UINT8], channels_last=1,
    ),
    "concat": case("QLinearConcat", Y | A | B, types=[UINT8], axis=1),
    "where": case("QLinearWhere", {"c": RNG.integers(0, 2, (3, 4)) > 0} | A | B | Y, types=[UINT8]),
    "gemm": case(
        "QGemm", {"a": q(3, 4), "as": scale(0.02), "az": np.uint8(100), "b": q(5, 4), "bs": scale(0.03),
        "bz": np.uint8(120), "c": ints(300, -200, 5, 70, 900), "ys": scale(0.05), "yz": np.uint8(128)}, types=[UINT8],
        transB=1, alpha=0.5,
    ),
    "gemm_to_float": case(
        "QGemm", {"a": q(3, 4), "as": scale(0.02), "az": np.uint8(100), "b": q(4, 5, dtype=np.int8),
        "bs": np.float32([0.1, 0.2, 0.1, 0.3, 0.1]), "bz": np.zeros(5, np.int8)},
    ),
    "matmul_integer_to_float": case(
        "MatMulIntegerToFloat", {"a": q(2, 3, 4), "b": q(4, 5), "as": scale(0.02), "bs": scale(0.03),
        "az": np.uint8(100), "bz": np.uint8(120), "bias": normal(5)},
    ),
    "dynamic_quantize_matmul": case(
        "DynamicQuantizeMatMul", {"a": normal(3, 4), "b": q(4, 5, dtype=np.int8), "bs": scale(0.03),
        "bz": np.int8(4), "bias": normal(5)},
    ),
    "attention": case(
        "QAttention", {"x": q(2, 3, 8), "w": q(8, 24, dtype=np.int8), "b": normal(24), "xs": scale(0.01),
        "ws": scale(0.02), "m": ints(3, 2), "xz": np.uint8(128), "wz": np.int8(0)}, constants=["w"], num_heads=2,
    ),
    "quantize": case("QuantizeLinear", {"x": normal(3, 4), "s": scale(0.02), "z": np.uint8(128)}, types=[UINT8]),
    "dequantize": case("DequantizeLinear", {"x": q(3, 4), "s": scale(0.02), "z": np.uint8(128)}),
}  # fmt: skip

KINKS = {"grid_sample", "fused_conv_hard_sigmoid", "crop_and_resize"}
"""Cases in which a kink is near: the step of the differences is smaller."""
STEPS = {"grid_sample_nearest": ["x"], "crop_and_resize_nearest": ["x"]}
"""Cases with steps, and the inputs by which they are differentiable."""
SHAPES_NEEDED = {"embed_layer_normalization", "embed_layer_normalization_positions", "matmul_4_bits_zero_points"}
"""Cases that ONNX Runtime's own shape inference refuses where a dimension is not known."""


def options(name):
    return {"step": 1e-3, "gradient_rtol": 3e-2} if name in KINKS else {"xs": STEPS.get(name)}


def check_quantised(proto, inputs):
    """Levels that are as the kernel's up to its way of rounding; a gradient for each floating-point input."""
    wanted = kernelcheck.run(proto, inputs)["y0"]
    xs = [name for name, x in inputs.items() if x.dtype == np.float32]
    y = "y0"
    if wanted.dtype != np.float32:  # levels are no floats: a scale makes them floats again
        y = "float"
        proto.graph.node.append(helper.make_node("DequantizeLinear", ["y0", "unit", "zero"], [y]))
        constants = {"unit": np.float32(1), "zero": np.zeros((), wanted.dtype)}
        proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    proto.graph.node.append(helper.make_node("Mul", [y, "weight"], ["loss"]))
    proto.graph.initializer.append(numpy_helper.from_array(normal(*wanted.shape), "weight"))
    proto.graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, None))
    made = onward.gradient(proto, "loss", xs).to_proto()
    assert not {node.domain for node in made.graph.node} & {"com.microsoft"}
    found = kernelcheck.run(made, inputs)
    if wanted.dtype == np.float32:
        np.testing.assert_allclose(found["y0"], wanted, rtol=1e-4, atol=1e-5)
    else:
        assert np.abs(found["y0"].astype(int) - wanted).max() <= 1
        assert np.mean(found["y0"] == wanted) > 0.9
    for x in xs:
        assert np.all(np.isfinite(found[f"{x}/grad"])) and np.any(found[f"{x}/grad"]), x


def variants(names):
    """Each case with no dimension known; with all of them, where that or a newer operator set makes a difference."""
    newer = [name for name in names if name in SHAPES_NEEDED or "gelu" in name or "grid_sample" in name]
    return [(name, 18, True) for name in names if name not in SHAPES_NEEDED] + [(name, 21, False) for name in newer]


@pytest.mark.parametrize(("name", "opset", "symbolic"), variants(CASES))
def test_rewrite_agrees_with_its_kernel(name, opset, symbolic):
    graph, inputs = CASES[name]
    kernelcheck.check(kernelcheck.model(graph, opset, symbolic=symbolic), inputs, **options(name))


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_operator_agrees_with_its_kernel(name):
    graph, inputs = QUANTISED[name]
    check_quantised(kernelcheck.model(graph, 18, symbolic=True), inputs)


HALF = [
    "fused_conv_clip",
    "bias_gelu",
    "skip_layer_normalization",
    "attention_mask_causal",
    "grouped_rotary_past",
    "matmul_4_bits",
]


@pytest.mark.parametrize("name", HALF)
def test_rewrite_in_half_precision(name):
    """Models for graphics cards are float16: their gradients are so too, and those of float32 up to rounding."""
    graph, inputs = CASES[name]
    xs = [key for key, x in inputs.items() if x.dtype == np.float32]
    half = {key: x.astype(np.float16) if key in xs else x for key, x in inputs.items()}
    y = graph.output[0].name
    wanted = kernelcheck.run(onward.gradient(kernelcheck.model(graph, 21), y, xs).to_proto(), inputs)
    found = kernelcheck.run(onward.gradient(kernelcheck.model(in_half(graph), 21), y, xs).to_proto(), half)
    for key, value in wanted.items():
        assert found[key].dtype == np.float16
        np.testing.assert_allclose(found[key], value, rtol=0.03, atol=0.03 * max(1, np.abs(value).max()), err_msg=key)


def in_half(graph):
    graph = onnx.GraphProto.FromString(graph.SerializeToString())
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    return graph


# ---- operators without a kernel on the CPU, by PyTorch ---------------------------------------------------------------

functional = torch.nn.functional
IMAGE = normal(2, 3, 5, 6)


def nhwc(tensor):
    return tensor.movedim(1, -1)


def nchw(tensor):
    return tensor.movedim(-1, 1)


BY_TORCH = {
    "bias_add": (case("BiasAdd", {"x": X, "b": BIAS, "skip": normal(2, 3, 8)}), lambda x, b, skip: x + b + skip),
    "bias_split_gelu": (
        case("BiasSplitGelu", {"x": X, "b": BIAS}),
        lambda x, b: (x + b)[..., :4] * functional.gelu((x + b)[..., 4:]),
    ),
    "bias_softmax": (
        case("BiasSoftmax", {"x": X, "b": normal(2, 1, 8)}, axis=2, is_inner_broadcast=1),
        lambda x, b: torch.softmax(x + b, -1),
    ),
    "bias_softmax_of_two_axes": (
        case("BiasSoftmax", {"x": X, "b": normal(1, 3, 8)}, axis=1, is_inner_broadcast=0),
        lambda x, b: torch.softmax((x + b).flatten(1), -1).reshape(x.shape),
    ),
    "bias_dropout": (
        case("BiasDropout", {"x": X, "b": BIAS, "residual": normal(2, 3, 8)}),
        lambda x, b, residual: x + b + residual,
    ),
    "gemm_fast_gelu": (
        case("GemmFastGelu", {"x": X, "w": normal(8, 5), "b": normal(5)}),
        lambda x, w, b: functional.gelu(x @ w + b, approximate="tanh"),
    ),
    "matmul_activation": (
        case("FusedMatMulActivation", {"a": normal(2, 4, 3), "b": normal(2, 4, 5)}, transA=1, activation="Elu",
             activation_alpha=0.5),
        lambda a, b: functional.elu(a.mT @ b, alpha=0.5),
    ),
    "matmul_softmax": (
        case("FusedMatMulActivation", {"a": normal(3, 4), "b": normal(4, 5)}, activation="Softmax", activation_axis=0),
        lambda a, b: torch.softmax(a @ b, 0),
    ),
    "group_norm": (
        case("GroupNorm", {"x": normal(2, 5, 6, 4), "s": normal(4), "t": normal(4)}, groups=2, activation=1),
        lambda x, s, t: nhwc(functional.silu(functional.group_norm(nchw(x), 2, s, t))),
    ),
    "group_norm_channels_first": (
        case("GroupNorm", {"x": normal(2, 4, 5, 6), "s": normal(4), "t": normal(4)}, groups=2, activation=0,
             channels_last=0, epsilon=1e-3),
        lambda x, s, t: functional.group_norm(x, 2, s, t, eps=1e-3),
    ),
    "skip_group_norm": (
        case("SkipGroupNorm", {"x": normal(2, 5, 6, 4), "s": normal(4), "t": normal(4), "skip": normal(2, 4),
             "b": normal(4)}, 2, groups=2, activation=0),
        lambda x, s, t, skip, b: (
            nhwc(functional.group_norm(nchw(x + skip[:, None, None] + b), 2, s, t)), x + skip[:, None, None] + b
        ),
    ),
    "nhwc_conv": (
        case("NhwcConv", {"x": normal(2, 5, 6, 3), "w": normal(4, 3, 3, 3), "b": normal(4)}, strides=[2, 1]),
        lambda x, w, b: nhwc(functional.conv2d(nchw(x), nchw(w), b, stride=(2, 1))),
    ),
    "nhwc_fused_conv": (
        case("NhwcFusedConv", {"x": normal(2, 5, 6, 3), "w": normal(4, 3, 3, 3), "b": normal(4),
             "z": normal(2, 3, 4, 4)}, activation="Relu"),
        lambda x, w, b, z: functional.relu(nhwc(functional.conv2d(nchw(x), w, b)) + z),
    ),
    "nhwc_max_pool": (
        case("NhwcMaxPool", {"x": normal(2, 5, 6, 3)}, kernel_shape=[2, 3], strides=[1, 2]),
        lambda x: nhwc(functional.max_pool2d(nchw(x), (2, 3), (1, 2))),
    ),
    "multi_head_packed": (
        case("MultiHeadAttention", {"q": normal(2, 3, 2, 3, 4)}, num_heads=2),
        lambda q: functional.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in q.unbind(3))
        ).transpose(1, 2).flatten(2),
    ),
    "multi_head_packed_keys": (
        case("MultiHeadAttention", {"q": normal(2, 3, 8), "kv": normal(2, 5, 2, 2, 4)}, num_heads=2),
        lambda q, kv: functional.scaled_dot_product_attention(
            q.unflatten(2, (2, 4)).transpose(1, 2), *(part.transpose(1, 2) for part in kv.unbind(3))
        ).transpose(1, 2).flatten(2),
    ),
    "attention_mask_of_rank_4": (
        attention(mask=np.tril(np.ones((2, 1, 5, 5), np.int32))),
        lambda x, w, b: functional.scaled_dot_product_attention(
            *(part.unflatten(2, (2, 4)).transpose(1, 2) for part in (x @ w + b).chunk(3, 2)), is_causal=True
        ).transpose(1, 2).flatten(2),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "opset", "symbolic"), variants(BY_TORCH))
def test_rewrite_agrees_with_pytorch(name, opset, symbolic):
    (graph, inputs), function = BY_TORCH[name]
    proto = kernelcheck.model(graph, opset, symbolic=symbolic)
    tensors = {key: torch.tensor(x, requires_grad=True) for key, x in inputs.items() if x.dtype == np.float32}
    ys = function(*tensors.values())
    ys = ys if isinstance(ys, tuple) else (ys,)
    expected = {value.name: y.detach().numpy() for value, y in zip(graph.output, ys, strict=True)}
    grads = kernelcheck.check(proto, inputs, expected=expected)
    loss = sum(
        (y * torch.tensor(kernelcheck.weights(value.name, y))).sum() for value, y in zip(graph.output, ys, strict=True)
    )
    for key, wanted in zip(tensors, torch.autograd.grad(loss, list(tensors.values())), strict=True):
        np.testing.assert_allclose(grads[key], wanted, rtol=1e-4, atol=1e-4)


def test_inverse_agrees_with_pytorch():
    x = normal(2, 3, 3) + 2 * np.eye(3, dtype=np.float32)
    graph, _ = case("Inverse", {"x": x})
    made = onward.vjp(kernelcheck.model(graph, 21), "y0", ["x"]).to_proto()
    dy = normal(2, 3, 3)
    tensor = torch.tensor(x, requires_grad=True)
    (wanted,) = torch.autograd.grad(torch.linalg.inv(tensor), tensor, torch.tensor(dy))
    np.testing.assert_allclose(kernelcheck.run(made, {"x": x, "dy": dy})["x/grad"], wanted, rtol=1e-3, atol=1e-4)


# ---- what is refused, and the table as a whole -----------------------------------------------------------------------


def refused(graph, y="y0", xs=("x",)):
    with pytest.raises(UnsupportedError) as caught:
        onward.gradient(kernelcheck.model(graph, 21), y, list(xs))
    return caught.value


def test_blocked_layouts_are_refused():
    graph, _ = case("ReorderInput", {"x": normal(1, 16, 4, 4)}, domain="com.microsoft.nchwc")
    error = refused(graph)
    assert "optimized by ONNX Runtime for one type of processor" in str(error) and "EXTENDED" in error.hint


@pytest.mark.parametrize(
    ("graph", "what", "x"),
    [
        (attention(do_rotary=1)[0], "do_rotary", "x"),
        (attention(past_present_share_buffer=1)[0], "a buffer that past and present share", "x"),
        (grouped(4, qk_output=1)[0], "scores as an output", "q"),
        (grouped(sliding_window_cache=1, local_window_size=2)[0], "a sliding cache", "q"),
        (n_bits(8, weight_prepacked=1)[0], "weights that are packed for one device", "a"),
        (case("CDist", {"x": normal(3, 4), "b": normal(5, 4)}, metric="cosine")[0], "the metric cosine", "x"),
    ],
)  # fmt: skip
def test_what_only_some_devices_do_is_refused(graph, what, x):
    error = refused(graph, xs=[x])
    assert error.message.endswith(f"with {what}") and error.hint


def test_every_rewrite_has_a_case():
    graphs = [graph for graph, _ in (*CASES.values(), *QUANTISED.values(), *(known for known, _ in BY_TORCH.values()))]
    known = {graph.node[0].op_type for graph in graphs}
    ours = {name for (domain, name), rule in RULES.items() if domain == "com.microsoft" and isinstance(rule, Rewrite)}
    assert ours - known == set()
    assert isinstance(RULES["com.microsoft", "Inverse"], Rule)
