"""Writes the recorded checkpoints of TensorFlow and Keras: `python tests/recorded/make_tensorflow.py`."""

from __future__ import annotations

import shutil
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent
FOLDERS = [HERE / name for name in ("tensorflow", "tensorflow_pieces", "keras")]


def trained() -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(3, activation="tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *layers], name="net")
    rate = keras.optimizers.schedules.CosineDecay(0.01, 20)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(rate, weight_decay=0.02, global_clipnorm=1.0), loss)
    draw = np.random.default_rng(0)
    for _ in range(3):
        model.train_on_batch(draw.random((8, 4), np.float32), draw.integers(0, 2, 8))
    return model


def main() -> None:
    for folder in FOLDERS:
        shutil.rmtree(folder, ignore_errors=True)
    managed, pieces, saved = FOLDERS
    model = trained()
    batches = iter(tf.data.Dataset.range(10))
    next(batches)
    state = tf.train.Checkpoint(
        model=model,
        optimizer=model.optimizer,
        step=tf.Variable(3, dtype=tf.int64),
        generator=tf.random.Generator.from_seed(1),
        batches=batches,
    )
    tf.train.CheckpointManager(state, str(managed), 1).save()
    module = tf.Module()
    module.table = tf.Variable(np.arange(45, dtype=np.float32).reshape(9, 5))
    module.offset = tf.Variable(np.arange(3, dtype=np.float32))
    policy = tf.train.experimental.MaxShardSizePolicy(max_shard_size=100)
    options = tf.train.CheckpointOptions(experimental_sharding_callback=policy)
    tf.train.Checkpoint(module=module).save(str(pieces / "ckpt"), options)
    saved.mkdir()
    model.save(saved / "model.keras")


if __name__ == "__main__":
    main()
