"""Shapes of inputs, said in the file where an exporter has left them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onward.arguments import checked
from onward.errors import InvalidModelError, UnknownNameError, UnsupportedError, near_or_first
from onward.model import Model, Source, load
from onward.model.core import Step, values
from onward.model.serde import stamp
from onward.transform.types import fill_in_types


@checked()
def declare(model: Source, shapes: Mapping[str, Sequence[int | str]]) -> Model:
    """A copy whose inputs have these shapes: `{"image": ("N", 3, 224, 224)}`, with names for sizes that stay open.

        fixed = onward.transform.declare("digits.onnx", {"image": ("N", 64)})

    What a file says already stays true: a number is not changed, nor is the number of axes. Shapes that follow from
    these in the graph are filled in.

    - `model`: any model
    - `shapes`: input -> its sizes
    """
    model = load(model).copy()
    inputs = {value.name or "": value for value in (*model.inputs, *_added_inputs(model.steps))}
    if unknown := [name for name in shapes if name not in inputs]:
        raise UnknownNameError(f"the model has no input `{unknown[0]}`", hint=near_or_first(unknown[0], inputs))
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
    """Refuse a model whose inputs have no shape, for what has to know at least how many axes they have."""
    inputs = [*model.inputs, *_added_inputs(model.steps[step : step + 1])]
    if missing := [value.name or "" for value in inputs if value.shape is None]:
        listed, verb = ", ".join(f"`{name}`" for name in missing), "have" if len(missing) > 1 else "has"
        raise UnsupportedError(f"{listed} {verb} no shape, which {needed_by} needs to know", hint=way_out(missing[0]))


def way_out(name: str) -> str:
    """What to do about an input without a shape."""
    call = f'onward.transform.declare(model, {{"{name}": ("N", 64)}})'
    return f"say it in the file, such as `{call}` (`onward set MODEL --shape {name}=N,64`)"


def _added_inputs(steps: Sequence[Step]) -> list[ir.Value]:
    return [value for step in steps for value in step.algorithm.inputs]


def _settle_sizes(value: ir.Value, sizes: Sequence[int | str]) -> dict[str, int | str]:
    """What open sizes of an input are called from now on, or are."""
    text = ", ".join(map(str, sizes))
    if any((isinstance(size, int) and size < 0) or size == "" for size in sizes):
        raise InvalidModelError(
            f"`{value.name}` cannot have the shape [{text}]", hint="give numbers, or names of sizes"
        )
    if value.shape is None:
        return {}
    known = list(value.shape)
    if len(known) != len(sizes) or any(isinstance(a, int) and a != b for a, b in zip(known, sizes, strict=True)):
        raise InvalidModelError(
            f"`{value.name}` has the shape {value.shape}, which is not [{text}]",
            hint="only sizes that are open can be settled",
        )
    return {d.value: size for d, size in zip(known, sizes, strict=True) if isinstance(d, ir.SymbolicDim) and d.value}
