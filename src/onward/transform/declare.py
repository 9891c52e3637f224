"""Shapes of inputs: declare missing ones, and make a fixed batch size dynamic."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.arguments import checked
from onward.constants import add_initializer, constant_ints
from onward.errors import DataError, InvalidModelError, UnknownNameError, UnsupportedError, suggest_or_list
from onward.model import Model, Source, load
from onward.model.checks import check_signatures
from onward.model.core import Step, values
from onward.model.serde import stamp
from onward.model.walk import ancestors
from onward.runtime.sessions import evaluate
from onward.standard import is_standard
from onward.transform.training import strip, without_steps
from onward.transform.types import fill_in_types


@checked()
def declare(model: Source, shapes: Mapping[str, Sequence[int | str]]) -> Model:
    """Return a copy whose inputs have these shapes, with names for open sizes.

        fixed = onward.transform.declare("digits.onnx", {"image": ("N", 64)})

    Stated sizes and numbers of axes do not change. Shapes that follow are filled in.

    - `model`: any model
    - `shapes`: input -> its sizes
    """
    model = load(model).copy()
    inputs = {value.name or "": value for value in (*model.inputs, *_added_inputs(model.steps))}
    if unknown := [name for name in shapes if name not in inputs]:
        raise UnknownNameError(f"the model has no input `{unknown[0]}`", hint=suggest_or_list(unknown[0], inputs))
    named: dict[str, int | str] = {}
    for name, sizes in shapes.items():
        named |= _settle_sizes(inputs[name], sizes)
        inputs[name].shape = ir.Shape(sizes)
    for graph in (model.graph, *(step.algorithm for step in model.steps)):
        for value in values(graph):
            if value.shape is not None and not value.is_initializer():
                value.shape = ir.Shape([d if isinstance(d, int) else named.get(d.value or "", d) for d in value.shape])
    fill_in_types(model, values(model.graph))
    return stamp(model)


def require_shapes(model: Model, step: int, needed_by: str) -> None:
    """Raise if inputs have no shape, for a caller that needs their number of axes."""
    inputs = [*model.inputs, *_added_inputs(model.steps[step : step + 1])]
    if missing := [value.name or "" for value in inputs if value.shape is None]:
        listed, verb = ", ".join(f"`{name}`" for name in missing), "have" if len(missing) > 1 else "has"
        raise UnsupportedError(f"{listed} {verb} no shape, which {needed_by} needs", hint=declare_hint(missing[0]))


def declare_hint(name: str) -> str:
    """Return the hint for an input without a shape."""
    call = f'onward.transform.declare(model, {{"{name}": ("N", 64)}})'
    return f"add it to the file: `{call}` (`onward set MODEL --shape {name}=N,64`)"


def _added_inputs(steps: Sequence[Step]) -> list[ir.Value]:
    return [value for step in steps for value in step.algorithm.inputs]


def _settle_sizes(value: ir.Value, sizes: Sequence[int | str]) -> dict[str, int | str]:
    """Return the new names or numbers of open sizes of an input."""
    text = ", ".join(map(str, sizes))
    if any((isinstance(size, int) and size < 0) or size == "" for size in sizes):
        raise InvalidModelError(f"`{value.name}` cannot have the shape [{text}]", hint="give sizes as numbers or names")
    if value.shape is None:
        return {}
    old = list(value.shape)
    if len(old) != len(sizes) or any(isinstance(a, int) and a != b for a, b in zip(old, sizes, strict=True)):
        raise InvalidModelError(
            f"`{value.name}` has the shape {value.shape}, not [{text}]",
            hint="change only symbolic sizes",
        )
    return {d.value: size for d, size in zip(old, sizes, strict=True) if isinstance(d, ir.SymbolicDim) and d.value}


# ---- a batch of any size ---------------------------------------------------------------------------------------------


USUAL_BATCH = 32
"""Default number of samples in a batch."""

BATCH = "batch"
MEANS_BATCH = re.compile(r"n?_?batch(_?(size|dim|axis))?|bs", re.IGNORECASE)
"""Names of the batch size in exported models."""
_MEANS_LENGTH = re.compile(
    r"(num_?)?(seq(uence)?|time(_?steps?)?|frames?|tokens?|nodes|edges)(_?(len(gth)?|dim|axis))?", re.IGNORECASE
)
"""Names of axes within a sample."""
_TOLERANCE = 1e-4
_MOST_NODES = 32
"""Largest number of nodes before a shape that are evaluated."""


def fixed_batch(model: Model) -> int | None:
    """Return the one batch size of all inputs; None if it is dynamic, or if they differ."""
    shapes = [value.shape for value in model.inputs]
    sizes = {shape[0] if shape is not None and len(shape) else None for shape in shapes}
    size = sizes.pop() if len(sizes) == 1 else None
    return size if isinstance(size, int) else None


def check_batch_axis(
    inputs: Mapping[str, ir.Value], of_model: Iterable[ir.Value], wanted: int | None = None, processes: int = 1
) -> int | None:
    """Return the one batch size that the inputs of a step take together; None if they take any.

    Args:
        of_model: the inputs of the model, which are not targets.
        wanted: the requested size.
        processes: the number of processes that share a batch.

    Raises:
        DataError: the batch may not be axis 0 of all inputs, or `wanted` is not their size.
    """
    own = {value.name or "" for value in of_model}
    if scalar := next((name for name in own & inputs.keys() if inputs[name].shape == ir.Shape([])), None):
        raise DataError(
            f"`{scalar}` is one number, which has no samples",
            hint=f'give the number: `constants={{"{scalar}": 1.0}}` (`--constant {scalar}=1.0`)',
        )
    shapes = {name: list(value.shape) for name, value in inputs.items() if value.shape is not None and len(value.shape)}
    symbols = {name: [getattr(dim, "value", None) for dim in shape] for name, shape in shapes.items()}
    first = {axes[0]: name for name, axes in reversed(symbols.items()) if axes[0] is not None}
    for name, axes in symbols.items():
        for axis, symbol in enumerate(axes):
            if symbol is None or symbol == axes[0]:
                continue
            if symbol in first:
                raise _misplaced(f"`{symbol}` is axis 0 of `{first[symbol]}` and axis {axis} of `{name}`", name, axis)
            if MEANS_BATCH.fullmatch(symbol):
                raise _misplaced(f"`{symbol}` is axis {axis} of `{name}`, and samples are axis 0", name, axis)
        if name in own and axes[0] is not None and _MEANS_LENGTH.fullmatch(axes[0]):
            raise DataError(
                f"axis 0 of `{name}` is `{axes[0]}`, which is not a batch",
                hint=f'if it is within a sample: `batch_axis={{"{name}": "none"}}` (`--batch-axis {name}=none`); '
                f"if it is the batch: `--batch-axis {name}=0`",
            )
    sizes = {name: shape[0] for name, shape in shapes.items() if isinstance(shape[0], int)}
    if not sizes:
        return None
    fixed_inputs = [name for name in sizes if name in own] or [*sizes]
    name = max(fixed_inputs, key=lambda name: (sizes[name] != 1, len(shapes[name])))
    size = sizes[name]
    if other := next((other for other in sizes if sizes[other] != size), None):
        raise _misplaced(f"axis 0 is {sizes[other]} for `{other}` but {size} for `{name}`", name)
    if any_size := next((other for other in shapes if other in own and other not in sizes), None):
        raise _misplaced(f"`{name}` takes {size} rows per batch, and `{any_size}` any number", name)
    for other, shape in shapes.items():
        if other not in own and other not in sizes and len(shape) > 2 and shape[1] == size:  # as [time, samples, ...]
            raise _misplaced(f"axis 1 of `{other}` is {size}, as the batch, and axis 0 is open", "OUTPUT")
    fixed = size * processes
    if wanted in (None, fixed):
        return fixed
    raise DataError(
        f"the model takes batches of {fixed}, not of {wanted}",
        hint=f"use `batch_size={fixed}` (`--batch-size {fixed}`)",
    )


def _misplaced(what: str, name: str, axis: int = 1) -> DataError:
    return DataError(
        what,
        hint=f'say where samples are: `batch_axis={{"{name}": {axis}}}` (`--batch-axis {name}={axis}`); or, for an '
        f'input that is not in the data: `constants={{"{name}": "zeros"}}` (`--constant {name}=zeros`)',
    )


def rebatch(source: Source) -> Model:
    """Return a copy of a model with a fixed batch size that takes any size.

    The first axis of inputs becomes a symbol, and so do target shapes of Reshape and Expand that
    contain it. Constants that are concatenated to a single sample are repeated for each. Then the
    model runs: for twice as many samples, it must return the results of each half, or their mean
    for a single number. Otherwise it is refused.
    """
    model = check_signatures(load(source))
    size = fixed_batch(model)
    if size is None:
        raise InvalidModelError("the model has no fixed batch size", hint="train it with any `batch_size`")
    result = model.copy()
    for value in [*result.inputs, *result.outputs]:
        value.shape = _free_axis(value.shape, size)
    for node in list(result.graph):
        for output in node.outputs:
            if not output.is_graph_output():
                output.shape = None
        if not is_standard(node):
            continue
        if node.op_type in _FREED and (target := _target(result, node.inputs[1])):
            _FREED[node.op_type](result, node, target, size)
        elif node.op_type == "Concat" and size == 1:
            _free_concat(result, node)
    rng = np.random.default_rng(0)
    halves = [{value.name or "": _sample(rng, value) for value in model.inputs} for _ in range(2)]
    whole = {name: np.concatenate([half[name] for half in halves]) for name in halves[0]}
    try:
        expected = [evaluate(without_steps(model), half) for half in halves]
        results = evaluate(without_steps(result), whole)
    except (DataError, UnsupportedError) as error:
        raise _refusal(size, error.message) from error
    for value, first, second, both in zip(result.outputs, *expected, results, strict=True):
        joined = np.concatenate([first, second]) if first.ndim else np.mean([first, second])  # a loss, for example
        if both.shape != joined.shape:
            raise _refusal(size, f"for {2 * size} samples `{value.name}` has the shape {list(both.shape)}")
        if not np.allclose(both, joined, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise _refusal(size, f"`{value.name}` of a sample depends on the other samples")
    return result


def _target(model: Model, shape: ir.Value | None) -> tuple[int, ...] | None:
    """Return the target shape that a node reads, if constant; traces compute some with nodes."""
    numbers_in_file = constant_ints(shape)
    if numbers_in_file is not None or shape is None or shape.producer() is None:
        return numbers_in_file
    nodes, read = ancestors([shape])
    constants = [value for value in read if value.producer() is None]
    if len(nodes) > _MOST_NODES or any(value.const_value is None for value in constants):
        return None
    view: Any = ir.GraphView(
        [],
        [shape],
        nodes=[node for node in model.graph if node in nodes],
        initializers=constants,
        opset_imports=model.graph.opset_imports,
        name="shape",
    )
    try:
        (numbers,) = evaluate(strip(Model(ir.Model(view, ir_version=model.ir.ir_version))))
    except UnsupportedError:
        return None
    return tuple(int(n) for n in numbers)


def _free_axis(shape: ir.Shape | None, size: int) -> ir.Shape | None:
    if shape is None or not len(shape) or shape[0] != size:
        return shape
    return ir.Shape([BATCH, *list(shape)[1:]])


def _free_reshape(model: Model, node: ir.Node, target: tuple[int, ...], size: int) -> None:
    """Make the first axis -1 or, if another axis is, that of the input."""
    if target[0] <= 0:
        return
    if -1 not in target:
        new = (-1, *target[1:])
    elif target[0] == size and (0 not in target or not node.attributes.get_int("allowzero", 0)):
        new = (0, *target[1:])
        node.attributes.pop("allowzero", None)
    else:
        return
    node.replace_input_with(1, _constant(model, f"{node.name or 'reshape'}/shape", new))


def _free_expand(model: Model, node: ir.Node, target: tuple[int, ...], size: int) -> None:
    """Make the first axis that of the batch; a single axis is not a batch."""
    if target[0] == size and len(target) > 1:
        node.replace_input_with(1, _batch_of(model, node, target[1:]))


def _free_concat(model: Model, node: ir.Node) -> None:
    """Repeat constants that are concatenated to each sample, such as a class token."""
    if node.attributes.get_int("axis", 0) == 0:
        return
    for i, value in enumerate(node.inputs):
        shape = value.const_value.shape.numpy() if value is not None and value.const_value is not None else ()
        if value is None or len(shape) < 2 or shape[0] != 1 or not value.is_initializer():
            continue
        repeated = ir.Node("", "Expand", [value, _batch_of(model, node, shape[1:])])
        repeated.name = model.names().fresh(f"{value.name}/repeated")
        repeated.outputs[0].name, repeated.outputs[0].type = repeated.name, value.type
        model.graph.insert_before(node, repeated)
        node.replace_input_with(i, repeated.outputs[0])


def _batch_of(model: Model, node: ir.Node, rest: Sequence[int]) -> ir.Value:
    """Return the shape of a batch with the size of the first input of the model."""
    name = node.name or node.op_type
    names = model.names()
    shape = ir.Node("", "Shape", [model.inputs[0]], name=names.fresh(f"{name}/input"))
    first = _constant(model, f"{name}/first", (0,))
    batch = ir.Node("", "Gather", [shape.outputs[0], first], name=names.fresh(f"{name}/batch"))
    others = _constant(model, f"{name}/rest", tuple(rest))
    axis = ir.AttrInt64("axis", 0)
    joined = ir.Node("", "Concat", [batch.outputs[0], others], [axis], name=names.fresh(f"{name}/shape"))
    for added in (shape, batch, joined):
        added.outputs[0].name = names.fresh(added.name or "")
    model.graph.insert_before(node, [shape, batch, joined])
    return joined.outputs[0]


_FREED = {"Expand": _free_expand, "Reshape": _free_reshape}
"""Operators whose second input is a shape."""


def _constant(model: Model, name: str, numbers: tuple[int, ...]) -> ir.Value:
    return add_initializer(model.graph, model.names().fresh(name), np.asarray(numbers, np.int64))


# ---- comparison ------------------------------------------------------------------------------------------------------


def _sample(rng: np.random.Generator, value: ir.Value) -> np.ndarray:
    """Return values that any model takes: small numbers, since integers may be indices."""
    assert value.shape is not None and value.dtype is not None
    shape = [size if isinstance(size, int) else 2 for size in value.shape]
    dtype = value.dtype.numpy()
    numbers: np.ndarray = rng.normal(size=shape) if value.dtype.is_floating_point() else rng.integers(0, 2, shape)
    return numbers.astype(dtype)


def _refusal(size: int, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the model works for batches of {size} only: {why}",
        hint=f"export it with a dynamic batch, or accumulate batches: `batch_size={size}, accumulate=32` "
        f"(`--batch-size {size} --accumulate 32`)",
    )
