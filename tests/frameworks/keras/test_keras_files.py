"""Runs as `.keras` files: loaded and trained where there is no Onward, on each of Keras's backends, and read back."""

from __future__ import annotations

import sys
import zipfile

import models
import numpy as np
import pytest
from marks import needs

import onward

keras = pytest.importorskip("keras")
from keras_runs import batches, layers, named, on_backend, real, whole  # noqa: E402

from onward.engines import start  # noqa: E402
from onward.errors import InvalidModelError, UnsupportedError  # noqa: E402
from onward.frameworks.keras import from_keras  # noqa: E402
from onward.frameworks.run_files import restore, write  # noqa: E402

pytestmark = [needs("keras"), needs("tensorflow")]

STEPS = 5
GOES_ON = """
import sys
sys.modules["onward"] = None  # importing it fails
import keras, numpy as np
import run

model, data, losses = keras.models.load_model("run.keras"), np.load("data.npz"), []
for i in range(int(data["steps"])):
    model.reset_metrics()
    losses.append(model.train_on_batch(data[f"x{i}"], data[f"y{i}"], return_dict=True)["loss"])
np.save("losses.npy", np.array(losses, np.float64))
model.save("later.keras")
model.fit(data["x0"], data["y0"], batch_size=3, verbose=0)
model.predict(data["x0"], verbose=0)
"""


def prepared(name):
    """A training model, and batches for it."""
    match name:
        case "mlp":
            model = onward.load(models.digits_mlp())
            options = {"optimizer": "adamw:lr=1e-2,eps=1e-3", "clip": "norm:1.0", "schedule": "cosine:steps=20"}
            return onward.prepare(model, loss="cross_entropy", **options), batches(real(64), whole(10))
        case "keras's own":
            model = onward.load(models.digits_mlp())
            options = {
                "optimizer": "adamw:lr=1e-2,eps=1e-3,variant=keras,weight_decay=0.1",
                "schedule": "linear:steps=20",
            }
            groups = [{"match": "*bias", "weight_decay": 0.0}]
            return onward.prepare(model, loss="cross_entropy", groups=groups, **options), batches(real(64), whole(10))
        case "cnn":
            loss, model = "cross_entropy:label_smoothing=0.1", onward.load(models.small_cnn())
            return onward.prepare(model, loss=loss, optimizer="momentum:lr=1e-2"), batches(real(1, 8, 8), whole(10))
        case "transformer":
            model = onward.transform.extract(
                onward.load(models.small_transformer()), inputs=["tokens"], outputs=["logits"]
            )
            options = {"loss": "cross_entropy:axis=-1,label_smoothing=0.1", "optimizer": "adam:lr=1e-3,eps=1e-3"}
            return onward.prepare(model, **options), batches(whole(32, 12), whole(32, 12))
        case "lstm":
            x = layers.Input((6, 4))
            made = keras.Model(
                x, layers.Dense(3)(layers.Bidirectional(layers.LSTM(5))(layers.GRU(4, return_sequences=True)(x)))
            )
            made.compile("sgd", "mse")
            plain = onward.transform.strip(from_keras(made, probe=False))
            return onward.prepare(plain, loss="mse", optimizer="rmsprop:lr=1e-2,eps=1e-3"), batches(real(6, 4), real(3))
    raise ValueError(name)


def goes_on(name, folder, *backends, go=lambda folder, backend: on_backend(backend, "-c", GOES_ON, folder=folder)):
    """Both sides make the same steps, from the same file; their losses and their state are the same."""
    training, data = prepared(name)
    with start(training, threads=1) as engine:  # a run that has begun
        for _ in range(3):
            engine.step(named(engine.inputs, next(data)))
        for key, array in engine.state().items():
            training.set(key, array)
        given = [next(data) for _ in range(STEPS)]
        expected = [float(engine.step(named(engine.inputs, batch))["loss"]) for batch in given]
        state = engine.state()
    path = folder / "run.keras"
    assert write(training, "keras", path) == [path, folder / "run.py"]
    arrays = {f"{key}{i}": array for i, batch in enumerate(given) for key, array in zip("xy", batch, strict=True)}
    np.savez(folder / "data.npz", steps=STEPS, **arrays)
    for backend in backends:
        go(folder, backend)
        np.testing.assert_allclose(np.load(folder / "losses.npy"), expected, rtol=1e-5, err_msg=backend)
        back = restore("keras", folder / "later.keras", training)
        for key, array in state.items():
            found = back.array(key)
            assert found.dtype == array.dtype
            np.testing.assert_allclose(found, array, rtol=1e-3, atol=1e-5, err_msg=f"{key} on {backend}")
    return training


def in_this_process(folder, backend):
    """In which nothing of ours can be imported then; `test_all_backends` starts others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "onward"]:
            patch.setitem(sys.modules, name, None)
        try:
            exec(GOES_ON, {})
        finally:
            sys.modules.pop("run", None)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A training model that went on as a file of Keras, and the folder of that. To write one takes seconds."""
    folder = tmp_path_factory.mktemp("keras")
    return goes_on("keras's own", folder, "tensorflow", go=in_this_process), folder


def test_a_run_goes_on_without_us(written):
    text = (written[1] / "run.py").read_text()
    assert "import onward" not in text and "from onward" not in text
    compile(text, "run.py", "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "keras's own", "cnn", "lstm", "transformer"])
def test_all_backends(name, tmp_path):
    goes_on(name, tmp_path, "tensorflow", "jax", "torch")


def test_only_the_state_of_the_same_training_model_is_read(written):
    training, path = written[0], written[1] / "run.keras"
    same = restore("keras", path, training)
    np.testing.assert_array_equal(same.array("fc1.weight"), training.array("fc1.weight"))
    with pytest.raises(UnsupportedError, match="holds the state of a run"):
        restore("keras", path)
    other = onward.prepare(onward.load(models.digits_mlp(16)), loss="cross_entropy", optimizer="sgd")
    with pytest.raises(UnsupportedError, match=r"fc1.weight` is \[32, 64\], where the training model has \[16, 64\]"):
        restore("keras", path, other)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.weights.h5", b"nothing")
    with pytest.raises(InvalidModelError, match="is not a file of Keras"):
        restore("keras", path, training)
