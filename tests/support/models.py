"""Small inference models that tests, snippets and examples start from: seeded, named as an exporter names them."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx.parser
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


def small_transformer(layers: int = 2, *, width: int = 16, heads: int = 2, seed: int = 0) -> onnx.ModelProto:
    """A decoder as exporters write it, with the loss: tokens and labels [N, T], of 32 kinds -> loss []."""
    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {"embedding.weight": rng.normal(0, 0.5, (32, width))}
    lines = ["x0 = Gather(embedding.weight, tokens)"]
    for i in range(layers):
        p, shapes = f"layers.{i}", {"qkv": 3 * width, "out": width, "up": 4 * width, "down": width}
        for name, size in shapes.items():
            weights[f"{p}.{name}.weight"] = rng.normal(0, 0.2, (4 * width if name == "down" else width, size))
            weights[f"{p}.{name}.bias"] = rng.normal(0, 0.1, size)
        for name in ("ln1", "ln2"):
            weights |= {f"{p}.{name}.weight": rng.uniform(0.5, 1.5, width), f"{p}.{name}.bias": np.zeros(width)}
        lines += [line.format(p=p, x=f"x{i}", y=f"x{i + 1}", scale=(width // heads) ** -0.5) for line in _LAYER]
    weights["head.weight"] = rng.normal(0, 0.2, (width, 32))
    lines += [
        f"logits = MatMul(x{layers}, head.weight)",
        "rows = Reshape(logits, rows_shape)",
        "classes = Reshape(labels, labels_shape)",
        "loss = SoftmaxCrossEntropyLoss(rows, classes)",
    ]
    text = f"""<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}]>
        small_transformer (int64[N, T] tokens, int64[N, T] labels) => (float loss)
        <int64[4] heads = {{0, 0, {heads}, {width // heads}}}, int64[3] joined = {{0, 0, {width}}},
         int64[2] rows_shape = {{-1, 32}}, int64[1] labels_shape = {{-1}}> {{ {_quoted(lines)} }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(w, np.float32), n) for n, w in weights.items())
    for node in model.graph.node:
        node.name = node.output[0]
    onnx.checker.check_model(model, full_check=True)
    return model


_LAYER = [
    "{p}.ln1 = LayerNormalization({x}, {p}.ln1.weight, {p}.ln1.bias)",
    "{p}.qkv.product = MatMul({p}.ln1, {p}.qkv.weight)",
    "{p}.qkv = Add({p}.qkv.product, {p}.qkv.bias)",
    "{p}.q, {p}.k, {p}.v = Split<axis = 2, num_outputs = 3>({p}.qkv)",
    "{p}.q.split = Reshape({p}.q, heads)",
    "{p}.k.split = Reshape({p}.k, heads)",
    "{p}.v.split = Reshape({p}.v, heads)",
    "{p}.q.heads = Transpose<perm = [0, 2, 1, 3]>({p}.q.split)",
    "{p}.k.heads = Transpose<perm = [0, 2, 3, 1]>({p}.k.split)",
    "{p}.v.heads = Transpose<perm = [0, 2, 1, 3]>({p}.v.split)",
    "{p}.scores = MatMul({p}.q.heads, {p}.k.heads)",
    "{p}.scale = Constant<value = float {{{scale}}}>()",
    "{p}.scaled = Mul({p}.scores, {p}.scale)",
    "{p}.probabilities = Softmax({p}.scaled)",
    "{p}.mixed = MatMul({p}.probabilities, {p}.v.heads)",
    "{p}.mixed.turned = Transpose<perm = [0, 2, 1, 3]>({p}.mixed)",
    "{p}.mixed.joined = Reshape({p}.mixed.turned, joined)",
    "{p}.out.product = MatMul({p}.mixed.joined, {p}.out.weight)",
    "{p}.out = Add({p}.out.product, {p}.out.bias)",
    "{p}.attended = Add({x}, {p}.out)",
    "{p}.ln2 = LayerNormalization({p}.attended, {p}.ln2.weight, {p}.ln2.bias)",
    "{p}.up.product = MatMul({p}.ln2, {p}.up.weight)",
    "{p}.up = Add({p}.up.product, {p}.up.bias)",
    '{p}.gelu = Gelu<approximate = "tanh">({p}.up)',
    "{p}.down.product = MatMul({p}.gelu, {p}.down.weight)",
    "{p}.down = Add({p}.down.product, {p}.down.bias)",
    "{y} = Add({p}.attended, {p}.down)",
]


def _quoted(lines: list[str]) -> str:
    """The parser takes names with dots only in quotes."""
    return "\n".join(re.sub(r"[A-Za-z]\w*(\.\w+)+", r'"\g<0>"', line) for line in lines)


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


def comparable(proto):
    """The same model with what has no meaning made equal: the order of type notes, and empty strings that are set."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    graphs = [proto.graph] + [info.algorithm for info in proto.training_info]
    while graphs:
        graph = graphs.pop()
        notes = sorted(graph.value_info, key=lambda info: info.name)
        del graph.value_info[:]
        graph.value_info.extend(notes)
        for node in graph.node:
            if not node.domain:
                node.ClearField("domain")
            graphs += [attribute.g for attribute in node.attribute if attribute.type == onnx.AttributeProto.GRAPH]
    for opset in proto.opset_import:
        opset.domain = opset.domain
    for field in ("producer_version", "domain", "model_version", "doc_string"):
        if not getattr(proto, field):
            proto.ClearField(field)
    return proto


def layers_without_names(count: int, *, odd: int | None = None) -> onnx.ModelProto:
    """x + dropout(relu(norm(x) a) b), `count` times, under names that say nothing; one may have another size."""
    rng = np.random.default_rng(0)
    nodes, tensors, taken = [], [], iter(rng.permutation(1000))

    def name() -> str:
        return f"t{next(taken)}"

    def weight(*shape: int) -> str:
        tensors.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32) / 2, name()))
        return tensors[-1].name

    def call(op: str, *inputs: str) -> str:
        nodes.append(helper.make_node(op, inputs, [name()]))
        return nodes[-1].output[0]

    x = call("MatMul", "x", weight(3, 8))
    for k in range(count):
        y = call("LayerNormalization", x, weight(8), weight(8))
        y = call("Relu", call("MatMul", y, weight(8, width := 12 if k == odd else 16)))
        x = call("Add", x, call("Dropout", call("MatMul", y, weight(width, 8))))
    nodes.append(helper.make_node("MatMul", [x, weight(8, 2)], ["y"]))
    info = [helper.make_tensor_value_info(*given) for given in (("x", 1, ["n", 3]), ("y", 1, ["n", 2]))]
    graph = helper.make_graph(nodes, "layers", info[:1], info[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
