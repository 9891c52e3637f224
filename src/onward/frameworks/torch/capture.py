"""An nn.Module as an inference model that can be trained as the module is.

What PyTorch's exporter leaves out is put back: names, ties, buffers, parameters that no output depends on, what is
frozen, and what training switches.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from onward.engines.torch.types import CODES, FLOAT8, to_array
from onward.frameworks.torch.arguments import Flat, is_hollow, tensors_of
from onward.frameworks.torch.exporter import export, free_names
from onward.model import Model
from onward.run_state.problems import Problems

KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""PARAMETER or BUFFER, as PyTorch's exporter writes it."""
PERSISTENT = "pkg.torch.export.graph_signature.InputSpec.persistent"
"""Whether a `state_dict` has it."""
ALSO = "torch.also"
"""The other names under which the module has it, and which place in its order these have; JSON."""
LEARNS = "torch.requires_grad"
"""Of a parameter that is not trained: whether PyTorch computes a gradient for it nevertheless."""
GROUP = "torch.group"
"""Of a parameter that is not trained: the group in which the optimizer has it nevertheless."""
STEP = "torch.step"
"""Of a counter of batches: the updates that there had been when it was read."""
COUNTER = "num_batches_tracked"
"""What PyTorch calls the number of batches that a normalization has seen."""


_PREFIX = "module."
"""What names begin with in the exported graph."""
_INSIDE = ("_orig_mod", "_original_module")
"""Where `torch.compile` and Lightning Fabric keep a module."""
_NOISE = ("pkg.torch.onnx.stack_trace", "pkg.torch.onnx.fx_node")
"""Metadata of nodes that repeat the source code of the module, with its place on somebody's disk."""
_RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


def capture_module(module: nn.Module, example_inputs: Any, dynamic_shapes: Mapping[str, Any] | None = None) -> Model:
    """The forward pass of a module, with its parameters and buffers under their names. The module stays as it is.

    - `example_inputs`: what `forward` takes: a tensor, a sequence of arguments, or a mapping by their names
    - `dynamic_shapes`: argument -> axis -> its name, for axes of any size; without it, the first axis of all tensors

    What is in `eval()` inside of a module in training stays as in inference: a normalization keeps its statistics. A
    module that is in `eval()` itself is taken as `train()` makes it.
    """
    return captured_in_place(copy.deepcopy(module), example_inputs, dynamic_shapes)


def captured_in_place(module: nn.Module, example_inputs: Any, dynamic_shapes: Mapping[str, Any] | None = None) -> Model:
    """The same of a module that nobody else needs: no copy is made, and it is left in training."""
    into_training(module)
    _check(module)
    model, changed = export(Flat(module, example_inputs), dynamic_shapes)
    _restore(model, module)
    _switch(model, module)
    _check_graph(model, module, changed)
    return model


def unwrap_module(module: nn.Module) -> nn.Module:
    """The module inside of what `torch.compile`, data parallelism and Lightning Fabric make of one."""
    while isinstance(module, DataParallel | DistributedDataParallel) or any(hasattr(module, name) for name in _INSIDE):
        name = next((name for name in _INSIDE if hasattr(module, name)), "module")
        module = getattr(module, name)
    return module


def check_copyable(module: nn.Module) -> None:
    """Refuse modules that keep results of computations, of which PyTorch makes no copies."""
    problems = Problems("the module")
    for prefix, layer in module.named_modules():
        for name, kept in vars(layer).items():
            if isinstance(kept, torch.Tensor) and kept.grad_fn is not None:
                problems.add(
                    f"it keeps `{f'{prefix}.{name}' if prefix else name}`, which is computed from other tensors",
                    "keep it detached; in place of `torch.nn.utils.weight_norm` use that of `parametrizations`",
                )
    problems.refuse()


def into_training(module: nn.Module) -> None:
    """Put a module, in place, into the mode that it is captured in."""
    for layer in module.modules():
        layer._compiled_call_impl = None  # of `module.compile()`
    if not module.training:
        module.train()
    if getattr(getattr(module, "config", None), "use_cache", False):
        module.config.use_cache = False  # of transformers: what it keeps for the next token, when it generates


# ---- what the module holds -------------------------------------------------------------------------------------------


def _restore(model: Model, module: nn.Module) -> None:
    """Give all that the module holds its name, in the module's order, used or not."""
    graph, named = model.graph, dict(tensors_of(module))
    main = {id(tensor): name for name, tensor in reversed(named.items())}
    exported = {name.removeprefix(_PREFIX): value for name, value in graph.initializers.items()}
    used = {main[id(tensor)]: exported.pop(name) for name, tensor in named.items() if name in exported}
    kept = module.state_dict(keep_vars=True).keys()
    graph.initializers.clear()
    free_names(model, named)
    for place, (name, tensor) in enumerate(named.items()):
        if main[id(tensor)] == name:
            value = used.get(name) or ir.Value()
            _describe(value, name, tensor, is_kept=name in kept)
            graph.register_initializer(value)
        else:
            tied = graph.initializers[main[id(tensor)]].metadata_props
            tied[ALSO] = json.dumps({**json.loads(tied.get(ALSO, "{}")), name: place})
    taken = model.names()
    for value in exported.values():  # constants
        assert value.const_value is not None and value.name is not None
        value.name = taken.fresh(value.name.removeprefix(_PREFIX))
        value.const_value = ir.Tensor(value.const_value.numpy().copy(), dtype=value.const_value.dtype, name=value.name)
        graph.register_initializer(value)
    for node in graph.all_nodes():
        for key in _NOISE:
            node.metadata_props.pop(key, None)


def _describe(value: ir.Value, name: str, tensor: torch.Tensor, *, is_kept: bool) -> None:
    dtype = CODES[tensor.dtype]
    value.name = name
    value.type, value.shape = ir.TensorType(dtype), ir.Shape(tuple(tensor.shape))
    array = to_array(tensor)
    value.const_value = ir.Tensor(array if is_hollow(tensor) else array.copy(), dtype=dtype, name=name)
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


def _normalizations(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Those that keep running statistics, and what the names of these begin with."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            yield f"{name}." if name else "", layer


# ---- refusals --------------------------------------------------------------------------------------------------------


def _check(module: nn.Module) -> None:
    problems = Problems("the module")
    for prefix, layer in _normalizations(module):
        if layer.training and layer.momentum is None:
            problems.add(f"`{prefix}running_mean` is an average over all batches", "give the layer a momentum")
    for name, layer in module.named_modules():
        _check_layer(name, layer, problems)
    for name, tensor in tensors_of(module):
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
        if tensor.is_meta or isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            problems.add(f"`{name}` has no values yet", "call the module once, or load its weights")
        elif tensor.dtype not in CODES or tensor.dtype in FLOAT8 or tensor.is_complex():
            problems.add(f"`{name}` is {str(tensor.dtype).removeprefix('torch.')}", "use float32")
        elif not is_plain or tensor.layout is not torch.strided:
            kind = tensor.layout if is_plain else type(tensor).__name__
            problems.add(f"`{name}` is no plain tensor ({kind})", "use dense tensors of PyTorch")
    problems.refuse()


def _check_layer(name: str, layer: nn.Module, problems: Problems) -> None:
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        for option in ("sparse", "max_norm", "scale_grad_by_freq"):
            if value := getattr(layer, option):
                problems.add(f"`{name}` has {option}={value}", "make the embedding without")
    if layer.training and getattr(layer, "layerdrop", None):
        problems.add(
            f"`{name}` leaves out whole layers at random (layerdrop={layer.layerdrop})",
            "train on without: `layerdrop = 0.0`",
        )
    if ".nn.quantized" in type(layer).__module__ or isinstance(layer, torch.jit.ScriptModule):
        kind = "compiled by TorchScript" if isinstance(layer, torch.jit.ScriptModule) else "quantised"
        problems.add(
            f"`{name}` is {kind}", "give the module as it was before that, in which its weights can be trained"
        )


def _check_graph(model: Model, module: nn.Module, changed: Iterable[str]) -> None:
    problems = Problems("the module")
    parts = ("running_mean", "running_var", COUNTER)
    expected = {f"{prefix}{part}" for prefix, _ in _normalizations(module) for part in parts}
    for name in (name.removeprefix(_PREFIX) for name in changed):
        if name not in expected:
            problems.add(f"its forward pass changes the buffer `{name}`", "return it, and keep it in the loop")
    if any(node.op_type in _RANDOM for node in model.graph.all_nodes()):
        problems.add(
            "it draws random numbers other than for dropout",
            "give them to the module as an input; or use `nn.Dropout`, or stochastic depth in its usual form",
        )
    problems.refuse()
