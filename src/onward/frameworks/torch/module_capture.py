"""Capture of an nn.Module as an inference model that can be trained like the module.

It restores what PyTorch's exporter drops: names, ties, buffers, unused parameters, frozen
parameters, and layers that training switches.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import onnx_ir as ir
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils import _pytree as pytree

from onward.engines.torch.types import CODES, FLOAT8, to_array
from onward.errors import UnsupportedError, first_line
from onward.frameworks.torch.arguments import Flat, is_hollow, tensors_of
from onward.frameworks.torch.exporter import export, free_names
from onward.frameworks.torch.translations import IN_MODE
from onward.model import Model
from onward.run_state.problems import Problems

KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""PARAMETER or BUFFER, as PyTorch's exporter writes it."""
PERSISTENT = "pkg.torch.export.graph_signature.InputSpec.persistent"
"""Presence in the `state_dict`."""
ALSO = "torch.also"
"""Other names of a tied tensor -> their positions in the order of the module; JSON."""
LEARNS = "torch.requires_grad"
"""`requires_grad` of a parameter that is not trained."""
GROUP = "torch.group"
"""Optimizer group of a parameter that is not trained."""
STEP = "torch.step"
"""Number of updates when a counter of batches was read."""
COUNTER = "num_batches_tracked"
"""PyTorch's name of the number of batches that a normalization has seen."""
LOSS = "loss"
"""Output of a module that computes its loss."""

_PREFIX = "module."
"""Prefix of names in the exported graph."""
_INSIDE = ("_orig_mod", "_original_module")
"""Attributes in which `torch.compile` and Lightning Fabric keep a module."""


def capture_module(module: nn.Module, example_inputs: Any, dynamic_shapes: Mapping[str, Any] | None = None) -> Model:
    """Capture the forward pass of a module, with its parameters and buffers under their names.

    - `example_inputs`: inputs of `forward`: a tensor, a sequence of arguments, or a mapping by name
    - `dynamic_shapes`: argument -> axis -> name of axes of any size (default: the first axis of all
      tensors)

    The module is not changed. Layers in `eval()` inside of a module in training stay in inference
    mode: a normalization keeps its statistics. A module in `eval()` is captured as in `train()`.
    """
    model, updates = captured_in_place(copy.deepcopy(module), example_inputs, dynamic_shapes)
    refuse_updates(updates)
    return model


def captured_in_place(
    module: nn.Module, example_inputs: Any, dynamic_shapes: Mapping[str, Any] | None = None
) -> tuple[Model, dict[str, str]]:
    """Capture a module without copying it, and leave it in training mode.

    Returns: the model, and the buffers that the forward pass itself changes -> names of their new
    values
    """
    into_training(module)
    _check(module)
    flat = Flat(module, example_inputs)
    with _assigned_buffers(module) as assigned:
        model, changed = export(flat, dynamic_shapes)
    flat.updated = _own_buffers(module, [*changed, *assigned])
    if flat.updated:
        with _in_both_modes(_switched_layers(flat)):
            model, _ = export(flat, dynamic_shapes)
        del model.graph.outputs[-len(flat.updated) :]
    _restore(model, module)
    _switch(model, module)
    return model, {name: f"{name}/next" for name in flat.updated}


def unwrap_module(module: nn.Module) -> nn.Module:
    """Return the module inside of `torch.compile`, data parallelism or Lightning Fabric."""
    while isinstance(module, DataParallel | DistributedDataParallel) or any(hasattr(module, name) for name in _INSIDE):
        name = next((name for name in _INSIDE if hasattr(module, name)), "module")
        module = getattr(module, name)
    return module


def copy_module(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy without tensors that a forward pass computed, as `torch.nn.utils.weight_norm` keeps them."""
    memo, nothing = {} if memo is None else memo, torch.empty(0)
    memo |= {id(tensor): nothing for _, _, tensor in _computed_tensors(module)}
    copied = copy.deepcopy(module, memo)
    for layer in copied.modules():
        for name in [name for name, value in vars(layer).items() if value is nothing]:
            delattr(layer, name)
    return copied


def _computed_tensors(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield layer, attribute and value of computed tensors, which PyTorch cannot copy."""
    for prefix, layer in module.named_modules():
        for name, tensor in vars(layer).items():
            is_computed = isinstance(tensor, FakeTensor) or getattr(tensor, "grad_fn", None) is not None
            if isinstance(tensor, torch.Tensor) and is_computed:
                yield prefix, name, tensor


def check_copyable(module: nn.Module, example_inputs: Any = None) -> None:
    """Refuse modules that read tensors computed before the forward pass; without an example, that hold any."""
    computed = [f"{prefix}.{name}" if prefix else name for prefix, name, _ in _computed_tensors(module)]
    if not computed:
        return
    if example_inputs is not None:
        flat = Flat(copy_module(module), example_inputs)
        with torch.no_grad(), torch.random.fork_rng(), contextlib.suppress(AttributeError):
            flat(*flat.inputs.values())
            return
    problems = Problems("the module")
    for name in computed:
        problems.add(
            f"it keeps `{name}`, which is computed from other tensors",
            "detach it; replace `torch.nn.utils.weight_norm` by `torch.nn.utils.parametrizations.weight_norm`",
        )
    problems.refuse()


def into_training(module: nn.Module) -> None:
    """Put a module into the mode in which it is captured."""
    for layer in module.modules():
        layer._compiled_call_impl = None  # of `module.compile()`
    if not module.training:
        module.train()
    if getattr(getattr(module, "config", None), "use_cache", False):
        module.config.use_cache = False  # of transformers: keys and values for generation


# ---- Lightning -------------------------------------------------------------------------------------------------------


def training_step(module: Any, batch: Any) -> tuple[nn.Module, Any]:
    """Return a Lightning module whose forward pass is the loss of a batch, and its input."""
    if not getattr(module, "automatic_optimization", True):
        raise UnsupportedError(
            f"`{type(module).__name__}` runs its own training loop (`automatic_optimization = False`)",
            hint="give the loss of its forward pass: `loss=...`",
        )
    shell = copy.copy(module)  # shares the tensors; a training step may call the forward pass of the module
    # A bound method, so that a copy of the shell calls a copy of the module.
    shell.forward = types.MethodType(_loss_by_name if isinstance(batch, Mapping) else _loss_of, module)
    return shell, dict(batch) if isinstance(batch, Mapping) else (batch,)


def _loss_of(module: Any, batch: Any) -> dict[str, torch.Tensor]:
    takes_index = len(inspect.signature(module.training_step).parameters) > 1
    output = module.training_step(*((batch, 0) if takes_index else (batch,)))
    return {LOSS: output[LOSS] if isinstance(output, Mapping) else output}


def _loss_by_name(module: Any, **batch: Any) -> dict[str, torch.Tensor]:
    return _loss_of(module, batch)


def configured(module: Any) -> tuple[Any, Any, int | None]:
    """Return the optimizer and scheduler that a Lightning module configures, and the updates per step of the scheduler.

    The last is None for a scheduler that steps once per epoch.
    """
    name = type(module).__name__
    hint = "pass them: `onward.from_torch(module, batch, optimizer=..., scheduler=...)`"
    try:
        answer = module.configure_optimizers()
    except Exception as error:  # of the user's code
        raise UnsupportedError(f"`{name}.configure_optimizers` fails: {first_line(error)}", hint=hint) from error
    if isinstance(answer, list | tuple) and len(answer) == 2 and isinstance(answer[0], list):
        optimizers, schedulers = answer
    else:
        optimizers = list(answer) if isinstance(answer, list | tuple) else [answer]
        schedulers = [x["lr_scheduler"] for x in optimizers if isinstance(x, Mapping) and x.get("lr_scheduler")]
        optimizers = [x["optimizer"] if isinstance(x, Mapping) else x for x in optimizers]
    schedulers = schedulers if isinstance(schedulers, list) else [schedulers]
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise UnsupportedError(
            f"`{name}` configures {len(optimizers)} optimizers and {len(schedulers)} schedulers, and a step has one",
            hint=hint,
        )
    if not schedulers:
        return optimizers[0], None, 1
    settings = schedulers[0] if isinstance(schedulers[0], Mapping) else {"scheduler": schedulers[0]}
    frequency = settings.get("frequency", 1) if settings.get("interval", "epoch") == "step" else None
    return optimizers[0], settings["scheduler"], frequency


# ---- what the module holds -------------------------------------------------------------------------------------------


def _restore(model: Model, module: nn.Module) -> None:
    """Give each tensor of the module its name, in the order of the module, including unused ones."""
    graph, named = model.graph, dict(tensors_of(module))
    main = {id(tensor): name for name, tensor in reversed(named.items())}
    exported = {name.removeprefix(_PREFIX): value for name, value in graph.initializers.items()}
    used = {main[id(tensor)]: exported.pop(name) for name, tensor in named.items() if name in exported}
    persistent = module.state_dict(keep_vars=True).keys()
    graph.initializers.clear()
    free_names(model, named)
    for position, (name, tensor) in enumerate(named.items()):
        if main[id(tensor)] == name:
            value, dtype, array = used.get(name) or ir.Value(), CODES[tensor.dtype], to_array(tensor)
            value.name = name
            value.type, value.shape = ir.TensorType(dtype), ir.Shape(tuple(tensor.shape))
            value.const_value = ir.Tensor(array if is_hollow(tensor) else array.copy(), dtype=dtype, name=name)
            value.metadata_props[KIND] = "PARAMETER" if isinstance(tensor, nn.Parameter) else "BUFFER"
            value.metadata_props[PERSISTENT] = str(name in persistent)
            value.metadata_props.pop("pkg.torch.onnx.original_node_name", None)
            if isinstance(tensor, nn.Parameter):
                value.metadata_props[LEARNS] = str(tensor.requires_grad)
            graph.register_initializer(value)
        else:
            tied = graph.initializers[main[id(tensor)]].metadata_props
            tied[ALSO] = json.dumps({**json.loads(tied.get(ALSO, "{}")), name: position})
    taken = model.names()
    for value in exported.values():  # constants
        assert value.const_value is not None and value.name is not None
        value.name = taken.fresh(value.name.removeprefix(_PREFIX))
        value.const_value = ir.Tensor(value.const_value.numpy().copy(), dtype=value.const_value.dtype, name=value.name)
        graph.register_initializer(value)


# ---- what training switches ------------------------------------------------------------------------------------------


def _switch(model: Model, module: nn.Module) -> None:
    """Rewrite layers so that training switches exactly those that the module switches.

    A normalization is switched if its statistics are stored and its scale is not frozen (see
    recipe/training_mode.py). An Identity before either of them changes that.
    """
    running = {f"{prefix}running_mean" for prefix, layer in _normalizations(module) if layer.training}
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    for node in list(model.graph.all_nodes()):
        if node.op_type == "Dropout":
            node.resize_inputs(2)
        elif node.op_type == "BatchNormalization":
            for i in (3, 4):  # a second call of a layer reads a copy of its statistics, in place of updated ones
                if (copied := _producer(node.inputs[i], "Identity")) is not None:
                    node.replace_input_with(i, copied.inputs[0])
            scale, mean = node.inputs[1], node.inputs[3]
            if mean is None or not mean.is_initializer():
                continue
            if mean.name not in running:
                _behind_identity(node, 3, 4)
            elif scale is not None and scale.name in frozen:
                _behind_identity(node, 1)


def _producer(value: ir.Value | None, operator: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == operator else None


def _behind_identity(node: ir.Node, *indices: int) -> None:
    assert node.graph is not None
    for i in indices:
        value = node.inputs[i]
        assert value is not None
        identity = ir.node("Identity", [value])
        identity.outputs[0].name = f"{node.name}/{value.name}"
        identity.outputs[0].type, identity.outputs[0].shape = value.type, value.shape
        node.graph.insert_before(node, identity)
        node.replace_input_with(i, identity.outputs[0])


def _normalizations(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Yield normalizations with running statistics, and the prefix of their names."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            yield f"{name}." if name else "", layer


# ---- buffers that a forward pass changes -----------------------------------------------------------------------------


def _own_buffers(module: nn.Module, changed: Iterable[str]) -> list[str]:
    """Return the changed buffers that are not statistics of a BatchNormalization."""
    suffixes = ("running_mean", "running_var", COUNTER)
    expected = {f"{prefix}{suffix}" for prefix, _ in _normalizations(module) for suffix in suffixes}
    names = dict.fromkeys(name.removeprefix(_PREFIX) for name in changed)
    return [name for name in names if name not in expected]


@contextlib.contextmanager
def _assigned_buffers(module: nn.Module) -> Iterator[dict[str, None]]:
    """Collect the buffers to which layers assign tensors. The exporter sees only changes in place."""
    prefixes = {id(layer): f"{name}." if name else "" for name, layer in module.named_modules()}
    assigned: dict[str, None] = {}

    def note(layer: nn.Module, name: str, _: Any) -> None:
        if id(layer) in prefixes and isinstance(layer._buffers.get(name), torch.Tensor):
            assigned[prefixes[id(layer)] + name] = None

    hook = register_module_buffer_registration_hook(note)
    try:
        yield assigned
    finally:
        hook.remove()


def _switched_layers(flat: Flat) -> list[nn.Module]:
    """Return the layers that update their buffers in training only, as a spectral norm."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in flat.updated)
    leaves = [name for name in owners if not any(flat.module.get_submodule(name).children())]
    if not leaves:
        return []
    other = copy_module(flat)
    layers = {name: other.module.get_submodule(name) for name in leaves}
    before = {name: [buffer.clone() for buffer in layer.buffers()] for name, layer in layers.items()}
    for layer in layers.values():
        layer.training = False
    with torch.no_grad(), torch.random.fork_rng():
        other(*other.inputs.values())
    return [
        flat.module.get_submodule(name)
        for name, layer in layers.items()
        if all(map(torch.equal, before[name], layer.buffers()))
    ]


@contextlib.contextmanager
def _in_both_modes(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Let layers and their hooks compute what they do in inference and in training, which a step takes."""

    def both(layer: nn.Module, call_layer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            layer.training = False
            inference = call_layer(*args, **kwargs)
            layer.training = True
            return pytree.tree_map(
                lambda x, y: IN_MODE(x, y) if isinstance(y, torch.Tensor) else y, inference, call_layer(*args, **kwargs)
            )

        return call

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(patch.object(layer, "_call_impl", both(layer, layer._call_impl)))
        yield


# ---- refusals --------------------------------------------------------------------------------------------------------


def _check(module: nn.Module) -> None:
    problems = Problems("the module")
    for prefix, layer in _normalizations(module):
        if layer.training and layer.momentum is None:
            problems.add(f"`{prefix}running_mean` is an average over all batches", "set `momentum=0.1` in the layer")
    for name, layer in module.named_modules():
        _check_layer(name, layer, problems)
    for name, tensor in tensors_of(module):
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
        if tensor.is_meta or isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            problems.add(f"`{name}` has no values yet", "call the module once, or load its weights")
        elif tensor.dtype not in CODES or tensor.dtype in FLOAT8 or tensor.is_complex():
            problems.add(f"`{name}` is {str(tensor.dtype).removeprefix('torch.')}", "use float32")
        elif not is_plain or tensor.layout is not torch.strided:
            description = tensor.layout if is_plain else type(tensor).__name__
            problems.add(f"`{name}` is not a plain tensor ({description})", "use dense tensors of PyTorch")
    problems.refuse()


def _check_layer(name: str, layer: nn.Module, problems: Problems) -> None:
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        for option in ("sparse", "max_norm", "scale_grad_by_freq"):
            if value := getattr(layer, option):
                problems.add(f"`{name}` has {option}={value}", f"create the embedding without `{option}`")
    if layer.training and getattr(layer, "layerdrop", None):
        problems.add(f"`{name}` drops layers at random (layerdrop={layer.layerdrop})", "set `layerdrop = 0.0`")
    if ".nn.quantized" in type(layer).__module__ or isinstance(layer, torch.jit.ScriptModule):
        description = "compiled by TorchScript" if isinstance(layer, torch.jit.ScriptModule) else "quantized"
        problems.add(f"`{name}` is {description}", "pass the original module, whose weights can be trained")


def refuse_updates(updates: Iterable[str]) -> None:
    """Refuse buffers that the forward pass changes, where no run can hold their new values."""
    problems = Problems("the module")
    for name in updates:
        owner = ".".join(["module", *name.split(".")[:-1]])
        problems.add(
            f"its forward pass changes the buffer `{name}`",
            f"return it, and keep it in the loop; or let the layer keep it: `{owner}.eval()`",
        )
    problems.refuse()


def batch_counters(model: Model) -> Iterator[ir.Value]:
    """Yield the counters of batches that normalization layers keep."""
    return (value for name, value in model.graph.initializers.items() if name.rpartition(".")[2] == COUNTER)
