"""Quantisation-aware training: by PyTorch's numbers, on every engine alike, and given back as integers."""

import functools
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from commands import run
from control_flow import on_onnxruntime
from marks import needs
from onnx import numpy_helper, parser
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from quantized_models import BATCHES, FLOAT, WEIGHTS, TorchNetwork
from thread_group import run_together

import onward
from onward.engines import start
from onward.errors import RecipeError, UnknownNameError, UnsupportedError
from onward.recipe import quantize
from onward.training.run import in_form_of

RNG = np.random.default_rng(1)
LEVELS = {"x": (0, 255), "r": (0, 255), "cw": (-8, 7), "w": (-8, 7)}
BATCHES_SEEN = "quantize/batches"


def prepared(spec="int8", optimizer="sgd:lr=0.05", model=FLOAT, **recipe):
    return onward.prepare(model, loss="mse", optimizer=optimizer, quantize=spec, **recipe)


def stepped(model, engine="onnxruntime", **options):
    """Losses, and the training model afterwards."""
    with start(model, engine=engine, **options) as running:
        target = next(name for name in running.inputs if name != "x")
        batches = [{"x": batch["x"], target: batch["y_target"]} for batch in BATCHES]
        losses = [float(running.step(batch)["loss"]) for batch in batches]
        return losses, running.updated(), running.evaluate(batches[-1])


def operators_run(proto, path):
    """What ONNX Runtime makes of a model."""
    options = ort.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(path), 3
    ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(path).graph.node]


# ---- the numbers of PyTorch ------------------------------------------------------------------------------------------


@needs("torch")
def test_observed_ranges_are_those_of_pytorch():
    """Over steps: losses, weights, scales and zero points, with PyTorch's own observers."""
    import torch
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver

    def activation():
        return FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)

    def weight():
        kind = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric, "ch_axis": 0, "averaging_constant": 1.0}
        return FakeQuantize(MovingAveragePerChannelMinMaxObserver, quant_min=-127, quant_max=127, **kind)

    rounding = {"x": activation(), "r": activation(), "cw": weight(), "w": weight()}
    network = TorchNetwork(**rounding)
    expected = network.train(torch.optim.SGD(network.parameters.values(), lr=0.05))
    losses, updated, _ = stepped(prepared("int8:calibrate=0"), threads=1)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    for name, parameter in network.parameters.items():
        np.testing.assert_allclose(updated.array(name), parameter.detach().numpy(), rtol=1e-4, atol=2e-6)
    for name in ("x", "r"):
        np.testing.assert_allclose(updated.array(f"{name}/scale"), rounding[name].scale.numpy()[0], rtol=1e-5)
        assert updated.array(f"{name}/zero") == int(rounding[name].zero_point)
    rounding["cw"](network.parameters["cw"])  # scales of weights are those of the weights as they are now
    np.testing.assert_allclose(updated.array("cw/scale"), rounding["cw"].scale.numpy(), rtol=1e-5)


@needs("torch")
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_learned_scales_are_those_of_pytorch(optimizer):
    """Against PyTorch's learnable fake quantisation, per tensor and per channel; of 4 bits, with much out of range."""
    import torch

    model = prepared("int4:ranges=lsq", f"{optimizer}:lr=0.02")
    beginning = {"x/scale": np.float32(0.02), "x/zero": np.uint8(120), "r/scale": np.float32(0.01), BATCHES_SEEN: 1}
    for name, number in beginning.items():
        model.set(name, number)
    scales = {name: torch.nn.Parameter(torch.tensor(model.array(f"{name}/scale").reshape(-1))) for name in LEVELS}
    zeros = {name: torch.full_like(scale.detach(), 120.0 * (name == "x")) for name, scale in scales.items()}

    def rounded(name, x):
        low, high = LEVELS[name]
        factor = 1 / (x.numel() * high) ** 0.5
        if name in WEIGHTS:
            learnable, where = torch._fake_quantize_learnable_per_channel_affine, (0, low, high)
        else:
            learnable, where = torch._fake_quantize_learnable_per_tensor_affine, (low, high)
        return learnable(x, scales[name], zeros[name], *where, factor)

    network = TorchNetwork(**{name: functools.partial(rounded, name) for name in LEVELS})
    groups = [{"params": list(network.parameters.values())}]
    for name, scale in scales.items():  # what divides by the size of gradients has rates by the size of the range
        groups.append({"params": [scale], "lr": 0.02 / (LEVELS[name][1] if optimizer == "adam" else 1)})
    made = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer](groups, lr=0.02)
    expected = network.train(made)
    losses, updated, _ = stepped(model, threads=1)
    np.testing.assert_allclose(losses, expected, rtol=5e-5)
    for name, scale in scales.items():
        found = updated.array(f"{name}/scale").reshape(-1)
        np.testing.assert_allclose(found, scale.detach().numpy(), rtol=2e-4)
        assert not np.allclose(found, model.array(f"{name}/scale").reshape(-1), rtol=1e-3)


@needs("torch")
@pytest.mark.parametrize("kind", ["int4", "uint8", "int16", "blocks"])
def test_one_pair_is_pytorchs_fake_quantisation(kind):
    """Values and gradients, of which some are out of range."""
    import torch

    x = RNG.standard_normal((4, 12)).astype("f")
    dtype = "int4" if kind == "blocks" else kind
    low, high = {"int4": (-8, 7), "uint8": (0, 255), "int16": (-(2**15), 2**15 - 1)}[dtype]
    shape = (4, 3) if kind == "blocks" else (4,)
    scale = (RNG.uniform(0.5, 1.5, shape) * 2.5 / (high - low)).astype("f")
    zero = np.full(shape, 3 if dtype == "uint8" else 0)
    where = "axis = 1, block_size = 4" if kind == "blocks" else "axis = 0"
    axes = ",".join(map(str, shape))
    proto = parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
    g (float[4,12] x) => (float[4,12] y) <float[{axes}] s, {dtype}[{axes}] z>
    {{ q = QuantizeLinear <{where}> (x, s, z)  y = DequantizeLinear <{where}> (q, s, z) }}""")
    code = proto.graph.value_info[1].type.tensor_type.elem_type
    proto.graph.initializer.append(numpy_helper.from_array(scale, "s"))
    proto.graph.initializer.append(onnx.helper.make_tensor("z", code, shape, zero.reshape(-1).tolist()))
    del proto.graph.value_info[:]
    rows = torch.tensor(x.reshape(-1, 4) if kind == "blocks" else x, requires_grad=True)
    expected = torch.fake_quantize_per_channel_affine(
        rows, torch.tensor(scale.reshape(-1)), torch.tensor(zero.reshape(-1), dtype=torch.int32), 0, low, high
    )
    seed = torch.tensor(RNG.standard_normal(expected.shape).astype("f"))
    (expected * seed).sum().backward()
    vjp = onward.differentiate.vjp(proto, "y", ["x"])
    given = {"x": x} | {v.name: seed.numpy().reshape(x.shape) for v in vjp.inputs if v.name != "x"}
    found = dict(zip([v.name for v in vjp.outputs], on_onnxruntime(vjp.to_proto(), given), strict=True))
    values = on_onnxruntime(proto, {"x": x})[0]
    gradient = next(array for name, array in found.items() if name != "y")
    np.testing.assert_allclose(values, expected.detach().numpy().reshape(x.shape), rtol=1e-6)
    np.testing.assert_allclose(gradient, rows.grad.numpy().reshape(x.shape), rtol=1e-6)
    if kind != "int16":
        assert 0 < np.count_nonzero(gradient) < gradient.size


# ---- the same everywhere, and exactly in what comes out --------------------------------------------------------------

SPECS = [
    "int8", "int8:ranges=lsq", "int8:activations=int8,ranges=fixed", "int4:block=8,percentile=99", "float8",
    "uint4:activations=none", "int8:activations=int16", "uint8:keep=last",
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_integers_compute_what_training_did(spec):
    """ONNX Runtime, given the file that comes out; which is checked, and so is the training model."""
    model = prepared(spec)
    assert not onward.check(model.to_proto())
    _, updated, evaluated = stepped(model, threads=1)
    result = onward.transform.strip(updated).to_proto()
    onnx.checker.check_model(result, full_check=True)
    assert not any(entry.key.startswith("train.") for node in result.graph.node for entry in node.metadata_props)
    assert not any(entry.key.startswith("train.") for one in result.graph.initializer for entry in one.metadata_props)
    (y,) = on_onnxruntime(result, {"x": BATCHES[-1]["x"]})
    step = max(float(updated.array("r/scale")) if "r/scale" in updated.graph.initializers else 0.0, 1e-4)
    np.testing.assert_allclose(y, evaluated["y"], atol=step)
    assert {one.name: one.data_type for one in result.graph.initializer}["cw/quantized"] != onnx.TensorProto.FLOAT
    assert "cw" not in {one.name for one in result.graph.initializer}


@pytest.mark.parametrize("spec", ["int8", "int4:block=8,ranges=lsq"])
@pytest.mark.parametrize(
    "engine",
    ["numpy", pytest.param("torch", marks=needs("torch")), pytest.param("jax", marks=[needs("jax"), pytest.mark.slow])],
)
def test_engines_agree(spec, engine):
    model = prepared(spec)
    expected, *_ = stepped(model, threads=1)
    found, *_ = stepped(model, engine, **({} if engine == "numpy" else {"compile": False}))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_native_kernels_and_accumulation_and_averages_go_with_it():
    model = prepared("int8:ranges=lsq", "adamw:lr=1e-3", accumulate=2, ema=0.9, clip="norm:1")
    assert not onward.check(model.to_proto())
    with_kernels, without = (stepped(model, threads=1, kernels=wanted)[0] for wanted in (True, False))
    np.testing.assert_allclose(with_kernels, without, rtol=1e-5)


@pytest.mark.parametrize("spec", ["int4:activations=none,ranges=lsq", "int8"])
def test_processes_share_weights_that_are_rounded_but_no_ranges(spec, monkeypatch):
    model = prepared(spec, "adam:lr=0.01")

    def steps(group=None):
        with start(model, **({} if group is None else {"strategy": "ddp"})) as running:
            target = next(name for name in running.inputs if name != "x")
            parts = [running.group.part({"x": batch["x"], target: batch["y_target"]}) for batch in BATCHES]
            return [float(running.step(part)["loss"]) for part in parts]

    if spec == "int8":
        with pytest.raises(UnsupportedError, match=r"ReduceMin .* over the samples of a batch"):
            run_together(2, monkeypatch, steps)
    else:
        expected = steps()
        for losses in run_together(2, monkeypatch, steps):
            np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_onnxruntime_computes_in_integers(tmp_path):
    updated = stepped(prepared(), threads=1)[1]
    made = operators_run(onward.transform.strip(updated).to_proto(), tmp_path / "optimized.onnx")
    assert {"QLinearConv", "QGemm"} <= set(made)
    assert not {"Conv", "Gemm", "FusedConv", "MaxPool"} & set(made)


def test_batch_normalization_is_folded_as_inference_does():
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    g (float[n,2,5,5] x) => (float[n,3,3,3] y) {
      c = Conv(x, w)
      n = BatchNormalization(c, scale, shift, mean, var)
      y = Relu(n)
    }""")
    shapes = {"w": (3, 2, 3, 3), "scale": (3,), "shift": (3,), "mean": (3,), "var": (3,)}
    arrays = {name: RNG.uniform(0.5, 1.5, shape).astype("f") for name, shape in shapes.items()}
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    model = onward.prepare(proto, loss="mse", quantize="int8:activations=uint16")
    assert model.step().differentiated() == ["w", "shift/folded"]
    assert "BatchNormalization" not in [node.op_type for node in model.graph]
    x = RNG.standard_normal((4, 2, 5, 5)).astype("f")
    with start(model, engine="numpy") as running:
        target = next(name for name in running.inputs if name != "x")
        batch = {"x": x, target: np.zeros((4, 3, 3, 3), "f")}
        running.load_state(quantize.calibrate(model, [batch]))
        np.testing.assert_allclose(running.evaluate(batch)["y"], on_onnxruntime(proto, {"x": x})[0], atol=0.05)


# ---- models that ONNX Runtime has quantised --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["per channel", "per tensor"])
def quantised(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantised")
    onnx.save(FLOAT, folder / "float.onnx")
    samples = SimpleNamespace(get_next=functools.partial(next, iter([{"x": b["x"]} for b in BATCHES]), None))
    reader = type("Reader", (CalibrationDataReader,), {"get_next": lambda self: samples.get_next()})()
    quantize_static(folder / "float.onnx", folder / "made.onnx", reader, per_channel=request.param)
    return onnx.load(folder / "made.onnx")


@pytest.mark.parametrize("ranges", ["moving", "lsq", "fixed"])
def test_what_is_quantised_already_comes_back_in_its_form(quantised, ranges):
    """Biases are trained, too, and ranges go on from those in the file."""
    model = prepared(f"int8:ranges={ranges}", "sgd:lr=0.02", quantised)
    assert not onward.check(model.to_proto())
    assert {"cb", "b", "cw", "w"} == {
        name.split("_")[0] for name in model.step().differentiated() if "scale" not in name
    }
    _, updated, evaluated = stepped(model, threads=1)
    with start(model, threads=1) as running:  # before training, what the file computes
        target = next(name for name in running.inputs if name != "x")
        batch = {"x": BATCHES[-1]["x"], target: BATCHES[-1]["y_target"]}
        step = 1.01 * float(updated.array("y_scale"))
        np.testing.assert_allclose(
            running.evaluate(batch)["y"], on_onnxruntime(quantised, {"x": batch["x"]})[0], atol=step
        )
    for result in (in_form_of(onward.load(quantised), updated), onward.transform.strip(updated)):
        assert written(result.to_proto()) == written(quantised)
        (y,) = on_onnxruntime(result.to_proto(), {"x": BATCHES[-1]["x"]})
        np.testing.assert_allclose(y, evaluated["y"], atol=step)


def written(proto):
    """All but the numbers."""
    return (
        sorted((node.op_type, list(node.input), list(node.output)) for node in proto.graph.node),
        {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in proto.graph.initializer},
    )


# ---- runs ------------------------------------------------------------------------------------------------------------


def data():
    """Four kinds of pictures, which a small network tells apart."""
    labels = np.arange(96) % 3
    pictures = RNG.standard_normal((96, 1, 6, 6)).astype("f") * 0.4
    for i, label in enumerate(labels):
        pictures[i, 0, 2 * label : 2 * label + 2] += 1
    return {"x": pictures, "labels": labels.astype(np.int64)}


def test_a_run_gives_integers_and_goes_on_bit_for_bit(tmp_path):
    columns, settings = data(), {"loss": "cross_entropy", "optimizer": "adam:lr=5e-3", "quiet": True, "threads": 1}
    settings |= {"quantize": "int8:keep=first", "validation": 0.25, "batch_size": 8}
    whole = onward.train(FLOAT, columns, epochs=4, run=tmp_path / "whole", **settings)
    onward.train(FLOAT, columns, epochs=2, run=tmp_path / "parts", **settings)
    parts = onward.resume(tmp_path / "parts", columns, epochs=4, quiet=True)
    for name in whole.model.step().update:
        np.testing.assert_array_equal(whole.model.array(name), parts.model.array(name), err_msg=name)
    assert whole.results["accuracy"] > 0.9
    last = whole.last.to_proto()
    assert written(last) == written(whole.best.to_proto())
    with start(whole.model, threads=1) as running:
        expected = running.evaluate({"x": columns["x"], "labels": columns["labels"]})["y"]
    (y,) = on_onnxruntime(last, {"x": columns["x"]})
    np.testing.assert_array_equal(y.argmax(1), expected.argmax(1))
    assert onward.describe(last).quantization.activations == {"uint8": 1}
    assert (
        "1 weight to int8, a scale for each channel: 108 numbers"
        in run("show", str(whole.path / "training.onnx")).stdout
    )


DIGITS = {
    "MLP": """f = Flatten(image)  a = Gemm<transB = 1>(f, w1, b1)  r = Relu(a)  c = Gemm<transB = 1>(r, w2, b2)
      h = Relu(c)  logits = Gemm<transB = 1>(h, w3, b3)""",
    "CNN": """a = Conv<pads = [1, 1, 1, 1]>(image, c1, b1)  r = Relu(a)
      p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)  c = Conv<pads = [1, 1, 1, 1]>(p, c2, b2)
      h = Relu(c)  f = Flatten(h)  logits = Gemm<transB = 1>(f, w4, b3)""",
    "attention": """rows = Squeeze(image, one)  q = MatMul(rows, q1)  k = MatMul(rows, k1)  v = MatMul(rows, v1)
      t = Transpose<perm = [0, 2, 1]>(k)  s = MatMul(q, t)  p = Softmax(s)  m = MatMul(p, v)  h = Relu(m)
      f = Flatten(h)  logits = Gemm<transB = 1>(f, w5, b3)""",
}
SIZES = {
    "w1": (32, 64), "b1": (32,), "w2": (32, 32), "b2": (32,), "w3": (10, 32), "b3": (10,), "c1": (32, 1, 3, 3),
    "c2": (32, 32, 3, 3), "w4": (10, 512), "q1": (8, 16), "k1": (8, 16), "v1": (8, 16), "w5": (10, 128),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["int8", "int8:ranges=lsq", "int4", "int8:activations=int8"])
@pytest.mark.parametrize("kind", DIGITS)
def test_predictions_for_digits_are_those_of_training(kind, spec, tmp_path):
    """Of all pictures, by the file in ONNX Runtime; and logits within one step of 8 bits."""
    from sklearn.datasets import load_digits

    heading = '<ir_version: 10, opset_import: ["" : 21]> g (float[n,1,8,8] image) => (float[n,10] logits)'
    proto = parser.parse_model(f"{heading} {{ {DIGITS[kind]} }}")
    draw = np.random.default_rng(0)
    for name in sorted({name for node in proto.graph.node for name in node.input if name in SIZES}):
        weight = draw.standard_normal(SIZES[name]) / np.sqrt(max(np.prod(SIZES[name][1:]), 8))
        proto.graph.initializer.append(numpy_helper.from_array(weight.astype("f"), name))
    proto.graph.initializer.append(numpy_helper.from_array(np.asarray([1], np.int64), "one"))
    found = load_digits()
    digits = {"image": (found.images[:, None] / 16).astype("f"), "labels": found.target.astype(np.int64)}
    usual = {"loss": "cross_entropy", "quiet": True, "threads": 1}
    exact = onward.train(proto, digits, optimizer="adam:lr=3e-3", epochs=8, run=tmp_path / "float", **usual).last
    trained = onward.train(
        exact, digits, optimizer="adam:lr=3e-4", epochs=2, run=tmp_path / "run", quantize=spec, **usual
    )
    with start(trained.model, threads=1) as running:
        expected = running.evaluate(digits)["logits"]
    (logits,) = on_onnxruntime(trained.last.to_proto(), {"image": digits["image"]})
    assert (expected.argmax(1) == digits["labels"]).mean() > 0.8
    np.testing.assert_array_equal(logits.argmax(1), expected.argmax(1))
    np.testing.assert_allclose(logits, expected, atol=np.ptp(expected) / 255)


def test_preprocessing_stays_outside(tmp_path):
    columns = data()
    trained = onward.train(
        FLOAT, {"x": columns["x"] * 255, "labels": columns["labels"]}, loss="cross_entropy", quantize="int8", epochs=1,
        preprocess="scale", run=tmp_path / "run", quiet=True, threads=1,
    )  # fmt: skip
    first = trained.last.to_proto().graph.node
    assert [node.op_type for node in first if "x" in node.input] == ["QuantizeLinear"]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("int3", UnknownNameError, "unknown type to quantize to `int3`"),
        ("int2", UnsupportedError, "no kernel"),
        ("int8:activations=float8", UnsupportedError, "activations cannot be float8"),
        ("int8:activations=int4", UnsupportedError, "activations cannot be int4"),
        ("int8:ranges=guess", RecipeError, "`ranges` of `quantize` is `guess`, but must be `moving`, `lsq` or `fixed`"),
        ("int8:blocks=32", RecipeError, "no option `blocks`"),
        ("int8:percentile=101", RecipeError, "from 50 to 100"),
        ("int8:targets=encoder*", UnknownNameError, "`encoder\\*` matches no node"),
        ("int8:operators=Relu", UnknownNameError, "unknown operator to quantize `Relu`"),
        ("int8:keep=first+last", UnknownNameError, "nothing is left to quantize"),
    ],
)
def test_what_cannot_be_is_said(spec, error, words):
    with pytest.raises(error, match=words) as raised:
        prepared(spec)
    assert raised.value.hint or "from 50" in words
    assert "Relu" not in (raised.value.hint or "")


def test_what_a_quantised_model_is_cannot_be_asked_for(quantised):
    with pytest.raises(RecipeError, match="already quantized, so `weights`"):
        prepared("int8:weights=int4", model=quantised)


# ---- pruning ---------------------------------------------------------------------------------------------------------


@needs("torch")
@pytest.mark.parametrize("optimizer", ["sgd:lr=0.05,momentum=0.9", "adamw:lr=0.01"])
def test_pruned_weights_are_those_of_pytorch(optimizer):
    """By `torch.nn.utils.prune`, over steps: the same masks, losses and weights."""
    import torch
    from torch.nn.utils import prune

    network = TorchNetwork(**dict.fromkeys(("x", "r", "cw", "w"), lambda x: x))
    holder = torch.nn.Module()
    for name in ("cw", "w"):
        holder.register_parameter(name, network.parameters[name])
        prune.l1_unstructured(holder, name, amount=0.6)
        mask = holder.get_buffer(f"{name}_mask")
        network.rounding[name] = mask.mul
    made = torch.optim.SGD if optimizer.startswith("sgd") else torch.optim.AdamW
    settings = {"lr": 0.05, "momentum": 0.9} if optimizer.startswith("sgd") else {"lr": 0.01}
    expected = network.train(made(network.parameters.values(), **settings))
    model = onward.prepare(FLOAT, loss="mse", optimizer=optimizer, prune="magnitude:sparsity=0.6")
    assert not onward.check(model.to_proto())
    losses, updated, _ = stepped(model, threads=1)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    result = onward.transform.strip(updated)
    for name in ("cw", "w"):
        pruned = (network.parameters[name] * holder.get_buffer(f"{name}_mask")).detach().numpy()
        np.testing.assert_allclose(result.array(name), pruned, rtol=1e-3, atol=1e-5)
        assert ((result.array(name) == 0) == (pruned == 0)).all()


def test_some_of_many_are_left_in_integers_and_averages_too():
    recipe = {"optimizer": "adamw:lr=0.01", "ema": 0.5, "prune": "2of4:keep=first", "quantize": "int8:ranges=lsq"}
    updated = stepped(onward.prepare(FLOAT, loss="mse", **recipe), threads=1)[1]
    result = in_form_of(onward.load(FLOAT), updated)
    left = result.array("w/quantized").reshape(3, 9, 4) != 0
    assert (left.sum(-1) <= 2).all() and left.sum() > 45
    with pytest.raises(RecipeError, match="sums up 1 numbers"):
        onward.prepare(FLOAT, loss="mse", prune="2of4")
    with pytest.raises(UnknownNameError, match="unknown pruning `half`"):
        onward.prepare(FLOAT, loss="mse", prune="half")
