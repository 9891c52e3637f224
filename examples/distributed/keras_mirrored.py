"""Train as a Keras model on several devices, with `MirroredStrategy`.

    python examples/distributed/keras_mirrored.py gpt trained.onnx

The devices here are two virtual CPUs; leave out the list of devices on a machine with GPUs. A batch
is the batch of all devices. Keras clips and accumulates as in the training model.
"""

from __future__ import annotations

import os
import sys

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import tensorflow as tf
from digits import ACCUMULATE, BATCH, prepare_digits

import onward


class Printer(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self.model.reset_metrics()  # else the loss is the mean of all batches

    def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
        print(f"loss {logs['loss']:.8f}", flush=True)


def main(kind: str, trained: str, devices: str = "2") -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * int(devices))
    model, inputs, targets = prepare_digits(kind, accumulate=ACCUMULATE)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(int(devices))])
    with strategy.scope():
        net = onward.to_keras(model)
    data = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(BATCH)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    net.fit(data.with_options(options), verbose=0, callbacks=[Printer()])
    onward.from_keras(net).save(trained)


if __name__ == "__main__":
    main(*sys.argv[1:])
