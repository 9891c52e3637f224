"""What only the torch engine has: unsigned integers, compiled steps, precision. Expected values are
those of numpy and ONNX Runtime."""

from __future__ import annotations

import warnings
from pathlib import Path

import ml_dtypes
import models
import numpy as np
import onnx
import pytest
from framework_training import trained
from marks import needs
from onnx import parser

import onward
from onward.engines import function, start
from onward.engines.framework import NotOnHost
from onward.recipe.optimizers import OPTIMIZERS

pytestmark = [needs("torch"), pytest.mark.usefixtures("one_torch_thread")]


# ---- types that PyTorch has few functions for ------------------------------------------------------------------------

UNSIGNED = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.floor_divide,
    "Mod": np.remainder,
    "Max": np.maximum,
    "Less": np.less,
    "Equal": np.equal,
    "BitwiseXor": np.bitwise_xor,
}


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("operator", UNSIGNED)
def test_unsigned_integers_wrap_around(operator, dtype):
    rng = np.random.default_rng(0)
    x, y = (rng.integers(1, np.iinfo(dtype).max, (5, 7), dtype, endpoint=True) for _ in range(2))
    y[0] = x[0]
    result = "bool" if operator in ("Less", "Equal") else dtype
    text = f'<ir_version: 10, opset_import: ["": 21]> g ({dtype}[5,7] x, {dtype}[5,7] y) => ({result}[5,7] z)'
    text += f" {{ z = {operator}(x, y) }}"
    found = function(parser.parse_model(text), engine="torch")({"x": x, "y": y})["z"]
    expected = UNSIGNED[operator](x, y)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.uint32])
def test_types_are_the_same_there_and_back(dtype):
    from onward.engines.torch import Torch

    size = np.dtype(dtype).itemsize
    array = np.arange(2 ** (8 * min(size, 2)), dtype=f"u{size}").view(dtype).reshape(-1, 2)
    assert Torch().supports(array.dtype)
    back = Torch().array(Torch().tensor(array))
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back.view(f"u{size}"), array.view(f"u{size}"))


# ---- training --------------------------------------------------------------------------------------------------------


def digits(optimizer="sgd:lr=0.1", steps=6, **recipe):
    """A training model, and batches for it."""
    model = onward.prepare(models.digits_mlp(), loss="cross_entropy", optimizer=optimizer, **recipe)
    rng = np.random.default_rng(0)
    with start(model) as engine:
        image = next(name for name in engine.inputs if name != "labels")
    return model, [
        {image: rng.standard_normal((16, 64)).astype("f"), "labels": rng.integers(0, 10, 16)} for _ in range(steps)
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name):
    model, batches = digits(name, freeze=["*bias"] if name == "muon" else [])  # which is for matrices
    expected, state = trained(model, batches, "onnxruntime", threads=1)
    losses, other = trained(model, batches, "torch", compile=False)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for key in state:
        size = max(np.abs(state[key]).max(initial=0), 1e-3)
        assert np.abs(state[key].astype(np.float64) - other[key]).max(initial=0) <= 1e-4 * size, key


@pytest.mark.parametrize("options", [{"compile": False}, pytest.param({}, marks=pytest.mark.slow)], ids=str)
def test_random_numbers_of_many_elements(options):
    """Many are counted on the device; few, as in test_agreement.py, on the host."""
    width, rng = 4096, np.random.default_rng(0)
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 8] x) => (float[n, 4] y)
        { h = MatMul(x, w1)  ratio = Constant<value = float {0.4}>()  d = Dropout(h, ratio)  y = MatMul(d, w2) }"""
    proto = parser.parse_model(text)
    for name, shape in (("w1", (8, width)), ("w2", (width, 4))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype("f"), name))
    batches = [{"x": rng.standard_normal((8, 8)).astype("f"), "labels": rng.integers(0, 4, 8)} for _ in range(4)]
    model = onward.prepare(proto, loss="cross_entropy", optimizer="sgd:lr=0.01")
    expected, _ = trained(model, batches, "onnxruntime", threads=1)
    losses, _ = trained(model, batches, "torch", **options)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_quantised_tensors_pass_gradients():
    """Straight through the rounding, as our rules have it."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 8] x) => (float[n, 4] y) <float scale = {0.05}, int8 zero = {3}>
        { q = QuantizeLinear(w, scale, zero)  d = DequantizeLinear(q, scale, zero)  y = MatMul(x, d) }"""
    rng = np.random.default_rng(0)
    proto = parser.parse_model(text)
    weights = 3 * rng.standard_normal((8, 4)).astype("f")  # of which some saturate
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    model = onward.prepare(proto, loss="cross_entropy", optimizer="sgd")
    batch = {"x": rng.standard_normal((8, 8)).astype("f"), "labels": rng.integers(0, 4, 8)}
    with start(model, threads=1) as reference, start(model, engine="torch", compile=False) as engine:
        expected, found = reference.gradients(batch)["w"], engine.gradients(batch)["w"]
    assert (expected == 0).any()
    assert (expected != 0).any()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


# ---- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_step_is_compiled_once_and_not_for_an_odd_batch():
    """Which runs operator by operator, with the same numbers, in turn with compiled steps that
    write into the state.
    """
    model, batches = digits("adam:lr=0.01", steps=4)
    small = {name: array[:5] for name, array in batches[0].items()}
    large = {name: np.concatenate([array, array]) for name, array in batches[0].items()}
    batches = [*batches, small, batches[0], small, small, large]
    expected, state = trained(model, batches, "onnxruntime", threads=1)
    said = []
    losses, other = trained(model, batches, "torch", on_compile=said.append)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for key in state:
        np.testing.assert_allclose(other[key], state[key], rtol=1e-4, atol=1e-6)
    assert len(said) == 2
    assert "labels [16]" in said[0]
    assert "labels [32]" in said[1]


@pytest.mark.slow
def test_accumulated_gradients_are_compiled():
    """Whether a step updates the parameters depends on a counter."""
    model, batches = digits("adam:lr=0.01", accumulate=2)
    expected, state = trained(model, batches, "onnxruntime", threads=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        losses, other = trained(model, batches, "torch")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for key in state:
        np.testing.assert_allclose(other[key], state[key], rtol=1e-4, atol=1e-6)


def test_what_depends_on_values_runs_without_being_compiled():
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 8] x) => (float[n, 4] y)
        { h = MatMul(x, w)  s = ReduceSum<keepdims = 0>(x)  zero = Constant<value = float {0.0}>()  c = Greater(s, zero)
          y = If(c) <then_branch = t () => (float[n, 4] a) { a = Identity(h) },
                     else_branch = e () => (float[n, 4] b) { b = Neg(h) }> }"""
    rng = np.random.default_rng(0)
    proto = parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal((8, 4)).astype("f"), "w"))
    model = onward.prepare(proto, loss="cross_entropy", optimizer="sgd:lr=0.1")
    batches = [{"x": rng.standard_normal((8, 8)).astype("f"), "labels": rng.integers(0, 4, 8)} for _ in range(4)]
    expected, _ = trained(model, batches, "onnxruntime", threads=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, _ = trained(model, batches, "torch")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert sum("the step is not compiled" in str(warning.message) for warning in caught) == 1


def test_a_traced_tensor_has_no_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from onward.engines.torch import Torch

    framework = Torch()
    tensor = framework.tensor(np.zeros(3, np.float32))
    with FakeTensorMode() as mode:
        with pytest.raises(NotOnHost):
            framework.array(mode.from_tensor(tensor))
        constant = framework.tensor(np.ones(3, np.float32))
    assert framework.array(constant).tolist() == [1, 1, 1]


# ---- recordings ------------------------------------------------------------------------------------------------------


def test_what_depends_on_values_is_not_recorded():
    """And what depends on sizes alone is, with its derivative."""
    import torch

    from onward.engines.torch.compilation import Recorded, Recording

    def switch(values):
        return [values[0] * 2 if float(values[0].sum()) > 0 else -values[0]]

    def square(values):
        return [values[0] * values[0], values[1]]

    switched, squared = Recorded(switch), Recorded(square)
    size = np.array([3])
    for x in (torch.ones(3), -torch.ones(3)):
        assert switched([x])[0].equal(switch([x])[0])
        leaf = x.clone().requires_grad_()
        y, known = squared([leaf, size])
        y.sum().backward()
        assert leaf.grad.equal(2 * x) and known is size
    assert [type(version) for version in squared._versions.values()] == [Recording]
    assert list(switched._versions.values()) == [switch]


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_statistics_are_those_of_pytorch(momentum):
    import torch

    from onward.engines.torch.layers import batch_normalization_at_once

    layer = torch.nn.BatchNorm2d(3, momentum=1 - momentum)
    x, mean, variance = torch.randn(5, 3, 4, 4) * 3 + 1, torch.zeros(3), torch.ones(3)
    y, new_mean, new_variance = batch_normalization_at_once(
        x, layer.weight, layer.bias, mean, variance, epsilon=layer.eps, momentum=momentum, training_mode=1, outputs=3
    )
    torch.testing.assert_close(y, layer(x))
    torch.testing.assert_close(new_mean, layer.running_mean)
    kept = momentum * variance
    torch.testing.assert_close((new_variance - kept) * (80 / 79) + kept, layer.running_var)


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "close"), [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_products_with_half_of_the_bits(precision, close):
    model, batches = digits("adam:lr=0.01")
    exact, _ = trained(model, batches, "torch", compile=False)
    losses, state = trained(model, batches, "torch", compile=False, precision=precision)
    np.testing.assert_allclose(losses, exact, rtol=close)
    assert losses != exact
    assert {array.dtype for array in state.values() if array.dtype.kind == "f"} == {np.dtype(np.float32)}
    with start(model, engine="torch", compile=False, precision=precision) as engine:
        assert all(array.dtype == np.float32 for array in engine.evaluate(batches[0]).values())


def test_settings_are_those_of_before_when_a_step_is_done():
    import torch

    model, batches = digits(steps=1)
    before = torch.backends.cudnn.allow_tf32
    trained(model, batches, "torch", compile=False, deterministic=True, precision="tf32")
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.allow_tf32 == before
    assert torch.is_grad_enabled()


def test_borders_of_regions_round_halves_away_from_zero():
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 2, 8, 8] x, float[4, 5] rois) => (float[4, 2, 2, 3] y)
        { y = MaxRoiPool<pooled_shape = [2, 3], spatial_scale = 0.5>(x, rois) }"""
    x = np.random.default_rng(0).standard_normal((1, 2, 8, 8)).astype("f")
    rois = np.array([[0, 1, 1, 5, 5], [0, 3, 1, 9, 7], [0, 5, 5, 5, 5], [0, 0, 3, 13, 13]], "f")
    expected, found = (
        function(parser.parse_model(text), engine=engine)({"x": x, "rois": rois})["y"]
        for engine in ("onnxruntime", "torch")
    )
    np.testing.assert_array_equal(found, expected)


def test_a_library_that_a_kill_left_empty_is_compiled_again(monkeypatch):
    """The compiler finds it in its cache, and looks no further; where that does not help, the step
    runs as it is.
    """
    import torch
    from torch._inductor.exc import InductorError

    from onward.engines.torch import compilation

    library = Path(compilation.cache_dir()) / "onward-test" / "empty.main.so"
    library.parent.mkdir(parents=True, exist_ok=True)

    def compiled(self):
        if library.exists():
            raise InductorError(ImportError(f"{library}: file too short"), None)
        return lambda state, constants, batch: ({}, {"loss": "compiled"})

    monkeypatch.setattr(compilation._Traced, "compiled", compiled)
    library.touch()
    step = compilation.CompiledStep(lambda state, constants, batch: ({}, {"loss": batch["x"].sum()}), None)
    assert step({}, {}, {"x": torch.ones(2)})[1]["loss"] == "compiled"
    assert not library.exists()
    monkeypatch.setattr(compilation, "_is_torn_library", lambda error: False)
    library.touch()
    with pytest.warns(UserWarning, match="step is not compiled.*file too short"):
        assert step({}, {}, {"x": torch.ones(3)})[1]["loss"] == 3
    library.unlink()
    library.parent.rmdir()


def test_a_step_of_very_many_nodes_is_not_compiled(monkeypatch):
    from onward.engines import torch as engine

    model, batches = digits(steps=1)
    expected = trained(model, batches, "torch", compile=False)
    monkeypatch.setattr(engine, "_MOST_NODES_ON_CPU", 3)
    with pytest.warns(UserWarning, match="the step is not compiled: compiling its .* nodes would take longer"):
        found = trained(model, batches, "torch")
    np.testing.assert_equal(found, expected)
