"""Lists of tensors, in which loops collect their results: here one tensor, whose first axis counts the elements."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from onward.convert.tensorflow.graph import Refused, as_int64, dtype_of
from onward.run.framework import Operators

operators = Operators()


@operators.define("TensorListReserve")
def reserve(op, element_shape, count, *, element_dtype, node):
    sizes = node.known(0)
    if element_dtype == tf.variant or sizes is None or sizes.ndim == 0 or (sizes < 0).any():
        raise Refused("the shape of the elements of a list is not known")
    shape = op.Concat(op.Reshape(as_int64(op, count), [1]), sizes.astype(np.int64), axis=0)
    return op.Expand(op.constant(np.zeros([], dtype_of(element_dtype).numpy())), shape)


@operators.define("TensorListSetItem")
def set_item(op, items, place, item):
    return op.ScatterND(items, op.Reshape(as_int64(op, place), [1, 1]), op.Unsqueeze(item, [0]))


operators(
    TensorListFromTensor=lambda op, x, _: x,
    TensorListStack=lambda op, items, _: items,
    TensorListGetItem=lambda op, items, place, _: op.Gather(items, as_int64(op, place), axis=0),
    TensorListLength=lambda op, items: op.Cast(op.Squeeze(op.Shape(items, start=0, end=1)), to=dtype_of(tf.int32)),
)
