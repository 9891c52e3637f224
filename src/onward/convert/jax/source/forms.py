"""How calls are written that Python, or JAX, has a shorter form for than the operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from onward.convert.jax.source.literals import plain_type
from onward.convert.program.calls import Step, Value, step_result
from onward.convert.program.expressions import Expression
from onward.convert.program.sizes import as_lists


class Given(NamedTuple):
    """A call of an operator: its inputs, those that are arrays as such, and the sizes of the first."""

    inputs: Sequence[Any]
    arrays: Sequence[np.ndarray | None]
    attributes: dict[str, Any]
    shape: Sequence[Any] | None
    result: Sequence[Any] | None
    """The sizes of the result, if they are known."""


Form = Callable[[Given], Step | Value | None]
"""A value if nothing is to be done, None where the operator says more."""


def short_form(operator: str, given: Given, is_float: bool) -> Step | Value | None:
    """The call for an operator, if there is a short one. `is_float` says whether the first input is."""
    if operator in _FORMS and None not in given.inputs and (is_float or operator not in _FOR_FLOATS):
        return _FORMS[operator](given)
    return None


def _call(function: str, *arguments: Any, **named: Any) -> Step:
    return Step(function, list(arguments), named)


def _infix(sign: str) -> Form:
    return lambda given: _call(sign, *given.inputs)


def _gemm(given: Given) -> Step | None:
    attributes = given.attributes
    if attributes["alpha"] != 1 or attributes["beta"] != 1:
        return None
    flags = ("transA", "transB")
    a, b = (step_result(".T", x) if attributes[flag] else x for x, flag in zip(given.inputs, flags, strict=False))
    return _call("+", step_result("@", a, b), given.inputs[2]) if len(given.inputs) > 2 else _call("@", a, b)


def _cast(given: Given) -> Step | None:
    dtype = plain_type(given.attributes["to"])
    return None if dtype is None else _call(".astype", given.inputs[0], Expression(dtype))


def _reduction(function: str) -> Form:
    def form(given: Given) -> Step | None:
        axes = given.arrays[1] if len(given.inputs) > 1 else None
        if (len(given.inputs) > 1 and axes is None) or given.attributes["noop_with_empty_axes"]:
            return None
        over = [] if axes is None or not axes.size else [_places(axes)]
        return _call(
            f"jnp.{function}", given.inputs[0], *over, **({"keepdims": True} if given.attributes["keepdims"] else {})
        )

    return form


def _by_places(function: str) -> Form:
    def form(given: Given) -> Step | None:
        axes = given.arrays[1] if len(given.inputs) > 1 else None
        return None if axes is None else _call(f"jnp.{function}", given.inputs[0], _places(axes))

    return form


def _reshape(given: Given) -> Step | None:
    if given.arrays[1] is None or not given.arrays[1].size:
        return None
    sizes = as_lists(given.arrays[1])
    if not given.attributes["allowzero"] and any(isinstance(size, int) and size == 0 for size in sizes):
        if given.shape is None:
            return None
        sizes = [given.shape[i] if isinstance(size, int) and size == 0 else size for i, size in enumerate(sizes)]
    return _call(".reshape", given.inputs[0], *sizes)


def _transpose(given: Given) -> Step:
    order = given.attributes.get("perm")
    if order is None or order == [1, 0]:
        return _call(".T", given.inputs[0])
    return _call(".transpose", given.inputs[0], *order)


def _expand(given: Given) -> Step | None:
    return None if given.result is None else _call("jnp.broadcast_to", given.inputs[0], tuple(given.result))


def _gather(given: Given) -> Step | None:
    place, axis = given.arrays[1], given.attributes["axis"]
    if place is None or place.ndim or given.shape is None or place.dtype == object:
        return None
    return _call("[]", given.inputs[0], [*[slice(None)] * (axis % len(given.shape)), int(place)])


_FAR = 2**31 - 1
"""What is beyond any end."""


def _slice(given: Given) -> Step | Value | None:
    """As Python has it, if it goes forward."""
    if given.shape is None or any(array is None for array in given.arrays[1:]):
        return None
    starts, ends, *rest = (as_lists(array) for array in given.arrays[1:])
    axes = rest[0] if rest else range(len(starts))
    steps = rest[1] if len(rest) > 1 else [1] * len(starts)
    if not all(isinstance(step, int) and step > 0 for step in steps):
        return None
    places = [slice(None)] * len(given.shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = given.shape[axis]
        whole = end is size or (isinstance(end, int) and (end >= _FAR or (isinstance(size, int) and end >= size)))
        first = None if isinstance(start, int) and (start == 0 or start <= -_FAR) else start
        places[axis] = slice(first, None if whole else end, None if step == 1 else step)
    while places and places[-1] == slice(None):
        places.pop()
    return _call("[]", given.inputs[0], places) if places else given.inputs[0]


def _places(axes: np.ndarray) -> Any:
    numbers = np.atleast_1d(axes).tolist()
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


_FORMS: dict[str, Form] = {
    "Add": _infix("+"),
    "Sub": _infix("-"),
    "Mul": _infix("*"),
    "Div": _infix("/"),
    "MatMul": _infix("@"),
    "Less": _infix("<"),
    "LessOrEqual": _infix("<="),
    "Greater": _infix(">"),
    "GreaterOrEqual": _infix(">="),
    "Equal": _infix("=="),
    "And": _infix("&"),
    "Or": _infix("|"),
    "BitwiseXor": _infix("^"),
    "Neg": _infix("neg"),
    "Not": _infix("not"),
    "Gemm": _gemm,
    "Cast": _cast,
    "ReduceSum": _reduction("sum"),
    "ReduceMean": _reduction("mean"),
    "Squeeze": _by_places("squeeze"),
    "Unsqueeze": _by_places("expand_dims"),
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Expand": _expand,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": lambda given: _call("jnp.concatenate", list(given.inputs), given.attributes["axis"]),
    "LogSoftmax": lambda given: _call("jax.nn.log_softmax", given.inputs[0], given.attributes["axis"]),
}
_FOR_FLOATS = ("Div", "Gemm", "ReduceSum", "ReduceMean")
"""What integers would be rounded by in another way, or become."""
