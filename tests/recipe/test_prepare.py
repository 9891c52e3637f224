"""Recipes against PyTorch: a prepared model, given PyTorch's gradients, does what PyTorch's training does."""

import contextlib
import math
import warnings

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from marks import needs
from models import digits_mlp, small_cnn
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from stepping import Stepper, batches, torch_mlp, weights

import onward
from onward.model.state import hyperparameters, states


def grads(parameters):
    return {name: p.grad.numpy().copy() for name, p in parameters.items() if p.grad is not None}


def assert_same(stepper, parameters, atol=1e-6):
    for name, parameter in parameters.items():
        if name in stepper.state:
            np.testing.assert_allclose(stepper.state[name], parameter.detach().numpy(), rtol=1e-5, atol=atol)


# ---- whole recipes ---------------------------------------------------------------------------------------------------


@needs("torch")
def test_adamw_with_schedule_clipping_and_freezing():
    import torch

    model = onward.prepare(
        digits_mlp(),
        loss="cross_entropy",
        optimizer="adamw:lr=1e-2,weight_decay=0.01",
        schedule="cosine:steps=10,warmup=3",
        clip="norm:0.5",
        freeze="fc1.bias",
    )
    stepper, (w, forward) = Stepper(model), torch_mlp(model)
    w["fc1.bias"].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in w.values() if p.requires_grad], lr=1e-2, weight_decay=0.01)
    for i, (x, y) in enumerate(batches((16, 64), 12)):
        factor = i / 3 if i < 3 else (1 + math.cos(math.pi * min(i - 3, 7) / 7)) / 2
        optimizer.param_groups[0]["lr"] = 1e-2 * factor
        loss = torch.nn.functional.cross_entropy(forward(torch.tensor(x)), torch.tensor(y))
        optimizer.zero_grad()
        loss.backward()
        gradients = grads(w)
        norm = torch.nn.utils.clip_grad_norm_([p for p in w.values() if p.grad is not None], 0.5)
        optimizer.step()
        outputs = stepper({"image": x, "labels": y}, gradients)
        assert outputs["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
        assert outputs["lr"] == pytest.approx(1e-2 * factor, rel=1e-12)
        assert outputs["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
        assert_same(stepper, w)
    assert stepper.state["step"] == 12
    assert "fc1.bias" not in stepper.state


@needs("torch")
def test_accumulation_equals_one_large_batch():
    import torch

    model = onward.prepare(digits_mlp(), loss="cross_entropy", optimizer="momentum:lr=0.1", accumulate=4, clip="norm:1")
    stepper, (w, forward) = Stepper(model), torch_mlp(model)
    optimizer = torch.optim.SGD(w.values(), lr=0.1, momentum=0.9)
    for i, (x, y) in enumerate(batches((8, 64), 12)):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(forward(torch.tensor(x)), torch.tensor(y))
        loss.backward()
        if i % 4 == 0:
            total = {name: torch.zeros_like(p) for name, p in w.items()}
        for name, p in w.items():
            total[name] += p.grad
        before = weights_of(stepper, w)
        stepper({"image": x, "labels": y}, grads(w))
        if i % 4 == 3:
            for name, p in w.items():
                p.grad = total[name] / 4
            torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
            optimizer.step()
            assert stepper.state["micro_step"] == 0
            assert not stepper.state["accum/fc1.weight"].any()
        else:
            assert all((before[name] == stepper.state[name]).all() for name in w)
        assert_same(stepper, w)
    assert stepper.state["step"] == 3


def weights_of(stepper, names):
    return {name: stepper.state[name].copy() for name in names}


@needs("torch")
def test_groups_have_their_own_optimizer_and_numbers():
    import torch

    model = onward.prepare(
        digits_mlp(),
        loss="cross_entropy",
        optimizer="adam:lr=1e-2",
        groups=["*.bias:lr=0.1", {"match": "fc2.*", "optimizer": "rmsprop:lr=1e-3,alpha=0.9"}],
    )
    stepper, (w, forward) = Stepper(model), torch_mlp(model)
    optimizers = [
        torch.optim.Adam([w["fc1.bias"], w["fc2.bias"]], lr=0.1),
        torch.optim.RMSprop([w["fc2.weight"]], lr=1e-3, alpha=0.9),
        torch.optim.Adam([w["fc1.weight"]], lr=1e-2),
    ]
    for x, y in batches((8, 64), 5):
        for p in w.values():
            p.grad = None
        torch.nn.functional.cross_entropy(forward(torch.tensor(x)), torch.tensor(y)).backward()
        gradients = grads(w)
        for optimizer in optimizers:
            optimizer.step()
        stepper({"image": x, "labels": y}, gradients)
        assert_same(stepper, w)
    groups = model.steps[0].fact("train.optimizer")
    assert [(g["name"], g["params"]) for g in groups] == [
        ("adam", ["fc1.bias", "fc2.bias"]),
        ("rmsprop", ["fc2.weight"]),
        ("adam", ["fc1.weight"]),
    ]


def test_averaging_follows_the_new_parameters():
    model = onward.prepare(digits_mlp(), loss="cross_entropy", optimizer="sgd:lr=1", ema=0.75)
    stepper = Stepper(model)
    average = weights(model)["fc2.weight"].astype(np.float64)
    for x, y in batches((4, 64), 5):
        gradients = {name: np.full_like(array, 0.5) for name, array in weights(model).items()}
        stepper({"image": x, "labels": y}, gradients)
        average = 0.75 * average + 0.25 * stepper.state["fc2.weight"]
        np.testing.assert_allclose(stepper.state["ema/fc2.weight"], average, rtol=1e-5, atol=1e-7)
    assert stepper.state["ema/n_averaged"] == 5


@needs("torch")
def test_loss_scaling_skips_overflows_as_grad_scaler_does():
    import torch

    model = onward.prepare(digits_mlp(), loss="cross_entropy", optimizer="adam:lr=1e-2", loss_scale="dynamic")
    model.set("scaler/growth_interval", 3.0)
    stepper = Stepper(model)
    w = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in weights(model).items()}
    optimizer = torch.optim.Adam(w.values(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=3)
    scaler.scale(torch.zeros(()))  # it makes its scale when it is first used
    rng = np.random.default_rng(0)
    for i, (x, y) in enumerate(batches((4, 64), 9)):
        scale = float(stepper.state["scaler/scale"])
        gradients = {n: rng.standard_normal(p.shape).astype(np.float32) * scale for n, p in w.items()}
        if i in (2, 7):
            gradients["fc1.bias"][3] = np.inf if i == 2 else np.nan
        for name, p in w.items():
            p.grad = torch.tensor(gradients[name])
        scaler.step(optimizer)
        scaler.update()
        stepper({"image": x, "labels": y}, gradients)
        assert stepper.state["scaler/scale"] == scaler.get_scale()
        assert_same(stepper, w)
    assert stepper.state["step"] == 7


def test_low_precision_parameters_get_a_master_copy():
    proto = digits_mlp()
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    model = onward.prepare(proto, loss="cross_entropy", optimizer="adam:lr=1e-4")
    stepper = Stepper(model)
    assert stepper.state["fc1.weight/master"].dtype == np.float32
    assert stepper.state["fc1.weight/exp_avg"].dtype == np.float32
    before = stepper.state["fc1.weight"].copy()
    gradients = {name: np.ones(array.shape, np.float16) for name, array in weights(model).items()}
    for x, y in batches((4, 64), 20):
        stepper({"image": x.astype(np.float16), "labels": y}, gradients)
    master = stepper.state["fc1.weight/master"]
    np.testing.assert_allclose(master, before.astype(np.float32) - 20e-4, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(stepper.state["fc1.weight"], master.astype(np.float16))
    plain = onward.prepare(proto, loss="cross_entropy", master_weights=False)
    assert not any(state.role == "master" for state in states(plain))


# ---- training mode ---------------------------------------------------------------------------------------------------


@needs("torch")
@pytest.mark.parametrize("variance", ["population", "sample"])
def test_batch_normalization_trains_and_its_statistics_are_state(variance):
    import torch

    model = onward.prepare(small_cnn(), loss="cross_entropy", optimizer="sgd", variance=variance)
    nodes = {node.op_type: node for node in model.graph}
    bn = nodes["BatchNormalization"]
    scale, bias, mean, var = (value.name for value in bn.inputs[1:5])
    stepper = Stepper(model)
    assert {mean, var} <= stepper.state.keys()
    assert bn.attributes.get_int("training_mode", 0) == 0  # inference stays inference

    momentum, epsilon = bn.attributes.get_float("momentum", 0.9), bn.attributes.get_float("epsilon", 1e-5)
    running_mean, running_var = (torch.tensor(stepper.state[name]) for name in (mean, var))
    w = {name: torch.tensor(array) for name, array in weights(model).items()}
    conv = nodes["Conv"]
    for x, y in batches((6, 1, 8, 8), 3):
        pads = conv.attributes.get_ints("pads", (0, 0, 0, 0))
        maps = torch.nn.functional.conv2d(
            torch.tensor(x),
            w[conv.inputs[1].name],
            w[conv.inputs[2].name] if len(conv.inputs) > 2 else None,
            padding=tuple(pads[:2]),
        )
        stepper({"image": x, "labels": y}, {n: np.zeros_like(stepper.state[n]) for n in stepper.gradients})
        variances = maps.var((0, 2, 3), unbiased=variance == "sample")
        running_mean = momentum * running_mean + (1 - momentum) * maps.mean((0, 2, 3))
        running_var = momentum * running_var + (1 - momentum) * variances
        np.testing.assert_allclose(stepper.state[mean], running_mean.numpy(), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(stepper.state[var], running_var.numpy(), rtol=1e-5, atol=1e-7)
    assert epsilon and scale in stepper.gradients and bias in stepper.gradients


def test_frozen_batch_normalization_keeps_its_statistics():
    scale = next(n for n in onward.load(small_cnn()).graph if n.op_type == "BatchNormalization").inputs[1].name
    model = onward.prepare(small_cnn(), loss="cross_entropy", freeze=[scale])
    assert not any(state.role == "statistics" or "running" in state.name for state in states(model))
    assert not any(node.op_type == "BatchNormalization" for node in model.steps[0].algorithm)


def test_dropout_draws_anew_at_each_step_and_the_same_for_the_same_state():
    first, second = (
        Stepper(onward.prepare(small_cnn(), loss="cross_entropy", optimizer="sgd", seed=7)) for _ in range(2)
    )
    x, y = next(batches((6, 1, 8, 8), 1))
    nothing = {name: np.zeros_like(first.state[name]) for name in first.gradients}
    losses = [float(first({"image": x, "labels": y}, nothing)["loss"]) for _ in range(4)]
    assert len(set(losses)) == 4
    for _ in range(2):
        second({"image": x, "labels": y}, nothing)
    third = Stepper(onward.prepare(small_cnn(), loss="cross_entropy", optimizer="sgd", seed=7))
    third.state = {name: array.copy() for name, array in second.state.items()}  # as if read from a file
    assert [float(third({"image": x, "labels": y}, nothing)["loss"]) for _ in range(2)] == losses[2:]
    other = Stepper(onward.prepare(small_cnn(), loss="cross_entropy", optimizer="sgd", seed=8))
    assert float(other({"image": x, "labels": y}, nothing)["loss"]) != losses[0]


def test_a_model_without_switched_operators_is_not_copied():
    model = onward.prepare(digits_mlp(), loss="mse", optimizer="sgd")
    assert not any(node.op_type in ("Gemm", "Relu") for node in model.steps[0].algorithm)


# ---- what is trained -------------------------------------------------------------------------------------------------

HIDDEN = """<ir_version: 10, opset_import: ["": 21]>
hidden (float[N,4] x) => (float[N,2] y)
<float[4,4] plain = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, int8[4,4] packed = {1,2,3,4, 1,2,3,4, 1,2,3,4, 1,2,3,4},
 float step = {0.5}, float[1] scale = {0.125}, float[2,4] turned = {1,2,3,4,5,6,7,8}, float[4] unused = {1,2,3,4},
 float[1,4] mask = {0.0, -100000.0, 0.0, 0.0}, float low = {-3.0}, float[4] slope = {0.1, 0.1, 0.1, 0.1}>
{
    c = Constant <value = float[4] {1.0, 2.0, 3.0, 4.0}> ()
    dims = Constant <value = int64[1] {4}> ()
    filled = ConstantOfShape <value = float[1] {0.5}> (dims)
    restored = DequantizeLinear(packed, step)
    a = MatMul(x, plain)
    b = MatMul(a, restored)
    d = Add(b, c)
    e = Mul(d, filled)
    f = Mul(e, scale)
    g = Add(f, mask)
    h = Clip(g, low)
    i = PRelu(h, slope)
    t = Transpose <perm = [1, 0]> (turned)
    y = MatMul(i, t)
}"""


def selection(model):
    fact = model.steps[0].fact("train.selection")
    return {name: (role, why) for role, reasons in fact.items() for why, names in reasons.items() for name in names}


def test_parameters_are_found_wherever_they_hide():
    proto = onnx.parser.parse_model(HIDDEN)
    model = onward.prepare(proto, loss="mse", optimizer="sgd")
    found = selection(model)
    trained = {name for name, (role, _) in found.items() if role == "parameter"}
    assert trained == {"plain", "restored", "c", "filled", "turned", "slope"}
    assert found["unused"] == ("constant", "no gradient reaches it from the loss")
    assert found["scale"] == ("constant", "a single number")
    assert found["mask"] == ("constant", "a mask")
    assert found["low"] == ("constant", "a setting of Clip")
    assert found["step"][0] == "constant"
    assert set(model.steps[0].differentiated()) == trained
    assert {"restored", "c", "filled"} <= model.graph.initializers.keys()
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    before, after = (ReferenceEvaluator(p).run(None, {"x": x})[0] for p in (proto, model.to_proto()))
    np.testing.assert_allclose(after, before, rtol=1e-6)


def test_parameters_behind_what_a_schema_calls_not_differentiable():
    """A spatial transformer learns where to look: AffineGrid has a derivative, whatever its schema says."""
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[N,6] x, float[N,1,4,4] picture) => (float[N,1,2,2] y)
    <float[6,6] weight = {1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0,
     0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1}>
    { at = MatMul(x, weight) shape = Constant<value_ints = [-1, 2, 3]>() theta = Reshape(at, shape)
      n = Shape<start = 0, end = 1>(x) rest = Constant<value_ints = [1, 2, 2]>() size = Concat<axis = 0>(n, rest)
      grid = AffineGrid(theta, size) y = GridSample(picture, grid) }"""
    found = selection(onward.prepare(onnx.parser.parse_model(text), loss="mse", optimizer="sgd"))
    assert found["weight"][0] == "parameter"


def test_numbers_that_fill_a_first_state_are_not_trained():
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        cell (float[N,1] x) => (float[N,1] y) <float[1,1] weight = {2.0}, float[1,1] recurrent = {0.5}>
        {
            zero = Constant <value = float {0.0}> ()
            size = Shape (x)
            state = Expand (zero, size)
            a = MatMul (x, weight)
            b = MatMul (state, recurrent)
            y = Add (a, b)
        }""")
    found = selection(onward.prepare(proto, loss="mse", optimizer="sgd"))
    assert found["zero"] == ("constant", "a single number")
    assert found["weight"][0] == found["recurrent"][0] == "parameter"


def test_patterns_choose_what_is_trained():
    proto = onnx.parser.parse_model(HIDDEN)
    assert onward.prepare(proto, loss="mse", trainable=["scale", "plain"]).steps[0].differentiated() == [
        "plain",
        "scale",
    ]
    assert "c" not in onward.prepare(proto, loss="mse", freeze=["c", "t*"]).steps[0].differentiated()
    with pytest.raises(onward.Error, match="`plian\\*` matches no") as error:
        onward.prepare(proto, loss="mse", freeze=["plian*"])
    assert "plain" in error.value.hint
    with pytest.raises(onward.Error, match="nothing is left to train"):
        onward.prepare(proto, loss="mse", freeze="*")


def test_the_last_values_with_gradients_are_named():
    """Before an ArgMax, or whatever a detector ends in."""
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]>
    g (float[n,4] x) => (int64[n,1] label, float[n,4] rounded) {
      h = MatMul(x, w)  logits = Relu(h)  label = ArgMax <axis = 1> (logits)  rounded = Round(logits)
    }""")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype="f"), "w"))
    with pytest.raises(onward.Error, match="nothing is left to train") as error:
        onward.prepare(proto, loss="rounded=mse")
    assert "`--loss logits=LOSS`" in error.value.hint
    del proto.graph.output[1]
    with pytest.raises(onward.Error, match="no floating-point output") as error:
        onward.prepare(proto, loss="cross_entropy")
    assert "`logits=cross_entropy`" in error.value.hint
    assert onward.prepare(proto, loss="logits=cross_entropy").step().differentiated() == ["w"]


def test_the_word_of_the_exporter_counts():
    proto = onnx.parser.parse_model(HIDDEN)
    kind = "pkg.torch.export.graph_signature.InputSpec.kind"
    for name, value in {"scale": "InputKind.PARAMETER", "plain": "InputKind.BUFFER"}.items():
        info = proto.graph.value_info.add(name=name)
        info.metadata_props.add(key=kind, value=value)
    trained = onward.prepare(proto, loss="mse").steps[0].differentiated()
    assert "scale" in trained and "plain" not in trained


def test_weights_that_were_inputs_with_defaults_become_initializers_only():
    proto = digits_mlp()
    proto.graph.input.append(onnx.helper.make_tensor_value_info("fc1.weight", onnx.TensorProto.FLOAT, [32, 64]))
    model = onward.prepare(proto, loss="cross_entropy")
    assert [value.name for value in model.graph.inputs] == ["image"]


def test_a_bias_of_one_output_is_a_parameter():
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[N,3] x) => (float[N,1] y)
    <float[3,1] w = {1,2,3}, float[1] b = {0}> { h = MatMul(x, w) y = Add(h, b) }"""
    assert onward.prepare(onnx.parser.parse_model(text), loss="mse").steps[0].differentiated() == ["w", "b"]


# ---- losses ----------------------------------------------------------------------------------------------------------

TWO_HEADS = """<ir_version: 10, opset_import: ["": 21]>
two (float[N,4] x) => (float[N,3] logits, float[N,1] value)
<float[4,3] w = {1,2,3,4,5,6,7,8,9,1,2,3}, float[4,1] v = {1,2,3,4}> { logits = MatMul(x, w) value = MatMul(x, v) }"""


def test_losses_on_several_outputs_are_summed():
    proto = onnx.parser.parse_model(TWO_HEADS)
    losses = {"logits": "cross_entropy", "value": "mse:scale=0.25"}
    for loss in (losses, ["logits=cross_entropy", "value=mse:scale=0.25"]):
        stepper = Stepper(onward.prepare(proto, loss=loss, optimizer="sgd"))
        rng = np.random.default_rng(0)
        x = rng.standard_normal((5, 4)).astype(np.float32)
        labels, target = rng.integers(0, 3, 5), rng.standard_normal((5, 1)).astype(np.float32)
        outputs = stepper.forward({"x": x, "labels": labels, "target": target})
        logits = outputs["logits"].astype(np.float64)
        entropy = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(5), labels])
        assert outputs["loss"] == pytest.approx(entropy + 0.25 * np.mean((outputs["value"] - target) ** 2), rel=1e-5)
    with pytest.raises(onward.Error, match="several outputs") as error:
        onward.prepare(proto, loss="mse")
    assert "logits=mse" in error.value.hint


def test_a_loss_can_be_a_model_a_function_or_a_value_of_the_model(tmp_path):
    loss = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
    l (float[N,10] logits, float[N,10] wanted) => (float loss) <float two = {2}>
    { d = Sub(logits, wanted) s = Pow(d, two) loss = ReduceMean <keepdims = 0> (s) }""")
    onnx.save(loss, tmp_path / "loss.onnx")
    function = onnx.parser.parse_function("""<opset_import: ["": 21], domain: "mine">
    Squared (logits, wanted) => (loss)
    { d = Sub(logits, wanted) s = Mul(d, d) loss = ReduceMean <keepdims = 0> (s) }""")
    rng = np.random.default_rng(0)
    x, wanted = rng.standard_normal((4, 64)).astype(np.float32), rng.standard_normal((4, 10)).astype(np.float32)
    for given in (loss, str(tmp_path / "loss.onnx"), function):
        model = onward.prepare(digits_mlp(), loss=given, optimizer="sgd")
        assert [value.name for value in model.steps[0].algorithm.inputs] == ["wanted"]
        outputs = Stepper(model).forward({"image": x, "wanted": wanted})
        assert outputs["loss"] == pytest.approx(np.mean((outputs["logits"] - wanted) ** 2), rel=1e-5)
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
    g (float[N,2] x) => (float cost) <float[2] w = {1, 2}> { h = Mul(x, w) cost = ReduceSum <keepdims = 0> (h) }""")
    model = onward.prepare(proto, loss="value:cost", optimizer="sgd")
    assert Stepper(model).forward({"x": np.ones((2, 2), np.float32)})["loss"] == 6


# ---- initial values --------------------------------------------------------------------------------------------------


def reset(model, step=0):
    """What the initialization graph computes."""
    import onnxruntime as ort

    proto = model.to_proto()
    graph = proto.training_info[step].initialization
    shell = onnx.ModelProto(
        ir_version=proto.ir_version, graph=graph, opset_import=proto.opset_import, functions=proto.functions
    )
    names = [value.name for value in graph.output]
    values = dict(zip(names, ort.InferenceSession(shell.SerializeToString()).run(names, {}), strict=True))
    return {key: values[value] for key, value in model.steps[step].reset.items()}


def test_every_state_variable_has_an_initial_value():
    model = onward.prepare(
        small_cnn(), loss="cross_entropy", optimizer="adam", ema=0.9, loss_scale="dynamic", accumulate=2, seed=5
    )
    initial = reset(model)
    assert initial.keys() == model.steps[0].update.keys()
    for state in states(model):
        np.testing.assert_array_equal(initial[state.name], state.value.const_value.numpy(), err_msg=state.name)


def test_initialisers_are_chosen_by_pattern_and_reproducible():
    recipe = {"loss": "cross_entropy", "optimizer": "sgd", "init": {"*.weight": "kaiming_normal", "fc1.bias": "ones"}}
    first, again = (reset(onward.prepare(digits_mlp(), **recipe, seed=1)) for _ in range(2))
    other = reset(onward.prepare(digits_mlp(), **recipe, seed=2))
    file = weights(onward.load(digits_mlp()))
    assert (first["fc1.weight"] == again["fc1.weight"]).all() and (first["fc1.weight"] != other["fc1.weight"]).any()
    assert (first["fc1.bias"] == 1).all() and (first["fc2.bias"] == file["fc2.bias"]).all()
    assert np.std(first["fc1.weight"]) == pytest.approx(math.sqrt(2 / 64), rel=0.1)


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_the_recipe_is_recorded():
    model = onward.prepare(digits_mlp(), loss="cross_entropy", optimizer="adamw:lr=1e-3", freeze="fc1.*", clip=1.0)
    assert model.steps[0].fact("train.recipe") == {
        "loss": "cross_entropy",
        "optimizer": "adamw:lr=1e-3",
        "freeze": "fc1.*",
        "clip": 1.0,
    }
    again = onward.prepare(digits_mlp(), **model.steps[0].fact("train.recipe"))
    assert again.to_proto() == model.to_proto()


def test_a_second_step_is_added_only_on_request():
    model = onward.prepare(digits_mlp(), loss="cross_entropy", trainable="fc1.*", optimizer="sgd")
    with pytest.raises(onward.Error, match="already carries its training"):
        onward.prepare(model, loss="cross_entropy")
    both = onward.prepare(model, loss="mse", trainable="fc2.*", optimizer="adam", append=True)
    assert [step.differentiated() for step in both.steps] == [["fc1.weight", "fc1.bias"], ["fc2.weight", "fc2.bias"]]
    for step in range(2):
        onnx.checker.check_model(ir.to_proto(both.combined(step)), full_check=True)
    assert onward.check(both) == []
    assert "step_1" in both.steps[1].update and "fc2.weight/exp_avg" in both.steps[1].update
    assert onward.load(both.to_proto()).to_proto() == both.to_proto()


def test_names_that_the_model_already_has_are_left_to_it():
    proto = onward.transform.rename(digits_mlp(), {"hidden": "step", "active": "lr"}).to_proto()
    model = onward.prepare(proto, loss="cross_entropy", optimizer="adam", accumulate=2)
    assert onward.check(model) == []
    assert "step" not in model.steps[0].update and "step_1" in model.steps[0].update


@pytest.mark.parametrize(
    "recipe",
    [
        {"optimizer": "sgd"},
        {"optimizer": "momentum", "clip": "value:1", "schedule": "step:size=10"},
        {"optimizer": "adagrad", "accumulate": 2, "loss_scale": "dynamic", "ema": 0.9, "clip": 1.0},
        {"optimizer": "lion", "groups": ["*.bias:lr=0.1"], "init": {"fc.weight": "orthogonal"}, "variance": "sample"},
    ],
)
@pytest.mark.parametrize("model", [digits_mlp, small_cnn])
def test_the_checker_has_nothing_to_say_about_what_we_make(model, recipe):
    recipe = {**recipe, "init": "file"} if model is digits_mlp else recipe
    assert [str(f) for f in onward.check(onward.prepare(model(), loss="cross_entropy", **recipe))] == []


def test_prepare_does_not_change_its_argument():
    proto = digits_mlp()
    before = proto.SerializeToString()
    model = onward.load(proto)
    onward.prepare(model, loss="cross_entropy")
    onward.prepare(proto, loss="cross_entropy")
    assert proto.SerializeToString() == before and not model.steps


def test_hyperparameters_of_schedules_and_clipping_are_in_the_file():
    model = onward.prepare(
        digits_mlp(),
        loss="cross_entropy",
        optimizer="adamw",
        clip="value:0.5",
        schedule=["warmup:steps=10,until=10", "cosine:steps=90,min=1e-5"],
    )
    found = hyperparameters(model)
    assert found["group0/weight_decay"] == 0.01 and found["clip/limit"] == 0.5
    assert found["schedule/0/until"] == 10 and found["schedule/1/steps"] == 90 and found["schedule/1/min"] == 1e-5


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"loss": "mse", "schedule": ["cosine:steps=3", "constant"]}, "until"),
        (
            {"loss": "mse", "schedule": ["cosine:steps=3,until=x", "constant"]},
            "`until` .* is `x`",
        ),
        ({"loss": "mse", "clip": "normal:1"}, "unknown gradient clipping `normal:1`"),
        ({"loss": "mse", "clip": "norm"}, "the limit of `clip=norm` is ``, which is not a number"),
        ({"loss": "mse", "loss_scale": "huge"}, "`loss_scale` is `huge`, which is not a number"),
        ({"loss": "mse", "optimizer": "adam:lr=true"}, "`lr` of optimizer `adam` is `True`, which is not a number"),
        ({"loss": "mse", "prune": True}, "`prune` is `True`, but must be a string or a mapping"),
        ({"loss": "mse", "init": "xaviar"}, "unknown initializer `xaviar`"),
        ({"loss": "mse:reduction=none"}, "not one number"),
        ({"loss": {"logit": "mse"}}, "no value `logit`"),
    ],
)
def test_mistakes_are_named(recipe, message):
    with pytest.raises(onward.Error, match=message):
        onward.prepare(digits_mlp(), **recipe)


def _ending_in(operator: str) -> onnx.ModelProto:
    model = digits_mlp()
    model.graph.node[-1].output[0] = "scores"
    model.graph.node.append(onnx.helper.make_node(operator, ["scores"], ["logits"]))
    return model


@pytest.mark.parametrize(
    ("operator", "loss", "way_out"),
    [
        ("Softmax", "ce", "--loss scores=cross_entropy"),
        ("Softmax", "nll", "--loss scores=cross_entropy"),
        ("Sigmoid", "bce_with_logits", "--loss scores=bce_with_logits"),
        ("Sigmoid", "cross_entropy", "--loss scores=bce_with_logits"),
        ("Softmax", "ctc:blank=1", "--loss scores=ctc:blank=1,logits=true"),
        ("Identity", "bce", "--loss bce_with_logits"),
        ("Identity", "nll:ignore_index=1", "--loss cross_entropy:ignore_index=1"),
        ("Identity", "ce", None),
        ("LogSoftmax", "ce", None),
        ("LogSoftmax", "nll", None),
        ("Softmax", "scores=ce", None),
        ("Softmax", "mse", None),
        ("Sigmoid", "bce", None),
    ],
)
def test_a_loss_on_what_it_is_not_for_is_warned_of(operator: str, loss: str, way_out: str | None) -> None:
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(onward.Error):  # of CTC on rows
        warnings.simplefilter("always")
        onward.prepare(_ending_in(operator), loss=loss)
    said = [str(warning.message) for warning in caught]
    assert [way_out in text for text in said if way_out] == ([True] if way_out else []) and bool(said) == bool(way_out)
    assert all(warning.filename == __file__ for warning in caught)  # not a line of ours


NORMALIZED = """<ir_version: 10, opset_import: ["": 21]>
net (float[N,3,2,2] x) => (float[N,4] y)
<float[3,1,1] mean = {0.5, 0.4, 0.3}, float[3,1,1] std = {0.2, 0.3, 0.4}, float[12,4] w = {W}, float[12] b = {B}> {
    two = Constant<value = float {2.0}>()
    scaled = Div(x, two)
    centred = Sub(scaled, mean)
    normal = LAST(centred, std)
    flat = Flatten(normal)
    shifted = Sub(flat, b)
    y = MatMul(shifted, w)
}""".replace("{W}", f"{{{', '.join(['0.1'] * 48)}}}").replace("{B}", f"{{{', '.join(['0.1'] * 12)}}}")


@pytest.mark.parametrize("last", ["Div", "Mul"])
def test_the_normalization_of_an_input_is_not_trained(last):
    model = onnx.parser.parse_model(NORMALIZED.replace("LAST", last))
    assert onward.prepare(model, loss="mse").steps[0].differentiated() == ["w", "b"]
    named = onward.prepare(model, loss="mse", trainable=["mean", "w"])
    assert set(named.steps[0].differentiated()) == {"mean", "w"}  # whoever wants it may


IN_CONSTANTS = """<ir_version: 10, opset_import: ["": 21]>
net (float[N,2] x) => (float[N,3] y) {
    stored = Constant<value = float[3,2] {1, 2, 3, 4, 5, 6}>()
    weight = Transpose(stored)
    bias = Constant<value_floats = [0.1, 0.2, 0.3]>()
    y = Gemm(x, weight, bias)
}"""


def test_weights_that_hide_in_constants_are_trained_by_any_of_their_names(tmp_path):
    model = onnx.parser.parse_model(IN_CONSTANTS)
    assert set(onward.prepare(model, loss="mse").steps[0].differentiated()) == {"stored", "bias"}
    named = onward.prepare(model, loss="mse", trainable="weight", groups=["weight:lr=0.5"])
    assert named.steps[0].differentiated() == ["stored"]
    data = {"x": np.ones((4, 2), np.float32), "target": np.zeros((4, 3), np.float32)}
    run = onward.train(model, data, loss="mse", optimizer="sgd:lr=0.1", run=tmp_path / "run", quiet=True)
    assert [node.op_type for node in run.best.graph] == ["Constant", "Transpose", "Constant", "Gemm"]
    x = {"x": data["x"][:1]}
    before, after = (ReferenceEvaluator(proto).run(None, x)[0] for proto in (model, run.best.to_proto()))
    np.testing.assert_allclose(after, before - 3 * 0.1 * 2 * before / 3, rtol=1e-5)  # two weights and a bias


IN_BODIES = """<ir_version: 10, opset_import: ["": 21]>
net (float[N,2] x, bool c) => (float[N,2] y) <float[2,2] w0 = {1,0,0,1}> {
    h = MatMul(x, w0)
    y = If (c) <
        then_branch = a () => (float[N,2] ya) <float[2,2] w = {1,2,3,4}> { ya = MatMul(h, w) },
        else_branch = b () => (float[N,2] yb) { w = Constant<value = float[2,2] {5,6,7,8}>() yb = MatMul(h, w) }
    >
}"""


@pytest.mark.parametrize("condition", [True, False])
def test_weights_in_bodies_are_trained_and_stored_there_again(condition, tmp_path):
    model = onnx.parser.parse_model(IN_BODIES)
    training = onward.prepare(model, loss="mse")
    names = ["w0", "y/then_branch/w", "y/else_branch/w"]
    assert training.steps[0].differentiated() == names and not onward.check(training)
    assert {w.name for w in onward.describe(model).weights if w.role == "trainable"} == set(names)
    frozen = onward.prepare(model, loss="mse", freeze=["*else*", "w0"])
    assert frozen.steps[0].differentiated() == [names[1]]
    assert [len(b.initializers) for b in (*frozen.graph.subgraphs(),) if b.name == "b"] == [0]  # in its node
    data = {"x": np.ones((4, 2), np.float32), "c": np.full(4, condition), "target": np.zeros((4, 2), np.float32)}
    fed = {"x": data["x"][:1], "c": np.array(condition)}
    (before,) = ReferenceEvaluator(model).run(None, fed)
    trained = onward.prepare(model, loss="mse", optimizer="sgd:lr=0.1", freeze="w0")
    with onward.engines.start(trained) as engine:
        engine.step({**data, "c": fed["c"]})
        stripped = onward.transform.strip(engine.updated())
    again = stripped.to_proto()
    (after,) = ReferenceEvaluator(again).run(None, fed)
    np.testing.assert_allclose(after, before - 2 * 0.1 * before, rtol=1e-5)  # by the mean of two squares
    bodies = [{a.name: a.g for a in p.graph.node[1].attribute} for p in (model, again)]
    for name in ("then_branch", "else_branch"):
        old, new = (body[name] for body in bodies)
        assert [t.name for t in new.initializer] == [t.name for t in old.initializer]
        assert [n.op_type for n in new.node] == [n.op_type for n in old.node] and not again.graph.initializer[1:]


EQUAL_BRANCHES = """<ir_version: 10, opset_import: ["": 21]>
net (float[N,2] x, bool c) => (float[N,2] y) {
    y = If (c) <
        then_branch = a () => (float[N,2] ya) <float[2,2] w = {1,2,3,4}, float[2] b0 = {0,0}> { ya = Gemm(x, w, b0) },
        else_branch = b () => (float[N,2] yb) <float[2,2] v = {1,2,3,4}, float[2] b1 = {0,0}> {
            s = Gemm(x, v, b1)
            yb = Relu(s)
        }
    >
}"""


def test_equal_weights_of_two_branches_are_one():
    training = onward.prepare(onnx.parser.parse_model(EQUAL_BRANCHES), loss="mse", optimizer="sgd")
    assert training.steps[0].differentiated() == ["w", "b0"]
    with onward.engines.start(training) as engine:
        engine.step({"x": np.ones((1, 2), np.float32), "c": np.array(True), "target": np.zeros((1, 2), np.float32)})
        stripped = onward.transform.strip(engine.updated())
    w, v, b0, b1 = (next(t for g in stripped.graph.subgraphs() for n, t in g.initializers.items() if n == name)
                    for name in ("w", "v", "b0", "b1"))  # fmt: skip
    np.testing.assert_array_equal(w.const_value.numpy(), v.const_value.numpy())
    np.testing.assert_array_equal(b0.const_value.numpy(), b1.const_value.numpy())
    assert b1.const_value.numpy().all()


IN_LOOP = """<ir_version: 10, opset_import: ["": 21]>
net (float[N,2] x) => (float[N,2] y) {
    three = Constant<value = int64 {3}>()
    y = Loop (three, , x) <body = cell (int64 i, bool go, float[N,2] h) => (bool more, float[N,2] after)
        <float[2,2] w = {0.5, -0.25, 1, 0.75}> {
            more = Identity(go)
            bias = Constant<value_floats = [0.1, -0.2]>()
            after = Gemm(h, w, bias)
        }>
}"""


@needs("torch")
@pytest.mark.parametrize("lora", [None, "rank=1,targets=w"])
def test_weights_of_a_loop_are_trained_like_those_of_pytorch(lora, tmp_path):
    import torch

    model = onnx.parser.parse_model(IN_LOOP)
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(4, 2)).astype(np.float32), "target": rng.normal(size=(4, 2)).astype(np.float32)}
    settings = {"loss": "mse", "optimizer": "sgd:lr=0.1", "epochs": 2, "batch_size": 4, "quiet": True, "lora": lora}
    best = onward.train(model, data, run=tmp_path / "run", **settings).load_best()
    (body,) = best.graph.subgraphs()
    assert [n.op_type for n in body] == ["Identity", "Constant", "Gemm"] and not best.graph.initializers
    trained = body.initializers["w"].const_value.numpy()
    w, b = torch.tensor([[0.5, -0.25], [1, 0.75]], requires_grad=True), torch.tensor([0.1, -0.2], requires_grad=True)
    if lora is not None:
        assert np.linalg.matrix_rank(trained - w.detach().numpy()) == 1
        return
    optimizer = torch.optim.SGD([w, b], 0.1)
    for _ in range(2):
        h = torch.tensor(data["x"])
        for _ in range(3):
            h = h @ w + b
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(h, torch.tensor(data["target"])).backward()
        optimizer.step()
    np.testing.assert_allclose(trained, w.detach().numpy(), rtol=1e-5)
