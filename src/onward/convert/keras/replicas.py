"""Keras models on several devices, as strategies of TensorFlow (`tf.distribute`) run them: a replica on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops


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


def _context() -> Any | None:
    """This replica among several, if it is one."""
    if not has_replicas():
        return None
    import tensorflow as tf

    return tf.distribute.get_replica_context()
