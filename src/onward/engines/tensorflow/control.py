"""Control flow: in Python if the conditions are known, else in the traced graph.

Short loops are unrolled during tracing: that is faster, and shapes may differ between iterations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from onward.engines.framework import Framework, Operators
from onward.engines.shared import control

operators = Operators()

UNROLLED = 64
"""Limit of iterations of an unrolled loop."""


def _place(framework: Framework, values: Any) -> tuple[Any, ...]:
    return tuple(framework.place(value) for value in values)


@operators.define("If")
def branch(condition, *, then_branch, else_branch, framework):
    if not tf.is_symbolic_tensor(condition):
        return control.branch(condition, then_branch=then_branch, else_branch=else_branch, framework=framework)
    results = []

    def run(body):
        results.append(_place(framework, body()))
        return tf.nest.flatten(results[-1])

    chosen = tf.cond(tf.reshape(condition, []), lambda: run(then_branch), lambda: run(else_branch))
    return tf.nest.pack_sequence_as(results[0], tf.nest.flatten(chosen))  # a sequence is one result


@operators.define("Loop")
def loop(trips=None, condition=None, *carried, body, framework):
    if not _is_traced(trips, condition, carried, body, framework):
        return control.loop(trips, condition, *carried, body=body, framework=framework)
    values = _place(framework, carried)
    start = tf.constant(True) if condition is None else tf.reshape(framework.place(condition), [])
    last = None if trips is None else tf.reshape(framework.place(trips), [])
    first = _place(framework, body(tf.constant(0, tf.int64), np.array(True), *values))  # only for types
    collected = first[1 + len(carried) :]

    def is_running(i, again, *_):
        return again if last is None else again & (i < last)

    def iteration(i, _, values, lists):
        again, *results = _place(framework, body(i, np.array(True), *values))
        rest = zip(lists, results[len(values) :], strict=True)
        written = tuple(items.write(tf.cast(i, tf.int32), item) for items, item in rest)
        return i + 1, tf.reshape(again, []), tuple(results[: len(values)]), written

    lists = tuple(tf.TensorArray(item.dtype, 0, dynamic_size=True, element_shape=item.shape) for item in collected)
    _, _, values, lists = tf.while_loop(is_running, iteration, (tf.constant(0, tf.int64), start, values, lists))
    return (*values, *(items.stack() for items in lists))


def _is_traced(trips, condition, carried, body, framework):
    """True if a loop must be in the graph: its number of iterations is unknown or large."""
    if any(tf.is_symbolic_tensor(value) for value in (trips, condition)):
        return True
    if tf.executing_eagerly() or any(isinstance(value, list) for value in carried):
        return False
    again, *results = body(np.array(0, np.int64), np.array(True), *carried)
    if tf.is_symbolic_tensor(again):
        return True
    same = all(
        not isinstance(new, list) and np.shape(old) == np.shape(new) for old, new in zip(carried, results, strict=False)
    )
    return trips is not None and framework.host(trips).item() > UNROLLED and same


@operators.define("Scan")
def scan(
    *inputs, body, num_scan_inputs, scan_input_axes, scan_input_directions, scan_output_axes,
    scan_output_directions, framework,
):  # fmt: skip
    values, scanned = _place(framework, inputs[:-num_scan_inputs]), _place(framework, inputs[-num_scan_inputs:])
    types = body.types[len(values) :]
    axes = scan_input_axes or [0] * num_scan_inputs
    rows = [
        _flip_if(_move_axis(x, axis, 0), back)
        for x, axis, back in zip(scanned, axes, scan_input_directions or [0] * num_scan_inputs, strict=True)
    ]
    count = rows[0].shape[0]
    short = tf.executing_eagerly() or (count is not None and count <= UNROLLED)
    values, collected = (_unroll if short else _in_graph)(body, values, rows, types, framework)
    axes, reversals = scan_output_axes or [0] * len(types), scan_output_directions or [0] * len(types)
    outputs = zip(collected, axes, reversals, strict=True)
    return (*values, *(_move_axis(_flip_if(y, back), 0, axis) for y, axis, back in outputs))


def _flip_if(x, back):
    return tf.reverse(x, [0]) if back else x


def _move_axis(x, before, after):
    order = list(range(x.shape.rank))
    order.insert(after % len(order), order.pop(before % len(order)))
    return tf.transpose(x, order) if order != sorted(order) else x


def _unroll(body, values, rows, types, framework):
    collected = []
    for slices in zip(*map(tf.unstack, rows), strict=True):
        results = _place(framework, body(*values, *slices))
        collected.append(results[len(values) :])
        values = results[: len(values)]
    columns = zip(control.columns(collected, types), types, strict=True)
    return values, [
        tf.stack(items) if items else framework.place(control.stack(framework, items, 0, type_))
        for items, type_ in columns
    ]


def _in_graph(body, values, rows, types, framework):
    count = tf.shape(rows[0])[0] if rows[0].shape[0] is None else rows[0].shape[0]
    first = _place(framework, body(*values, *(row[0] for row in rows)))  # only for types
    sources = [tf.TensorArray(row.dtype, count).unstack(row) for row in rows]

    def iteration(i, values, lists):
        results = _place(framework, body(*values, *(source.read(i) for source in sources)))
        rest = zip(lists, results[len(values) :], strict=True)
        return i + 1, results[: len(values)], tuple(items.write(i, item) for items, item in rest)

    lists = tuple(tf.TensorArray(item.dtype, count, element_shape=item.shape) for item in first[len(values) :])
    _, values, lists = tf.while_loop(lambda i, *_: i < count, iteration, (0, values, lists), maximum_iterations=count)
    return values, [tf.ensure_shape(items.stack(), [rows[0].shape[0], *items.element_shape]) for items in lists]
