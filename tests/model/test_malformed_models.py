"""Models that can be read, and break a rule deeper down: what works on them says so, with an error of ours."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from broken_models import DAMAGES, GOOD, Damage, put
from models import digits_mlp, small_cnn
from onnx import ModelProto, TensorProto, helper
from runs import QUIET, digits

import onward
from onward.engines import start
from onward.errors import DataError, InvalidModelError, UnsupportedError
from onward.rules import RULES, Rule


def node(proto: ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in proto.graph.node if node.name == name)


def changed(change: Callable[[ModelProto], Any]) -> ModelProto:
    proto = digits_mlp()
    change(proto)
    return proto


def prepared(proto: ModelProto) -> onward.Model:
    return onward.prepare(proto, loss="cross_entropy")


WORK: dict[str, Callable[[ModelProto], Any]] = {
    "prepare": prepared,
    "gradient": lambda proto: onward.gradient(proto, "logits", "*"),
    "replace_head": lambda proto: onward.replace_head(proto, classes=3),
    "lora.add": lambda proto: onward.lora.add(proto, rank=2, targets="*"),
    "train": lambda proto: onward.train(proto, digits(), loss="cross_entropy", **QUIET),
}
NODES: dict[str, tuple[Callable[[ModelProto], Any], str]] = {
    "no inputs": (lambda proto: node(proto, "fc2").ClearField("input"), r"`fc2` \(Gemm\) has 0 inputs, and needs 2"),
    "an attribute of another type": (
        lambda proto: node(proto, "fc1").attribute.append(helper.make_attribute("transA", 1.5)),
        r"`fc1` \(Gemm\) has an attribute `transA` of type float, not int",
    ),
    "an attribute without a type": (
        lambda proto: node(proto, "fc1").attribute.append(onnx.AttributeProto(name="transA", i=1)),
        r"`fc1` \(Gemm\) has an attribute `transA` of type undefined, not int",
    ),
    "no attribute": (
        lambda proto: node(proto, "relu").MergeFrom(onnx.NodeProto(op_type="Cast")),
        r"`relu` \(Cast\) has no attribute `to`",
    ),
}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("case", NODES)
def test_nodes_that_break_the_rules_of_their_operator(
    case: str, work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    change, message = NODES[case]
    proto = changed(change)
    onward.load(proto)  # can be looked at
    with pytest.raises(InvalidModelError, match=message):
        WORK[work](proto)


def test_nodes_of_a_function_and_of_an_algorithm() -> None:
    proto = digits_mlp()
    opsets = [helper.make_opsetid("", 21)]
    proto.functions.append(
        helper.make_function("f", "F", ["x"], ["y"], [helper.make_node("Add", ["x"], ["y"])], opsets)
    )
    with pytest.raises(InvalidModelError, match=r"`y` \(Add\) has 1 inputs, and needs 2"):
        prepared(proto)
    training = prepared(digits_mlp()).to_proto()
    next(n for n in training.training_info[0].algorithm.node if n.op_type == "Gradient").ClearField("input")
    with pytest.raises(InvalidModelError, match=r"\(Gradient\) has 0 inputs, and needs 1"):
        onward.lower(training)


EVERYWHERE = {
    **WORK,
    "lower": onward.lower,
    "inline": onward.transform.inline,
    "onnxruntime": start,
    "numpy": lambda proto: start(proto, engine="numpy"),
}


@pytest.mark.parametrize("work", EVERYWHERE)
@pytest.mark.parametrize("length", [1, 3])
def test_functions_that_call_themselves(
    length: int, work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directly, or in a circle: one error, wherever such a model is used."""
    monkeypatch.chdir(tmp_path)
    proto = digits_mlp()
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    for i in range(length):
        call = helper.make_node(f"F{(i + 1) % length}", ["x"], ["y"], domain="f")
        proto.functions.append(helper.make_function("f", f"F{i}", ["x"], ["y"], [call], opsets))
    node(proto, "relu").MergeFrom(onnx.NodeProto(op_type="F0", domain="f"))
    proto.opset_import.append(opsets[1])
    with pytest.raises(InvalidModelError, match=r"a function calls itself: `f\.F0` -> ") as raised:
        EVERYWHERE[work](proto)
    assert "Loop" in (raised.value.hint or "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"raw_data": b"123"}, "`fc1.weight` has 3 bytes, and needs 8192"),
        ({"data_type": TensorProto.DOUBLE}, "`fc1.weight` has 8192 bytes, and needs 16384"),
        ({"data_type": TensorProto.UNDEFINED}, "`fc1.weight` has data, but no type"),
    ],
)
def test_tensors_that_are_damaged(change: dict[str, Any], message: str) -> None:
    proto = digits_mlp()
    weight = next(tensor for tensor in proto.graph.initializer if tensor.name == "fc1.weight")
    weight.MergeFrom(TensorProto(**change))
    with pytest.raises(InvalidModelError, match=message):
        onward.load(proto)


def test_sizes_that_no_machine_has() -> None:
    proto = small_cnn(channels=2)
    conv = next(node for node in proto.graph.node if node.op_type == "Conv")
    next(attribute for attribute in conv.attribute if attribute.name == "pads").ints[:] = [1, 1, 1, 2**60]
    del proto.graph.value_info[:]
    with pytest.raises(InvalidModelError, match="which no machine can hold"):
        onward.lower(prepared(proto))


@pytest.mark.parametrize("key", ["nothing", "image", b"\xc3("])
def test_updates_of_what_is_no_state(key: str | bytes) -> None:
    proto = prepared(digits_mlp()).to_proto()
    name = key if isinstance(key, bytes) else key.encode()  # protobuf reads what is no text, but does not write it
    binding = proto.training_info[0].update_binding[0]
    value = onnx.StringStringEntryProto(value=binding.value).SerializeToString()
    binding.ParseFromString(b"\x0a" + bytes([len(name)]) + name + value)
    with pytest.raises(InvalidModelError, match=r"updates .*, which is not an initializer"):
        onward.lower(proto)


def test_operators_of_a_domain_that_is_not_imported() -> None:
    proto = changed(lambda proto: node(proto, "relu").MergeFrom(onnx.NodeProto(domain="nowhere")))
    with pytest.raises(onward.Error):
        WORK["replace_head"](proto)


def test_native_kernels_are_ours_alone(tmp_path: Path) -> None:
    """They are handed places in memory, and trust the lowering that wrote the node."""
    proto = onward.load(digits_mlp()).to_proto()
    body = helper.make_graph([helper.make_node("Elementwise", ["x"], ["y"], domain="onward.kernels")], "body", [], [])
    proto.graph.node.append(helper.make_node("If", ["image"], ["z"], then_branch=body, else_branch=body))
    onnx.save(proto, tmp_path / "model.onnx")
    for source in (proto, proto.SerializeToString(), tmp_path / "model.onnx"):
        with pytest.raises(InvalidModelError, match="calls a native kernel") as caught:
            onward.load(source)
        assert caught.value.hint


def test_a_value_of_a_type_that_the_library_cannot_hold() -> None:
    proto = prepared(digits_mlp()).to_proto()
    proto.graph.output[0].type.map_type.SetInParent()
    onward.lower(proto, part="evaluation")
    model = digits_mlp()
    model.graph.output[0].type.map_type.SetInParent()
    with pytest.raises(UnsupportedError, match="the type of `loss` is not known"):
        onward.lower(prepared(model))


def test_what_the_runtime_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that do not go together, which only shows when they are known."""
    monkeypatch.chdir(tmp_path)
    proto = digits_mlp()
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(7, np.float32), "seven"))
    proto.graph.node.append(helper.make_node("Mul", ["logits", "seven"], ["scaled"], name="scale"))
    proto.graph.output[0].name = "scaled"
    with pytest.raises(onward.Error):
        WORK["train"](proto)


def test_what_the_runtime_cannot_compute() -> None:
    proto = digits_mlp()
    nodes = [
        helper.make_node("Shape", ["logits"], ["shape"]),
        helper.make_node("ReduceSum", ["shape"], ["far"], keepdims=0),
        helper.make_node("Gather", ["logits", "far"], ["row"], name="gather"),
        helper.make_node("Add", ["logits", "row"], ["scores"]),
    ]
    proto.graph.node.extend(nodes)
    proto.graph.output[0].name = "scores"
    batch = {name: array[:4] for name, array in digits().items()}
    with start(prepared(proto), threads=1) as engine:
        for use in (engine.step, engine.evaluate, engine.gradients):
            with pytest.raises(DataError, match=r"ONNX Runtime could not .* Gather"):
                use(batch)


def test_a_rule_that_fails_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not blamed on the model: the error is what it was, with a note that says where."""

    def relu(op: Any, dy: Any, x: Any) -> Any:
        assert x is None, "a bug"

    monkeypatch.setitem(RULES, ("", "Relu"), Rule(("", "Relu"), relu, positional=1))
    with pytest.raises(AssertionError, match="a bug") as raised:
        onward.gradient(digits_mlp(), "logits", ["fc1.weight"])
    assert not isinstance(raised.value, onward.Error)
    assert raised.value.__notes__ == ["in the rule for `Relu`, at the node `relu`"]


INVALID = {
    "(float[2,3] x, float[2,3] z) => (float[2,6] y) { y = Concat <axis = 7> (x, z) }": "axis must be in",
    "(float[2,3] x) => (float[2,3] y) { y = com.microsoft.CropAndResize(x) }": "has input size 1",
}


@pytest.mark.parametrize("text", INVALID)
def test_a_node_that_no_rule_can_take(text: str) -> None:
    """Whether the node is to blame is for `onnx` to say, and for ONNX Runtime where the operator is its own."""
    imports = '"" : 21, "com.microsoft" : 1'
    proto = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> g {text}")
    with pytest.raises(InvalidModelError, match=f"cannot differentiate .*{INVALID[text]}"):
        onward.gradient(proto, "y", ["x"])


# ---- graphs that do not hang together --------------------------------------------------------------------------------

IMAGES = {"image": np.zeros((4, 64), np.float32), "labels": np.zeros(4, np.int64)}


UNCONNECTED: dict[str, Callable[[onnx.GraphProto], object]] = {
    "the node `relu` reads `nowhere`, which does not exist": lambda graph: put(graph.node[1].input, 0, "nowhere"),
    "the node `fc1` reads `fc1.weight`, which does not exist": lambda graph: graph.initializer.pop(0),
    "the node `fc1` reads `logits`, which is computed only later": lambda graph: put(graph.node[0].input, 0, "logits"),
    "nothing computes the output `nowhere`": lambda graph: put(graph.output[0], "name", "nowhere"),
    "not valid ONNX: Output 'hidden' is redeclared": lambda graph: put(graph.node[1].output, 0, "hidden"),
    "nothing computes the output `logits`": lambda graph: graph.ClearField("node"),
    "the input `image` has no type": lambda graph: put(graph.input[0].type.tensor_type, "elem_type", 0),
}
"""The message -> what is done to a model to get it."""


@pytest.mark.parametrize("message", UNCONNECTED)
def test_graphs_that_do_not_hang_together(message: str) -> None:
    model = digits_mlp()
    UNCONNECTED[message](model.graph)
    for use in (
        lambda: onward.train(model, IMAGES, loss="cross_entropy", quiet=True),
        lambda: onward.prepare(model, loss="cross_entropy"),
        lambda: onward.gradient(model, "logits", ["image"]),
    ):
        with pytest.raises(InvalidModelError, match=re.escape(message)) as caught:
            use()
        assert "onward check" in (caught.value.hint or "")


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_damaged_training_models_are_lowered_or_refused(damage: Damage) -> None:
    model = GOOD[damage.of]()
    damage.apply(model)
    with contextlib.suppress(onward.Error):  # and nothing else
        onward.lower(model)
