"""Small inference models that tests, snippets and examples start from: seeded, named as an exporter names them."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET, IR_VERSION = 21, 10


def digits_mlp(hidden: int = 32, *, seed: int = 0) -> onnx.ModelProto:
    """A classifier of 8x8 digits, flat: image [N, 64] -> fc1 -> Relu -> fc2 -> logits [N, 10]."""
    rng = np.random.default_rng(seed)
    return _model(
        "digits_mlp",
        [
            helper.make_node("Gemm", ["image", "fc1.weight", "fc1.bias"], ["hidden"], name="fc1", transB=1),
            helper.make_node("Relu", ["hidden"], ["active"], name="relu"),
            helper.make_node("Gemm", ["active", "fc2.weight", "fc2.bias"], ["logits"], name="fc2", transB=1),
        ],
        image=["N", 64],
        logits=["N", 10],
        weights={
            "fc1.weight": _kaiming(rng, hidden, 64),
            "fc1.bias": np.zeros(hidden),
            "fc2.weight": _kaiming(rng, 10, hidden),
            "fc2.bias": np.zeros(10),
        },
    )


def small_cnn(channels: int = 8, *, seed: int = 0) -> onnx.ModelProto:
    """A classifier of 8x8 digits with what behaves differently in training: image [N, 1, 8, 8] -> logits [N, 10].

    BatchNormalization and Dropout are in inference mode, as exporters write them.
    """
    rng = np.random.default_rng(seed)
    batch_norm = ["bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"]
    return _model(
        "small_cnn",
        [
            helper.make_node("Conv", ["image", "conv.weight", "conv.bias"], ["conv"], name="conv", pads=[1, 1, 1, 1]),
            helper.make_node("BatchNormalization", ["conv", *batch_norm], ["bn"], name="bn", momentum=0.9),
            helper.make_node("Relu", ["bn"], ["relu"], name="relu"),
            helper.make_node("MaxPool", ["relu"], ["pool"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
            helper.make_node("Dropout", ["pool", "dropout.ratio"], ["dropout"], name="dropout"),
            helper.make_node("Flatten", ["dropout"], ["flat"], name="flatten", axis=1),
            helper.make_node("Gemm", ["flat", "fc.weight", "fc.bias"], ["logits"], name="fc", transB=1),
        ],
        image=["N", 1, 8, 8],
        logits=["N", 10],
        weights={
            "conv.weight": _kaiming(rng, channels, 1, 3, 3),
            "conv.bias": np.zeros(channels),
            "bn.weight": rng.uniform(0.5, 1.5, channels),
            "bn.bias": rng.normal(0, 0.1, channels),
            "bn.running_mean": rng.normal(0, 0.1, channels),
            "bn.running_var": rng.uniform(0.5, 1.5, channels),
            "dropout.ratio": np.array(0.25),
            "fc.weight": _kaiming(rng, 10, channels * 16),
            "fc.bias": np.zeros(10),
        },
    )


def _kaiming(rng: np.random.Generator, out: int, *rest: int) -> np.ndarray:
    return rng.normal(0, np.sqrt(2 / np.prod(rest)), (out, *rest))


def _model(
    name: str,
    nodes: list[onnx.NodeProto],
    *,
    image: list[int | str],
    logits: list[int | str],
    weights: dict[str, np.ndarray],
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, image)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, logits)],
        [numpy_helper.from_array(np.asarray(w, np.float32), n) for n, w in weights.items()],
    )
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="onward-tests")
    onnx.checker.check_model(model, full_check=True)
    return model
