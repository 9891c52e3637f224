"""Control flow in Python, for eager frameworks and for traces that unroll loops.

Operators with nested graphs get inputs that may be on the host or not, and may take the
`framework`. A nested graph is a function. Its `types` are the (dtype, shape) of its outputs, None
if unknown.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from onward.engines.framework import Framework, Operators
from onward.engines.step_errors import check_growth

operators = Operators()


@operators.define("If")
def branch(condition, *, then_branch, else_branch, framework):
    return tuple((then_branch if framework.host(condition).item() else else_branch)())


@operators.define("Loop")
def loop(trips=None, condition=None, *carried, body, framework):
    count = None if trips is None else framework.host(trips).item()
    running = True if condition is None else framework.host(condition).item()
    values, collected = list(carried), []
    types = body.types[1 + len(carried) :]
    for i in itertools.count() if count is None else range(count):
        if not running:
            break
        again, *results = body(np.array(i, np.int64), np.array(True), *values)
        running = framework.host(again).item()
        values = results[: len(carried)]
        if types:
            collected.append(results[len(carried) :])
            check_growth(collected)
    outputs = (stack(framework, items, 0, type_) for items, type_ in zip(columns(collected, types), types, strict=True))
    return (*values, *outputs)


@operators.define("Scan")
def scan(
    *inputs, body, num_scan_inputs, scan_input_axes, scan_input_directions, scan_output_axes,
    scan_output_directions, framework, length=None,
):  # fmt: skip
    """Run a Scan. `length` is the number of iterations if the shapes of tensors do not tell."""
    values, scanned = list(inputs[:-num_scan_inputs]), inputs[-num_scan_inputs:]
    axes = scan_input_axes or [0] * num_scan_inputs
    reversals = scan_input_directions or [0] * num_scan_inputs
    length = scanned[0].shape[axes[0]] if length is None else length
    collected = []
    for i in range(length):
        indices = (length - 1 - i if reverse else i for reverse in reversals)
        slices = [take_slice(framework, x, index, axis) for x, index, axis in zip(scanned, indices, axes, strict=True)]
        results = body(*values, *slices)
        values, rest = results[: len(values)], results[len(values) :]
        collected.append(rest)
    types = body.types[len(values) :]
    axes = scan_output_axes or [0] * len(types)
    reversals = scan_output_directions or [0] * len(types)
    outputs = [
        stack(framework, items[::-1] if reverse else items, axis, type_)
        for items, reverse, axis, type_ in zip(columns(collected, types), reversals, axes, types, strict=True)
    ]
    return (*values, *outputs)


def columns(rows: Sequence[Sequence[Any]], types: Sequence[Any]) -> list[list[Any]]:
    """Transpose rows of outputs per iteration to columns of iterations per output."""
    return [[row[i] for row in rows] for i in range(len(types))]


def stack(framework: Framework, items: list[Any], axis: int, type_: tuple[np.dtype, Sequence[int | None]]) -> Any:
    """Stack tensors along a new axis. Without tensors, return an empty array of the known type."""
    if not items:
        dtype, shape = type_
        sizes = [size or 0 for size in shape or ()]
        sizes.insert(axis % (len(sizes) + 1), 0)
        return np.zeros(sizes, dtype)
    if all(isinstance(item, np.ndarray) for item in items):
        return np.stack(items, axis)
    unsqueezed = [framework.operators["Unsqueeze"](framework.place(item), np.array([axis])) for item in items]
    return framework.operators["Concat"](*unsqueezed, axis=axis)


def take_slice(framework: Framework, x: Any, index: int, axis: int) -> Any:
    """Return the slice at an index of an axis, without that axis."""
    if isinstance(x, np.ndarray):
        return np.take(x, index, axis)
    operators, axes = framework.operators, np.array([axis])
    return operators["Squeeze"](operators["Slice"](x, np.array([index]), np.array([index + 1]), axes), axes)
