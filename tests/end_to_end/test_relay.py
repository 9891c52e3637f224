"""Runs that go from PyTorch to Keras to JAX: 30 steps in each, and the losses are those of PyTorch alone."""

import gzip
import itertools
import re
import subprocess
import sys

import numpy as np
import pytest
from marks import needs

import onward

torch = pytest.importorskip("torch")

from paths import ROOT  # noqa: E402
from representatives import chosen  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402
from torch_runs import CASES, Loop, batches, without_dropout  # noqa: E402

pytestmark = [
    *(needs(name) for name in ("onnxscript", "tensorflow", "jax", "optax")),
    pytest.mark.usefixtures("one_torch_thread"),
]

LEG = 30


def lion(parameters):
    from onward.frameworks.torch.formulas import EXACT

    return EXACT["Lion"](parameters, lr=1e-3, weight_decay=0.01)


def decaying(optimizer):
    return lr_scheduler.ExponentialLR(optimizer, 0.97)


OPTIMIZERS = {
    "momentum, decaying": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), decaying),
    "adagrad, small accumulators": (lambda p: torch.optim.Adagrad(p, 1e-2, initial_accumulator_value=1e-6), None),
    "adam, large eps": (lambda p: torch.optim.Adam(p, 1e-2, eps=1e-3), None),
    "adamw": (lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-6, weight_decay=0.1), decaying),
    "rmsprop with momentum": (lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9, eps=1e-4), decaying),
    "lion": (lion, None),
}
GRID = list(itertools.product(CASES, OPTIMIZERS))
QUICK = {
    ("mlp", "lion"),
    ("cnn", "adagrad, small accumulators"),
}


@pytest.mark.slow("cnn-adagrad, small accumulators", "mlp-lion")
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow]) for pair in GRID],
)
def test_a_relay(name, optimizer):
    made, schedule = OPTIMIZERS[optimizer]
    case = without_dropout(CASES[name]._replace(optimizer=made, scheduler=schedule, clip=None))
    loop, given = Loop.of(case), batches(case, 3 * LEG, seed=1)
    expected = loop.steps(given[:LEG])
    training = loop.captured()
    expected += loop.steps(given[LEG:])
    losses, training = in_keras(training, given[LEG : 2 * LEG])
    more, _ = in_jax(training, given[2 * LEG :])
    np.testing.assert_allclose([*losses, *more], expected[LEG:], rtol=1e-5)


def in_keras(training, given):
    model = onward.to_keras(training)
    losses = []
    for inputs, target in given:
        model.reset_metrics()
        x = [array.numpy() for array in inputs.values()]
        losses.append(float(model.train_on_batch(x[0] if len(x) == 1 else x, target.numpy())))
    return losses, onward.from_keras(model)


def in_jax(training, given):
    import jax

    carried = onward.to_jax(training)
    step, state = jax.jit(carried.step), carried.state
    target_name = training.step().algorithm.inputs[0].name
    losses = []
    for inputs, target in given:
        batch = {**{key: x.numpy() for key, x in inputs.items()}, target_name: target.numpy()}
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, carried.training(state)


FORMS = {
    "sparse": ("softmax", "sparse_categorical_crossentropy", "labels"),
    "categorical": ("softmax", "categorical_crossentropy", "one hot"),
    "smooth": ("softmax", {"class_name": "CategoricalCrossentropy", "config": {"label_smoothing": 0.1}}, "one hot"),
    "binary": ("sigmoid", "binary_crossentropy", "binary"),
    "smooth binary": ("sigmoid", {"class_name": "BinaryCrossentropy", "config": {"label_smoothing": 0.1}}, "binary"),
    "focal": ("softmax", "categorical_focal_crossentropy", "one hot"),
    "binary focal": ("sigmoid", "binary_focal_crossentropy", "binary"),
    "divergence": ("softmax", "kl_divergence", "one hot"),
}


@pytest.mark.slow("binary", "sparse")
@pytest.mark.parametrize("form", chosen(FORMS, ["sparse", "binary", "focal"]))
def test_losses_behind_an_activation(form):
    """Keras looks behind a softmax or sigmoid, or has formulas of its own: what goes on elsewhere does the same."""
    import keras

    activation, loss, kind = FORMS[form]
    keras.utils.set_random_seed(0)
    rng, layers = np.random.default_rng(0), keras.layers
    model = keras.Sequential([layers.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(4, activation)])
    model.compile(keras.optimizers.Adam(0.01), loss if isinstance(loss, str) else keras.losses.deserialize(loss))
    labels = rng.integers(0, 4, (6, 8))
    targets = {"labels": labels, "one hot": np.eye(4, dtype="f")[labels], "binary": rng.integers(0, 2, (6, 8, 4))}[kind]
    given = [(x, y) for x, y in zip(rng.normal(size=(6, 8, 6)).astype("f"), targets, strict=True)]
    model.train_on_batch(*given[0])
    training, expected = onward.from_keras(model), []
    for batch in given[1:]:
        model.reset_metrics()
        expected.append(float(model.train_on_batch(*batch)))
    named = [({training.inputs[0].name: torch.tensor(x)}, torch.tensor(y)) for x, y in given[1:]]
    np.testing.assert_allclose(in_jax(training, named)[0], expected, rtol=1e-4)
    for live in (True, False):
        np.testing.assert_allclose(in_torch(training, named, live), expected, rtol=1e-4)


def in_torch(training, given, live):
    module, optimizer, _, loss = onward.to_torch(training, live=live)
    losses = []
    for inputs, target in given:
        optimizer.zero_grad()
        found = loss(module(*inputs.values()), target if target.ndim == 1 else target.float())
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("data", ["digits", "mnist", "packed mnist"])
def test_the_example(data, tmp_path):
    if data != "digits":
        write_mnist(tmp_path, pack=data == "packed mnist")
    script = ROOT / "examples" / "relay" / "relay.py"
    options = ["--leg", "3", "--out", tmp_path / "out", *([] if data == "digits" else ["--mnist", tmp_path])]
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, check=True)
    apart = [float(number) for number in re.findall(r"difference from PyTorch alone (\S+)", done.stdout)]
    assert len(apart) == 4 and max(apart) < 1e-5


def write_mnist(folder, *, pack):
    """A few images of noise, in the format of MNIST."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 100).astype(np.uint8)
    images = rng.integers(0, 100, (100, 28, 28)).astype(np.uint8) + labels[:, None, None] * 15
    for name, array in {"train-images-idx3-ubyte": images, "train-labels-idx1-ubyte": labels}.items():
        data = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()
        (folder / (f"{name}.gz" if pack else name)).write_bytes(gzip.compress(data) if pack else data)
