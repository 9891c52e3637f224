"""Short forms of operators: `x + y`, `x[1:]`, `x.T`."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from onward.frameworks.program.calls import ProgramStep, Value, step_result


class OperatorArguments(NamedTuple):
    """Arguments of an operator."""

    inputs: Sequence[Any]
    constants: Sequence[Any]
    """Constant inputs as lists and numbers; None for others."""
    attributes: Mapping[str, Any]
    shape: Sequence[Any] | None
    """Sizes of the first input, if they are known."""
    result: Sequence[Any] | None = None
    """Sizes of the result, if they are known."""

    def constant(self, index: int) -> Any:
        """Return an optional constant input as a list."""
        value = self.constants[index] if index < len(self.constants) else None
        return value if value is None or isinstance(value, list) else [value]


Form = Callable[[OperatorArguments, Mapping[str, str]], ProgramStep | Value | None]
"""Short form of an operator: a call, a value if the operator does nothing, or None."""


class Dialect(NamedTuple):
    """Functions of a framework."""

    functions: Mapping[str, str]
    """Functions by their numpy names. A method begins with a dot, and takes sizes one by one."""
    own: Mapping[str, Form]
    """Forms of this framework alone."""
    without: Container[str] = ()

    def short_form(self, operator: str, arguments: OperatorArguments, is_float: bool) -> ProgramStep | Value | None:
        """Return the short call for an operator, or None. `is_float` describes the first tensor."""
        form = self.own.get(operator, _FORMS.get(operator))
        if form is None or None in arguments.inputs or operator in self.without:
            return None
        return None if operator in _FLOATS and not is_float else form(arguments, self.functions)


def _call(function: str, *arguments: Any, **named: Any) -> ProgramStep:
    return ProgramStep(function, list(arguments), named)


def _with_sizes(function: str, x: Any, sizes: Sequence[Any]) -> ProgramStep:
    return _call(function, x, *sizes) if function.startswith(".") else _call(function, x, list(sizes))


def _infix(sign: str) -> Form:
    return lambda given, _: _call(sign, *given.inputs)


def _gemm(given: OperatorArguments, functions: Mapping[str, str]) -> ProgramStep | None:
    attributes = given.attributes
    if attributes.get("alpha", 1) != 1 or attributes.get("beta", 1) != 1:
        return None
    flags, transpose = ("transA", "transB"), functions["T"]
    a, b = (
        step_result(transpose, x) if attributes.get(flag) else x for x, flag in zip(given.inputs, flags, strict=False)
    )
    return _call("+", step_result("@", a, b), given.inputs[2]) if len(given.inputs) > 2 else _call("@", a, b)


def _reduction(function: str) -> Form:
    def form(given: OperatorArguments, functions: Mapping[str, str]) -> ProgramStep | None:
        axes = given.constant(1)
        if (len(given.inputs) > 1 and axes is None) or given.attributes.get("noop_with_empty_axes"):
            return None
        keepdims = {"keepdims": True} if given.attributes.get("keepdims", 1) else {}
        return _call(functions[function], given.inputs[0], *([_axes(axes)] if axes else []), **keepdims)

    return form


def _by_axes(function: str) -> Form:
    def form(given: OperatorArguments, functions: Mapping[str, str]) -> ProgramStep | None:
        axes = given.constant(1)
        return None if axes is None else _call(functions[function], given.inputs[0], _axes(axes))

    return form


def _reshape(given: OperatorArguments, functions: Mapping[str, str]) -> ProgramStep | None:
    sizes = given.constant(1)
    if not sizes:
        return None
    if not given.attributes.get("allowzero") and any(_is(size, 0) for size in sizes):
        if given.shape is None:
            return None
        sizes = [given.shape[i] if _is(size, 0) else size for i, size in enumerate(sizes)]
    unknown = [i for i, size in enumerate(sizes) if not isinstance(size, int)]
    if len(unknown) == 1 and all(size > 0 for i, size in enumerate(sizes) if i not in unknown):
        sizes = [-1 if i in unknown else size for i, size in enumerate(sizes)]
    return _with_sizes(functions["reshape"], given.inputs[0], sizes)


def _is(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


def _transpose(given: OperatorArguments, functions: Mapping[str, str]) -> ProgramStep:
    order = given.attributes.get("perm")
    if order is None or list(order) == [1, 0]:
        return _call(functions["T"], given.inputs[0])
    return _with_sizes(functions["transpose"], given.inputs[0], order)


def _gather(given: OperatorArguments, _: Mapping[str, str]) -> ProgramStep | None:
    index, axis = given.constants[1], given.attributes.get("axis", 0)
    if not isinstance(index, int) or given.shape is None:
        return None
    return _call("[]", given.inputs[0], [*[slice(None)] * (axis % len(given.shape)), index])


_FAR = 2**31 - 1
"""End that is beyond any axis."""


def _slice(given: OperatorArguments, _: Mapping[str, str]) -> ProgramStep | Value | None:
    if given.shape is None or None in given.constants[1:]:
        return None
    slices = slice_places(given.shape, *given.constants[1:])
    return None if slices is None else _call("[]", given.inputs[0], slices) if slices else given.inputs[0]


def slice_places(
    shape: Sequence[Any],
    starts: Sequence[Any],
    ends: Sequence[Any],
    axes: Sequence[int] | None = None,
    steps: Sequence[Any] | None = None,
) -> list[slice] | None:
    """Return Python slices without full ones at the end, or None if a step is not positive."""
    steps = [1] * len(starts) if steps is None else steps
    if not all(isinstance(step, int) and step > 0 for step in steps):
        return None
    slices = [slice(None)] * len(shape)
    for start, end, axis, step in zip(starts, ends, range(len(starts)) if axes is None else axes, steps, strict=True):
        size = shape[axis]
        is_far = isinstance(end, int) and (end >= _FAR or (isinstance(size, int) and end >= size))
        first = None if isinstance(start, int) and (start == 0 or start <= -_FAR) else start
        slices[axis] = slice(first, None if is_far or str(end) == str(size) else end, None if step == 1 else step)
    while slices and slices[-1] == slice(None):
        slices.pop()
    return slices


def _expand(given: OperatorArguments, functions: Mapping[str, str]) -> ProgramStep | None:
    return None if given.result is None else _call(functions["broadcast_to"], given.inputs[0], tuple(given.result))


def _axes(axes: Sequence[int]) -> Any:
    return axes[0] if len(axes) == 1 else tuple(axes)


_SIGNS = {
    "Add": "+", "Sub": "-", "Mul": "*", "Div": "/", "MatMul": "@", "Less": "<", "LessOrEqual": "<=", "Greater": ">",
    "GreaterOrEqual": ">=", "Equal": "==", "And": "&", "Or": "|", "BitwiseXor": "^", "Neg": "neg", "Not": "not",
}  # fmt: skip
_FORMS: dict[str, Form] = {
    **{operator: _infix(sign) for operator, sign in _SIGNS.items()},
    "Gemm": _gemm,
    "ReduceSum": _reduction("sum"),
    "ReduceMean": _reduction("mean"),
    "Squeeze": _by_axes("squeeze"),
    "Unsqueeze": _by_axes("expand_dims"),
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Expand": _expand,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": lambda given, names: _call(names["concatenate"], list(given.inputs), given.attributes["axis"]),
    "LogSoftmax": lambda given, names: _call(names["log_softmax"], given.inputs[0], given.attributes.get("axis", -1)),
}
_FLOATS = ("Div", "Gemm", "ReduceSum", "ReduceMean")
"""Operators that round integers differently."""
