"""Checkpoints as scripts of Keras and TensorFlow write them, by callbacks and in loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STEPS = 10
_RNG = np.random.default_rng(0)
DATA = [(_RNG.random((8, 8), "float32"), _RNG.integers(0, 3, 8)) for _ in range(2 * STEPS)]


class KerasLayout(NamedTuple):
    """What a script saves of a compiled model."""

    train: Callable[[Any, Path], Any]
    """Trains for ten steps and saves."""
    file: str = "run"
    like: bool = True
    """True if the file has no layers, which a training model must have then."""
    form: str = ""
    """The format that Onward writes."""
    load: Callable[[Any, Path], Any] | None = None
    """Returns the model with what Onward wrote."""
    refusal: str = ""


def compiled(seed: int = 0) -> Any:
    import keras

    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(6, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(1e-2, epsilon=1e-3), loss=loss)
    return model


def steps(model: Any, data: Any) -> list[float]:
    """Train, and return the loss of each batch."""
    losses = []
    for inputs, labels in data:
        model.reset_metrics()
        losses.append(float(model.train_on_batch(inputs, labels)))
    return losses


def _fit(model: Any, *callbacks: Any) -> None:
    inputs, labels = (np.concatenate(arrays) for arrays in zip(*DATA[:STEPS], strict=True))
    model.fit(inputs, labels, batch_size=8, shuffle=False, verbose=0, callbacks=list(callbacks))


def _saved(model: Any, path: Path) -> None:
    steps(model, DATA[:STEPS])
    model.save(path)


def _by_checkpoint(model: Any, path: Path) -> None:
    import keras

    _fit(model, keras.callbacks.ModelCheckpoint(path, save_weights_only=path.name.endswith(".weights.h5")))


def _backed_up(model: Any, path: Path) -> None:
    import keras

    _fit(model, keras.callbacks.BackupAndRestore(path, delete_checkpoint=False))


def _objects(model: Any) -> Any:
    import tensorflow as tf

    return tf.train.Checkpoint(model=model, optimizer=model.optimizer, step=tf.Variable(STEPS))


def _loop(model: Any, path: Path) -> None:
    """Save by a prefix after a loop with a `GradientTape`."""
    import tensorflow as tf

    for inputs, labels in DATA[:STEPS]:
        with tf.GradientTape() as tape:
            loss = model.loss(labels, model(inputs, training=True))
        slopes = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(slopes, model.trainable_variables, strict=True))
    _objects(model).write(str(path))


def _managed(model: Any, path: Path) -> None:
    import tensorflow as tf

    steps(model, DATA[:STEPS])
    tf.train.CheckpointManager(_objects(model), str(path), 2).save()


def _restored(model: Any, path: Path) -> Any:
    import tensorflow as tf

    _objects(model).restore(tf.train.latest_checkpoint(str(path))).expect_partial()
    return model


def _loaded(model: Any, path: Path) -> Any:
    import keras

    return keras.saving.load_model(path)


def _saved_model(model: Any, path: Path) -> None:
    import tensorflow as tf

    steps(model, DATA[:STEPS])
    tf.saved_model.save(model, str(path))


def _exported(model: Any, path: Path) -> None:
    steps(model, DATA[:STEPS])
    model.export(path, verbose=False)


KERAS_LAYOUTS: dict[str, KerasLayout] = {
    "model.keras": KerasLayout(_saved, "model.keras", False, "keras", _loaded),
    "model.h5 of Keras 3": KerasLayout(_saved, "model.h5", False, "keras", _loaded),
    "ModelCheckpoint": KerasLayout(_by_checkpoint, "best.keras", False, "keras", _loaded),
    "ModelCheckpoint of weights": KerasLayout(_by_checkpoint, "best.weights.h5"),
    "BackupAndRestore": KerasLayout(_backed_up),
    "tf.train.Checkpoint": KerasLayout(_loop, "ckpt"),
    "CheckpointManager": KerasLayout(_managed, form="tensorflow", load=_restored),
    "SavedModel": KerasLayout(_saved_model),
    "model.export": KerasLayout(_exported, refusal="`onward train --weights"),
}
