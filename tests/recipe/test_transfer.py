"""Transfer learning: new heads, low-rank adapters, parameters by role and distillation, against PyTorch."""

import json
import shutil
import warnings

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import needs
from models import digits_mlp, small_cnn, small_transformer
from paths import CHECKPOINTS
from representatives import examples
from stepping import Stepper

import onward
from onward.recipe.lora.adapters import adapters
from onward.training.run import in_form_of


def run(model, feeds):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC  # beyond, activations are quantised
    return ort.InferenceSession(onward.load(model).to_proto().SerializeToString(), options).run(None, feeds)


def arrays(model):
    return {name: np.array(value.const_value.numpy()) for name, value in onward.load(model).graph.initializers.items()}


def sound(model):
    """The model, about which the checker has nothing to say."""
    assert not onward.check(model)
    return model


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def parsed(text, **weights):
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


# ---- new heads -------------------------------------------------------------------------------------------------------

HEADER = '<ir_version: 10, opset_import: ["": 21]>'
W, B = numbers(4, 7), numbers(7, seed=1)
HEADS = {
    "Gemm": (HEADER + "g (float[N,4] x) => (float[N,7] y) { y = Gemm(x, w, b) }", {"w": W, "b": B}),
    "Gemm, transposed": (HEADER + "g (float[N,4] x) => (float[N,7] y) { y = Gemm<transB = 1>(x, w) }", {"w": W.T}),
    "MatMul and Add": (
        HEADER + "g (float[N,T,4] x) => (float[N,T,7] y) { p = MatMul(x, w) y = Add(b, p) }",
        {"w": W, "b": B},
    ),
    "MatMul with a Transpose": (
        HEADER + "g (float[2,T,4] x) => (float[2,T,7] y) { t = Transpose(w) p = MatMul(x, t) y = Add(p, b) }",
        {"w": W.T, "b": B},
    ),
    "weights in nodes": (
        HEADER + "g (float[N,1] x) => (float[N,3] y) { w = Constant<value = float[1,3] {1,2,3}>() y = MatMul(x, w) }",
        {},
    ),
    "Conv before pooling": (
        HEADER + "g (float[N,4,H,3] x) => (float[N,7] y) { c = Conv(x, w, b) p = GlobalAveragePool(c) y = Flatten(p) }",
        {"w": W.T.reshape(7, 4, 1, 1), "b": B},
    ),
    "a fixed shape behind": (
        HEADER + "g (float[2,4] x) => (float[1,2,7] y) <int64[3] s = {1, 2, 7}> { p = MatMul(x, w) y = Reshape(p, s) }",
        {"w": W},
    ),
    "a shape behind that is put together": (
        HEADER + """g (float[N,4] x) => (float[N,1,7] y) <int64[2] t = {1, 7}> {
            p = MatMul(x, w) f = Constant<value_ints = [-1]>() s = Concat<axis = 0>(f, t) y = Reshape(p, s) }""",
        {"w": W},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_a_new_head_gives_the_new_number_of_logits(name):
    text, weights = HEADS[name]
    old = parsed(text, **weights)
    new = sound(onward.replace_head(old, classes=2))
    dims = onward.load(old).inputs[0].shape
    x = numbers(*(size if isinstance(size, int) else 5 for size in dims))
    before, after = run(old, {"x": x})[0], run(new, {"x": x})[0]
    assert after.shape == (*before.shape[:-1], 2)
    assert [str(d) for d in new.outputs[0].shape] == [*(str(d) for d in onward.load(old).outputs[0].shape[:-1]), "2"]
    # With the first rows of the old weights, it gives the first of the old logits.
    former = arrays(onward.prepare(old, loss="mse"))  # where constants in nodes are initializers too
    for parameter in ("w", "b"):
        if parameter in new.graph.initializers:
            axis = former[parameter].shape.index(before.shape[-1])
            new.set(parameter, former[parameter].take([0, 1], axis))
    np.testing.assert_allclose(run(new, {"x": x})[0], before[..., :2], rtol=1e-5, atol=1e-6)


def test_all_but_the_head_stays():
    old, new = onward.load(small_cnn()), sound(onward.replace_head(small_cnn(), 3, seed=5))
    assert [(n.op_type, n.name) for n in new.graph] == [(n.op_type, n.name) for n in old.graph]
    before, after = arrays(old), arrays(new)
    assert before.keys() == after.keys()
    for name in before.keys() - {"fc.weight", "fc.bias"}:
        np.testing.assert_array_equal(before[name], after[name])
    assert after["fc.weight"].shape == (3, 128) and not after["fc.bias"].any()
    assert (arrays(onward.replace_head(small_cnn(), 3, seed=5))["fc.weight"] == after["fc.weight"]).all()
    assert (arrays(onward.replace_head(small_cnn(), 3, seed=6))["fc.weight"] != after["fc.weight"]).any()
    probabilities = onward.replace_head(parsed(SOFTMAX, w=W), 3)
    np.testing.assert_allclose(run(probabilities, {"x": numbers(6, 4)})[0].sum(-1), 1, rtol=1e-6)


SOFTMAX = HEADER + "g (float[N,4] x) => (float[N,7] y) { p = MatMul(x, w) y = Softmax(p) }"


@needs("torch")
@pytest.mark.parametrize("text", [HEADS["Gemm"], HEADS["Gemm, transposed"], HEADS["Conv before pooling"]])
def test_a_new_head_starts_as_a_layer_of_torch_does(text):
    import torch

    new = arrays(onward.replace_head(parsed(text[0], **text[1]), classes=3000))["w"]
    reference = torch.nn.Linear(4, 3000).weight.detach().numpy()
    assert np.abs(new).max() == pytest.approx(np.abs(reference).max(), rel=1e-2)  # 1 / sqrt(fan_in) = 0.5
    assert new.std() == pytest.approx(reference.std(), rel=0.03)
    normal = arrays(onward.replace_head(digits_mlp(), 3000, init="normal:std=0.02", bias_init="constant:value=1"))
    assert normal["fc2.weight"].std() == pytest.approx(0.02, rel=0.03)
    assert (normal["fc2.bias"] == 1).all()


def test_a_head_can_be_named_and_one_that_cannot_be_replaced_is_refused():
    two = HEADER + "g (float[N,4] x) => (float[N,7] y, float[N,7] z) { y = MatMul(x, w) z = MatMul(x, v) }"
    two = parsed(two, w=W, v=W + 1)
    with pytest.raises(onward.Error, match="2 layers may give the logits") as error:
        onward.replace_head(two, 3)
    assert "v, w" in error.value.hint
    assert arrays(onward.replace_head(two, 3, layer="v"))["v"].shape == (4, 3)
    with pytest.raises(onward.Error, match="no layer `vv`"):
        onward.replace_head(two, 3, layer="vv")
    tied = HEADER + "g (int64[N] i) => (float[N,7] y) { x = Gather(t, i) w = Transpose(t) y = MatMul(x, w) }"
    with pytest.raises(onward.Error, match=r"`t` of the head is tied: Gather `.*` also reads it"):
        onward.replace_head(parsed(tied, t=W.T), 3)
    quantised = (
        HEADER
        + """g (float[N,4] x) => (float[N,7] y) <float s = {0.1}>
        { w = DequantizeLinear(q, s) y = MatMul(x, w) }"""
    )
    with pytest.raises(onward.Error, match="`q` of the head is quantized"):
        onward.replace_head(parsed(quantised, q=np.ones((4, 7), np.int8)), 3)
    scaled = HEADER + "g (float[N,4] x) => (float[N,7] y) { p = MatMul(x, w) y = Mul(p, b) }"
    with pytest.raises(onward.Error, match=r"`b`, which Mul .* is for 7 classes"):
        onward.replace_head(parsed(scaled, w=W, b=B), 3)
    unclear = (
        HEADER + "g (float[7,4] x) => (float[7,7] y) <int64[2] s = {7, -1}> { p = MatMul(x, w) y = Reshape(p, s) }"
    )
    unclear = parsed(unclear, w=W)
    unclear.graph.value_info.append(onnx.helper.make_tensor_value_info("p", onnx.TensorProto.FLOAT, [7, 7]))
    with pytest.raises(onward.Error, match=r"several sizes of Reshape `.*` are 7"):
        onward.replace_head(unclear, 3)
    with pytest.raises(onward.Error, match="carries its training") as error:
        onward.replace_head(onward.prepare(digits_mlp(), loss="ce"), 3)
    assert "strip" in error.value.hint
    for classes in (0, True, 2.5):
        with pytest.raises(onward.Error, match="`classes` is"):
            onward.replace_head(digits_mlp(), classes)


# ---- adapters --------------------------------------------------------------------------------------------------------


def adapted(model, seed=3, **options):
    """A model with adapters that have learned something."""
    model = onward.lora.add(model, **options)
    for name, value in model.graph.initializers.items():
        if name.endswith("/lora_B"):
            model.set(name, 0.3 * numbers(*value.shape, seed=seed))
    return sound(model)


@needs("torch")
def test_adapters_train_as_in_torch():
    import torch
    import torch.nn.functional as F

    model = onward.lora.add(digits_mlp(), rank=3, alpha=6, targets="fc*")
    training = sound(onward.prepare(model, loss="cross_entropy", optimizer="momentum:lr=0.05"))
    names = [f"fc{i}.weight/lora_{part}" for i in (1, 2) for part in "AB"]
    assert training.step().differentiated() == names
    stepper = Stepper(training, own_gradients=True)
    w = {name: torch.tensor(array) for name, array in arrays(model).items()}
    learned = [w[name].requires_grad_() for name in names]
    optimizer = torch.optim.SGD(learned, lr=0.05, momentum=0.9)

    def layer(x, i):
        change = (x @ w[f"fc{i}.weight/lora_A"]) @ w[f"fc{i}.weight/lora_B"]
        return F.linear(x, w[f"fc{i}.weight"], w[f"fc{i}.bias"]) + 6 / 3 * change

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((16, 64)).astype(np.float32), rng.integers(0, 10, 16)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(layer(torch.relu(layer(torch.tensor(x), 1)), 2), torch.tensor(y))
        loss.backward()
        optimizer.step()
        losses.append(float(stepper({"image": x, "labels": y})["loss"]))
        assert losses[-1] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert losses[-1] < 0.7 * losses[0]
    for name in names:
        np.testing.assert_allclose(stepper.state[name], w[name].detach().numpy(), rtol=1e-3, atol=1e-5)


CONVOLUTIONS = {
    "1x1": {"kernel_size": 1},
    "strides, pads, dilations": {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2},
    "groups": {"kernel_size": 3, "groups": 2, "padding": 1},
}


@needs("torch")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_adapters_of_convolutions_are_convolutions(name):
    import torch

    settings, groups = CONVOLUTIONS[name], CONVOLUTIONS[name].get("groups", 1)
    conv = torch.nn.Conv2d(4, 6, **settings)
    kernel = conv.kernel_size[0]
    attributes = {
        "strides": list(conv.stride),
        "pads": list(conv.padding) * 2,
        "dilations": list(conv.dilation),
        "group": groups,
    }
    text = ", ".join(f"{key} = {value}" for key, value in attributes.items())
    proto = parsed(
        HEADER + f"g (float[N,4,9,9] x) => (float[N,6,H,W] y) {{ y = Conv<{text}>(x, w, b) }}",
        w=conv.weight.detach().numpy(),
        b=conv.bias.detach().numpy(),
    )
    model, x = adapted(proto, rank=2, alpha=3, targets="w"), numbers(2, 4, 9, 9)
    found = {name: torch.tensor(array) for name, array in arrays(model).items()}
    assert found["w/lora_A"].shape == (2 * groups, 4 // groups, kernel, kernel)
    inner = torch.nn.functional.conv2d(
        torch.tensor(x), found["w/lora_A"], None, conv.stride, conv.padding, conv.dilation, groups
    )
    change = torch.nn.functional.conv2d(inner, found["w/lora_B"], groups=groups)
    expected = (conv(torch.tensor(x)) + 3 / 2 * change).detach().numpy()
    np.testing.assert_allclose(run(model, {"x": x})[0], expected, rtol=1e-4, atol=1e-5)
    merged = sound(onward.lora.merge(model))
    assert [node.op_type for node in merged.graph] == ["Conv"]
    np.testing.assert_allclose(run(merged, {"x": x})[0], expected, rtol=1e-4, atol=1e-5)


@examples(4)
@given(st.booleans(), st.booleans(), st.sampled_from([1.0, 0.5]), st.integers(1, 5), st.integers(0, 9))
def test_merging_changes_nothing_but_the_weights(turn_a, turn_b, factor, rank, seed):
    """Of a Gemm in all its forms, followed by a weight that is used twice."""
    text = f"""{HEADER} g (float[{"4,N" if turn_a else "N,4"}] x) => (float[N,7] y) {{
        h = Gemm<transA = {int(turn_a)}, transB = {int(turn_b)}, alpha = {factor}>(x, w, b)
        i = MatMul(h, v) j = Tanh(i) k = MatMul(j, v) y = Add(k, b) }}"""
    w = numbers(4, 7, seed=seed)
    proto = parsed(text, w=w.T.copy() if turn_b else w, b=B, v=numbers(7, 7, seed=seed + 1))
    model = adapted(proto, rank=rank, targets="*", seed=seed)
    x = numbers(4, 3) if turn_a else numbers(3, 4)
    before, expected = run(proto, {"x": x})[0], run(model, {"x": x})[0]
    assert np.abs(before - expected).max() > 1e-3
    merged = onward.lora.merge(model)
    np.testing.assert_allclose(run(merged, {"x": x})[0], expected, rtol=1e-4, atol=1e-4)
    assert [(n.op_type, n.name, n.outputs[0].name) for n in merged.graph] == [
        (n.op_type, n.name, n.output[0]) for n in proto.graph.node
    ]
    assert arrays(merged).keys() == {"w", "b", "v"}
    np.testing.assert_array_equal(run(onward.lora.add(proto, rank=rank, targets="*"), {"x": x})[0], before)


def test_a_tied_weight_is_merged_where_it_is_adapted():
    text = HEADER + "g (int64[N] i) => (float[N,7] y) { x = Gather(t, i) w = Transpose(t) y = MatMul(x, w) }"
    model, i = adapted(parsed(text, t=W.T.copy()), rank=2, targets="t"), {"i": np.array([3, 0, 6])}
    merged = sound(onward.lora.merge(model))
    np.testing.assert_allclose(run(merged, i)[0], run(model, i)[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(arrays(merged)["t"], W.T)
    assert arrays(merged).keys() == {"t", "t/merged"}


def test_a_run_gives_back_what_it_has_trained():
    """The graph that was given where it has a place for all that was learned, else the graph that was trained."""
    tied = HEADER + "g (int64[N] i) => (float[N,7] y) { x = Gather(t, i) w = Transpose(t) y = MatMul(x, w) }"
    for proto, feeds in ((digits_mlp(), {"image": numbers(2, 64)}), (parsed(tied, t=W.T.copy()), {"i": np.arange(3)})):
        model = adapted(proto, rank=2, targets="*")
        given_back = sound(in_form_of(onward.load(proto), onward.prepare(model, loss="mse")))
        np.testing.assert_allclose(run(given_back, feeds)[0], run(model, feeds)[0], rtol=1e-4, atol=1e-4)
        assert len(given_back.graph) == len(proto.graph.node)


@needs("torch")
def test_quantised_weights_can_be_adapted_but_not_merged():
    import torch

    text = (
        HEADER
        + """g (float[N,4] x) => (float[N,7] y) <float s = {0.1}>
        { w = DequantizeLinear(q, s) y = MatMul(x, w) }"""
    )
    q = np.random.default_rng(0).integers(-9, 9, (4, 7)).astype(np.int8)
    model, x = adapted(parsed(text, q=q), rank=2, alpha=2, targets="q"), numbers(5, 4)
    a, b = (torch.tensor(arrays(model)[f"q/lora_{part}"]) for part in "AB")
    expected = torch.tensor(x) @ (torch.tensor(q) * torch.tensor(0.1)) + torch.tensor(x) @ a @ b
    np.testing.assert_allclose(run(model, {"x": x})[0], expected.numpy(), rtol=1e-4, atol=1e-5)
    assert onward.prepare(model, loss="mse").step().differentiated() == ["q/lora_A", "q/lora_B"]
    with pytest.raises(onward.Error, match="weight is quantized"):
        onward.lora.merge(model)


def test_what_is_trained_beside_adapters():
    model = onward.lora.add(onward.replace_head(digits_mlp(), 3), rank=2, targets="fc1*")
    new = ["fc2.weight", "fc2.bias", "fc1.weight/lora_A", "fc1.weight/lora_B"]
    assert onward.prepare(model, loss="ce").step().differentiated() == new
    assert onward.prepare(model, loss="ce", trainable="*/lora_*").step().differentiated() == new[2:]
    assert "fc1.weight" in onward.prepare(model, loss="ce", trainable="*").step().differentiated()
    reasons = onward.prepare(model, loss="ce").step().fact("train.selection")["frozen"]
    assert reasons == {"the model has adapters": ["fc1.weight", "fc1.bias"]}


def test_dropout_of_adapters_acts_in_training_alone():
    model = adapted(digits_mlp(), rank=2, targets="fc1*", dropout=0.5)
    x, y = numbers(8, 64), np.arange(8)
    np.testing.assert_array_equal(run(model, {"image": x})[0], run(model, {"image": x})[0])
    stepper = Stepper(onward.prepare(model, loss="ce", optimizer="sgd:lr=0"), own_gradients=True)
    first, second = (float(stepper({"image": x, "labels": y})["loss"]) for _ in range(2))
    assert first != second


@needs("torch")
@pytest.mark.parametrize("place", ["adapter.safetensors", "folder"])
def test_adapters_are_saved_as_peft_does(tmp_path, place):
    import torch
    from safetensors import safe_open

    model, base = adapted(small_cnn(), rank=2, alpha=5, targets="*"), onward.load(small_cnn())
    path = onward.lora.save(model, tmp_path / place)
    file = path if path.is_file() else path / "adapter_model.safetensors"
    with safe_open(file, "pt") as opened:
        saved = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (it is no mapping)
        config = opened.metadata().get("adapter_config") or (path / "adapter_config.json").read_text()
    config = json.loads(config)
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 5)
    assert config["target_modules"] == ["conv", "fc"]
    a, b = (saved[f"base_model.model.fc.lora_{part}.weight"] for part in "AB")
    assert (tuple(a.shape), tuple(b.shape)) == ((2, 128), (10, 2))
    merged = arrays(onward.lora.merge(model))
    np.testing.assert_allclose(merged["fc.weight"], torch.tensor(arrays(base)["fc.weight"]) + 5 / 2 * b @ a, atol=1e-6)
    again = sound(onward.lora.load(base, path))
    x = {"image": numbers(2, 1, 8, 8)}
    np.testing.assert_array_equal(run(again, x)[0], run(model, x)[0])
    other = adapted(small_cnn(), rank=4, targets="fc*", seed=9)  # what it has there is replaced
    np.testing.assert_array_equal(run(onward.lora.load(other, path), x)[0], run(model, x)[0])


def test_one_session_of_onnxruntime_switches_between_adapters(tmp_path):
    """Two adapters of other ranks and layers give the outputs of merged models; without one, the base model runs."""
    cases = {
        "a": adapted(small_cnn(), rank=2, alpha=5, targets="*"),
        "b": adapted(small_cnn(), 9, rank=3, targets="fc"),
    }
    base = sound(onward.lora.as_inputs(cases["a"]))
    base.save(tmp_path / "base.onnx")
    session = ort.InferenceSession(tmp_path / "base.onnx")
    feeds = {"image": numbers(2, 1, 8, 8)}
    np.testing.assert_allclose(session.run(None, feeds)[0], run(onward.load(small_cnn()), feeds)[0], rtol=1e-5)
    for name in "aba":
        path = onward.lora.save(cases[name], tmp_path / f"{name}.onnx_adapter")
        adapter, options = ort.LoraAdapter(), ort.RunOptions()
        adapter.Load(str(path))
        options.add_active_adapter(adapter)
        merged = run(onward.lora.merge(cases[name]), feeds)[0]
        np.testing.assert_allclose(session.run(None, feeds, options)[0], merged, rtol=1e-5, atol=1e-5)
        again = onward.lora.load(small_cnn(), path)
        np.testing.assert_allclose(run(again, feeds)[0], merged, rtol=1e-5, atol=1e-5)
    (tmp_path / "broken.onnx_adapter").write_bytes(path.read_bytes()[:50])
    with pytest.raises(onward.Error, match="holds no adapter"):
        onward.lora.load(small_cnn(), tmp_path / "broken.onnx_adapter")


def _adapted_folder(folder):
    """Train adapters of a model in a folder of onnxruntime-genai; write them and their base into a copy."""
    base = onward.load(CHECKPOINTS / "genai")
    adapted = onward.lora.add(base, rank=2, alpha=4, targets=["*qkv_proj*", "*down_proj*"])
    training = onward.prepare(adapted, loss="logits=cross_entropy:axis=-1", optimizer="adamw:lr=3e-2")
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(3, 32, (2, 4, 8))
    feed = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    feed |= {f"past_key_values.0.{part}": np.zeros((4, 1, 0, 16), np.float32) for part in ("key", "value")}
    with onward.engines.start(training) as engine:
        losses = [float(engine.step({**feed, "labels": labels})["loss"]) for _ in range(20)]
        trained = onward.transform.strip(engine.updated())
    assert losses[-1] < losses[0] - 0.3
    shutil.copytree(CHECKPOINTS / "genai", folder / "base")
    onward.lora.as_inputs(trained).save(folder / "base" / "model.onnx")
    onward.lora.save(trained, folder / "base" / "words.onnx_adapter")
    shutil.copytree(CHECKPOINTS / "genai", folder / "merged")
    onward.lora.merge(trained).save(folder / "merged" / "model.onnx")
    return feed


def test_adapters_of_a_folder_of_onnxruntime_genai(tmp_path):
    feed = _adapted_folder(tmp_path)
    session, merged = (ort.InferenceSession(tmp_path / name / "model.onnx") for name in ("base", "merged"))
    adapter, options = ort.LoraAdapter(), ort.RunOptions()
    adapter.Load(str(tmp_path / "base" / "words.onnx_adapter"))
    options.add_active_adapter(adapter)
    expected, original = merged.run(["logits"], feed)[0], session.run(["logits"], feed)[0]
    np.testing.assert_allclose(session.run(["logits"], feed, options)[0], expected, rtol=1e-5, atol=1e-5)
    assert np.abs(original - expected).max() > 0.1
    (tmp_path / "base" / "genai_config.json").write_text('{"model": {"decoder": {"filename": "../x.onnx"}}}')
    with pytest.raises(onward.Error, match="does not name a model"):
        onward.load(tmp_path / "base")


@pytest.mark.slow
def test_onnxruntime_genai_generates_with_adapters(tmp_path):
    """Its generator loads the folder, and the adapter gives the words and logits of the merged model."""
    genai = pytest.importorskip("onnxruntime_genai")
    _adapted_folder(tmp_path)

    def generate(folder, adapter=None):
        model = genai.Model(str(folder))
        (parameters := genai.GeneratorParams(model)).set_search_options(max_length=12, do_sample=False, batch_size=1)
        generator, adapters = genai.Generator(model, parameters), genai.Adapters(model)
        if adapter is not None:
            adapters.load(str(adapter), "words")
            generator.set_active_adapter(adapters, "words")
        generator.append_tokens([[1, 5, 9, 12]])
        logits = np.array(generator.get_output("logits"))
        while not generator.is_done():
            generator.generate_next_token()
        return [*map(int, generator.get_sequence(0))], logits

    base, merged = generate(tmp_path / "base"), generate(tmp_path / "merged")
    active = generate(tmp_path / "base", tmp_path / "base" / "words.onnx_adapter")
    original = generate(CHECKPOINTS / "genai")
    assert base[0] == original[0] and active[0] == merged[0]
    np.testing.assert_allclose(base[1], original[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(active[1], merged[1], rtol=1e-5, atol=1e-5)


def test_an_adapter_for_another_model_is_refused(tmp_path):
    from safetensors.numpy import load_file, save

    path = onward.lora.save(onward.lora.add(small_cnn(), targets="fc*"), tmp_path / "a.safetensors")
    with pytest.raises(onward.Error, match="`fc` of the adapter matches no layer") as error:
        onward.lora.load(digits_mlp(), path)
    assert "fc1" in error.value.hint
    with pytest.raises(onward.Error, match=r"does not fit `fc\.weight`"):
        onward.lora.load(small_cnn(channels=4), onward.lora.save(onward.lora.add(small_cnn(), targets="fc*"), path))
    weights, config = load_file(path), {"format": "pt", "adapter_config": json.dumps({"lora_alpha": 8})}
    whole = {key: array.view(np.int32) for key, array in weights.items()}
    path.write_bytes(save(whole, config))  # the bits of floating-point numbers, as integers
    with pytest.raises(onward.Error, match=r"`base_model\.model\.fc\.lora_[AB]\.weight` of `.*` is I32"):
        onward.lora.load(small_cnn(), path)
    for wrong in ({"lora_alpha": "8"}, {"lora_alpha": 8, "lora_dropout": 2}, {"lora_alpha": 8, "alpha_pattern": [1]}):
        path.write_bytes(save(weights, {"adapter_config": json.dumps(wrong)}))
        with pytest.raises(onward.Error, match="must be"):
            onward.lora.load(small_cnn(), path)
    path.write_bytes(b"no safetensors at all")
    with pytest.raises(onward.Error, match="holds no adapter"):
        onward.lora.load(small_cnn(), path)
    for action in (onward.lora.merge, lambda model: onward.lora.save(model, path)):
        with pytest.raises(onward.Error, match="has no adapters"):
            action(digits_mlp())


def test_layers_to_adapt_by_default():
    """Those of attention, else all that are larger than their adapters; the message names them."""
    with pytest.warns(UserWarning, match="no layer is named after attention: adapters are on `fc1`, `fc2`"):
        model = onward.lora.add(digits_mlp(), rank=2)
    assert {adapter.module for adapter in adapters(model)} == {"fc1", "fc2"}
    with pytest.warns(UserWarning, match="adapters are on `fc1`;"):  # those of fc2 would be larger than it
        onward.lora.add(digits_mlp(), rank=9)
    with pytest.warns(UserWarning, match="adapters are on `conv"):
        onward.lora.add(small_cnn(), rank=1)
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]>
    g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, a)  y = MatMul(h, b) }""")
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.eye(8, dtype="f"), name) for name in "ab")
    named = onward.load(proto)
    for node, name in zip(named.graph, ("/block/self_attn/q_proj/MatMul", "/block/mlp/MatMul"), strict=True):
        node.name = name
    named = onward.load(named.to_proto())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = adapters(onward.lora.add(named))
    assert [adapter.weight for adapter in chosen] == ["a"]


def test_adapters_that_cannot_be_are_refused():
    with pytest.raises(onward.Error, match=r"`\*attn\*` matches no weight") as error:
        onward.lora.add(digits_mlp(), targets="*attn*")
    assert "fc2, fc1" in error.value.hint
    with pytest.raises(onward.Error, match="already has an adapter"):
        onward.lora.add(onward.lora.add(digits_mlp(), targets="fc1"), targets="fc*")
    for options, message in (
        ({"rank": 0}, "`rank` is 0"),
        ({"rank": True}, "rank"),
        ({"dropout": 1.0}, "`dropout` is 1"),
    ):
        with pytest.raises(onward.Error, match=message):
            onward.lora.add(digits_mlp(), targets="*", **options)
    with pytest.raises(onward.Error, match="carries its training"):
        onward.lora.merge(onward.prepare(onward.lora.add(digits_mlp(), targets="*"), loss="ce"))


def test_names_of_the_framework_count_where_the_exporter_lost_them():
    text = (
        HEADER
        + """g (float[N,4] x) => (float[N,4] y) {
        q = MatMul(x, "val_1") k = MatMul(q, "onnx::MatMul_2") l = MatMul(k, u) y = Add(l, "layer.value.bias") }"""
    )
    square = {name: numbers(4, 4, seed=i) for i, name in enumerate(("val_1", "onnx::MatMul_2", "u"))}
    model = parsed(text, **square, **{"layer.value.bias": numbers(4)})
    note = model.graph.node[0].metadata_props.add()
    note.key, note.value = "pkg.torch.onnx.name_scopes", "['', 'layer', 'layer.query', 'linear']"
    model.graph.node[1].name = "/layer/key/MatMul"
    found = onward.lora.add(model, targets=["layer.query", "*key*", "*.value"])
    assert [n for n in found.graph.initializers if n.endswith("_A")] == [f"{name}/lora_A" for name in square]


@needs("torch")
def test_a_model_as_it_is_exported():
    """By the exporter that traces, at an operator set without LayerNormalization: weights have lost their names."""
    import torch
    import torch_models
    from torch_export import by_torchscript, quiet

    torch.manual_seed(0)
    with quiet():
        bert = torch_models.bert("eager")
        module = bert.module.eval()
        with torch.no_grad():
            for parameter in module.parameters():  # the exporter would merge those that are equal
                parameter += torch.randn_like(parameter) / 20
        inputs = bert.inputs(2, 6)
        model = onward.load(by_torchscript(module, inputs, {}, opset=14))
    names = dict(module.named_parameters())

    def trained(**recipe):
        return set(sound(onward.prepare(model, loss="value:loss", optimizer="sgd", **recipe)).step().differentiated())

    assert trained(trainable="biases") == {name for name in names if name.endswith(".bias")}
    assert trained(trainable="norms") == {name for name in names if "LayerNorm" in name}
    assert trained(trainable="head") == {"model.classifier.weight", "model.classifier.bias"}
    changed = adapted(model, rank=2, alpha=4, targets=["*query", "*value"])
    assert len(trained()) > len(names) / 2 and len(trained(lora="rank=2,targets=*query")) == 4
    saved = {a.module: a for a in adapters(changed)}
    assert set(saved) == {
        name.removesuffix(".weight") for name in names if name.endswith(("query.weight", "value.weight"))
    }
    with torch.no_grad():  # W + alpha / rank B A, where torch has them
        for owner, adapter in saved.items():
            product = adapter.a.const_value.numpy() @ adapter.b.const_value.numpy()
            names[f"{owner}.weight"] += 4 / 2 * torch.tensor(product.T)
        expected = float(module(*inputs.values()))
    feeds = {name: x.numpy() for name, x in inputs.items()}
    assert float(run(changed, feeds)[0]) == pytest.approx(expected, rel=1e-5)
    assert float(run(onward.lora.merge(changed), feeds)[0]) == pytest.approx(expected, rel=1e-5)


def test_layers_in_branches_are_adapted_too():
    text = (
        HEADER
        + """g (float[N,4] x, bool c) => (float[N,7] y) { y = If(c) <
        then_branch = t () => (float[N,7] a) { a = MatMul(x, w) },
        else_branch = e () => (float[N,7] b) { h = Relu(x) b = MatMul(h, w) }> }"""
    )
    model = adapted(parsed(text, w=W), rank=2, targets="w")
    merged, x = sound(onward.lora.merge(model)), numbers(3, 4)
    for c in (True, False):
        feeds = {"x": x, "c": np.array(c)}
        np.testing.assert_allclose(run(merged, feeds)[0], run(model, feeds)[0], rtol=1e-5, atol=1e-5)
    stepper = Stepper(onward.prepare(model, loss="mse", optimizer="sgd:lr=1e-3"), own_gradients=True)
    batch = {"x": x, "c": np.array(True), "target": numbers(3, 7)}
    losses = [float(stepper(batch)["loss"]) for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


def test_adapters_follow_their_weight_to_another_name():
    training = onward.prepare(digits_mlp(), loss="ce", lora="rank=2,targets=fc1")
    renamed = sound(onward.transform.rename(training, {"fc1.weight": "first"}))
    assert renamed.step().differentiated() == ["first/lora_A", "first/lora_B"]
    assert arrays(onward.lora.merge(onward.transform.strip(renamed))).keys() == {
        "first",
        "fc1.bias",
        "fc2.weight",
        "fc2.bias",
    }


def test_weights_outside_the_file_stay_there(tmp_path):
    path = onward.load(small_transformer(width=32)).save(tmp_path / "model.onnx", data="data")
    for changed in (
        onward.lora.add(path, targets="layers.0.qkv*"),
        onward.lora.merge(onward.lora.add(path, targets="layers.0.qkv*")),
        onward.replace_head(path, 5),
    ):
        tensors = {name: value.const_value for name, value in changed.graph.initializers.items()}
        unread = [t for t in tensors.values() if isinstance(t, ir.ExternalTensor)]
        assert {"embedding.weight", "layers.1.up.weight"} <= {t.name for t in unread}
        assert all(t._array is None for t in unread)
    saved = onward.load(changed.save(tmp_path / "changed.onnx"))
    np.testing.assert_array_equal(arrays(saved)["embedding.weight"], arrays(path)["embedding.weight"])


# ---- what is trained, by role ----------------------------------------------------------------------------------------

WRITTEN_OUT = (
    HEADER
    + """
written_out (float[N,2,4] x) => (float[N,2,4] y)
<float[1] e = {0.00001}, float[1] two = {2.0}> {
    h = MatMul(x, a) i = Add(b, h) p = Add(i, position)
    m = ReduceMean<keepdims = 1>(p) c = Sub(p, m) s = Pow(c, two) v = ReduceMean<keepdims = 1>(s)
    t = Add(v, e) r = Sqrt(t) n = Div(c, r) o = Mul(n, scale) q = Add(o, shift)
    y = MatMul(q, last) }"""
)


def test_biases_norms_and_heads_are_found_whatever_they_are_called():
    weights = {name: numbers(4, 4, seed=i) for i, name in enumerate(("a", "last"))}
    weights |= {name: numbers(4, seed=i) for i, name in enumerate(("b", "scale", "shift"))}
    written_out = parsed(WRITTEN_OUT, **weights, position=numbers(2, 4))

    def trained(model, **recipe):
        return set(sound(onward.prepare(model, loss="mse", **recipe)).step().differentiated())

    assert trained(written_out, trainable="biases") == {"b", "shift"}
    assert trained(written_out, trainable="norms") == {"scale", "shift"}
    assert trained(written_out, trainable=["head", "b"]) == {"last", "b"}
    assert trained(written_out, freeze="biases") == {"a", "last", "scale", "position"}
    assert trained(small_cnn(), trainable="norms") == {"bn.weight", "bn.bias"}
    assert trained(small_cnn(), trainable="biases") == {"conv.bias", "bn.bias", "fc.bias"}
    with pytest.raises(onward.Error, match="`norms` matches no"):
        trained(digits_mlp(), trainable="norms")


def test_groups_take_roles_too():
    model = onward.prepare(small_cnn(), loss="ce", groups=["head:lr=0.1", "norms:weight_decay=0"])
    groups = model.step().fact("train.optimizer")
    assert [set(group["params"]) for group in groups] == [
        {"fc.weight", "fc.bias"},
        {"bn.weight", "bn.bias"},
        {"conv.weight", "conv.bias"},
    ]


# ---- distillation ----------------------------------------------------------------------------------------------------


@needs("torch")
@pytest.mark.parametrize("hard", ["cross_entropy", None])
def test_a_student_learns_from_a_teacher_as_in_torch(hard):
    import torch
    import torch.nn.functional as F

    student, teacher = digits_mlp(8), digits_mlp(16, seed=1)
    distill = "kl:temperature=4,weight=0.3" if hard else "kl:temperature=4"
    model = sound(onward.prepare(student, loss=hard, teacher=teacher, distill=distill, optimizer="sgd:lr=0.1"))
    stepper = Stepper(model, own_gradients=True)
    w = {name: torch.tensor(array, requires_grad=True) for name, array in arrays(student).items()}
    fixed = {name: torch.tensor(array) for name, array in arrays(teacher).items()}
    optimizer = torch.optim.SGD(w.values(), lr=0.1)

    def forward(w, x):
        return F.linear(torch.relu(F.linear(x, w["fc1.weight"], w["fc1.bias"])), w["fc2.weight"], w["fc2.bias"])

    rng = np.random.default_rng(0)
    for _ in range(6):
        x, y = rng.standard_normal((8, 64)).astype(np.float32), rng.integers(0, 10, 8)
        logits = forward(w, torch.tensor(x))
        soft = F.kl_div(
            F.log_softmax(logits / 4, 1), F.softmax(forward(fixed, torch.tensor(x)) / 4, 1), reduction="batchmean"
        )
        loss = 16 * soft if hard is None else 0.7 * F.cross_entropy(logits, torch.tensor(y)) + 0.3 * 16 * soft
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outputs = stepper({"image": x, "labels": y} if hard else {"image": x})
        assert float(outputs["loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
        for name in w:
            np.testing.assert_allclose(stepper.state[name], w[name].detach().numpy(), rtol=1e-4, atol=1e-5)
    left = onward.transform.strip(model)
    assert arrays(left).keys() == w.keys() and len(left.graph) == 3
    assert set(model.step().differentiated()) == w.keys()


@needs("torch")
def test_a_teacher_may_be_of_another_form():
    """Of another operator set and precision, with another input name, looked at in the middle, in inference mode."""
    import torch

    teacher = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 22]>
        t (float16[N,64] pixels) => (float16[N,1] unused)
        <float16[64,1] v = {1}> { features = Dropout(pixels) unused = MatMul(features, v) }""".replace(
            "{1}", "{" + "1," * 63 + "1}"
        )
    )
    student = digits_mlp(64)
    distill = ["mse:student=hidden,teacher=features,weight=0.25"]
    model = sound(onward.prepare(student, loss="ce", teacher=teacher, distill=distill, optimizer="sgd"))
    w, (x, y) = arrays(student), (numbers(4, 64), np.arange(4))
    hidden = torch.tensor(x) @ torch.tensor(w["fc1.weight"]).T
    logits = torch.relu(hidden) @ torch.tensor(w["fc2.weight"]).T
    soft = torch.nn.functional.mse_loss(hidden, torch.tensor(x).half().float())
    expected = 0.75 * torch.nn.functional.cross_entropy(logits, torch.tensor(y)) + 0.25 * soft
    assert float(Stepper(model).forward({"image": x, "labels": y})["loss"]) == pytest.approx(float(expected), rel=1e-5)
    assert "teacher/v" not in model.step().algorithm.initializers  # what nobody looks at is left out


def test_teachers_that_do_not_fit_are_refused():
    def prepare(teacher=None, **recipe):
        return onward.prepare(digits_mlp(), loss="ce", teacher=teacher, **recipe)

    for teacher, distill, message in (
        (None, "kl", "`distill` needs a `teacher`"),
        (digits_mlp(), "kl:weight=2", "`weight` of .* is 2, but must be at least 0 and at most 1"),
        (digits_mlp(), "kl:temperature=0", "`temperature` of `kl` is 0, but must be positive"),
        (digits_mlp(), "kl:axis=2", "`axis` of `kl` is `2`"),
        (digits_mlp(), "kl:student=nothing", "the model has no value `nothing`"),
        (digits_mlp(), "kl:teacher=nothing", "the teacher has no value `nothing`"),
        (digits_mlp(), "kk", "unknown distillation loss `kk`"),
        (digits_mlp(), ["kl:weight=0.6", "mse:weight=0.6"], "more than 1"),
        (onward.replace_head(digits_mlp(), 4), "kl", "but `logits` of the teacher is"),
        (small_cnn(), "kl", "the teacher reads `image` of shape"),
        (
            onward.transform.rename(small_transformer(), {"tokens": "words"}),
            "kl:teacher=loss",
            "the model lacks the teacher's input `words`",
        ),
    ):
        with pytest.raises(onward.Error, match=message):
            prepare(teacher, distill=distill)
    with pytest.raises(onward.Error, match="nothing to learn from"):
        onward.prepare(digits_mlp(), loss=None)


# ---- in one line -----------------------------------------------------------------------------------------------------


def test_a_recipe_says_all_of_it(tmp_path):
    recipe = {"new_head": "classes=4,init=normal:std=0.02", "lora": "rank=2,targets=[conv,nothing*],dropout=0.1"}
    model = sound(onward.prepare(small_cnn(), loss="ce", teacher=onward.replace_head(small_cnn(), 4), **recipe, seed=3))
    new = ["fc.weight", "fc.bias", "conv.weight/lora_A", "conv.weight/lora_B"]
    assert model.step().differentiated() == new
    assert model.step().fact("train.recipe")["lora"] == recipe["lora"]
    assert (arrays(model)["fc.weight"] != arrays(onward.prepare(small_cnn(), loss="ce", **recipe))["fc.weight"]).any()
    merged = sound(onward.lora.merge(onward.transform.strip(model)))
    assert [node.op_type for node in merged.graph] == [node.op_type for node in onward.load(small_cnn()).graph]
    for options, message in (
        ({"new_head": "layer=fc"}, "needs `classes`"),
        ({"lora": "rang=8"}, "has no option `rang`"),
        ({"lora": "8,fc"}, "is not `option=value`"),
    ):
        with pytest.raises(onward.Error, match=message):
            onward.prepare(small_cnn(), loss="ce", **options)


def test_the_command_line_says_it_too(tmp_path):
    from onward.cli.commands import app

    onnx.save(small_cnn(), tmp_path / "net.onnx")
    onnx.save(onward.replace_head(small_cnn(), 4).to_proto(), tmp_path / "teacher.onnx")
    arguments = ["prepare", str(tmp_path / "net.onnx"), "--new-head", "classes=4", "--lora", "rank=2,targets=conv*"]
    arguments += ["--teacher", str(tmp_path / "teacher.onnx"), "--distill", "kl:temperature=2"]
    with pytest.raises(SystemExit) as done:
        app([*arguments, "-o", str(tmp_path / "training.onnx")], prog_name="onward")
    assert not done.value.code
    model = sound(onward.load(tmp_path / "training.onnx"))
    assert "conv.weight/lora_A" in model.step().differentiated()
    assert model.step().fact("train.distill")[0]["options"]["temperature"] == 2
