"""An nn.Module as an inference model that can be trained as the module is.

PyTorch's exporter is told not to optimize, since it would merge parameters that are equal and fold others away; what it
leaves out is put back: names, ties, buffers, parameters that no output depends on, what is frozen.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import logging
import re
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from onward.convert.torch.rewrites import TRANSLATIONS, rewrite
from onward.errors import UnsupportedError
from onward.model import Model
from onward.run.torch.types import CODES, to_array

KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
PERSISTENT = "pkg.torch.export.graph_signature.InputSpec.persistent"
ALSO = "torch.also"
"""Of an initializer: the other names under which the module has it, and which place in its order these have; JSON."""
LEARNS = "torch.requires_grad"
"""Of a parameter that is not trained: whether PyTorch computes a gradient for it nevertheless."""

_PREFIX = "module."
_NOISE = ("pkg.torch.onnx.stack_trace", "pkg.torch.onnx.fx_node")
"""Metadata of nodes that repeat the source code of the module, with its place on somebody's disk."""
_RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


def captured(module: nn.Module, example_inputs: Any, dynamic_shapes: Mapping[str, Any] | None = None) -> Model:
    """The forward pass of a module, with its parameters and buffers under their names. The module stays as it is.

    - `example_inputs`: what `forward` takes: a tensor, a sequence of arguments, or a mapping by their names
    - `dynamic_shapes`: argument -> axis -> its name, for axes of any size; without it, the first axis of all tensors

    What is in `eval()` inside of a module in training stays as in inference: a normalization keeps its statistics. A
    module that is in `eval()` itself is taken as `train()` makes it.
    """
    module = copy.deepcopy(module)
    into_training(module)
    _refuse(_untrainable(module))
    flat = Flat(module, example_inputs)
    axes = {name: _axes(name, tensor, dynamic_shapes) for name, tensor in flat.inputs.items()}
    program = _exported(flat, axes)
    model = Model(program.model)
    model.ir.producer_name = "onward"  # not the exporter that merges what is equal, which `prepare` would undo
    _name_outputs(model, program)
    _name_axes(model, axes)
    _restore(model, module)
    _switch(model, module)
    _refuse([*_changed_buffers(program, module), *_random(model)])
    return model


def into_training(module: nn.Module) -> None:
    """Put a module, in place, into the mode that it is captured in."""
    if not module.training:
        module.train()
    if getattr(getattr(module, "config", None), "use_cache", False):
        module.config.use_cache = False  # of transformers: what it keeps for the next token, when it generates


def _refuse(problems: Iterable[str]) -> None:
    if found := list(dict.fromkeys(problems)):
        raise UnsupportedError("the module cannot be captured exactly: " + "; ".join(found))


# ---- arguments and results -------------------------------------------------------------------------------------------


def _arguments(module: nn.Module, example_inputs: Any) -> inspect.BoundArguments:
    signature = inspect.signature(module.forward)
    if isinstance(example_inputs, Mapping):
        return signature.bind(**example_inputs)
    if isinstance(example_inputs, torch.Tensor):
        return signature.bind(example_inputs)
    return signature.bind(*example_inputs)


class Flat(nn.Module):  # type: ignore[misc]
    """A module as a function from tensors to tensors, however it takes and returns them."""

    def __init__(self, module: nn.Module, example_inputs: Any):
        super().__init__()
        self.module = module
        arguments = _arguments(module, example_inputs)
        leaves, self._structure = pytree.tree_flatten_with_path((arguments.args, arguments.kwargs))
        names = _argument_names(arguments)
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves]
        tensors = {i: leaf for i, (_, leaf) in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        self.inputs = {_joined((names[path[:2]], *path[2:])): leaf for path, leaf in leaves if torch.is_tensor(leaf)}
        self._places = list(tensors)

    def forward(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        found = pytree.tree_flatten_with_path(self.module(*args, **kwargs))[0]
        return {_joined(path or ("output",)): x for path, x in found if isinstance(x, torch.Tensor)}


def _argument_names(arguments: inspect.BoundArguments) -> dict[tuple[Any, ...], str]:
    """Where `(args, kwargs)` have an argument -> its name."""
    names: list[str] = []
    for name, value in arguments.arguments.items():
        kind = arguments.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}_{i}" for i in range(len(value))]
        elif len(names) < len(arguments.args):
            names.append(name)
    placed = {(pytree.SequenceKey(0), pytree.SequenceKey(i)): name for i, name in enumerate(names)}
    return placed | {(pytree.SequenceKey(1), pytree.MappingKey(name)): name for name in arguments.kwargs}


def _joined(path: Sequence[Any]) -> str:
    """A name from where something is: `state_0`, `logits`, and `output_1` for what has no name."""
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    return "_".join(["output", *parts] if parts[0].isdigit() else parts)


# ---- the exporter ----------------------------------------------------------------------------------------------------


def _exported(flat: Flat, axes: Mapping[str, Mapping[int, Any]]) -> torch.onnx.ONNXProgram:
    dims = {name: {axis: _dim(size) for axis, size in sizes.items()} for name, sizes in axes.items()}
    with _quiet(), torch.random.fork_rng():
        try:
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
        except Exception as error:
            raise _explained(error) from error
    assert made is not None
    return made


def _axes(name: str, tensor: torch.Tensor, dynamic_shapes: Mapping[str, Any] | None) -> dict[int, Any]:
    if dynamic_shapes is None:
        return {0: "batch"} if tensor.ndim else {}
    given = dynamic_shapes.get(name) or {}
    return dict(given.items() if isinstance(given, Mapping) else enumerate(given))


def _dim(size: Any) -> Any:
    return Dim.AUTO if isinstance(size, str) else size


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter has much to say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


def _explained(error: Exception) -> UnsupportedError:
    """What the user can do about a failure of the exporter."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any(isinstance(cause, GuardOnDataDependentSymNode) for cause in causes):
        return UnsupportedError(
            f"the forward pass decides by the values of tensors what to do ({_place(error)}), and a graph cannot",
            hint="choose by `torch.where`, or write both branches with `torch.cond`",
        )
    reason = str(causes[-1]).strip().partition("\n")[0]
    return UnsupportedError(
        f"PyTorch cannot export the module: {reason}",
        hint="`torch.onnx.export(module, example_inputs, dynamo=True, optimize=False)` says more",
    )


def _place(error: BaseException) -> str:
    """The last line of the user's own code on the way to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not re.search(r"[/\\](torch|onward)[/\\]", f.filename)]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else str(error).splitlines()[0]


# ---- what the exporter leaves out ------------------------------------------------------------------------------------


def _name_outputs(model: Model, program: torch.onnx.ONNXProgram) -> None:
    assert program.exported_program is not None
    names, taken = program.exported_program.call_spec.out_spec.context, model.names()
    for value, name in zip(model.graph.outputs, names, strict=True):
        value.name = taken.fresh(name)


def _name_axes(model: Model, axes: Mapping[str, Mapping[int, Any]]) -> None:
    """Call sizes that may vary as the user does: the exporter numbers them."""
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        assert value.shape is not None
        for axis, size in axes[value.name or ""].items():
            if isinstance(size, str) and isinstance(dim := value.shape[axis], ir.SymbolicDim) and dim.value:
                names.setdefault(dim.value, size)
    for value in _all_values(model):
        if value.shape is not None and not value.shape.is_static():
            value.shape = ir.Shape([_renamed(dim, names) for dim in value.shape])


def _all_values(model: Model) -> Iterator[ir.Value]:
    yield from model.graph.inputs
    for node in model.graph.all_nodes():
        yield from node.outputs


def _renamed(dim: int | ir.SymbolicDim, names: Mapping[str, str]) -> int | str | None:
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    return re.sub(r"\w+", lambda found: names.get(found[0], found[0]), dim.value)


def _restore(model: Model, module: nn.Module) -> None:
    """Give all that the module holds its name, in the module's order, used or not."""
    graph, named = model.graph, dict(_held(module))
    exported = {name.removeprefix(_PREFIX): value for name, value in graph.initializers.items()}
    first: dict[int, str] = {}
    for name, tensor in named.items():
        first.setdefault(id(tensor), name)
    persistent = module.state_dict(keep_vars=True).keys()
    found: dict[str, ir.Value] = {}
    for name, tensor in named.items():
        known = exported.pop(name, None)
        main = first[id(tensor)]
        if known is not None:
            found[main] = known
    constants = list(exported.values())
    graph.initializers.clear()
    for name in dict.fromkeys(first.values()):
        value = found.get(name) or ir.Value()
        _describe(value, name, named[name], is_kept=name in persistent)
        also = {
            other: place
            for place, (other, tensor) in enumerate(named.items())
            if other != name and first[id(tensor)] == name
        }
        if also:
            value.metadata_props[ALSO] = json.dumps(also)
        graph.register_initializer(value)
    names = model.names()
    for value in constants:
        assert value.const_value is not None and value.name is not None
        value.name = names.fresh(value.name.removeprefix(_PREFIX))
        value.const_value = ir.Tensor(value.const_value.numpy().copy(), dtype=value.const_value.dtype, name=value.name)
        graph.register_initializer(value)
    for node in graph.all_nodes():
        for key in _NOISE:
            node.metadata_props.pop(key, None)


def _held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, as `state_dict` orders them, those that are not kept by it among them."""
    held = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    order = [name for name in module.state_dict() if name in held]
    for name in dict.fromkeys([*order, *held]):
        yield name, held[name]


def _describe(value: ir.Value, name: str, tensor: torch.Tensor, *, is_kept: bool) -> None:
    dtype = CODES[tensor.dtype]
    value.name = name
    value.type, value.shape = ir.TensorType(dtype), ir.Shape(tuple(tensor.shape))
    value.const_value = ir.Tensor(to_array(tensor).copy(), dtype=dtype, name=name)
    is_parameter = isinstance(tensor, nn.Parameter)
    value.metadata_props[KIND] = "PARAMETER" if is_parameter else "BUFFER"
    value.metadata_props[PERSISTENT] = str(is_kept)
    value.metadata_props.pop("pkg.torch.onnx.original_node_name", None)
    if is_parameter:
        value.metadata_props[LEARNS] = str(tensor.requires_grad)


# ---- what training switches ------------------------------------------------------------------------------------------


def _switch(model: Model, module: nn.Module) -> None:
    """Write the graph as inference runs it, so that training finds what to switch, and only that.

    A normalization is switched if its statistics are stored and its scale is not frozen (see recipe/forward.py): an
    Identity before the one or the other is how one is kept from it, or made to.
    """
    running = {f"{prefix}running_mean" for prefix, layer in _normalizations(module) if layer.training}
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    for node in list(model.graph.all_nodes()):
        if node.op_type == "Dropout":
            node.resize_inputs(2)
        elif node.op_type == "BatchNormalization" and (mean := node.inputs[3]) is not None and mean.is_initializer():
            scale = node.inputs[1]
            if mean.name not in running:
                _behind_identity(node, 3, 4)
            elif scale is not None and scale.name in frozen:
                _behind_identity(node, 1)


def _behind_identity(node: ir.Node, *places: int) -> None:
    assert node.graph is not None
    for i in places:
        value = node.inputs[i]
        assert value is not None
        identity = ir.node("Identity", [value])
        identity.outputs[0].name = f"{node.name}/{value.name}"
        identity.outputs[0].type, identity.outputs[0].shape = value.type, value.shape
        node.graph.insert_before(node, identity)
        node.replace_input_with(i, identity.outputs[0])


# ---- refusals --------------------------------------------------------------------------------------------------------


def _normalizations(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Those that keep running statistics, and what the names of these begin with."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            yield f"{name}." if name else "", layer


def _untrainable(module: nn.Module) -> Iterator[str]:
    for prefix, layer in _normalizations(module):
        if layer.training and layer.momentum is None:
            yield f"`{prefix}running_mean` is an average over all batches (give the layer a momentum)"
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            options = {
                "sparse": layer.sparse,
                "max_norm": layer.max_norm,
                "scale_grad_by_freq": layer.scale_grad_by_freq,
            }
            for option, value in options.items():
                if value:
                    yield f"`{name}` has {option}={value}"
    for name, tensor in _held(module):
        if tensor.is_meta or isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            yield f"`{name}` has no values yet"
        elif tensor.dtype not in CODES:
            yield f"`{name}` is {tensor.dtype}".replace("torch.", "")


def _changed_buffers(program: torch.onnx.ONNXProgram, module: nn.Module) -> Iterator[str]:
    assert program.exported_program is not None
    expected = {
        f"{_PREFIX}{prefix}{part}"
        for prefix, _ in _normalizations(module)
        for part in ("running_mean", "running_var", "num_batches_tracked")
    }
    for name in program.exported_program.graph_signature.buffers_to_mutate.values():
        if name not in expected:
            yield f"the forward pass changes the buffer `{name.removeprefix(_PREFIX)}`"


def _random(model: Model) -> Iterator[str]:
    for node in model.graph.all_nodes():
        if node.op_type in _RANDOM:
            yield "the forward pass draws random numbers other than for dropout (give them to it as an input)"
