"""PyTorch's exporter: told what not to do, quiet, and with errors that say what can be done about them."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from onward.build import Names
from onward.errors import DataError, Error, UnknownNameError, UnsupportedError, first_line, suggest
from onward.frameworks.randomness import no_chance
from onward.frameworks.torch.arguments import Flat
from onward.frameworks.torch.rewrites import rewrite
from onward.frameworks.torch.translations import TRANSLATIONS, define_functions
from onward.lowering.runtime import widen_node
from onward.model import Model


def explain(error: Exception, what: str = "the module") -> UnsupportedError:
    """What the user can do about a failure of the exporter."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    frames = (frame for cause in causes for frame, _ in traceback.walk_tb(cause.__traceback__))
    if any(isinstance(value, PackedSequence) for frame in frames for value in frame.f_locals.values()):
        return UnsupportedError(
            "the module packs sequences of different lengths (`pack_padded_sequence`), and a graph cannot",
            hint="run over padded sequences, and leave out the padding after that, by a mask for example",
        )
    if any(isinstance(cause, GuardOnDataDependentSymNode) for cause in causes):
        return UnsupportedError(
            f"the forward pass decides by the values of tensors what to do ({_place(causes)}), and a graph cannot",
            hint="choose by `torch.where`, or write both branches with `torch.cond`",
        )
    for cause in causes:
        if isinstance(cause, DynamicOutputShapeException) and "ctc_loss" in str(cause):
            return UnsupportedError(
                "PyTorch cannot trace `ctc_loss`",
                hint="let the module return its log-probabilities, and say the loss: `loss=nn.CTCLoss()`",
            )
    return UnsupportedError(
        f"PyTorch cannot export {what}: {first_line(causes[-1])}",
        hint="`torch.onnx.export(module, example_inputs, dynamo=True, optimize=False)` says more",
    )


def fault_of_example(flat: Flat) -> DataError | None:
    """How the module fails with the example by itself, if it does."""
    try:
        with torch.no_grad(), torch.random.fork_rng():
            copy.deepcopy(flat)(*flat.inputs.values())
    except Exception as error:
        inputs = {name: f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for name, x in flat.inputs.items()}
        shown = ", ".join(f"`{name}` {kind}" for name, kind in inputs.items())
        return DataError(
            f"the module fails with the example: {first_line(error)}",
            hint=f"check shapes and types of the example: {shown}",
        )
    return None


def _place(causes: Sequence[BaseException]) -> str:
    """The last line of the user's own code on the way to an error, or to what caused it."""
    frames = [frame for cause in causes for frame in traceback.extract_tb(cause.__traceback__)]
    own = [frame for frame in frames if _is_users(frame.filename)]
    in_files = [frame for frame in own if not frame.filename.startswith("<")]  # `<string>`: what a library wrote itself
    for frame in (in_files or own)[-1:]:
        return f"{frame.filename}, line {frame.lineno}"
    return first_line(causes[0])


_HOMES = [Path(str(torch.__file__)).parent, Path(__file__).parents[2]]
"""The packages of PyTorch and Onward."""
_LIBRARY = Path(sysconfig.get_path("stdlib"))


def _is_users(filename: str) -> bool:
    """Whether a file is neither ours nor of PyTorch or Python, wherever these are installed."""
    path = Path(filename)
    of_python = path.is_relative_to(_LIBRARY) and "site-packages" not in path.relative_to(_LIBRARY).parts
    return not of_python and not any(path.is_relative_to(home) for home in _HOMES)


class NeverBelowZero(TorchFunctionMode):  # type: ignore[misc]
    """Answers whether a number from `torch.rand` is below 0, as modules ask that leave out layers with probability 0.

    Without an answer the exporter takes it for a decision by values.
    """

    def __init__(self) -> None:
        super().__init__()
        self._drawn: dict[int, torch.Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_asked = function is torch.Tensor.lt and id(args[0]) in self._drawn
        if is_asked and isinstance(args[1], int | float) and args[1] <= 0:
            return False
        if function is F.l1_loss:
            _refuse_weight()
        result = function(*args, **(kwargs or {}))
        if function is torch.rand and result.ndim == 0:
            self._drawn[id(result)] = result  # which keeps its id from being used again
        return result


def _refuse_weight() -> None:
    """Refuse the `weight` of a call of `l1_loss` that is on the stack: PyTorch does not hand it to modes such as these.

    Its exporter traces by them, and the comparison with the module runs under one: both would leave it out.
    """
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code is F.l1_loss.__code__ and frame.f_locals.get("weight") is not None:
            raise UnsupportedError(
                "PyTorch drops the `weight` of `l1_loss` while it traces",
                hint="write it out: `((x - y).abs() * weight).sum() / weight.sum()`",
            )


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
                f"there is no input `{name}`", hint=suggest(name, known) or f"one of {', '.join(known)}"
            )
    axes: dict[str, dict[int, Any]] = {}
    for name, tensor in flat.inputs.items():
        given: Any = {0: "batch"} if tensor.ndim and dynamic_shapes is None else (dynamic_shapes or {}).get(name) or {}
        axes[name] = dict(given.items() if isinstance(given, Mapping) else enumerate(given))
    dims = [{axis: Dim.AUTO if isinstance(size, str) else size for axis, size in axes[name].items()} for name in axes]
    with quiet(), torch.random.fork_rng():
        try:
            with no_chance("the module"), NeverBelowZero():
                program = torch.export.export(
                    flat, tuple(flat.inputs.values()), dynamic_shapes=(tuple(dims),), strict=False
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
    assert made is not None and made.exported_program is not None
    program = made.exported_program
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


def free_names(model: Model, names: Collection[str]) -> Names:
    """Rename computed values that have one of these names: the exporter names values after operators.

    Returns:
        the names that are taken now
    """
    taken = model.names()
    taken.take(names)
    for value in [value for node in model.graph.all_nodes() for value in node.outputs]:
        if value.name and value.name in names:
            value.name = taken.fresh(value.name)
    return taken


def _name_outputs(model: Model, names: Sequence[str]) -> None:
    """Call outputs as the module does."""
    held = {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}
    taken = free_names(model, names)
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
            dims = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
            renamed = [re.sub(r"\w+", lambda m: names.get(m[0], m[0]), x) if isinstance(x, str) else x for x in dims]
            value.shape = ir.Shape(renamed)


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
