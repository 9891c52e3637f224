"""Samples on axis 0 of all inputs and outputs, and constants in the place of inputs.

Data have samples on axis 0. If a file has them elsewhere, the training model begins and ends with nodes
that move the axis; constants replace inputs that are not data. `strip` restores inputs and outputs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import Error, RecipeError, UnknownNameError, suggest_or_list, warn
from onward.model import Model
from onward.model.core import values
from onward.recipe.preprocessing.join import move_before
from onward.standard import OLDEST_OPSET
from onward.transform.declare import BATCH, MEANS_BATCH, declare_hint, fixed_batch
from onward.transform.opset import of_one_opset
from onward.transform.training import INTERFACE_KEY
from onward.transform.types import fill_in_types

Axis = int | Literal["none"]
"""The axis of samples; `none`: a sample is a whole tensor."""


# ---- the axis of samples ---------------------------------------------------------------------------------------------


def batch_axes(
    model: Model, chosen: Mapping[str, Any], constants: Iterable[str]
) -> tuple[dict[str, Axis], dict[str, str]]:
    """Return the axes of samples that are `chosen` or follow from symbols, and the symbols of the latter.

    The batch is the one symbol that all inputs of data share and that is the first axis of one of
    them, or has a name such as `batch`. Axes that remain are 0.
    """
    axes = _parsed(model, chosen)
    constants = set(constants)
    inputs = [value for value in model.inputs if value.name not in (*constants, *_done(model))]
    symbols = {value.name or "": _symbols(value) for value in inputs}
    for name in symbols:
        axis = axes.get(name)
        symbols[name] = [] if axis == "none" else symbols[name] if axis is None else [symbols[name][axis]]
    shared = set.intersection(*map(set, symbols.values())) - {None} if symbols else set()
    named = {symbol for symbol in shared if MEANS_BATCH.fullmatch(symbol or "")}
    candidates = named or {symbol for symbol in shared if any(symbol == axis[0] for axis in symbols.values())}
    read_off: dict[str, str] = {}
    if len(candidates) == 1:
        (batch,) = candidates
        for value in [*inputs, *model.outputs]:
            name, dims = value.name or "", _symbols(value)
            if name not in axes and batch in dims and dims[0] != batch:
                axes[name], read_off[name] = dims.index(batch), batch or ""
    if inputs and all(axes.get(value.name or "") == "none" for value in inputs):
        axes |= {value.name or "": "none" for value in model.outputs if value.name not in axes}
    return axes, read_off


def _parsed(model: Model, chosen: Mapping[str, Any]) -> dict[str, Axis]:
    """Return the axes by name: patterns of names, and axes as text, come from the command line."""
    values = {value.name or "": value for value in (*model.inputs, *model.outputs)}
    axes: dict[str, Axis] = {}
    for pattern, stated in chosen.items():
        names = [pattern] if pattern in values else [name for name in values if fnmatchcase(name, pattern)]
        if not names and pattern not in _done(model):
            raise UnknownNameError(
                f"the model has no input or output `{pattern}`", hint=suggest_or_list(pattern, values)
            )
        for name in names:
            shape = values[name].shape
            rank = None if shape is None or values[name].is_graph_output() else len(shape)
            text = str(stated)
            axis: Axis = int(text) if text.isdecimal() else "none"
            if (axis == "none" and text != "none") or (isinstance(axis, int) and rank is not None and axis >= rank):
                size = "any shape" if rank is None else f"the shape {shape}"
                raise RecipeError(
                    f"`batch_axis` of `{name}` is `{stated}`, and it has {size}", hint="write an axis, or `none`"
                )
            if shape is None and axis != 0:
                raise RecipeError(f"`{name}` has no shape, which `batch_axis` needs", hint=declare_hint(name))
            axes[name] = axis
    return axes


def _symbols(value: ir.Value) -> list[str | None]:
    return [getattr(dim, "value", None) for dim in value.shape or ()]


def _done(model: Model) -> set[str]:
    """Return the inputs and outputs that have samples first, or are constants, since an earlier call."""
    texts = [node.metadata_props[INTERFACE_KEY] for node in model.graph if INTERFACE_KEY in node.metadata_props]
    return {json.loads(text)["name"] for text in texts}


def correct_shape(model: Model, value: ir.Value) -> None:
    """Give an output the shape that is computed, if the declared one contradicts it or is less definite."""
    declared = value.shape
    if declared is None or not value.is_graph_output():
        return
    value.shape = None
    fill_in_types(model, [value])
    computed, value.shape = value.shape, declared
    if computed is None:
        return
    pairs = [*zip(computed, declared, strict=False)]
    differ = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)
    if differ or len(computed) != len(declared):
        warn(f"`{value.name}` is declared as {declared}, and computed as {computed}, which is used")
        value.shape = computed
    elif moving := [i for i in _moving_axes(model, value, pairs) if isinstance(declared[i], int)]:
        warn(f"`{value.name}` is declared as {declared}, but the sizes of axes {moving} follow the inputs")
        value.shape = ir.Shape([a if i in moving or isinstance(a, int) else b for i, (a, b) in enumerate(pairs)])
    elif fixed_batch(model) is not None:  # else a tool may have opened inputs, and left sizes of inner values
        value.shape = ir.Shape([a if isinstance(a, int) else b for a, b in pairs])


_OPEN_SIZES = 64, 96
"""Sizes of open dimensions, to see which sizes of an output depend on them."""


def _moving_axes(model: Model, value: ir.Value, pairs: Sequence[tuple[Any, Any]]) -> list[int]:
    """Return the axes of an output whose sizes depend on open sizes of inputs, where the model states a number."""
    if all(isinstance(a, int) or not isinstance(b, int) for a, b in pairs):
        return []
    shapes = []
    for size in _OPEN_SIZES:
        sized = model.copy()
        for node in sized.graph:  # a tool may have stored the sizes of its example
            for output in node.outputs:
                output.shape = None
        for entry in sized.inputs:
            if entry.shape is not None:
                entry.shape = ir.Shape([dim if isinstance(dim, int) else size for dim in entry.shape])
        result = sized.outputs[model.outputs.index(value)]
        with suppress(Error):
            fill_in_types(sized, [result])
        shapes.append(result.shape or ())
    both = enumerate(zip(*shapes, strict=False))
    return [i for i, (a, b) in both if isinstance(a, int) and isinstance(b, int) and a != b]


# ---- nodes at the edges ----------------------------------------------------------------------------------------------


def with_samples_first(source: Model, chosen: Mapping[str, Any], constants: Mapping[str, Any]) -> Model:
    """Return a copy with samples on axis 0 and constants in the place of inputs. Repeated calls change nothing."""
    done = _done(source)
    axes = {name: axis for name, axis in _parsed(source, chosen).items() if name not in done}
    constants = {name: value for name, value in constants.items() if name not in done}
    if not axes and not constants:
        return source
    model = of_one_opset(source.copy(), OLDEST_OPSET)
    inputs = {value.name or "": value for value in model.inputs}
    if unknown := [name for name in constants if name not in inputs]:
        raise UnknownNameError(f"the model has no input `{unknown[0]}`", hint=suggest_or_list(unknown[0], inputs))
    for value in model.outputs:
        if value.name in axes:
            correct_shape(model, value)
    _rename_first(model, axes, constants)
    is_alone = any(axes.get(value.name or "") == "none" for value in model.outputs)
    first = ir.Graph([], [], nodes=[], name="interface", opset_imports={"": model.opset})
    op = Builder(first, opset=model.opset, names=model.names(), scope="interface")
    positions = {name: model.graph.inputs.index(value) for name, value in inputs.items()}
    samples: list[ir.Value] = []
    for name, value in inputs.items():
        if name not in constants:
            samples.append(raw := _sample_input(value, axes.get(name, 0), is_alone))
            if raw is not value:
                _enter(model, positions[name], value, _as_in_file(op(raw), axes.get(name, 0)), raw)
    if not samples:
        raise RecipeError("no input is left for data", hint=f"leave out the constant `{next(iter(constants))}`")
    for name, stated in constants.items():
        value, stored = inputs[name], op.constant(_array(inputs[name], stated))
        axis = axes.get(name)
        sizes = _sizes(op, value, stored, axis, samples)
        result = op.Identity(stored) if sizes is None else op.Expand(stored, sizes)
        _enter(model, positions[name], value, result, None)
        if isinstance(axis, int) and value.shape is not None:
            shape = [*value.shape]
            shape[axis] = next((raw.shape[0] for raw in samples if raw.shape), shape[axis])
            result.value.shape = ir.Shape(shape)
    move_before(model.graph, first)
    op = Builder(model.graph, opset=model.opset, names=op.names, scope="interface")
    for i, value in enumerate(list(model.graph.outputs)):
        if value.name in axes and axes[value.name] != 0:
            _leave(op, model.graph, i, value, axes[value.name])
    return model


def _rename_first(model: Model, axes: Mapping[str, Axis], constants: Iterable[str]) -> None:
    """Give first axes that are chosen the symbol of a batch, wherever their own stands."""
    chosen = [
        value for value in model.inputs if axes.get(value.name or "") == 0 and (value.name or "") not in constants
    ]
    chosen = [value for value in chosen if value.shape is not None and not isinstance(value.shape[0], int)]
    old = {_symbols(value)[0] for value in chosen} - {None}
    for value in values(model.graph):
        if value.shape is not None and old.intersection(_symbols(value)):
            value.shape = ir.Shape([BATCH if getattr(dim, "value", None) in old else dim for dim in value.shape])
    for value in chosen:
        assert value.shape is not None
        value.shape = ir.Shape([BATCH, *list(value.shape)[1:]])


def _sample_input(value: ir.Value, axis: Axis, is_alone: bool) -> ir.Value:
    """Return an input with samples on axis 0; only one of them if each is alone in a batch."""
    dims = list(value.shape or ())
    size: Any = 1 if axis == "none" or not dims else dims.pop(axis)
    size = 1 if is_alone and not isinstance(size, int) else size
    if axis == 0 and (not value.shape or size == value.shape[0]):
        return value
    if isinstance(size, ir.SymbolicDim) and size.value is None:
        size = BATCH
    return ir.Value(name=value.name, type=value.type, shape=ir.Shape([size, *dims]), doc_string=value.doc_string)


def _as_in_file(x: Expr, axis: Axis) -> Expr:
    if axis == "none":
        return x.op.Squeeze(x, [0])
    return x.op.Transpose(x, perm=_order(x.value, axis, first=False)) if axis else x.op.Identity(x)


def _order(value: ir.Value, axis: int, first: bool) -> list[int]:
    """Return the permutation that moves an axis to the front, or the first axis there."""
    axes = [*range(len(value.shape or ()))]
    axes.insert(0 if first else axis, axes.pop(axis if first else 0))
    return axes


def _enter(model: Model, position: int, value: ir.Value, result: Expr, raw: ir.Value | None) -> None:
    """Let the graph read a result in the place of an input, and data at `raw`."""
    fact = {"name": value.name, "input": position, "shape": _stated(value.shape)}
    value.name = result.op.names.fresh(f"{value.name}/inside")
    result.value.name, result.value.type, result.value.shape = value.name, value.type, value.shape
    value.replace_all_uses_with(result.value, replace_graph_outputs=True)
    at = model.graph.inputs.index(value)
    model.graph.inputs[at : at + 1] = [] if raw is None else [raw]
    _tag(result, fact)


def _tag(result: Expr, fact: Mapping[str, Any]) -> None:
    node = result.value.producer()
    assert node is not None
    node.metadata_props[INTERFACE_KEY] = json.dumps(fact)


def _stated(shape: ir.Shape | None) -> list[int | str | None] | None:
    return None if shape is None else [dim if isinstance(dim, int) else dim.value for dim in shape]


def _leave(op: Builder, graph: ir.Graph, position: int, value: ir.Value, axis: Axis) -> None:
    """Put samples of an output on axis 0."""
    dims: list[Any] = list(value.shape or ())
    if axis != "none" and axis >= len(dims):
        raise RecipeError(
            f"`batch_axis` of `{value.name}` is {axis}, and it has the shape {value.shape}",
            hint="write an axis, or `none`",
        )
    fact = {"name": value.name, "shape": _stated(value.shape)}
    if axis == "none":
        moved = op.Unsqueeze(value, [0])
        dims = [1, *(None if MEANS_BATCH.fullmatch(getattr(dim, "value", None) or "") else dim for dim in dims)]
    else:
        moved = op.Transpose(value, perm=_order(value, axis, first=True))
        dims.insert(0, dims.pop(axis))
    name, value.name = value.name, op.names.fresh(f"{value.name}/inside")
    moved.value.name, moved.value.type = name, value.type
    moved.value.shape = None if value.shape is None else ir.Shape(dims)
    graph.outputs[position] = moved.value
    _tag(moved, fact)


# ---- constants -------------------------------------------------------------------------------------------------------


_WORDS = {"zeros": 0, "ones": 1}


def _array(value: ir.Value, stated: Any) -> np.ndarray:
    """Return a constant in the type of an input: a number, numbers, `zeros` or `ones`."""
    assert value.dtype is not None
    dtype = value.dtype.numpy()
    if isinstance(stated, str) and dtype.kind != "O":
        try:
            stated = _WORDS[stated] if stated in _WORDS else json.loads(stated)
        except ValueError:
            raise RecipeError(
                f"the constant `{value.name}` is `{stated}`", hint="write a number, a list, `zeros` or `ones`"
            ) from None
    array = np.asarray(stated)
    result = array.astype(dtype)
    if dtype.kind in "iub" and not np.array_equal(result, array):
        raise RecipeError(f"`{value.name}` takes {dtype}, and the constant is {stated}", hint="round it")
    return result


def _sizes(op: Builder, value: ir.Value, stored: Expr, axis: Axis | None, data: list[ir.Value]) -> Expr | None:
    """Return the shape of a constant, computed from the data; None if it is its own."""
    if value.shape is None:
        return None
    own = tuple(stored.value.shape or ())
    parts: list[Any] = []
    for i, dim in enumerate(value.shape):
        symbol = getattr(dim, "value", None)
        source = next(((v, _symbols(v).index(symbol)) for v in data if symbol in _symbols(v)), None) if symbol else None
        if i == axis:
            source = next(((v, 0) for v in data if v.shape), source)
        at = i - len(value.shape) + len(own)
        if source is not None:
            parts.append(op.Shape(source[0], start=source[1], end=source[1] + 1))
        elif isinstance(dim, int) or (at >= 0 and own[at] != 1):
            parts.append(np.asarray([dim if isinstance(dim, int) else own[at]], np.int64))
        else:
            raise RecipeError(
                f"axis {i} of `{value.name}` is open: {value.shape}",
                hint=f"if it is the batch: {option_of_axis(value.name or '', i)}",
            )
    if len(own) > len(parts) or any(
        size not in (1, part.item() if isinstance(part, np.ndarray) else 1)
        for size, part in zip(reversed(own), reversed(parts), strict=False)
    ):
        raise RecipeError(
            f"`{value.name}` takes {value.shape}, and the constant is {list(own)}", hint="write `zeros`, or its numbers"
        )
    return op.Concat(*parts, axis=0) if parts else None


def option_of_axis(name: str, axis: Axis) -> str:
    """Return the option that says where samples are."""
    return f'`batch_axis={{"{name}": {json.dumps(axis)}}}` (`--batch-axis {name}={axis}`)'
