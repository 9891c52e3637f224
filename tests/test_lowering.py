"""Training models as plain ONNX: what each part computes on stock ONNX Runtime, and what a file says about itself."""

import functools
import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import onward
from models import digits_mlp, small_cnn, small_transformer
from onward.lowering.contract import contract_of
from onward.lowering.step import PARTS
from onward.model.state import states
from onward.run import load
from stepping import Stepper

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
    "cnn": (small_cnn, SQUARE, CE | {"optimizer": "rmsprop"}),
    "cnn, everything": (small_cnn, SQUARE, {"loss": "cross_entropy:label_smoothing=0.1"} | EVERYTHING),
    "transformer": (lambda: small_transformer(1), TOKENS, {"loss": "value:loss", "optimizer": "adam"}),
    "transformer with dropout": (dropped_transformer, TOKENS, {"loss": "value:loss", "optimizer": "adam"}),
    "float16": (half_mlp, FLAT | {"image": IMAGES.astype(np.float16)}, CE | {"loss_scale": 128, "ema": 0.5}),
    "tied": (tied_mlp, {"image": IMAGES, "target": IMAGES}, {"loss": "mse", "optimizer": "adagrad"}),
    "function": (with_function, FLAT, CE | {"optimizer": "nadam"}),
}


@pytest.fixture(params=CASES, scope="module")
def case(request):
    """A training model, a batch for it, and the parts that it is lowered to, each made once."""
    proto, batch, recipe = CASES[request.param]
    model = onward.prepare(proto(), **recipe)
    return model, batch, functools.cache(functools.partial(part, model))


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
    return {s.name: np.array(s.value.const_value.numpy()) for s in states(model, step)}


def assert_close(found, expected, rtol=1e-6, atol=1e-6):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        np.testing.assert_allclose(
            found[name].astype(np.float64), array.astype(np.float64), rtol=rtol, atol=atol, err_msg=name
        )


# ---- what the parts compute ------------------------------------------------------------------------------------------


def test_a_step_is_what_the_algorithm_computes(case):
    model, batch, lowered = case
    step, reference, state = lowered("step"), Stepper(model, own_gradients=True), stored(model)
    assert set(step.contract["state"]) == set(state)
    for _ in range(5):
        results, expected = step({**batch, **state}), reference(batch)
        assert_close({name: results[name] for name in step.contract["metrics"]}, {
            name: np.asarray(expected[name]) for name in step.contract["metrics"]
        })  # fmt: skip
        state.update(step.new_state(results))
    assert_close(state, reference.state)


def test_gradients_and_apply_make_a_step(case):
    model, batch, lowered = case
    step, gradients, apply = (lowered(name) for name in ("step", "gradients", "apply"))
    state = stored(model)
    assert set(gradients.contract["gradients"].values()) == set(model.step().differentiated())
    for _ in range(3):
        whole = step({**batch, **state})
        expected = step.new_state(whole)
        first = gradients({**batch, **state})
        state.update(gradients.new_state(first))
        second = apply({**{name: first[name] for name in apply.contract["gradients"]}, **state})
        state.update(apply.new_state(second))
        # In one graph, ONNX Runtime leaves gradients in float32 that cross from one part to the other in float16.
        assert_close(state, expected, **({"rtol": 0.05, "atol": 1e-3} if "fc1.weight/master" in state else {}))
        metrics = {name: {**first, **second}[name] for name in step.contract["metrics"]}
        assert_close(metrics, {name: whole[name] for name in step.contract["metrics"]})


def test_an_evaluation_is_the_loss_of_what_inference_computes(case):
    """The outputs are those of the stripped model; the loss is computed from them by hand."""
    model, batch, lowered = case
    step, evaluation, state = lowered("step"), lowered("evaluation"), stored(model)
    state.update(step.new_state(step({**batch, **state})))
    for name, array in state.items():
        if name in model.graph.initializers:
            model = model.copy()
            model.set(name, array)
    proto = onward.strip(model).to_proto()
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in proto.graph.output]
    known = {value.name for value in session.get_inputs()}
    outputs = dict(zip(names, session.run(names, {k: v for k, v in batch.items() if k in known}), strict=True))
    results = evaluation({**batch, **state})
    assert evaluation.contract["outputs"] == names and evaluation.contract["update"] == {}
    assert_close({name: results[name] for name in names}, outputs, rtol=1e-5)
    loss = results[evaluation.contract["loss"]]
    np.testing.assert_allclose(loss, loss_by_hand(outputs, batch, model), rtol=1e-3 if loss.dtype != "f4" else 1e-5)


def loss_by_hand(outputs, batch, model):
    if "loss" in outputs:
        return outputs["loss"]
    if "decoded" in outputs:
        return np.mean((outputs["decoded"] - batch["target"]) ** 2)
    scores = outputs["logits"].astype(np.float64)
    logarithms = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    smoothing = model.step().fact("train.loss")[0].get("options", {}).get("label_smoothing", 0.0)
    picked = logarithms[np.arange(len(scores)), batch["labels"]]
    return -np.mean((1 - smoothing) * picked + smoothing * logarithms.mean(1))


def test_state_and_initialization_hold_what_a_loop_starts_from(case):
    model, _, lowered = case
    state, initial = lowered("state"), lowered("initialization")
    assert state.new_state(state({})).keys() == initial.new_state(initial({})).keys() == stored(model).keys()
    for name, array in stored(model).items():
        np.testing.assert_array_equal(state({})[name], array, strict=True)
        if model.step().fact("train.recipe").get("init", "file") == "file":
            np.testing.assert_array_equal(initial({})[name], array, strict=True)


def test_an_initializer_starts_anew():
    model = onward.prepare(digits_mlp(8), loss="cross_entropy", init={"fc1.*": "ones"}, ema=0.9)
    initial = part(model, "initialization")({})
    np.testing.assert_array_equal(initial["fc1.weight"], np.ones((8, 64), np.float32))
    np.testing.assert_array_equal(initial["ema/fc1.weight"], np.ones((8, 64), np.float32))
    np.testing.assert_array_equal(initial["fc2.weight"], stored(model)["fc2.weight"])


def test_recomputation_changes_no_number():
    model = onward.prepare(small_transformer(2), loss="value:loss", optimizer="sgd")
    state = stored(model)
    plain, again = part(model, "step"), part(model, "step", recompute=1)
    assert_close(again({**TOKENS, **state}), plain({**TOKENS, **state}), rtol=1e-5)


# ---- engines ---------------------------------------------------------------------------------------------------------


def test_the_engine_computes_the_same(case):
    """Over enough steps to use both sets of buffers, and with a last batch of another size."""
    model, batch, lowered = case
    reference = Stepper(model, own_gradients=True)
    fewer = {name: array[: len(array) // 2] for name, array in batch.items()}
    with load(model) as engine:
        for one in (batch, batch, fewer, batch, fewer):
            metrics, expected = engine.step(one), reference(one)
            assert_close(metrics, {name: np.asarray(expected[name]) for name in metrics})
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
    onward.read(original).save(tmp_path / "original.onnx", data=data)
    onward.prepare(tmp_path / "original.onnx", loss="cross_entropy", freeze="fc.*").save(tmp_path / "training.onnx")
    with load(tmp_path / "training.onnx") as engine:
        for _ in range(3):
            engine.step(SQUARE)
        state = engine.state()
        onward.strip(engine.updated()).save(tmp_path / "trained.onnx")
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
    return proto


def test_frozen_weights_outside_the_file_stay_there(tmp_path, monkeypatch):
    """Nothing reads them but the runtime, which maps the file."""
    onward.read(digits_mlp(4096)).save(tmp_path / "digits.onnx", data="data")
    model = onward.prepare(tmp_path / "digits.onnx", loss="cross_entropy", freeze="fc1.*", optimizer="sgd:lr=0.1")
    import onnx_ir as ir

    read = []
    original = ir.ExternalTensor.numpy
    monkeypatch.setattr(ir.ExternalTensor, "numpy", lambda self: (read.append(self.name), original(self))[1])
    with load(model) as engine:
        losses = [float(engine.step(FLAT)["loss"]) for _ in range(3)]
        engine.evaluate(FLAT)
    assert "fc1.weight" not in read
    with load(onward.prepare(digits_mlp(4096), loss="cross_entropy", freeze="fc1.*", optimizer="sgd:lr=0.1")) as engine:
        assert losses == [float(engine.step(FLAT)["loss"]) for _ in range(3)]


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
    with load(model) as engine:
        assert float(engine.step(batch)["loss"]) == pytest.approx(np.log(4))
    model.set("table", np.zeros((rows, 1024), np.float32))
    with load(model) as engine:
        assert float(engine.step(batch)["loss"]) == pytest.approx(np.log(4))


# ---- models that others wrote, and other shapes of training ----------------------------------------------------------


def test_two_steps_that_take_turns():
    """As in a GAN: each step trains its part of the model, with its own state."""
    model = onward.prepare(digits_mlp(8), loss="cross_entropy", optimizer="sgd:lr=0.1", freeze="fc2.*")
    model = onward.prepare(model, loss="cross_entropy", optimizer="adam", freeze="fc1.*", append=True)
    for index, trained in ((0, "fc1"), (1, "fc2")):
        labels = next(v.name for v in model.step(index).algorithm.inputs)
        batch = {"image": IMAGES, labels: LABELS}
        step = Part(onward.lower(model, index))
        reference = Stepper(model, index, own_gradients=True)
        results = step({**batch, **stored(model, index)})
        reference(batch)
        assert_close(step.new_state(results), reference.state)
        assert set(onward.lower(model, index, part="gradients").graph.outputs[1].name.split(".")[:1]) == {trained}
        assert_close(Part(onward.lower(model, index, part="state"))({}), stored(model, index), 0, 0)


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


@pytest.mark.parametrize("opset", [13, 18])
def test_gradients_of_gradients(opset):
    model = onward.read(penalised(opset))
    x, w = np.array([1.0, -2.0, 0.5], np.float32), np.array(0.5, np.float32)
    slope = 2 * x * w**2
    loss = np.mean((x * w) ** 2 + slope**2)
    gradient = np.mean(2 * x**2 * w + 16 * x**2 * w**3)
    results = part(model, "step")({"x": x, "w": w})
    np.testing.assert_allclose(results["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(results["new"], w - 0.1 * gradient, rtol=1e-6)
    first = part(model, "gradients")
    assert first.contract["gradients"] == {"dw": "w"} and first.contract["loss"] == "loss"
    found = first({"x": x, "w": w})
    np.testing.assert_allclose(found["dw"], gradient, rtol=1e-6)
    second = part(model, "apply")
    assert second.contract["gradients"] == {"dw": "w"}
    np.testing.assert_allclose(second({"dw": found["dw"], "w": w})["new"], w - 0.1 * gradient, rtol=1e-6)
    with pytest.raises(onward.Error, match="no initialization"):
        onward.lower(model, part="initialization")


def test_state_that_is_only_written_or_only_read_is_state_all_the_same():
    text = """<ir_version: 10, opset_import: ["": 21]>
      g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul(x, w) }"""
    proto = onnx.parser.parse_model(text)
    info = proto.training_info.add()
    info.algorithm.CopyFrom(
        onnx.parser.parse_graph("a () => (float[2] kept, float[2] w2) <float[2] last = {0, 0}> {"
        " kept = Identity(x) w2 = Add(w, y) }")
    )  # fmt: skip
    info.initialization.CopyFrom(
        onnx.parser.parse_graph("i () => (float[2] zero) { zero = Constant<value = float[2] {0, 0}>() }")
    )
    for key, value in (("w", "w2"), ("last", "kept")):
        info.update_binding.add(key=key, value=value)
        info.initialization_binding.add(key=key, value="zero")
    model = onward.read(proto)
    step = part(model, "step")
    assert step.contract["batch"] == ["x"] and step.contract["state"] == ["w", "last"]
    state = step.new_state(step({"x": np.float32([3, 4]), **stored(model)}))
    np.testing.assert_array_equal(state["last"], [3, 4])
    np.testing.assert_array_equal(state["w"], [4, 10])
    initial = part(model, "initialization")
    np.testing.assert_array_equal(initial.new_state(initial({}))["w"], [0, 0])
    with load(model) as engine:
        engine.step({"x": np.float32([3, 4])})
        np.testing.assert_array_equal(engine.state()["last"], [3, 4])


@pytest.mark.parametrize("change", ["rename", "prefix", "inline"])
def test_an_evaluation_survives_other_names(change):
    """Which values inference has instead of those of training is recorded, not guessed from names."""
    model = onward.prepare(small_cnn(), loss="cross_entropy")
    expected = part(model, "evaluation")({**SQUARE, **stored(model)})["loss"]
    prefix = "m/" if change == "prefix" else ""
    if change == "rename":
        model = onward.rename(model, {"relu": "rectified", "pool": "pooled", "bn": "normal"})
    model = onward.add_prefix(model, "m/") if prefix else onward.inline(model) if change == "inline" else model
    batch = {prefix + name: array for name, array in SQUARE.items()}
    np.testing.assert_allclose(part(model, "evaluation")({**batch, **stored(model)})[f"{prefix}loss"], expected)


def test_what_is_refused():
    model = onward.prepare(digits_mlp(8), loss="cross_entropy")
    with pytest.raises(onward.Error, match="no part `steps`") as caught:
        onward.lower(model, part="steps")
    assert "step" in caught.value.hint
    with pytest.raises(onward.Error, match="there is no step 1"):
        onward.lower(model, 1)
    with pytest.raises(onward.Error, match="there is no step 0"):
        onward.lower(digits_mlp(8))
    with pytest.raises(onward.Error, match="not a lowered model"):
        contract_of(model)
    assert list(PARTS) == ["step", "evaluation", "gradients", "apply", "initialization", "state"]
