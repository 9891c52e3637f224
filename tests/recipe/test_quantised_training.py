"""Models that ONNX Runtime's quantiser made: trained on every engine alike, and given back in the form they had."""

import numpy as np
import onnx
import pytest
from control_flow import on_onnxruntime
from marks import needs
from onnx import numpy_helper, parser
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from quantized_models import FLOAT

import onward
from onward.engines import start
from onward.errors import RecipeError, UnsupportedError
from onward.training.run import in_form_of

RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 1, 6, 6)).astype("f")
INT8, UINT8 = QuantType.QInt8, QuantType.QUInt8
FORMS = {
    f"{format.name} {kind.name}{' per channel' * per_channel}": (format, kind, per_channel)
    for format in QuantFormat
    for kind in (INT8, UINT8)
    for per_channel in (False, True)
}
FLOATS = ["cb", "b"]
"""Weights that dynamic quantisation leaves as floats."""
QDQ = [name for name in FORMS if name.startswith("QDQ")]


class Samples(CalibrationDataReader):
    def __init__(self):
        self._batches = iter([{"x": X[:4]}, {"x": X[4:]}])

    def get_next(self):
        return next(self._batches, None)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """By the name of a form."""
    folder = tmp_path_factory.mktemp("quantised")
    onnx.save(FLOAT, folder / "float.onnx")
    made = {}
    for name, (form, kind, per_channel) in FORMS.items():
        kinds = {"weight_type": kind, "activation_type": kind, "per_channel": per_channel}
        quantize_static(folder / "float.onnx", folder / "made.onnx", Samples(), quant_format=form, **kinds)
        made[name] = onnx.load(folder / "made.onnx")
    quantize_dynamic(folder / "float.onnx", folder / "made.onnx", weight_type=INT8)
    return made | {"dynamic": onnx.load(folder / "made.onnx")}


def written(proto):
    """All but the numbers."""
    return (
        [(node.op_type, list(node.input), list(node.output)) for node in proto.graph.node],
        {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in proto.graph.initializer},
    )


def steps(model, engine, count=5, **options):
    with start(model, engine=engine, **options) as running:
        batch = {name: X if name == "x" else np.ones((8, 3), "f") for name in running.inputs}
        losses = [float(running.step(batch)["loss"]) for _ in range(count)]
        return losses, running.updated(), float(running.evaluate(batch)["loss"])


@pytest.mark.parametrize("form", [*QDQ, "dynamic"])
def test_the_form_comes_back(quantised, form):
    """With other integers, which compute what training has computed last."""
    proto = quantised[form]
    model = onward.prepare(proto, loss="mse", optimizer="sgd:lr=0.05", trainable=FLOATS if form == "dynamic" else None)
    assert not onward.check(model.to_proto())
    losses, updated, loss = steps(model, "onnxruntime", threads=1)
    assert losses == sorted(losses, reverse=True)
    assert model.step().differentiated() == (
        ["cb", "b"] if form == "dynamic" else ["cw_DequantizeLinear_Output", "w_DequantizeLinear_Output"]
    )
    for result in (in_form_of(onward.load(proto), updated), onward.transform.strip(updated)):
        assert written(result.to_proto()) == written(proto)
        (y,) = on_onnxruntime(result.to_proto(), {"x": X})
        assert np.mean((y - 1) ** 2) == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow("jax-QDQ QInt8 per channel", "jax-dynamic")
@pytest.mark.parametrize("form", ["QDQ QInt8 per channel", "dynamic"])
@pytest.mark.parametrize(
    "engine", ["numpy", pytest.param("torch", marks=needs("torch")), pytest.param("jax", marks=needs("jax"))]
)
def test_engines_agree(quantised, form, engine):
    """Frameworks' own derivatives of rounding are zero: gradients are those of the rules."""
    trainable = FLOATS if form == "dynamic" else None
    model = onward.prepare(quantised[form], loss="mse", optimizer="sgd:lr=0.05", trainable=trainable)
    options = {} if engine == "numpy" else {"compile": False}
    expected, *_ = steps(model, "onnxruntime", 3, threads=1)
    found, *_ = steps(model, engine, 3, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_integers_that_operators_take_are_not_trained(quantised):
    for form in set(FORMS) - set(QDQ) | {"dynamic"}:
        with pytest.raises(
            RecipeError, match=r"the weights of 2 operators are integers: `.*(QLinear|Integer)"
        ) as raised:
            onward.prepare(quantised[form], loss="mse")
        assert "--dequantize" in raised.value.hint


@pytest.mark.parametrize(
    "form", ["QDQ QInt8 per channel", "QOperator QUInt8", "QOperator QInt8 per channel", "dynamic"]
)
def test_dequantized(quantised, form):
    """The float model computes what the quantised one does but for rounding, and learns like any other."""
    with pytest.warns(UserWarning, match="tensors of integers are float weights now"):
        model = onward.prepare(quantised[form], loss="mse", optimizer="sgd:lr=0.05", dequantize=True)
    assert sorted(model.step().differentiated()) == ["b", "cb", "cw", "w"]
    result = onward.transform.strip(model).to_proto()
    assert not [node for node in result.graph.node if "Quantize" in node.op_type or "Integer" in node.op_type]
    inside = {"x": X * 0.5}  # the ranges were measured on X
    (expected,), (actual,) = (on_onnxruntime(proto, inside) for proto in (quantised[form], result))
    assert np.abs(actual - expected).max() < 0.02 * np.ptp(expected)
    losses, updated, _ = steps(model, "onnxruntime", threads=1)
    assert losses == sorted(losses, reverse=True)
    assert written(in_form_of(onward.load(quantised[form]), updated).to_proto()) == written(result)


def test_saturation_is_kept(quantised):
    """Quantisers drop a Relu or Clip whose bounds are the ends of a range."""
    form = "QOperator QUInt8"
    with pytest.warns(UserWarning, match="dequantized"):
        model = onward.transform.strip(onward.prepare(quantised[form], loss="mse", dequantize=True)).to_proto()
    assert not [node for node in model.graph.node if node.op_type == "Relu"]
    (expected,), (actual,) = (on_onnxruntime(proto, {"x": X * 3}) for proto in (quantised[form], model))
    assert np.abs(actual - expected).max() < 0.03 * np.ptp(expected)


def test_dequantized_recurrence(tmp_path):
    """Of an embedding, an LSTM and a matmul, as ONNX Runtime quantises them dynamically."""
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    g (int64[t,n] x) => (float[t,n,5] y) {
      e = Gather(table, x)  h, last, cell = LSTM <hidden_size = 6, direction = "bidirectional"> (e, w, r, b)
      t = Transpose <perm = [0, 2, 1, 3]> (h)  s = Constant <value = int64[3] {0, 0, 12}> ()  f = Reshape(t, s)
      y = MatMul(f, m)
    }""")
    shapes = {"table": (20, 8), "w": (2, 24, 8), "r": (2, 24, 6), "b": (2, 48), "m": (12, 5)}
    arrays = {name: RNG.uniform(-0.6, 0.6, shape).astype("f") for name, shape in shapes.items()}
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    onnx.save(proto, tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx", weight_type=INT8)
    quantized = onnx.load(tmp_path / "int8.onnx")
    assert any(node.op_type == "DynamicQuantizeLSTM" for node in quantized.graph.node)
    with pytest.warns(UserWarning, match="the model is dequantized: 4 tensors"):
        model = onward.prepare(quantized, loss="mse", dequantize=True)
    floats = {n: model.graph.initializers[n].const_value.numpy() for n in ("table", "w", "r", "m")}
    for name, array in floats.items():
        assert np.abs(array - arrays[name]).max() <= 1.3 / 255, name  # half a level, or a whole one for 7 bits
    words = {"x": RNG.integers(0, 20, (7, 3))}
    (expected,), (actual,) = (on_onnxruntime(p, words) for p in (quantized, onward.transform.strip(model).to_proto()))
    assert np.abs(actual - expected).max() < 0.03 * np.ptp(expected)


def test_only_quantized_models_are_dequantized():
    with pytest.raises(RecipeError, match="the model is not quantized"):
        onward.prepare(FLOAT, loss="mse", dequantize=True)


def test_what_is_in_front_of_integers_has_its_gradient(quantised):
    """The two formats are the same model, one with operators on integers, the other with rounding between floats."""
    dy = RNG.standard_normal((8, 3)).astype("f")
    forms = ("QDQ QUInt8", "QOperator QUInt8")
    models = [onward.differentiate.vjp(quantised[form], "y", ["x"]).to_proto() for form in forms]
    first, second = (on_onnxruntime(model, {"x": X, "dy": dy})[0] for model in models)
    assert np.abs(first).max() > 0
    close = np.isclose(first, second, rtol=1e-3, atol=1e-4)
    assert close.mean() > 0.99  # the runtime's kernels on integers may round a tie the other way


def test_arithmetic_on_integers_is_refused():
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    g (float[2] x) => (float[2] y) <float s = {0.1}, uint8 z = {128}> {
      q = QuantizeLinear(x, s, z)  a = Add(q, q)  y = DequantizeLinear(a, s, z)
    }""")
    with pytest.raises(UnsupportedError, match=r"`Add` .*: `q` holds the integers of a quantized tensor") as raised:
        onward.gradient(proto, "y", ["x"])
    assert "QDQ" in raised.value.hint


def test_integers_without_a_zero_point_and_shared_ones():
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    g (float[n,2] x) => (float[n,2] y) <int8[2,2] q = {1, -2, 3, 4}, int8[2,2] tied = {1, 2, 3, 4}, float s = {0.5}> {
      w = DequantizeLinear(q, s)  t = DequantizeLinear(tied, s)  u = DequantizeLinear(tied, s)
      a = MatMul(x, w)  b = MatMul(a, t)  y = MatMul(b, u)
    }""")
    model = onward.prepare(proto, loss="mse", optimizer="sgd:lr=0.1")
    assert model.step().differentiated() == ["w"]
    assert written(onward.transform.strip(model).to_proto()) == written(proto)
    stored = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in onward.transform.strip(model).to_proto().graph.initializer
    }
    np.testing.assert_array_equal(stored["q"], [[1, -2], [3, 4]])


@needs("torch")
def test_pytorch_goes_straight_through_pairs_and_nothing_else(quantised):
    import torch

    model = onward.prepare(quantised["QDQ QInt8 per channel"], loss="mse", optimizer="sgd:lr=0.05")
    expected, *_ = steps(model, "onnxruntime", 4, threads=1)
    carried, found = onward.to_torch(model), []
    for _ in expected:
        carried.optimizer.zero_grad()
        loss = carried.loss(carried.module(torch.tensor(X)), torch.ones(8, 3))
        loss.backward()
        carried.optimizer.step()
        found.append(loss.item())
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    dynamic = onward.prepare(quantised["dynamic"], loss="mse", trainable=FLOATS)
    with pytest.raises(UnsupportedError, match="rounds to integers"):
        onward.to_torch(dynamic, probe=False)


@needs("jax")
@pytest.mark.parametrize("form", ["QDQ QInt8", "dynamic"])
def test_jax_does_not_see_through_rounding(quantised, form):
    model = onward.prepare(quantised[form], loss="mse", trainable=FLOATS if form == "dynamic" else None)
    with pytest.raises(UnsupportedError, match="rounds to integers") as raised:
        onward.to_jax(model, probe=False)
    assert "onward.engines.start" in raised.value.hint
