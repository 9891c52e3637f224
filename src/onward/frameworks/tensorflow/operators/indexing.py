"""Reads and writes at computed indices, and lists of tensors."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from onward.engines.framework import Operators
from onward.frameworks.formulas.graph_building import END, permute
from onward.frameworks.tensorflow.graph import RefusedOperation, as_int64, dtype_of

operators = Operators()


@operators.define("GatherV2")
def gather(op, x, indices, _, *, batch_dims, node):
    axis, count = node.number(2) % node.rank(0), batch_dims % (node.rank(1) + 1)
    if not count:
        return op.Gather(x, as_int64(op, indices), axis=axis)
    if axis != count:
        raise RefusedOperation("it gathers along an axis other than the first after the batch")
    return op.GatherND(x, op.Unsqueeze(as_int64(op, indices), [-1]), batch_dims=count)


@operators.define("ResourceGather")
def gather_rows(op, variable, indices, *, batch_dims, node):
    if batch_dims:
        raise RefusedOperation("it gathers from batches of a variable")
    return op.Gather(node.read(op, variable), as_int64(op, indices), axis=0)


operators(
    Where=lambda op, condition: permute(op, op.NonZero(condition), [1, 0]),
    InvertPermutation=lambda op, x, *, node, T: op.constant(np.argsort(node.array(0)).astype(dtype_of(T).numpy())),
    GatherNd=lambda op, x, indices: op.GatherND(x, as_int64(op, indices)),
    TensorScatterUpdate=lambda op, x, indices, new: op.ScatterND(x, as_int64(op, indices), new),
    TensorScatterAdd=lambda op, x, indices, new: op.ScatterND(x, as_int64(op, indices), new, reduction="add"),
    TensorScatterSub=lambda op, x, indices, new: op.ScatterND(x, as_int64(op, indices), -new, reduction="add"),
)


@operators.define("ScatterNd")
def scatter_nd(op, indices, updates, shape):
    zeros = op.Expand(op.scalar(0, updates), as_int64(op, shape))
    return op.ScatterND(zeros, as_int64(op, indices), updates, reduction="add")


@operators.define("UnsortedSegmentSum")
def sum_of_segments(op, x, segments, count, *, node):
    if node.rank(1) != 1:
        raise RefusedOperation("its segment ids are not a vector")
    ids, size = as_int64(op, segments), op.Reshape(as_int64(op, count), [1])
    rows = op.Concat(size + np.int64(1), op.Slice(op.Shape(x), [1], [END]), axis=0)
    # TensorFlow drops rows with a negative id, which ScatterND counts from the end: they go to an extra row.
    targets = op.Unsqueeze(op.Where(ids < 0, size, ids), [-1])
    sums = op.ScatterND(op.Expand(op.scalar(0, x), rows), targets, x, reduction="add")
    return op.Slice(sums, [0], size, [0])


@operators.define("OneHot")
def one_hot(op, indices, depth, on, off, *, axis, node):
    """Set nothing for a negative index. OneHot of ONNX counts it from the end."""
    classes = op.Range(np.int64(0), op.Reshape(as_int64(op, depth), []), np.int64(1))
    behind = 0 if axis == -1 else node.rank(0) - axis
    classes = op.Unsqueeze(classes, list(range(1, behind + 1))) if behind else classes
    return op.Where(op.Equal(op.Unsqueeze(as_int64(op, indices), [axis]), classes), on, off)


@operators.define("TensorListReserve")
def reserve(op, _, count, *, element_dtype, node):
    sizes = next((shape.as_list() for shape in _element_shapes(node) if shape.is_fully_defined()), None)
    if element_dtype == tf.variant or sizes is None:
        raise RefusedOperation("the shape of the elements of a list is unknown")
    shape = op.Concat(op.Reshape(as_int64(op, count), [1]), np.array(sizes, np.int64), axis=0)
    return op.Expand(op.constant(np.zeros([], dtype_of(element_dtype).numpy())), shape)


def _element_shapes(node):
    """Return the shapes of elements: of the list, and of what a loop writes to it."""
    declared = node.known(0)
    if declared is not None:
        yield tf.TensorShape(None if declared.ndim == 0 else [None if size < 0 else size for size in declared])
    items = node.operation.outputs[0]
    for reader in items.consumers():
        if reader.type in ("While", "StatelessWhile"):
            body = node.of(reader).function("body")
            result = body.outputs[[x is items for x in reader.inputs].index(True)].op
            while result.type == "Identity":
                result = result.inputs[0].op
            if result.type == "TensorListSetItem":
                yield result.inputs[2].shape


operators(
    TensorListSetItem=lambda op, items, index, item: op.ScatterND(
        items, op.Reshape(as_int64(op, index), [1, 1]), op.Unsqueeze(item, [0])
    ),
    TensorListFromTensor=lambda op, x, _: x,
    TensorListStack=lambda op, items, _: items,
    TensorListGetItem=lambda op, items, index, _: op.Gather(items, as_int64(op, index), axis=0),
    TensorListLength=lambda op, items: op.Cast(op.Squeeze(op.Shape(items, start=0, end=1)), to=dtype_of(tf.int32)),
)
