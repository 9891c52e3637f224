"""Lists of tensors, in which loops collect their results: here one tensor, whose first axis counts the elements."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from onward.engines.framework import Operators
from onward.frameworks.tensorflow.graph import Refused, as_int64, dtype_of

operators = Operators()


@operators.define("TensorListReserve")
def reserve(op, _, count, *, element_dtype, node):
    sizes = next((shape.as_list() for shape in _element_shapes(node) if shape.is_fully_defined()), None)
    if element_dtype == tf.variant or sizes is None:
        raise Refused("the shape of the elements of a list is not known")
    shape = op.Concat(op.Reshape(as_int64(op, count), [1]), np.array(sizes, np.int64), axis=0)
    return op.Expand(op.constant(np.zeros([], dtype_of(element_dtype).numpy())), shape)


def _element_shapes(node):
    """What is said about elements: where the list is made, and where a loop writes them."""
    said = node.known(0)
    if said is not None:
        yield tf.TensorShape(None if said.ndim == 0 else [None if size < 0 else size for size in said])
    made = node.operation.outputs[0]
    for reader in made.consumers():
        if reader.type in ("While", "StatelessWhile"):
            body = node.of(reader).function("body")
            result = body.outputs[[x is made for x in reader.inputs].index(True)].op
            while result.type == "Identity":
                result = result.inputs[0].op
            if result.type == "TensorListSetItem":
                yield result.inputs[2].shape


@operators.define("TensorListSetItem")
def set_item(op, items, place, item):
    return op.ScatterND(items, op.Reshape(as_int64(op, place), [1, 1]), op.Unsqueeze(item, [0]))


operators(
    TensorListFromTensor=lambda op, x, _: x,
    TensorListStack=lambda op, items, _: items,
    TensorListGetItem=lambda op, items, place, _: op.Gather(items, as_int64(op, place), axis=0),
    TensorListLength=lambda op, items: op.Cast(op.Squeeze(op.Shape(items, start=0, end=1)), to=dtype_of(tf.int32)),
)
