"""Control flow by Python's own, for frameworks that run operators at once, or that unroll what they
trace.

Operators with nested graphs get their inputs as they are, on the host or not, and may ask for the
`framework`. A nested graph is a function; its `types` are those of its outputs, as (dtype, shape)
with None for what is not known.
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
    goes_on = True if condition is None else framework.host(condition).item()
    values, collected = list(carried), []
    kinds = body.types[1 + len(carried) :]
    for i in itertools.count() if count is None else range(count):
        if not goes_on:
            break
        again, *results = body(np.array(i, np.int64), np.array(True), *values)
        goes_on = framework.host(again).item()
        values = results[: len(carried)]
        if kinds:
            collected.append(results[len(carried) :])
            check_growth(collected)
    return (
        *values,
        *(stack(framework, items, 0, kind) for items, kind in zip(columns(collected, kinds), kinds, strict=True)),
    )


@operators.define("Scan")
def scan(
    *inputs, body, num_scan_inputs, scan_input_axes, scan_input_directions, scan_output_axes,
    scan_output_directions, framework, length=None,
):  # fmt: skip
    """`length` says how many rounds there are where tensors do not."""
    values, scanned = list(inputs[:-num_scan_inputs]), inputs[-num_scan_inputs:]
    axes = scan_input_axes or [0] * num_scan_inputs
    reversals = scan_input_directions or [0] * num_scan_inputs
    length = scanned[0].shape[axes[0]] if length is None else length
    collected = []
    for i in range(length):
        places = (length - 1 - i if reverse else i for reverse in reversals)
        slices = [take_slice(framework, x, place, axis) for x, place, axis in zip(scanned, places, axes, strict=True)]
        results = body(*values, *slices)
        values, rest = results[: len(values)], results[len(values) :]
        collected.append(rest)
    kinds = body.types[len(values) :]
    axes = scan_output_axes or [0] * len(kinds)
    reversals = scan_output_directions or [0] * len(kinds)
    outputs = [
        stack(framework, items[::-1] if reverse else items, axis, kind)
        for items, reverse, axis, kind in zip(columns(collected, kinds), reversals, axes, kinds, strict=True)
    ]
    return (*values, *outputs)


def columns(rows: Sequence[Sequence[Any]], kinds: Sequence[Any]) -> list[list[Any]]:
    """What each output was in all iterations."""
    return [[row[i] for row in rows] for i in range(len(kinds))]


def stack(framework: Framework, items: list[Any], axis: int, kind: tuple[np.dtype, Sequence[int | None]]) -> Any:
    """Tensors one after the other along a new axis; without any, what is known of their shape."""
    if not items:
        dtype, shape = kind
        sizes = [size or 0 for size in shape or ()]
        sizes.insert(axis % (len(sizes) + 1), 0)
        return np.zeros(sizes, dtype)
    if all(isinstance(item, np.ndarray) for item in items):
        return np.stack(items, axis)
    unsqueezed = [framework.operators["Unsqueeze"](framework.place(item), np.array([axis])) for item in items]
    return framework.operators["Concat"](*unsqueezed, axis=axis)


def take_slice(framework: Framework, x: Any, place: int, axis: int) -> Any:
    """One slice of a tensor along an axis, which goes."""
    if isinstance(x, np.ndarray):
        return np.take(x, place, axis)
    operators, axes = framework.operators, np.array([axis])
    return operators["Squeeze"](operators["Slice"](x, np.array([place]), np.array([place + 1]), axes), axes)
