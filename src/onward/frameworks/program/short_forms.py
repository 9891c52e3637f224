"""How calls are written that Python, or the framework, has a shorter form for than the operator."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from onward.frameworks.program.calls import ProgramStep, Value, step_result


class OperatorCall(NamedTuple):
    """A call of an operator."""

    inputs: Sequence[Any]
    known: Sequence[Any]
    """Those inputs that are known while the program is written, as lists and numbers; None for others."""
    attributes: Mapping[str, Any]
    shape: Sequence[Any] | None
    """The sizes of the first input, if they are known."""
    result: Sequence[Any] | None = None
    """Those of the result."""

    def known_input(self, place: int) -> Any:
        """One that need not be given, as a list."""
        found = self.known[place] if place < len(self.known) else None
        return found if found is None or isinstance(found, list) else [found]


Form = Callable[[OperatorCall, Mapping[str, str]], ProgramStep | Value | None]
"""A value if nothing is to be done, None where the operator says more."""


class Dialect(NamedTuple):
    """What a framework has."""

    functions: Mapping[str, str]
    """By what numpy calls them; methods begin with a dot, and take sizes one by one."""
    own: Mapping[str, Form]
    """Operators that others have no such forms for."""
    without: Container[str] = ()

    def short_form(self, operator: str, given: OperatorCall, is_float: bool) -> ProgramStep | Value | None:
        """The call for an operator, if there is a short one. `is_float` says whether the first tensor is."""
        form = self.own.get(operator, _FORMS.get(operator))
        if (
            form is None
            or None in given.inputs
            or operator in self.without
            or not (is_float or operator not in _FLOATS)
        ):
            return None
        return form(given, self.functions)


def _call(function: str, *arguments: Any, **named: Any) -> ProgramStep:
    return ProgramStep(function, list(arguments), named)


def _with_sizes(function: str, x: Any, sizes: Sequence[Any]) -> ProgramStep:
    return _call(function, x, *sizes) if function.startswith(".") else _call(function, x, list(sizes))


def _infix(sign: str) -> Form:
    return lambda given, _: _call(sign, *given.inputs)


def _gemm(given: OperatorCall, functions: Mapping[str, str]) -> ProgramStep | None:
    attributes = {"alpha": 1, "beta": 1, "transA": 0, "transB": 0, **given.attributes}
    if attributes["alpha"] != 1 or attributes["beta"] != 1:
        return None
    flags = ("transA", "transB")
    turn = functions["T"]
    a, b = (step_result(turn, x) if attributes[flag] else x for x, flag in zip(given.inputs, flags, strict=False))
    return _call("+", step_result("@", a, b), given.inputs[2]) if len(given.inputs) > 2 else _call("@", a, b)


def _reduction(function: str) -> Form:
    def form(given: OperatorCall, functions: Mapping[str, str]) -> ProgramStep | None:
        axes = given.known_input(1)
        if (len(given.inputs) > 1 and axes is None) or given.attributes.get("noop_with_empty_axes"):
            return None
        kept = {"keepdims": True} if given.attributes.get("keepdims", 1) else {}
        return _call(functions[function], given.inputs[0], *([_places(axes)] if axes else []), **kept)

    return form


def _by_places(function: str) -> Form:
    def form(given: OperatorCall, functions: Mapping[str, str]) -> ProgramStep | None:
        axes = given.known_input(1)
        return None if axes is None else _call(functions[function], given.inputs[0], _places(axes))

    return form


def _reshape(given: OperatorCall, functions: Mapping[str, str]) -> ProgramStep | None:
    sizes = given.known_input(1)
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


def _transpose(given: OperatorCall, functions: Mapping[str, str]) -> ProgramStep:
    order = given.attributes.get("perm")
    if order is None or list(order) == [1, 0]:
        return _call(functions["T"], given.inputs[0])
    return _with_sizes(functions["transpose"], given.inputs[0], order)


def _gather(given: OperatorCall, _: Mapping[str, str]) -> ProgramStep | None:
    place, axis = given.known[1], given.attributes.get("axis", 0)
    if not isinstance(place, int) or given.shape is None:
        return None
    return _call("[]", given.inputs[0], [*[slice(None)] * (axis % len(given.shape)), place])


_FAR = 2**31 - 1
"""What is beyond any end."""


def _slice(given: OperatorCall, _: Mapping[str, str]) -> ProgramStep | Value | None:
    if given.shape is None or any(known is None for known in given.known[1:]):
        return None
    places = slice_places(given.shape, *given.known[1:])
    return None if places is None else _call("[]", given.inputs[0], places) if places else given.inputs[0]


def slice_places(
    shape: Sequence[Any],
    starts: Sequence[Any],
    ends: Sequence[Any],
    axes: Sequence[int] | None = None,
    steps: Sequence[Any] | None = None,
) -> list[slice] | None:
    """A slice as Python has it, without what chooses everything at the end; None if it does not go forward."""
    steps = [1] * len(starts) if steps is None else steps
    if not all(isinstance(step, int) and step > 0 for step in steps):
        return None
    places = [slice(None)] * len(shape)
    for start, end, axis, step in zip(starts, ends, range(len(starts)) if axes is None else axes, steps, strict=True):
        size = shape[axis]
        is_far = isinstance(end, int) and (end >= _FAR or (isinstance(size, int) and end >= size))
        first = None if isinstance(start, int) and (start == 0 or start <= -_FAR) else start
        places[axis] = slice(first, None if is_far or str(end) == str(size) else end, None if step == 1 else step)
    while places and places[-1] == slice(None):
        places.pop()
    return places


def _concat(given: OperatorCall, functions: Mapping[str, str]) -> ProgramStep:
    return _call(functions["concatenate"], list(given.inputs), given.attributes["axis"])


def _expand(given: OperatorCall, functions: Mapping[str, str]) -> ProgramStep | None:
    return None if given.result is None else _call(functions["broadcast_to"], given.inputs[0], tuple(given.result))


def _log_softmax(given: OperatorCall, functions: Mapping[str, str]) -> ProgramStep:
    return _call(functions["log_softmax"], given.inputs[0], given.attributes.get("axis", -1))


def _places(axes: Sequence[int]) -> Any:
    return axes[0] if len(axes) == 1 else tuple(axes)


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
    "ReduceSum": _reduction("sum"),
    "ReduceMean": _reduction("mean"),
    "Squeeze": _by_places("squeeze"),
    "Unsqueeze": _by_places("expand_dims"),
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Expand": _expand,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": _concat,
    "LogSoftmax": _log_softmax,
}
_FLOATS = ("Div", "Gemm", "ReduceSum", "ReduceMean")
"""What integers would be rounded by in another way, or become."""
