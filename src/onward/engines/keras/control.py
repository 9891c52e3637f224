"""Control flow. If only the data decide about a branch, both are computed, and one is selected."""

from __future__ import annotations

import functools

from onward.engines.framework import NotOnHost, Operators
from onward.engines.shared import control
from onward.errors import UnsupportedError

operators = Operators(control.operators)


def branch(condition, *, then_branch, else_branch, framework):
    try:
        return control.branch(condition, then_branch=then_branch, else_branch=else_branch, framework=framework)
    except NotOnHost:

        def choose(a, b):
            if not isinstance(a, list):
                return framework.operators["Where"](condition, framework.place(a), framework.place(b))
            if len(a) != len(b):
                raise UnsupportedError(
                    f"the branches of an `If` give Keras sequences of {len(a)} and {len(b)} elements",
                    hint="give both sequences the same length, or write another target, such as `--to torch`",
                ) from None
            return [choose(x, y) for x, y in zip(a, b, strict=True)]

        return tuple(choose(a, b) for a, b in zip(then_branch(), else_branch(), strict=True))


@functools.wraps(control.scan)
def scan(*inputs, num_scan_inputs, scan_input_axes, framework, **others):
    axis = scan_input_axes[0] if scan_input_axes else 0
    length = framework.shape_of(inputs[-num_scan_inputs])[axis]
    if not isinstance(length, int):
        raise UnsupportedError(
            f"Keras unrolls a `Scan` of the loss or model, whose size along axis {axis} is unknown",
            hint="declare it: `onward set MODEL --shape x=16,N,64`, or `onward.transform.declare`",
        )
    settings = {"num_scan_inputs": num_scan_inputs, "scan_input_axes": scan_input_axes, "framework": framework}
    return control.scan(*inputs, length=length, **settings, **others)


operators["If"] = branch
operators["Scan"] = scan
