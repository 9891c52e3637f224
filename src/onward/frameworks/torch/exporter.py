"""PyTorch's exporter: told what not to do, quiet, and with errors that say what can be done about them."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir
import torch
from torch.export import Dim

from onward.errors import Error, UnknownNameError, UnsupportedError, near
from onward.frameworks.randomness import no_chance
from onward.frameworks.torch.arguments import Flat
from onward.frameworks.torch.failures import explain, fault_of_example
from onward.frameworks.torch.randomness import NeverBelowZero
from onward.frameworks.torch.rewrites import rewrite
from onward.frameworks.torch.translations import TRANSLATIONS, define_functions
from onward.lowering.runtime import widen_node
from onward.model import Model

_NORMALIZATIONS = ("GroupNormalization", "InstanceNormalization", "LayerNormalization")


class Exported(NamedTuple):
    """A graph as the exporter makes it, with names of inputs and outputs, but not yet of what the module holds."""

    model: Model
    changed: list[str]
    """Buffers that the forward pass changes."""


def export(flat: Flat, dynamic_shapes: Mapping[str, Any] | None) -> Exported:
    """The graph of a module. It is not optimized: that would merge parameters that are equal, and fold others away."""
    for name in dynamic_shapes or ():
        if name not in flat.inputs:
            known = list(flat.inputs)
            raise UnknownNameError(
                f"there is no input `{name}`", hint=near(name, known) or f"one of {', '.join(known)}"
            )
    axes = {name: _axes(name, tensor, dynamic_shapes) for name, tensor in flat.inputs.items()}
    made = _export(flat, axes)
    program = made.exported_program
    assert program is not None
    model = Model(made.model)
    define_functions(model)
    model.ir.producer_name = "onward"  # not the exporter that merges what is equal, which `prepare` would undo
    _settle_sizes(model)
    _settle_normalizations(model)
    _name_outputs(model, program.call_spec.out_spec.context)
    _check_axes(model, axes, each=dynamic_shapes is not None)
    _name_axes(model, axes)
    return Exported(model, list(program.graph_signature.buffers_to_mutate.values()))


class _Function(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self._function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self._function(*tensors)


def export_function(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], what: str) -> Model:
    """The graph of a function of tensors that have these shapes; errors say `what` it is."""
    with quiet(), torch.random.fork_rng():
        try:
            with torch.no_grad():
                program = torch.export.export(_Function(function), inputs, strict=False)
            made = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
        except Error:
            raise
        except Exception as error:
            raise explain(error, what) from error
    assert made is not None
    return Model(made.model)


def _axes(name: str, tensor: torch.Tensor, dynamic_shapes: Mapping[str, Any] | None) -> dict[int, Any]:
    if dynamic_shapes is None:
        return {0: "batch"} if tensor.ndim else {}
    given = dynamic_shapes.get(name) or {}
    return dict(given.items() if isinstance(given, Mapping) else enumerate(given))


def _export(flat: Flat, axes: Mapping[str, Mapping[int, Any]]) -> torch.onnx.ONNXProgram:
    dims = {name: {axis: _dim(size) for axis, size in sizes.items()} for name, sizes in axes.items()}
    with quiet(), torch.random.fork_rng():
        try:
            with no_chance("the module"), NeverBelowZero():
                program = torch.export.export(
                    flat, tuple(flat.inputs.values()), dynamic_shapes=(tuple(dims.values()),), strict=False
                )
            rewrite(program)
            made = torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,
                verbose=False,
                input_names=list(flat.inputs),
                custom_translation_table=TRANSLATIONS,
            )
        except Error:
            raise
        except Exception as error:
            raise fault_of_example(flat) or explain(error) from error
    assert made is not None
    return made


def _dim(size: Any) -> Any:
    return Dim.AUTO if isinstance(size, str) else size


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The exporter has much to say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


# ---- names -----------------------------------------------------------------------------------------------------------


def _name_outputs(model: Model, names: Sequence[str]) -> None:
    """Call outputs as the module does. The exporter names values after operators, and those make way."""
    taken = model.names()
    taken.take(names)
    held = {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}
    for value in [value for node in model.graph.all_nodes() for value in node.outputs]:
        if value.name and value.name in names:
            value.name = taken.fresh(value.name)
    for value, name in zip(model.graph.outputs, names, strict=True):
        value.name = taken.fresh(name) if name in held else name


def _name_axes(model: Model, axes: Mapping[str, Mapping[int, Any]]) -> None:
    """Call sizes that may vary as the user does: the exporter numbers them."""
    names: dict[str, str] = {}
    for value, axis, name in _named_axes(model, axes):
        assert value.shape is not None
        if isinstance(dim := value.shape[axis], ir.SymbolicDim) and dim.value:
            names.setdefault(dim.value, name)
    for value in _all_values(model):
        if value.shape is not None and not value.shape.is_static():
            value.shape = ir.Shape([_rename_dim(dim, names) for dim in value.shape])


def _settle_sizes(model: Model) -> None:
    """Make sizes numbers that turned out to be numbers: the exporter leaves them symbols, of the name `4`."""
    for value in _all_values(model):
        if value.shape is not None:
            dims = [int(str(dim)) if str(dim).isdigit() else dim for dim in value.shape]
            value.shape = ir.Shape(dims)


def _settle_normalizations(model: Model) -> None:
    """Widen what PyTorch normalizes in 16 bits with weights in float32, as it does itself: ONNX takes one type."""
    names, halves = model.names(), (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    for node in list(model.graph.all_nodes()):
        types = {value.dtype for value in node.inputs if value is not None}
        if node.op_type in _NORMALIZATIONS and ir.DataType.FLOAT in types:
            for dtype in halves:
                widen_node(node, dtype, names, {})


def _named_axes(model: Model, axes: Mapping[str, Mapping[int, Any]]) -> Iterator[tuple[ir.Value, int, str]]:
    for value in model.graph.inputs:
        for axis, name in axes[value.name or ""].items():
            if isinstance(name, str):
                yield value, axis, name


def _check_axes(model: Model, axes: Mapping[str, Mapping[int, Any]], *, each: bool) -> None:
    """Each size that the user named must be able to vary; of those that we did, at least one."""
    named = list(_named_axes(model, axes))
    fixed = [
        (value, axis) for value, axis, _ in named if value.shape is not None and isinstance(value.shape[axis], int)
    ]
    if fixed and (each or len(fixed) == len(named)):
        value, axis = fixed[0]
        assert value.shape is not None
        raise UnsupportedError(
            f"the module takes `{value.name}` with a size of {value.shape[axis]} along axis {axis} only",
            hint="give an example in which it is at least 2; or allow no other sizes: `dynamic_shapes={}`",
        )


def _all_values(model: Model) -> Iterator[ir.Value]:
    yield from model.graph.inputs
    for node in model.graph.all_nodes():
        yield from node.outputs


def _rename_dim(dim: int | ir.SymbolicDim, names: Mapping[str, str]) -> int | str | None:
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    return re.sub(r"\w+", lambda found: names.get(found[0], found[0]), dim.value)
