"""Keras models on several devices, as strategies of TensorFlow (`tf.distribute`) run them: a replica on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from onward.engines.keras import normalization


def has_replicas() -> bool:
    """Whether a model that is made now will be on several devices."""
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return bool(tf.distribute.get_strategy().num_replicas_in_sync > 1)


def share_of_replica(loss: Any) -> Any:
    """What a replica adds to the loss of all, as Keras has it for its own losses: batches are divided evenly."""
    context = _context()
    return loss if context is None else loss / ops.cast(context.num_replicas_in_sync, loss.dtype)


def sum_over_replicas(gradients: Sequence[Any]) -> Sequence[Any]:
    """Gradients of the loss of all replicas, for optimizers that need all of them at once."""
    context = _context()
    if context is None:
        return gradients
    import tensorflow as tf

    return context.all_reduce(tf.distribute.ReduceOp.SUM, [ops.convert_to_tensor(g) for g in gradients])


def batch_normalization(
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Any:
    """BatchNormalization with the statistics of all replicas in training, which have equally many samples."""
    context = _context() if training_mode else None
    if context is None:
        return normalization.batch_normalization(
            x, scale, bias, mean, variance, epsilon=epsilon, momentum=momentum, training_mode=training_mode
        )
    import tensorflow as tf

    over = [0, *range(2, len(x.shape))]
    here = context.all_reduce(tf.distribute.ReduceOp.MEAN, ops.mean(x, over))
    distance = ops.square(x - ops.reshape(here, (-1, *[1] * (len(x.shape) - 2))))
    there = context.all_reduce(tf.distribute.ReduceOp.MEAN, ops.mean(distance, over))
    y = normalization.batch_normalization(x, scale, bias, here, there, epsilon=epsilon)
    return y, mean * momentum + here * (1 - momentum), variance * momentum + there * (1 - momentum)


def _context() -> Any | None:
    """This replica among several, if it is one."""
    if not has_replicas():
        return None
    import tensorflow as tf

    return tf.distribute.get_replica_context()
