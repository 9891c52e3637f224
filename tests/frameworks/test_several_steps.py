"""A GAN with an encoder: three alternating steps in one file, in JAX and TensorFlow as in a plain loop of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from marks import needs
from onnx import helper, numpy_helper

import onward
from onward.errors import UnsupportedError

torch = pytest.importorskip("torch")

_SIZES = {
    "generator.0": (3, 8),
    "generator.2": (8, 4),
    "discriminator.0": (4, 8),
    "discriminator.2": (8, 1),
    "encoder": (4, 3),
}
_ROUNDS = 3
_READ = {"discriminator": ("z", "x"), "generator": ("z",), "information": ("z", "target")}


class Gan(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = {name: torch.nn.Linear(*sizes) for name, sizes in _SIZES.items()}
        self.generator = torch.nn.Sequential(layers["generator.0"], torch.nn.Tanh(), layers["generator.2"])
        self.discriminator = torch.nn.Sequential(layers["discriminator.0"], torch.nn.Tanh(), layers["discriminator.2"])
        self.encoder = layers["encoder"]


def _training(gan: Gan) -> onward.Model:
    arrays = {name: x.detach().numpy().copy() for name, x in gan.named_parameters()}
    nodes = []

    def apply(network: str, x: str, result: str) -> None:
        for layer in [name for name in _SIZES if name.startswith(network)]:
            y = result if layer in (f"{network}.2", network) else f"{result}/{layer}"
            nodes.append(helper.make_node("Gemm", [x, f"{layer}.weight", f"{layer}.bias"], [y], transB=1))
            if y != result:
                nodes.append(helper.make_node("Tanh", [y], [f"{y}/tanh"]))
            x = f"{y}/tanh"

    apply("generator", "z", "generated")
    apply("discriminator", "generated", "fake")
    apply("discriminator", "x", "real")
    apply("encoder", "generated", "code")
    interface = [
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", size]) for name, size in sizes.items()]
        for sizes in ({"z": 3, "x": 4}, {"fake": 1, "real": 1, "code": 3})
    ]
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    proto = helper.make_model(helper.make_graph(nodes, "gan", *interface, weights))
    adam = "adam:lr=0.01,beta1=0.5,eps=1e-3"
    both = ["fake=bce_with_logits:constant=0", "real=bce_with_logits:constant=1"]
    model = onward.prepare(
        onward.load(proto), loss=both, trainable="discriminator.*", optimizer=adam, name="discriminator"
    )
    model = onward.prepare(
        model, loss=both[0].replace("=0", "=1"), trainable="generator.*", optimizer=adam, name="generator", append=True
    )
    momentum, trained = "sgd:lr=0.1,momentum=0.9", ["generator.*", "encoder.*"]
    return onward.prepare(
        model, loss="code=mse", trainable=trained, optimizer=momentum, name="information", append=True
    )


def _plain_loop(gan: Gan, batch: dict[str, np.ndarray]) -> Iterator[tuple[str, float]]:
    """Yield the losses of alternating steps of PyTorch."""
    z, x, target = (torch.from_numpy(batch[name]) for name in ("z", "x", "target"))
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    zeros, ones = torch.zeros(len(z), 1), torch.ones(len(z), 1)
    adam = {"lr": 0.01, "betas": (0.5, 0.999), "eps": 1e-3}
    information = [*gan.generator.parameters(), *gan.encoder.parameters()]
    steps = {
        "discriminator": (
            torch.optim.Adam(gan.discriminator.parameters(), **adam),
            lambda: bce(gan.discriminator(gan.generator(z)), zeros) + bce(gan.discriminator(x), ones),
        ),
        "generator": (
            torch.optim.Adam(gan.generator.parameters(), **adam),
            lambda: bce(gan.discriminator(gan.generator(z)), ones),
        ),
        "information": (
            torch.optim.SGD(information, lr=0.1, momentum=0.9),
            lambda: torch.nn.functional.mse_loss(gan.encoder(gan.generator(z)), target),
        ),
    }
    for _ in range(_ROUNDS):
        for name, (optimizer, compute) in steps.items():
            gan.zero_grad()
            loss = compute()
            loss.backward()
            optimizer.step()
            yield name, float(loss.detach())


@pytest.fixture
def objects() -> tuple[Gan, onward.Model, dict[str, np.ndarray]]:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    gan = Gan()
    batch = {
        name: rng.normal(size=(6, size)).astype(np.float32) for name, size in {"z": 3, "x": 4, "target": 3}.items()
    }
    return gan, _training(gan), batch


def _assert_trained(after: onward.Model, gan: Gan) -> None:
    for name, expected in gan.named_parameters():
        np.testing.assert_allclose(after.array(name), expected.detach().numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    assert [int(after.array(name)) for name in ("step", "step_1", "step_2")] == [_ROUNDS] * 3


def test_steps_of_torch_share_a_module(objects: Any) -> None:
    gan, training, batch = objects
    module, optimizer, scheduler, loss = onward.to_torch(training)
    assert scheduler == dict.fromkeys(_READ)
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    module.double().float()  # the steps see tensors that are replaced
    for name, expected in _plain_loop(gan, batch):
        inputs = [tensors[key] for key in _READ[name] if key != "target"]
        targets = [tensors["target"]] if name == "information" else []
        value = loss[name](module.steps[name](*inputs), *targets)
        optimizer[name].zero_grad()
        value.backward()
        optimizer[name].step()
        np.testing.assert_allclose(float(value.detach()), expected, rtol=1e-5)
    for name, expected in gan.named_parameters():
        torch.testing.assert_close(module.state_dict()[name], expected.detach(), rtol=1e-4, atol=1e-6)
    code = gan.encoder(gan.generator(tensors["z"]))
    torch.testing.assert_close(module(tensors["z"], tensors["x"])["code"], code, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(module.to_model().array("encoder.bias"), module.arrays()["encoder.bias"])


@needs("jax", "optax")
def test_steps_of_jax_share_a_state(objects: Any) -> None:
    import jax

    gan, training, batch = objects
    carried = onward.to_jax(training, probe=False)
    steps, state = {name: jax.jit(step) for name, step in carried.step.items()}, carried.state
    for name, expected in _plain_loop(gan, batch):
        state, metrics = steps[name](state, batch)
        np.testing.assert_allclose(float(metrics["loss"]), expected, rtol=1e-5)
    after = carried.training(state)
    _assert_trained(after, gan)
    again = onward.to_jax(after, probe=False)
    same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), again.state, state)
    assert all(jax.tree.leaves(same))
    outputs = again.apply(state, {"z": batch["z"], "x": batch["x"]})
    expected = gan.encoder(gan.generator(torch.from_numpy(batch["z"]))).detach().numpy()
    np.testing.assert_allclose(outputs["code"], expected, rtol=1e-4, atol=1e-6)


@needs("tensorflow")
@pytest.mark.slow
def test_steps_of_a_saved_model_share_variables(objects: Any, tmp_path: Path) -> None:
    import tensorflow as tf

    gan, training, batch = objects
    tf.saved_model.save(onward.to_tensorflow(training), str(tmp_path / "gan"))
    module = tf.saved_model.load(str(tmp_path / "gan"))
    for name, expected in _plain_loop(gan, batch):
        metrics = module.train_step[name](**{key: batch[key] for key in _READ[name]})
        np.testing.assert_allclose(float(metrics["loss"]), expected, rtol=1e-5)
    tf.saved_model.save(module, str(tmp_path / "trained"))
    for after in (onward.from_tensorflow(module), onward.from_tensorflow(tmp_path / "trained")):
        _assert_trained(after, gan)


def test_normalizations_follow_the_step_that_trains_them() -> None:
    """One that a step freezes keeps its statistics there; so it does on the engines."""
    shapes = {"g_weight": (4, 3), "g_scale": (4,), "g_bias": (4,), "d_weight": (1, 4), "d_scale": (4,), "d_bias": (4,)}
    text = """<ir_version: 10, opset_import: ["" : 20]>
        gan (float[n,3] z, float[n,4] x) => (float[n,1] fake, float[n,1] real) {
            h = Gemm <transB: int = 1> (z, g_weight)
            generated = BatchNormalization (h, g_scale, g_bias, g_mean, g_var)
            normal = BatchNormalization (generated, d_scale, d_bias, d_mean, d_var)
            fake = Gemm <transB: int = 1> (normal, d_weight)
            normal_x = BatchNormalization (x, d_scale, d_bias, x_mean, x_var)
            real = Gemm <transB: int = 1> (normal_x, d_weight)
        }"""
    proto, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrays |= {f"{key}_{name}": np.full(4, name == "var", np.float32) for key in "gdx" for name in ("mean", "var")}
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    both, options = ["fake=mse:constant=0", "real=mse:constant=1,scale=0.5"], {"optimizer": "sgd:lr=0.1", "clip": 1.0}
    training = onward.prepare(onward.load(proto), loss=both, trainable="d_*", name="d", **options)
    training = onward.prepare(training, loss="fake=mse", trainable="g_*", name="g", append=True, **options)
    module, optimizer, _, loss = onward.to_torch(training)
    engine = onward.engines.start(training, threads=1)
    for _ in range(2):
        batch = {"z": rng.normal(size=(6, 3)), "x": rng.normal(size=(6, 4)), "target": rng.normal(size=(6, 1))}
        batch = {name: array.astype(np.float32) for name, array in batch.items()}
        engine.step(batch)
        z, x, target = map(torch.from_numpy, batch.values())
        for name, inputs, targets in (("d", (z, x), ()), ("g", (z,), (target,))):
            optimizer[name].zero_grad()
            loss[name](module.steps[name](*inputs), *targets).backward()
            optimizer[name].step()
    after = engine.updated()
    for name in arrays:
        np.testing.assert_allclose(module.arrays()[name], after.array(name), rtol=1e-4, atol=1e-6, err_msg=name)


@needs("keras")
def test_keras_holds_one_step(objects: Any) -> None:
    with pytest.raises(UnsupportedError, match="has 3 steps") as refusal:
        onward.to_keras(objects[1])
    assert "onward.to_torch(training)" in str(refusal.value)
