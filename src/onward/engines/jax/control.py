"""Control flow: in Python if conditions are known, else in `lax`, which is compiled.

A Loop switches to `lax` at the first unknown condition. It then must not have scan outputs, whose
size would be unknown.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.engines.framework import NotOnHost, Operators
from onward.engines.shared.control import columns, stack
from onward.engines.step_errors import check_growth

operators = Operators()

_FEW = 10_000
"""Limit of iterations for a `scan`, which has a derivative. A longer Loop is a `while_loop`."""


def _if_known(value, framework):
    """Return a number, or None during tracing."""
    try:
        return framework.host(value).item()
    except NotOnHost:
        return None


def _place(values, framework):
    return jax.tree.map(framework.place, values)


@operators.define("If")
def branch(condition, *, then_branch, else_branch, framework):
    taken = _if_known(condition, framework)
    if taken is not None:
        return tuple((then_branch if taken else else_branch)())
    branches = (lambda body=body: _place(body(), framework) for body in (then_branch, else_branch))
    return tuple(lax.cond(condition.reshape(()), *branches))


@operators.define("Loop")
def loop(trips=None, condition=None, *carried, body, framework):
    count = np.iinfo(np.int64).max if trips is None else _if_known(trips, framework)
    running = np.array(True) if condition is None else condition
    values, collected = list(carried), []
    types = body.types[1 + len(carried) :]
    for i in itertools.count():
        again = _if_known(running, framework)
        if count is None or again is None:
            values = _go_on(i, trips if count is None else count, running, values, types, body, framework)
            break
        if not again or i >= count:
            break
        running, *results = body(np.array(i, np.int64), np.array(True), *values)
        values = results[: len(carried)]
        if types:
            collected.append(results[len(carried) :])
            check_growth(collected)
    outputs = (stack(framework, items, 0, type_) for items, type_ in zip(columns(collected, types), types, strict=True))
    return (*values, *outputs)


def _go_on(start, count, running, values, types, body, framework):
    """Run the iterations of a Loop from `start` on in `lax`."""
    if types:
        raise NotOnHost

    def iterate(i, values):
        again, *results = _place(body(i, np.array(True), *values), framework)
        return again.reshape(()), results

    state = _place((running.reshape(()), values), framework)
    if isinstance(count, int) and count - start <= _FEW:

        def step(state, i):
            return lax.cond(state[0], lambda: iterate(i, state[1]), lambda: state), None

        return lax.scan(step, state, jnp.arange(start, count))[0][1]
    limit = _place(np.array(count, np.int64) if isinstance(count, int) else count, framework).reshape(())
    _, _, values = lax.while_loop(
        lambda state: state[1] & (state[0] < limit),
        lambda state: (state[0] + 1, *iterate(state[0], state[2])),
        (jnp.asarray(start, np.int64), *state),
    )
    return values


@operators.define("Scan")
def scan(
    *inputs, body, num_scan_inputs, scan_input_axes=None, scan_input_directions=None, scan_output_axes=None,
    scan_output_directions=None, framework,
):  # fmt: skip
    inputs = _place(list(inputs), framework)
    values, scanned = inputs[:-num_scan_inputs], inputs[-num_scan_inputs:]
    axes = scan_input_axes or [0] * num_scan_inputs
    reversals = scan_input_directions or [0] * num_scan_inputs
    slices = [
        _flip_if(jnp.moveaxis(x, axis, 0), reverse) for x, axis, reverse in zip(scanned, axes, reversals, strict=True)
    ]

    def step(values, slices):
        results = _place(body(*values, *slices), framework)
        return results[: len(values)], results[len(values) :]

    values, collected = lax.scan(step, values, slices)
    axes = scan_output_axes or [0] * len(collected)
    reversals = scan_output_directions or [0] * len(collected)
    outputs = (
        jnp.moveaxis(_flip_if(x, reverse), 0, axis) for x, axis, reverse in zip(collected, axes, reversals, strict=True)
    )
    return (*values, *outputs)


def _flip_if(x, reverse):
    return jnp.flip(x, 0) if reverse else x
