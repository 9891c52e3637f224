"""A model as a live nn.Module: real parameters under their names, and a graph that PyTorch's operators execute."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.nn import functional as F

from onward.convert.torch.capture import ALSO, KIND, LEARNS, PERSISTENT
from onward.differentiate.api import COMMON_OPSET, OLDEST_OPSET
from onward.model import Model, Source, read
from onward.numeric.precision import converted
from onward.recipe.forward import Variance, functions_to_inline, is_switchable
from onward.recipe.trainable import judge
from onward.run.interpreted import interpreter
from onward.run.interpreter import Interpreter
from onward.run.torch import Torch
from onward.run.torch.normalization import batch_normalization
from onward.run.torch.types import CODES, from_array, to_array
from onward.transform.inline import inline
from onward.transform.opset import convert_opset

COUNTER = "num_batches_tracked"
"""What PyTorch calls the number of batches that a normalization has seen."""


def to_module(
    source: Source, *, trainable: Collection[str] | None = None, statistics: Variance = "sample"
) -> OnnxModule:
    """The inference graph of a model as a module.

    Without a list of what is trainable, all that looks like a parameter is. `statistics` is the running variance that
    BatchNorm keeps in training: that of the sample, as PyTorch has it, or of the population.
    """
    return OnnxModule(_Graph.of(read(source), trainable, statistics))


class OnnxModule(nn.Module):  # type: ignore[misc]
    """A graph of ONNX operators, computed by PyTorch.

    It takes the inputs of the graph by position or name, and returns its output, or several by name. In training,
    Dropout drops and BatchNorm follows its batches; in inference both are as the model has them.
    """

    def __init__(self, graph: _Graph):
        super().__init__()
        self._graph = graph
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in graph.state.items():
            made = from_array(tensor.numpy()).clone()
            tensors[name] = nn.Parameter(made, graph.learns[name]) if name in graph.learns else made
        for name, main in graph.names():
            self._hold(name, tensors[main], is_constant=main in graph.constants)
        paths = {id(x): path for path, x in (*self.named_parameters(), *self.named_buffers())}
        self._paths = {name: paths[id(tensor)] for name, tensor in tensors.items()}

    def _hold(self, name: str, tensor: torch.Tensor, *, is_constant: bool) -> None:
        owner, attribute = _place(self, name)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(attribute, tensor)
        else:
            owner.register_buffer(attribute, tensor, persistent=not is_constant)

    def _state(self) -> dict[str, torch.Tensor]:
        held = dict(self.named_parameters()) | dict(self.named_buffers())
        return {name: held[path] for name, path in self._paths.items()}

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in the model, which PyTorch may not allow."""
        held = dict(self.named_parameters())
        return {name: held[path] for name, path in self._paths.items() if path in held}

    def forward(self, *inputs: Any, **named: Any) -> Any:
        given = dict(zip(self._graph.inputs, inputs, strict=False)) | named
        state = self._state()
        if self.training:
            for counter in self._graph.counters:
                state[counter] += 1
        results = self._graph.execute(state, given, training=self.training)
        return results if len(results) > 1 else next(iter(results.values()))

    def named(self, inputs: Any) -> dict[str, Any]:
        """Inputs by name, where they are a tensor or a sequence of them."""
        if isinstance(inputs, Mapping):
            return dict(inputs)
        return dict(zip(self._graph.inputs, [inputs] if isinstance(inputs, torch.Tensor) else inputs, strict=True))

    def to_model(self) -> Model:
        """The model that this is, with the weights as they are now."""
        return self._graph.with_state(self._state())

    def extra_repr(self) -> str:
        return f"{', '.join(self._graph.inputs)} -> {', '.join(self._graph.outputs)}"


# ---- names -----------------------------------------------------------------------------------------------------------


class _Folder(nn.Module):  # type: ignore[misc]
    """A part of the names of parameters: what is before a dot."""


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Where a module keeps what has this name; parts that PyTorch cannot take get an underscore."""
    *folders, last = name.split(".")
    owner = root
    for part in folders:
        part = _free(owner, part, _Folder)
        if not hasattr(owner, part):
            owner.add_module(part, _Folder())
        owner = getattr(owner, part)
    return owner, _free(owner, last)


def _free(owner: nn.Module, part: str, kind: type | None = None) -> str:
    part = part or "_"
    while hasattr(owner, part) and not (kind is not None and isinstance(getattr(owner, part), kind)):
        part += "_"
    return part


# ---- the graph -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Graph:
    """What executes; copies of a module share it, since it holds no state."""

    model: Model
    """Without the tensors that the module holds: they are inputs."""
    statistics: Variance
    inputs: list[str]
    outputs: list[str]
    state: dict[str, ir.TensorProtocol]
    learns: dict[str, bool]
    """Parameters, and whether they require gradients."""
    constants: set[str]
    """State that is no part of a `state_dict`."""
    also: dict[str, dict[str, int]]
    """Other names of tied weights, and their places in the order of all."""
    switched: list[str]
    """Names of the normalizations that follow their batches."""
    counters: list[str]

    @classmethod
    def of(cls, model: Model, trainable: Collection[str] | None, statistics: Variance) -> _Graph:
        model = convert_opset(model, COMMON_OPSET) if model.opset < OLDEST_OPSET else model
        if hidden := functions_to_inline(model):
            model = inline(model, hidden)
        model = model.copy()
        _name_nodes(model)
        learns = _parameters(model, trainable)
        held = {name: value for name, value in model.graph.initializers.items() if name in learns or _is_held(value)}
        switched = _switched(model, [name for name, learn in learns.items() if not learn])
        graph = cls(
            model,
            statistics,
            inputs=[value.name or "" for value in model.inputs],
            outputs=[value.name or "" for value in model.outputs],
            state={name: value.const_value for name, value in held.items() if value.const_value is not None},
            learns=learns,
            constants={n for n, v in held.items() if n not in learns and not _is_kept(v, switched)},
            also={name: json.loads(v.metadata_props[ALSO]) for name, v in held.items() if ALSO in v.metadata_props},
            switched=[node.name or "" for node in switched],
            counters=[name for node in switched if (name := _counter(node)) in held],
        )
        _make_inputs(model, held.values())
        return graph

    def names(self) -> list[tuple[str, str]]:
        """All names in their order, and what they are names of."""
        names = [(name, name) for name in self.state]
        others = sorted((place, other, main) for main, also in self.also.items() for other, place in also.items())
        for place, other, main in others:
            names.insert(place, (other, main))
        return names

    def __deepcopy__(self, memo: Any) -> _Graph:
        return self

    def execute(self, state: Mapping[str, torch.Tensor], given: Mapping[str, Any], *, training: bool) -> dict[str, Any]:
        device, dtype = _where(state, self.state)
        tensors = {name: _tensor(value, device) for name, value in given.items()}
        return self._interpreter(training, device, dtype)({**state, **tensors})

    @functools.cached_property
    def _made(self) -> dict[Any, Interpreter]:
        return {}

    def _interpreter(self, training: bool, device: torch.device, dtype: ir.DataType | None) -> Interpreter:
        key = training, device, dtype
        if key not in self._made:
            model = self.model.copy()
            if training:
                _train(model, self.switched)
            if dtype is not None:
                model = converted(model, dtype)
            self._made[key] = interpreter(model, _Live(device, self.statistics))
        return self._made[key]

    def with_state(self, state: Mapping[str, torch.Tensor]) -> Model:
        """The model with the tensors that a module holds."""
        _, dtype = _where(state, self.state)
        model = self.model.copy() if dtype is None else converted(self.model, dtype)
        constants = list(model.graph.initializers.values())
        model.graph.initializers.clear()
        held = {value.name: value for value in model.graph.inputs if value.name in state}
        for name, tensor in state.items():
            model.graph.inputs.remove(held[name])
            held[name].const_value = ir.Tensor(to_array(tensor).copy(), dtype=CODES[tensor.dtype], name=name)
            if name in self.learns:
                held[name].metadata_props[LEARNS] = str(tensor.requires_grad)
            model.graph.register_initializer(held[name])
        for value in constants:
            model.graph.register_initializer(value)
        return model

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in vars(self).items() if key != "_made"}
        state = {name: (tensor.numpy(), tensor.dtype) for name, tensor in self.state.items()}
        return {**kept, "model": self.model.to_proto().SerializeToString(), "state": state}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        state = {name: ir.Tensor(array, dtype=dtype, name=name) for name, (array, dtype) in kept["state"].items()}
        vars(self).update({**kept, "model": read(kept["model"]), "state": state})


def _name_nodes(model: Model) -> None:
    names = model.names()
    for node in model.graph.all_nodes():
        node.name = node.name or names.fresh(node.op_type)


def _parameters(model: Model, trainable: Collection[str] | None) -> dict[str, bool]:
    """What is a parameter, and whether it is trained."""
    by_rule = {choice.name for choice in judge(model, model.outputs) if choice.role == "parameter"}
    found = {}
    for name, value in model.graph.initializers.items():
        kind = value.metadata_props.get(KIND)
        if kind == "PARAMETER" or (kind is None and name in by_rule) or name in (trainable or ()):
            learns = value.metadata_props.get(LEARNS)
            found[name] = learns != "False" if trainable is None else name in trainable or learns == "True"
    return found


def _is_held(value: ir.Value) -> bool:
    """Whether the module holds it beside parameters: buffers, and floats that are more than a number."""
    tensor = value.const_value
    assert tensor is not None
    return value.metadata_props.get(KIND) == "BUFFER" or (tensor.dtype.is_floating_point() and len(tensor.shape) > 0)


def _is_kept(value: ir.Value, switched: Collection[ir.Node]) -> bool:
    if KIND in value.metadata_props:
        return value.metadata_props.get(PERSISTENT) == "True"
    return any(node in switched for node in value.consumers())


def _switched(model: Model, frozen: Collection[str]) -> list[ir.Node]:
    nodes = model.graph.all_nodes()
    return [node for node in nodes if node.op_type == "BatchNormalization" and is_switchable(node, frozen)]


def _counter(node: ir.Node) -> str:
    mean = node.inputs[3]
    assert mean is not None and mean.name is not None
    prefix, dot, _ = mean.name.rpartition(".")
    return f"{prefix}{dot}{COUNTER}"


def _make_inputs(model: Model, held: Collection[ir.Value]) -> None:
    for value in held:
        tensor = value.const_value
        assert tensor is not None and value.name is not None
        value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
        value.const_value = None
        model.graph.initializers.pop(value.name)
        if value not in model.graph.inputs:
            model.graph.inputs.append(value)


def _where(state: Mapping[str, torch.Tensor], declared: Mapping[str, Any]) -> tuple[torch.device, ir.DataType | None]:
    """Where the module is now, and the type that it was converted to, if it was."""
    floats = (name for name, tensor in state.items() if tensor.is_floating_point())
    name = next(floats, None)
    if name is None:
        return torch.device("cpu"), None
    dtype = CODES[state[name].dtype]
    return state[name].device, None if dtype == declared[name].dtype else dtype


def _tensor(value: Any, device: torch.device) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device=device)


# ---- training mode ---------------------------------------------------------------------------------------------------


def _train(model: Model, switched: Collection[str]) -> None:
    """Switch what computes something else in training, in place."""
    on = ir.Value(name=model.names().fresh("training"), const_value=ir.Tensor(np.array(True)))
    model.graph.register_initializer(on)
    for node in model.graph.all_nodes():
        if node.op_type == "Dropout" and node.domain == "":
            node.resize_inputs(3)
            node.replace_input_with(2, on)
        elif node.name in switched:
            node.attributes.add(ir.AttrInt64("training_mode", 1))


class _Live(Torch):
    """PyTorch with gradients left on, and with statistics that are buffers of a module."""

    def __init__(self, device: torch.device, statistics: Variance):
        super().__init__(str(device))
        self.operators["BatchNormalization"] = functools.partial(_batch_normalization, statistics)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        yield


def _batch_normalization(
    statistics: Variance,
    x: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    *,
    training_mode: int,
    momentum: float,
    epsilon: float,
    outputs: int,
) -> Any:
    """In training the running statistics change in place, as those of PyTorch's own layer do."""
    share = float(str(np.float32(1 - momentum)))  # of the batch: 0.1, not 0.10000002
    if training_mode and statistics == "sample":
        return F.batch_norm(x, mean, variance, scale, bias, True, share, epsilon)
    if training_mode:
        with torch.no_grad():
            of_batch = torch.var_mean(x, (0, *range(2, x.ndim)), correction=0)
            for old, new in zip((variance, mean), of_batch, strict=True):
                old.mul_(1 - share).add_(new, alpha=share)
    return batch_normalization(
        x, scale, bias, mean, variance, epsilon=epsilon, momentum=momentum, training_mode=training_mode, outputs=1
    )
