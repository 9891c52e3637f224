"""Training models of many kinds, and their lowered parts on stock ONNX Runtime, driven by what a file says."""

import functools
import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from models import digits_mlp, small_cnn, small_transformer
from onnx import helper, numpy_helper

import onward
from onward.model.state import carried_state

# ---- the models ------------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.normal(size=(6, 64)).astype(np.float32), RNG.integers(0, 10, 6)
FLAT = {"image": IMAGES, "labels": LABELS}
SQUARE = {"image": IMAGES.reshape(-1, 1, 8, 8), "labels": LABELS}
TOKENS = {"tokens": RNG.integers(0, 32, (2, 5)), "labels": RNG.integers(0, 32, (2, 5))}


def half_mlp():
    """In float16, which gets master weights."""
    proto = digits_mlp(8)
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    return proto


def tied_mlp():
    """image -> tied -> Relu -> tied, transposed: an autoencoder with one matrix for both."""
    nodes = [
        helper.make_node("MatMul", ["image", "tied"], ["hidden"], name="encode"),
        helper.make_node("Relu", ["hidden"], ["active"], name="relu"),
        helper.make_node("Transpose", ["tied"], ["turned"], name="turn"),
        helper.make_node("MatMul", ["active", "turned"], ["decoded"], name="decode"),
    ]
    value = lambda name: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 64])
    weight = numpy_helper.from_array(np.random.default_rng(1).normal(0, 0.1, (64, 8)).astype(np.float32), "tied")
    graph = helper.make_graph(nodes, "tied", [value("image")], [value("decoded")], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def with_function():
    """The layers of the MLP, as calls of a function of the model."""
    proto = digits_mlp(8)
    body = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)]
    proto.functions.append(
        helper.make_function("custom", "Linear", ["x", "w", "b"], ["y"], body, [helper.make_opsetid("", 21)])
    )
    proto.opset_import.append(helper.make_opsetid("custom", 1))
    for node in proto.graph.node:
        if node.op_type == "Gemm":
            node.op_type, node.domain = "Linear", "custom"
            del node.attribute[:]
    return proto


def dropped_transformer():
    """A decoder whose own loss comes after a Dropout."""
    proto = small_transformer(1)
    i, node = next((i, n) for i, n in enumerate(proto.graph.node) if n.output[0] == "logits")
    drop = helper.make_node("Dropout", [node.input[0]], ["dropped"], name="dropout")
    node.input[0] = "dropped"
    proto.graph.node.insert(i, drop)
    return proto


CE = {"loss": "cross_entropy"}
EVERYTHING = {
    "optimizer": "adamw:lr=1e-2",
    "schedule": "cosine:steps=20,warmup=2",
    "clip": 1.0,
    "accumulate": 2,
    "ema": 0.9,
    "loss_scale": "dynamic",
    "groups": ["*.bias:weight_decay=0"],
}
CASES = {
    "mlp, sgd": (digits_mlp, FLAT, CE | {"optimizer": "sgd:lr=0.1"}),
    "mlp, everything": (lambda: digits_mlp(8), FLAT, CE | EVERYTHING),
    "mlp, fresh start": (
        lambda: digits_mlp(8),
        FLAT,
        CE | {"optimizer": "lamb", "init": {"*.weight": "kaiming_normal"}},
    ),
    "mlp, frozen": (digits_mlp, FLAT, CE | {"optimizer": "momentum:lr=0.1", "freeze": "fc1.*"}),
    "cnn": (small_cnn, SQUARE, {"loss": "cross_entropy:label_smoothing=0.1", "optimizer": "rmsprop", "clip": 1.0}),
    "transformer": (lambda: small_transformer(1), TOKENS, {"loss": "value:loss", "optimizer": "adam"}),
    "transformer with dropout": (dropped_transformer, TOKENS, {"loss": "value:loss", "optimizer": "adam"}),
    "float16": (half_mlp, FLAT | {"image": IMAGES.astype(np.float16)}, CE | {"loss_scale": 128, "ema": 0.5}),
    "tied": (tied_mlp, {"image": IMAGES, "target": IMAGES}, {"loss": "mse", "optimizer": "adagrad"}),
    "function": (with_function, FLAT, CE | {"optimizer": "nadam"}),
}


GRADIENT = "ai.onnx.preview.training.Gradient"


def penalised(opset):
    """With a penalty on the slope of y = (x w)^2: loss = mean(y + (dy/dx)^2), of second order in w."""
    text = f"""<ir_version: 8, opset_import: ["": {opset}, "ai.onnx.preview.training": 1]>
      g (float[N] x) => (float[N] y) <float w = {{0.5}}> {{ a = Mul(x, w) y = Mul(a, a) }}"""
    proto = onnx.parser.parse_model(text)
    algorithm = onnx.parser.parse_graph(f"""
      training () => (float new, float loss) <float rate = {{0.1}}> {{
        dx = {GRADIENT}<xs = ["x"], zs = ["w"], y = "y">(x, w)
        d2 = Mul(dx, dx)
        both = Add(y, d2)
        loss = ReduceMean<keepdims = 0>(both)
        dw = {GRADIENT}<xs = ["w"], zs = ["x"], y = "loss">(w, x)
        change = Mul(rate, dw)
        new = Sub(w, change)
      }}""")
    info = proto.training_info.add()
    info.algorithm.CopyFrom(algorithm)
    info.update_binding.add(key="w", value="new")
    return proto


# ---- their parts -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=CASES, scope="module")
def case(request):
    """A training model, a batch for it, and the parts that it is lowered to, each made once."""
    proto, batch, recipe = CASES[request.param]
    model = onward.prepare(proto(), **recipe)
    return model, batch, functools.cache(functools.partial(part, model))


def own_metrics(model):
    """Return the names of metrics in the file, in which two values cannot be called `loss`."""
    step = model.step()
    return [value.name for value in step.algorithm.outputs if value.name not in step.update.values()]


class Part:
    """A lowered part on ONNX Runtime, driven by what the file says and nothing else."""

    def __init__(self, lowered):
        proto = lowered.to_proto()
        onnx.checker.check_model(proto, full_check=True)
        assert [opset.domain for opset in proto.opset_import] == [""]
        assert proto.opset_import[0].version <= 26 and proto.ir_version <= 10
        assert not proto.functions and not proto.training_info
        self.session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        self.contract = json.loads(self.session.get_modelmeta().custom_metadata_map["train.lowered"])
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.outputs = [value.name for value in self.session.get_outputs()]
        said = self.contract
        given, computed = ([], said["gradients"]) if said["part"] == "gradients" else (said["gradients"], [])
        assert self.inputs == [*said["batch"], *given, *said["state"]]
        results = [*said["metrics"], *said["outputs"], *computed, *said["update"].values()]
        assert self.outputs == list(dict.fromkeys(results))

    def __call__(self, values):
        found = self.session.run(self.outputs, {name: values[name] for name in self.inputs})
        return dict(zip(self.outputs, found, strict=True))

    def new_state(self, results):
        return {name: results[new] for name, new in self.contract["update"].items()}


def part(model, name, **options):
    return Part(onward.lower(model, part=name, **options))


def stored(model, step=0):
    return {s.name: np.array(s.value.const_value.numpy()) for s in carried_state(model, step)}


def assert_close(found, expected, rtol=1e-6, atol=1e-6):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        np.testing.assert_allclose(
            found[name].astype(np.float64), array.astype(np.float64), rtol=rtol, atol=atol, err_msg=name
        )
