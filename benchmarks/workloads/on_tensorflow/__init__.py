"""The workloads in TensorFlow: functions of variables, a Keras optimizer, and the step as one `tf.function`."""

from __future__ import annotations

from pathlib import Path

import keras
import tensorflow as tf

from workloads import Step, Workload, channels_last
from workloads.on_tensorflow import images, sequences

MODELS = {**images.MODELS, **sequences.MODELS}


def load(workload: Workload, folder: Path, threads: int, *, jit_compile: bool = False) -> Step:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    model, optimizer = MODELS[workload.model], _optimizer(workload)
    variables = {
        name: tf.Variable(array, trainable=workload.trains(name) and "running" not in name)
        for name, array in channels_last.weights(folder).items()
    }
    trained = [variable for variable in variables.values() if variable.trainable]
    optimizer.build(trained)

    @tf.function(jit_compile=jit_compile)
    def update(x, labels):
        with tf.GradientTape() as tape:
            logits = model(variables, x)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        optimizer.apply(tape.gradient(loss, trained), trained)
        return loss

    return lambda x, labels: float(update(tf.constant(x), tf.constant(labels)))


def _optimizer(workload: Workload) -> keras.optimizers.Optimizer:
    rates = dict(workload.rates)
    rate = rates.pop("lr")
    if workload.optimizer in ("sgd", "momentum"):
        return keras.optimizers.SGD(rate, **rates)
    return {"adam": keras.optimizers.Adam, "adamw": keras.optimizers.AdamW}[workload.optimizer](
        rate, epsilon=1e-8, **rates
    )
