"""Engines: the same numbers as the algorithm's, weights of any size, and the way back into the inference model."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from lowered import FLAT, SQUARE, assert_close, case, own_metrics, stored
from models import digits_mlp, small_cnn
from onnx import helper, numpy_helper
from stepping import Stepper

import onward
from onward.engines import onnxruntime, start
from onward.engines.onnxruntime import OnnxRuntime
from onward.model.storage.external import BORROWED
from onward.model.storage.tensor_sites import HeldTensor

__all__ = ["case"]  # a fixture


def test_the_engine_computes_the_same(case):
    """Over enough steps to use both sets of buffers, and with a last batch of another size.

    The plain graph, to the last digits: the gradient of a bias before a normalization is rounding errors alone.
    """
    model, batch, lowered = case
    reference = Stepper(model, own_gradients=True)
    fewer = {name: array[: len(array) // 2] for name, array in batch.items()}
    with start(model, kernels=False) as engine:
        for one in (batch, batch, fewer, batch, fewer):
            metrics, expected = engine.step(one), reference(one)
            own = dict(zip(metrics, own_metrics(model), strict=True))
            assert_close(metrics, {name: np.asarray(expected[own[name]]) for name in metrics})
        assert_close(engine.state(), reference.state)
        before = engine.state()
        results = engine.evaluate(batch)
        assert_close(engine.state(), before, 0, 0)
        assert_close(lowered("evaluation")({**batch, **before}), results, rtol=1e-5)
        kept = stored(model)
        engine.load_state(kept)
        assert_close(engine.state(), kept, 0, 0)
        results = engine.evaluate(fewer)
        assert_close(lowered("evaluation")({**fewer, **kept}), results, rtol=1e-5)


@pytest.mark.parametrize("data", ["none", "data", "safetensors"])
def test_trained_weights_go_back_into_the_graph_as_it_was(tmp_path, data):
    """Names, order, layout and metadata stay: only numbers differ, and only those of what was trained."""
    original = small_cnn(channels=32)
    original.producer_name, original.doc_string = "somebody", "A model of theirs."
    helper.set_model_props(original, {"author": "they", "classes": "0 to 9"})
    original.graph.node[0].doc_string = "the first layer"
    onward.load(original).save(tmp_path / "original.onnx", data=data)
    onward.prepare(tmp_path / "original.onnx", loss="cross_entropy", freeze="fc.*").save(tmp_path / "training.onnx")
    with start(tmp_path / "training.onnx") as engine:
        for _ in range(3):
            engine.step(SQUARE)
        state = engine.state()
        onward.transform.strip(engine.updated()).save(tmp_path / "trained.onnx")
    before, after = (onnx.load(tmp_path / name) for name in ("original.onnx", "trained.onnx"))
    old, new = ({t.name: numpy_helper.to_array(t) for t in proto.graph.initializer} for proto in (before, after))
    assert list(old) == list(new)
    changed = {name for name in old if not np.array_equal(old[name], new[name])}
    assert changed == {f"conv.{x}" for x in ("weight", "bias")} | {
        f"bn.{x}" for x in ("weight", "bias", "running_mean", "running_var")
    }
    for name in changed:
        np.testing.assert_array_equal(new[name], state[name])
    assert without_numbers(after) == without_numbers(before)


def without_numbers(proto):
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    for tensor in proto.graph.initializer:
        for field in ("raw_data", "float_data", "external_data", "data_location"):
            tensor.ClearField(field)
        for entry in [entry for entry in tensor.metadata_props if entry.key == BORROWED]:  # belongs to `external_data`
            tensor.metadata_props.remove(entry)
    return proto


def test_frozen_weights_outside_the_file_stay_there(tmp_path, monkeypatch):
    """Nothing reads them but the runtime, which maps the file."""
    onward.load(digits_mlp(4096)).save(tmp_path / "digits.onnx", data="data")
    model = onward.prepare(tmp_path / "digits.onnx", loss="cross_entropy", freeze="fc1.*", optimizer="sgd:lr=0.1")
    read = []
    original = HeldTensor.numpy
    monkeypatch.setattr(HeldTensor, "numpy", lambda self: (read.append(self.name), original(self))[1])
    with start(model) as engine:
        losses = [float(engine.step(FLAT)["loss"]) for _ in range(3)]
        engine.evaluate(FLAT)
    assert "fc1.weight" not in read
    with start(
        onward.prepare(digits_mlp(4096), loss="cross_entropy", freeze="fc1.*", optimizer="sgd:lr=0.1")
    ) as engine:
        assert losses == [float(engine.step(FLAT)["loss"]) for _ in range(3)]


@pytest.mark.parametrize("name", ["onnxruntime", "numpy"])
def test_steps_that_take_turns_read_what_the_other_has_changed(name):
    """A step hands its weights to the other; what comes out is what comes out of both in one, with their own rates."""
    model = onward.prepare(digits_mlp(8), loss="cross_entropy", optimizer="sgd:lr=0.1", freeze="fc2.*")
    model = onward.prepare(model, loss="cross_entropy", optimizer="sgd:lr=0.2", freeze="fc1.*", append=True)
    targets = [next(value.name for value in step.algorithm.inputs) for step in model.steps]
    reference = {tensor.name: numpy_helper.to_array(tensor) for tensor in digits_mlp(8).graph.initializer}
    with start(model, 0, engine=name) as first, start(model, 1, engine=name) as second:
        for _ in range(3):
            for engine, other, target, part, rate in (
                (first, second, targets[0], "fc1", 0.1),
                (second, first, targets[1], "fc2", 0.2),
            ):
                engine.step({"image": FLAT["image"], target: FLAT["labels"]})
                changed = {name: array for name, array in engine.state().items() if name.startswith(part)}
                other.load_state(changed)
                gradients = of_the_classifier(reference, FLAT["image"], FLAT["labels"])
                reference |= {name: reference[name] - rate * gradients[name] for name in changed}
                for name, array in changed.items():
                    np.testing.assert_allclose(array, reference[name], rtol=1e-4, atol=1e-6)


def of_the_classifier(weights, images, labels):
    """Gradients of the cross entropy of `digits_mlp`, by hand."""
    hidden = images @ weights["fc1.weight"].T + weights["fc1.bias"]
    active = np.maximum(hidden, 0)
    logits = active @ weights["fc2.weight"].T + weights["fc2.bias"]
    shares = np.exp(logits - logits.max(1, keepdims=True))
    upstream = (shares / shares.sum(1, keepdims=True) - np.eye(logits.shape[1])[labels]) / len(labels)
    inner = upstream @ weights["fc2.weight"] * (hidden > 0)
    return {
        "fc2.weight": upstream.T @ active, "fc2.bias": upstream.sum(0),
        "fc1.weight": inner.T @ images, "fc1.bias": inner.sum(0),
    }  # fmt: skip


def test_gradients_save_memory_as_the_step_does(monkeypatch):
    """What is computed again, is so wherever gradients are computed, and changes no number."""
    model, made = onward.prepare(digits_mlp(), loss="cross_entropy", optimizer="sgd:lr=0.1"), []
    session = OnnxRuntime._session
    monkeypatch.setattr(OnnxRuntime, "_session", lambda self, model: (made.append(model), session(self, model))[1])
    found = []
    for recompute in (None, "relu"):
        with start(model, recompute=recompute) as engine:
            engine.step(FLAT)
            found.append(engine.gradients(FLAT))
    counts = [sum(node.op_type == "Relu" for node in part.graph) for part in made]
    assert counts == [1, 1, 2, 2]  # step and gradients, kept and computed again
    assert_close(*found, 0, 0)


def test_a_step_of_many_small_nodes_is_not_optimized_for_long(monkeypatch):
    """The optimizers of ONNX Runtime take time by the square of the nodes, and would win nothing."""
    levels, session = [], ort.InferenceSession

    def made(data, options, **rest):
        levels.append(options.graph_optimization_level)
        return session(data, options, **rest)

    monkeypatch.setattr(ort, "InferenceSession", made)
    plain, all_of_them = ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    model = onward.prepare(digits_mlp(8), loss="cross_entropy", optimizer="sgd:lr=0.1")
    losses = []
    for many in (5_000, 10):
        monkeypatch.setattr(onnxruntime, "_MANY_NODES", many)
        with start(model) as engine:
            losses.append(float(engine.step(FLAT)["loss"]))
    with start(onward.prepare(digits_mlp(4096), loss="cross_entropy", optimizer="sgd:lr=0.1")):
        pass
    assert levels == [all_of_them, plain, all_of_them]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.slow
def test_more_than_fits_into_a_protobuf(tmp_path):
    """Frozen weights of 2.1 GiB: in memory, and in a sparse file."""
    rows = 550_000
    nodes = [helper.make_node("Gather", ["table", "ids"], ["x"]), helper.make_node("MatMul", ["x", "w"], ["logits"])]
    info = helper.make_tensor_value_info
    inputs, outputs = [info("ids", onnx.TensorProto.INT64, ["N"])], [info("logits", onnx.TensorProto.FLOAT, ["N", 4])]
    weight = numpy_helper.from_array(np.ones((1024, 4), np.float32), "w")
    table = onnx.TensorProto(name="table", data_type=onnx.TensorProto.FLOAT, dims=[rows, 1024])
    table.data_location = onnx.TensorProto.EXTERNAL
    table.external_data.add(key="location", value="table.data")
    with open(tmp_path / "table.data", "wb") as file:
        file.truncate(rows * 4096)
    graph = helper.make_graph(nodes, "table", inputs, outputs, [table, weight])
    opsets = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "model.onnx")
    model = onward.prepare(tmp_path / "model.onnx", loss="cross_entropy", freeze="table")
    batch = {"ids": np.array([0, rows - 1]), "labels": np.array([1, 2])}
    with start(model) as engine:
        assert float(engine.step(batch)["loss"]) == pytest.approx(np.log(4))
    model.set("table", np.zeros((rows, 1024), np.float32))
    with start(model) as engine:
        assert float(engine.step(batch)["loss"]) == pytest.approx(np.log(4))
