"""Transformations carry training along: what a step computes is the same before and after."""

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from models import digits_mlp, small_cnn
from stepping import Stepper

import onward
from onward.model.state import states

RECIPE = {
    "loss": "cross_entropy:label_smoothing=0.1",
    "optimizer": "adamw:lr=1e-2",
    "schedule": "cosine:steps=20,warmup=2",
    "ema": 0.9,
}


@pytest.fixture
def training():
    return onward.prepare(small_cnn(), **RECIPE, clip="value:0.5")


def batch(seed=0, shape=(6, 1, 8, 8)):
    rng = np.random.default_rng(seed)
    return {"image": rng.standard_normal(shape).astype(np.float32), "labels": rng.integers(0, 10, shape[0])}


def run(model, names=None, steps=3, feeds=batch):
    """Loss and state of a few steps with gradients that depend only on the parameter's original name."""
    names = names or {}
    stepper = Stepper(model)
    losses = []
    for i in range(steps):
        gradients = {}
        for x in stepper.gradients:
            original = next((old for old, new in names.items() if new == x), x)
            rng = np.random.default_rng([i, *original.encode()])
            gradients[x] = rng.standard_normal(stepper.state[x].shape).astype(stepper.state[x].dtype)
        losses.append(float(stepper(feeds(i), gradients)["loss"]))
    return losses, stepper.state


def assert_same_training(before, after, names=None):
    losses, state = run(before)
    new_losses, new_state = run(after, names)
    np.testing.assert_allclose(new_losses, losses, rtol=1e-6)
    rename = lambda name: next((name.replace(old, new) for old, new in (names or {}).items() if old in name), name)
    assert {rename(name) for name in state} == set(new_state)
    for name, array in state.items():
        if name != "rng":
            np.testing.assert_allclose(new_state[rename(name)], array, rtol=1e-5, atol=1e-6, err_msg=name)


def valid(model):
    proto = model.to_proto()
    onnx.checker.check_model(proto, full_check=True)
    for i in range(len(model.steps)):
        onnx.checker.check_model(ir.to_proto(model.combined(i)), full_check=True)
    assert onward.load(proto).to_proto() == proto
    return proto


def inference(proto, **feeds):
    return ort.InferenceSession(proto.SerializeToString()).run(None, feeds)


# ---- names -----------------------------------------------------------------------------------------------------------


def test_rename_follows_a_parameter_everywhere(training):
    names = {"fc.weight": "head.kernel"}
    renamed = onward.transform.rename(training, names)
    proto = valid(renamed)
    step = renamed.steps[0]
    assert "head.kernel/exp_avg" in step.update and "ema/head.kernel" in step.update
    assert "head.kernel" in step.differentiated() and "fc.weight" not in step.differentiated()
    assert "head.kernel" in step.fact("train.optimizer")[0]["params"]
    slot = next(state for state in states(renamed) if state.name == "head.kernel/exp_avg")
    assert slot.parameter == "head.kernel"
    assert b"fc.weight" not in b"".join(t.SerializeToString() for t in proto.training_info[0].algorithm.initializer)
    assert_same_training(training, renamed, names)


def test_rename_can_swap_and_refuses_clashes(training):
    swapped = onward.transform.rename(training, {"conv.bias": "bn.bias", "bn.bias": "conv.bias"})
    valid(swapped)
    np.testing.assert_array_equal(
        swapped.graph.initializers["conv.bias"].const_value.numpy(),
        training.graph.initializers["bn.bias"].const_value.numpy(),
    )
    with pytest.raises(onward.Error, match="already the name"):
        onward.transform.rename(training, {"conv.bias": "fc.bias"})
    with pytest.raises(onward.Error, match=r"unknown value `conv\.bais`") as error:
        onward.transform.rename(training, {"conv.bais": "x"})
    assert "conv.bias" in error.value.hint


def test_prefix_renames_everything_and_leaves_the_original(training):
    before = training.to_proto()
    prefixed = onward.transform.add_prefix(training, "a/")
    assert training.to_proto() == before
    valid(prefixed)
    assert {value.name for value in prefixed.inputs} == {"a/image"}
    assert all(key.startswith("a/") for key in prefixed.steps[0].update)
    names = {name: f"a/{name}" for name in training.steps[0].differentiated()}
    feeds = lambda i: {f"a/{name}": array for name, array in batch(i).items()}
    _, state = run(training)
    _, new = run(_unprefixed_outputs(prefixed), names, feeds=feeds)
    np.testing.assert_allclose(new["a/fc.bias"], state["fc.bias"], rtol=1e-5, atol=1e-6)


def _unprefixed_outputs(model):
    return onward.transform.rename(model, {"a/loss": "loss"})


# ---- merge -----------------------------------------------------------------------------------------------------------

NORMALIZE = """<ir_version: 8, opset_import: ["": 13]>
normalize (float[N,1,8,8] pixels) => (float[N,1,8,8] scaled) <float[1] mean = {0.5}, float[1] deviation = {2.0}>
{ centred = Sub(pixels, mean) scaled = Div(centred, deviation) }"""


def test_merge_puts_a_model_before_a_training_model(training):
    first = onnx.parser.parse_model(NORMALIZE)
    merged = onward.transform.merge(first, training, {"scaled": "image"})
    proto = valid(merged)
    assert [value.name for value in merged.inputs] == ["pixels"]
    assert merged.steps[0].update == training.steps[0].update
    x = batch()["image"]
    expected = inference(training.to_proto(), image=(x - 0.5) / 2)[0]
    np.testing.assert_allclose(inference(proto, pixels=x)[0], expected, rtol=1e-5, atol=1e-6)
    feeds = lambda i: {"pixels": batch(i)["image"] * 2 + 0.5, "labels": batch(i)["labels"]}
    losses, _ = run(training)
    np.testing.assert_allclose(run(merged, feeds=feeds)[0], losses, rtol=1e-5)


def test_merge_keeps_the_training_of_both():
    classifier = onward.prepare(digits_mlp(), loss="cross_entropy", optimizer="sgd")
    other = onward.prepare(digits_mlp(hidden=16, seed=1), loss="mse", optimizer="adam")
    with pytest.raises(onward.Error, match="both models have values named") as error:
        onward.transform.merge(classifier, onward.transform.rename(other, {"image": "logits2"}), {"logits": "logits2"})
    assert "prefix" in error.value.hint
    with pytest.raises(onward.Error, match="the second model has no input"):
        onward.transform.merge(classifier, other, {"logits": "imagine"}, prefix="b/")
    widened = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
    widen (float[N,10] logits) => (float[N,64] wide) <float[10,64] w = {0}> { wide = MatMul(logits, w) }
    """.replace("{0}", "{" + ", ".join(["0.1"] * 640) + "}")
    )
    joined = onward.transform.merge(onward.transform.merge(classifier, widened, prefix="w/"), other, prefix="b/")
    valid(joined)
    assert [len(step.update) for step in joined.steps] == [len(classifier.steps[0].update), len(other.steps[0].update)]
    assert joined.steps[1].differentiated()[0] == "b/fc1.weight"


# ---- extract ---------------------------------------------------------------------------------------------------------


def test_extract_moves_the_rest_of_the_forward_pass_into_training():
    training = onward.prepare(digits_mlp(), loss="cross_entropy", optimizer="adam:lr=0.1")
    part = onward.transform.extract(training, ["image"], ["active"])
    proto = valid(part)
    assert [node.op_type for node in part.graph] == ["Gemm", "Relu"]
    assert "Gemm" in [node.op_type for node in part.steps[0].algorithm]
    x = batch(shape=(4, 64))["image"]
    assert inference(proto, image=x)[0].shape == (4, 32)
    feeds = lambda i: batch(i, (6, 64))
    losses, state = run(training, feeds=feeds)
    new_losses, new_state = run(part, feeds=feeds)
    np.testing.assert_allclose(new_losses, losses, rtol=1e-6)
    assert set(state) == set(new_state)


def test_extract_drops_the_state_of_what_is_cut_away():
    training = onward.prepare(digits_mlp(), loss="cross_entropy", optimizer="adam:lr=0.1")
    head = onward.transform.extract(training, ["active"], ["logits"])
    valid(head)
    assert set(head.graph.initializers) == {"fc2.weight", "fc2.bias"}
    assert head.steps[0].differentiated() == ["fc2.weight", "fc2.bias"]
    assert not any("fc1" in name for name in (*head.steps[0].update, *head.steps[0].reset))
    rng = np.random.default_rng(0)
    feeds = lambda i: {"active": rng.random((5, 32), np.float32), "labels": rng.integers(0, 10, 5)}
    losses, state = run(head, feeds=feeds)
    assert np.isfinite(losses).all() and state["step"] == 3


def test_extract_refuses_what_a_step_cannot_do_without():
    training = onward.prepare(digits_mlp(), loss="cross_entropy", clip="norm:1")
    with pytest.raises(onward.Error, match="depends on the gradient of") as error:
        onward.transform.extract(training, ["active"], ["logits"])
    assert "strip" in error.value.hint
    with pytest.raises(onward.Error, match="also depend on `image`"):
        onward.transform.extract(training, [], ["logits"])
    with pytest.raises(onward.Error, match="unknown value `activ`"):
        onward.transform.extract(training, ["activ"], ["logits"])


# ---- functions and operator sets -------------------------------------------------------------------------------------


def test_inline_replaces_calls_in_training_too(training):
    plain = onward.transform.inline(training)
    valid(plain)
    assert not plain.functions and "onward" not in plain.ir.opset_imports
    assert not any(node.domain == "onward" for node in plain.steps[0].algorithm.all_nodes())
    assert_same_training(training, plain)


def test_inline_can_choose(training):
    some = onward.transform.inline(training, ["onward.AdamW"])
    valid(some)
    assert ("onward", "AdamW", "") not in some.functions and ("onward", "Dropout", "") in some.functions
    assert_same_training(training, some)


@pytest.mark.parametrize(("start", "version"), [(18, 21), (21, 22), (21, 24), (18, 26)])
def test_operator_set_conversion_keeps_training(start, version):
    proto = small_cnn()
    proto.opset_import[0].version = start  # nothing in it changed in between
    training = onward.prepare(proto, **RECIPE, clip="value:0.5")
    assert training.opset == start
    converted = onward.transform.convert_opset(training, version)
    valid(converted)
    assert converted.opset == version
    assert all(function.opset_imports[""] == version for function in converted.functions.values())
    assert_same_training(training, converted)


def test_operator_set_conversion_of_an_old_model_with_nested_graphs():
    text = """<ir_version: 6, opset_import: ["": 11]>
    g (float[N,4] x, bool c) => (float[N] y) <float[4,4] w = {1,0,0,0,0,1,0,0,0,0,1,0,0,0,0,1}>
    { h = MatMul(x, w)
      y = If (c) <then_branch = t () => (float[N] a) { a = ReduceSum <axes = [1], keepdims = 0> (h) },
                  else_branch = e () => (float[N] b) { b = ReduceMax <axes = [1], keepdims = 0> (h) }> }"""
    proto = onnx.parser.parse_model(text)
    training = onward.prepare(proto, loss="mse", optimizer="sgd")
    assert training.opset == 21
    valid(training)
    x = np.random.default_rng(0).random((3, 4), np.float32)
    for c in (True, False):
        after = inference(training.to_proto(), x=x, c=np.array(c))[0]
        np.testing.assert_allclose(after, inference(proto, x=x, c=np.array(c))[0], rtol=1e-6)


def test_a_scan_of_operator_set_8_goes_through_its_batch():
    """And not through one axis less, as `onnx` would have it."""
    text = """
        <ir_version: 3, opset_import: ["" : 8]>
        f (LENGTHSfloat[N,2] start, float[N,T,2] x) => (float[N,2] last, float[N,T,2] sums) {
            last, sums = Scan (FIRST, start, x) <num_scan_inputs = 1, directions = [1],
                body = add (float[2] before, float[2] next) => (float[2] after, float[2] sum) {
                    after = Add (before, next)
                    sum = Identity (after)
                }>
        }"""
    model = onnx.parser.parse_model(text.replace("LENGTHS", "").replace("FIRST", '""'))
    converted = onward.transform.convert_opset(model, 21)
    onnx.checker.check_model(converted.to_proto(), full_check=True)
    start, x = batch(shape=(4, 2))["image"], batch(shape=(4, 5, 2))["image"]
    last, sums = inference(converted.to_proto(), start=start, x=x)
    expected = start[:, None] + np.cumsum(x[:, ::-1], axis=1)
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last, expected[:, -1], rtol=1e-5, atol=1e-6)
    with_lengths = text.replace("LENGTHS", "int64[N] lengths, ").replace("FIRST", "lengths")
    with pytest.raises(onward.errors.UnsupportedError, match="lengths"):
        onward.transform.convert_opset(onnx.parser.parse_model(with_lengths), 21)


def test_what_onnx_cannot_convert_is_refused(training):
    with pytest.raises(onward.Error, match="cannot convert") as error:
        onward.transform.convert_opset(training, 9)
    assert error.value.hint


# ---- strip and refresh -----------------------------------------------------------------------------------------------


def test_strip_leaves_the_inference_model(training):
    stripped = onward.transform.strip(training)
    proto = stripped.to_proto()
    assert not proto.training_info and not proto.functions
    assert [opset.domain for opset in proto.opset_import] == [""]
    assert proto.graph == onward.load(small_cnn()).to_proto().graph


def test_refresh_puts_training_back_after_another_tool(training):
    changed = onnx.shape_inference.infer_shapes(onward.transform.strip(training).to_proto())
    changed.graph.node[0].name = "renamed by somebody"
    again = onward.transform.refresh(changed, training)
    valid(again)
    assert again.graph[0].name == "renamed by somebody"
    assert_same_training(training, again)


def test_refresh_follows_a_change_of_operator_set(training):
    from onnx import version_converter

    changed = version_converter.convert_version(onward.transform.strip(training).to_proto(), 22)
    again = onward.transform.refresh(changed, training)
    assert again.opset == 22
    assert_same_training(training, again)


def test_refresh_says_all_that_no_longer_matches(training):
    changed = onward.transform.strip(training).to_proto()
    for tensor in changed.graph.initializer:
        if tensor.name == "fc.bias":
            tensor.dims[:] = [5, 2]
    changed = onward.transform.rename(changed, {"bn.weight": "scale"}).to_proto()
    with pytest.raises(onward.Error, match="no longer matches") as error:
        onward.transform.refresh(changed, training)
    assert "`bn.weight` is gone" in str(error.value) and "`fc.bias` had shape" in str(error.value)
    assert "recipe" in error.value.hint
    with pytest.raises(onward.Error, match="the second model has no training"):
        onward.transform.refresh(training, small_cnn())
