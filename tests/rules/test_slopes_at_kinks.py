"""Derivatives exactly where a function has a kink: those of the framework that a model comes from, on every engine.

Values are there often: a channel that is constant is exactly 0 after a normalization.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from marks import needs

import onward
from onward.engines import ENGINES, function, is_installed, start
from onward.errors import MismatchError

INSTALLED = [engine for engine in ENGINES if is_installed(engine)]
TRAINING = "ai.onnx.preview.training"

# ---- Clip ------------------------------------------------------------------------------------------------------------

ZERO_TO_SIX = "low = Constant <value = float {0}> () high = Constant <value = float {6}> () y = Clip(x, low, high)"
CLIPS = {
    "constants": (ZERO_TO_SIX, ["x"], [0, 0, 1, 0]),
    "initializers": ("y = Clip(x, zero, six)", ["x"], [0, 0, 1, 0]),
    "other bounds": ("y = Clip(x, minus, six)", ["x"], [1, 1, 1, 1]),
    "one bound each": ("a = Clip(x, zero) y = Clip(a, , six)", ["x"], [0, 1, 1, 1]),
    "a bound that is trained": ("y = Clip(x, zero, six)", ["x", "six"], [0, 1, 1, 1]),
}
"""Nodes, what is differentiated by, and the derivative at -1, 0, 3 and 6."""
OTHERS = {
    "Abs": ("y = Abs(x)", ["x"], [-1, 0, 1, 1]),
    "ReduceL1": ("y = ReduceL1(x)", ["x"], [-1, 0, 1, 1]),
    "ThresholdedRelu": ("y = ThresholdedRelu <alpha = 3.0> (x)", ["x"], [0, 0, 0, 1]),
}


@pytest.mark.parametrize("engine", INSTALLED)
def test_operators(engine: str) -> None:
    """A Clip from 0 to 6 is a ReLU6, with the slope 0 at its bounds. That of other Clips is 1."""
    x = np.array([-1, 0, 3, 6], np.float32)
    for name, (nodes, xs, expected) in (CLIPS | OTHERS).items():
        outputs = ", ".join(["dx", "db"][: len(xs)])
        quoted = ", ".join(f'"{one}"' for one in xs)
        model = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 21, "{TRAINING}": 1]> g (float[4] x) => (float[4] dx) '
            f"<float zero = {{0}}, float six = {{6}}, float minus = {{-2}}> "
            f'{{ {nodes} {outputs} = {TRAINING}.Gradient <xs = [{quoted}], y = "y"> ({", ".join(xs)}) }}'
        )
        found = function(model, engine=engine)({"x": x})["dx"]
        np.testing.assert_array_equal(found, np.asarray(expected, np.float32), err_msg=name)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


@needs("torch", "onnxscript")
def test_pytorch() -> None:
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    zeros, sixes = torch.zeros(2), torch.full((2,), 6.0)
    kinks = {
        "relu6": (F.relu6, [0, 6]),
        "hardtanh": (F.hardtanh, [-1, 1]),
        "hardtanh_0_6": (lambda x: F.hardtanh(x, 0, 6), [0, 6]),
        "hardsigmoid": (F.hardsigmoid, [-3, 3]),
        "hardswish": (F.hardswish, [-3, 3]),
        "hardswish_in_parts": (lambda x: x * F.relu6(x + 3) / 6, [-3, 3]),
        "clamp_0_6": (lambda x: x.clamp(0, 6), [0, 6]),
        "clamp_1_1": (lambda x: x.clamp(-1, 1), [-1, 1]),
        "clamp_min": (lambda x: x.clamp(min=0), [0, 1]),
        "clamp_tensors": (lambda x: x.clamp(zeros, sixes), [0, 6]),
        "clamp_min_tensor": (lambda x: torch.clamp_min(x, zeros), [0, 1]),
        "clamp_max_tensor": (lambda x: torch.clamp_max(x, sixes), [0, 6]),
        "threshold": (lambda x: F.threshold(x, 1.0, 0.0), [1, 2]),
        "hardshrink": (F.hardshrink, [-0.5, 0.5]),
        "softshrink": (F.softshrink, [-0.5, 0.5]),
        "leaky_relu": (F.leaky_relu, [0, 1]),
        "prelu": (lambda x: F.prelu(x, torch.tensor([0.25])), [0, 1]),
        "elu": (lambda x: F.elu(x, 2.0), [0, 1]),
        "selu": (F.selu, [0, 1]),
        "celu": (lambda x: F.celu(x, 2.0), [0, 1]),
        "abs": (torch.abs, [0, 1]),
        "maximum": (lambda x: torch.maximum(x, zeros), [0, 1]),
        "max": (lambda x: x.max(), [1, 1]),
        "max_dim": (lambda x: x.max(0).values, [1, 1]),
        "min_dim": (lambda x: x.view(1, 2).min(-1, keepdim=True).values, [1, 1]),
        "topk": (lambda x: x.topk(1).values, [1, 1]),
        "cosine_of_zeros": (lambda x: F.cosine_similarity(x, torch.tensor([1.0, 2]), 0), [0, 0]),
        "cosine_below_eps": (lambda x: F.cosine_similarity(x, torch.tensor([[1.0, 2]]), 1, eps=10.0), [1, 2.5]),
    }

    class Kinks(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.points = torch.nn.ParameterDict({name: torch.tensor(at).float() for name, (_, at) in kinks.items()})

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": sum(compute(self.points[name] * x.mean()).sum() for name, (compute, _) in kinks.items())}

    module, x = Kinks(), torch.ones(2)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    model = onward.from_torch(module, x, loss="loss", optimizer=optimizer, probe=False)
    module(x)["loss"].backward()
    for engine in INSTALLED:
        options = {} if engine in ("onnxruntime", "numpy") else {"compile": False}
        with start(model, engine=engine, **options) as running:
            found = running.gradients({"x": x.numpy()})
        for name, parameter in module.points.items():
            expected = parameter.grad.numpy()
            np.testing.assert_allclose(found[f"points.{name}"], expected, rtol=1e-4, err_msg=f"{name} on {engine}")


@needs("torch", "onnxscript")
def test_a_channel_that_is_constant() -> None:
    """After BatchNorm it is exactly 0, where ReLU6 has no slope: its shift stays as it is."""
    torch = pytest.importorskip("torch")
    nn = torch.nn
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU6(), nn.Flatten(), nn.Linear(4 * 9, 3)
    )
    with torch.no_grad():
        module[0].weight[1] = 0
    x, y = torch.randn(4, 2, 3, 3), torch.tensor([0, 1, 2, 0])
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    model = onward.from_torch(module, x, loss=nn.CrossEntropyLoss(), optimizer=optimizer)
    assert [node.op_type for node in model.graph].count("Clip") == 1
    with start(model) as running:
        found = running.gradients(dict(zip(running.inputs, (x.numpy(), y.numpy()), strict=True)))
    nn.CrossEntropyLoss()(module(x), y).backward()
    assert found["1.bias"][1] == 0
    np.testing.assert_allclose(found["1.bias"], module[1].bias.grad.numpy(), rtol=1e-4, atol=1e-6)


@needs("torch", "onnxscript")
def test_another_slope_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is exactly 0 in PyTorch alone counts: it is no rounding error."""
    torch = pytest.importorskip("torch")
    from onward.frameworks.torch import translations

    monkeypatch.delitem(translations.TRANSLATIONS, torch.ops.aten.hardtanh.default)
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Hardtanh(0, 1), torch.nn.Linear(2, 1))
    torch.nn.init.zeros_(module[0].weight)
    torch.nn.init.zeros_(module[0].bias)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    with pytest.raises(MismatchError, match="gradient"):
        onward.from_torch(module, torch.ones(3, 2), loss=torch.nn.MSELoss(), optimizer=optimizer)


# ---- JAX -------------------------------------------------------------------------------------------------------------


@needs("jax", "optax")
def test_jax() -> None:
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    jnp, nn = jax.numpy, jax.nn
    kinks = {
        "relu": (nn.relu, [0.0, 1]),
        "relu6": (nn.relu6, [0.0, 6]),
        "hard_tanh": (nn.hard_tanh, [-1.0, 1]),
        "hard_sigmoid": (nn.hard_sigmoid, [-3.0, 3]),
        "hard_swish": (nn.hard_swish, [-3.0, 3]),
        "clip": (lambda x: jnp.clip(x, 0, 6), [0.0, 6]),
        "clamp": (lambda x: jax.lax.clamp(0.0, x, 6.0), [0.0, 6]),
        "leaky_relu": (nn.leaky_relu, [0.0, 1]),
        "abs": (jnp.abs, [0.0, 1]),
        "softplus": (nn.softplus, [0.0, 1]),
        "logaddexp": (lambda x: jnp.logaddexp(x, jnp.ones(2)), [0.0, 1]),
        "max": (jnp.max, [1.0, 1]),
    }

    def loss(points: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        return sum((compute(points[name]) * batch["x"].mean()).sum() for name, (compute, _) in kinks.items())

    points = {name: jnp.asarray(at) for name, (_, at) in kinks.items()}
    batch = {"x": np.ones(2, np.float32)}
    model = onward.from_jax(loss, points, batch, optimizer=optax.sgd(0.1))
    expected = jax.grad(loss)(points, batch)
    for engine in ("onnxruntime", "jax"):
        with start(model, engine=engine) as running:
            found = running.gradients(batch)
        assert len(found) == len(expected)
        for name, array in found.items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-5, err_msg=f"{name} on {engine}")
