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
    model = onward.prepare(proto, loss="mse", optimizer="sgd:lr=0.05")
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
    model = onward.prepare(quantised[form], loss="mse", optimizer="sgd:lr=0.05")
    options = {} if engine == "numpy" else {"compile": False}
    expected, *_ = steps(model, "onnxruntime", 3, threads=1)
    found, *_ = steps(model, engine, 3, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_integers_that_operators_take_are_not_trained(quantised):
    for form in set(FORMS) - set(QDQ):
        with pytest.raises(RecipeError, match=r"nothing is left to train: .* a setting of QLinearConv") as raised:
            onward.prepare(quantised[form], loss="mse")
        assert "QDQ" in raised.value.hint


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
    dynamic = onward.prepare(quantised["dynamic"], loss="mse")
    with pytest.raises(UnsupportedError, match="rounds to integers"):
        onward.to_torch(dynamic, probe=False)


@needs("jax")
@pytest.mark.parametrize("form", ["QDQ QInt8", "dynamic"])
def test_jax_does_not_see_through_rounding(quantised, form):
    with pytest.raises(UnsupportedError, match="rounds to integers") as raised:
        onward.to_jax(onward.prepare(quantised[form], loss="mse"), probe=False)
    assert "onward.engines.start" in raised.value.hint
