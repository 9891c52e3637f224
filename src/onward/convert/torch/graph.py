"""The graph of a module: what executes, apart from the tensors that the module holds."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onward.agreement.steps import without_dropout
from onward.convert.torch.module_engine import Live
from onward.convert.torch.tags import ALSO, COUNTER, KIND, LEARNS, PERSISTENT
from onward.engines.framework_engine import interpreter
from onward.engines.interpreter import Interpreter
from onward.engines.torch.types import CODES, to_array
from onward.model import Model, load
from onward.model.core import as_input, values
from onward.options import Variance
from onward.recipe.forward import functions_to_inline, is_switchable
from onward.recipe.trainable import judge
from onward.standard import OLDEST_OPSET
from onward.transform.float_type import convert_floats
from onward.transform.inline import inline
from onward.transform.opset import of_one_opset


@dataclasses.dataclass(eq=False)
class Graph:
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
    inner: Sequence[str] = ()
    """Those outputs that the model itself does not have."""

    @classmethod
    def of(
        cls, model: Model, trainable: Collection[str] | None, statistics: Variance, inner: Sequence[str] = ()
    ) -> Graph:
        model = of_one_opset(model, OLDEST_OPSET)
        table = Live(torch.device("cpu"), statistics).operators
        own = [name for f in model.functions.values() if (name := f"{f.domain}.{f.name}") not in table]
        if hidden := [*functions_to_inline(model), *own]:
            model = inline(model, hidden)
        model = model.copy()
        _name_nodes(model)
        known = {value.name: value for value in values(model.graph)}
        model.graph.outputs.extend(known[name] for name in inner)
        learns = _parameters(model, trainable)
        held = {name: value for name, value in model.graph.initializers.items() if name in learns or _is_held(value)}
        switched = _switched_nodes(model, [name for name, learn in learns.items() if not learn])
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
            inner=inner,
        )
        for name in held:
            as_input(model.graph, name)
        return graph

    def names(self) -> list[tuple[str, str]]:
        """All names in their order, and what they are names of."""
        names = [(name, name) for name in self.state]
        others = sorted((place, other, main) for main, also in self.also.items() for other, place in also.items())
        for place, other, main in others:
            names.insert(place, (other, main))
        return names

    def __deepcopy__(self, memo: Any) -> Graph:
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
                model = convert_floats(model, dtype)
            self._made[key] = interpreter(model, Live(device, self.statistics))
        return self._made[key]

    def without_dropout(self) -> Graph:
        return dataclasses.replace(self, model=without_dropout(self.model))

    def with_state(self, state: Mapping[str, torch.Tensor]) -> Model:
        """The model with the tensors that a module holds."""
        _, dtype = _where(state, self.state)
        model = self.model.copy() if dtype is None else convert_floats(self.model, dtype)
        constants = list(model.graph.initializers.values())
        del model.graph.outputs[len(model.graph.outputs) - len(self.inner) :]
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
        vars(self).update({**kept, "model": load(kept["model"]), "state": state})


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


def _switched_nodes(model: Model, frozen: Collection[str]) -> list[ir.Node]:
    nodes = model.graph.all_nodes()
    return [node for node in nodes if node.op_type == "BatchNormalization" and is_switchable(node, frozen)]


def _counter(node: ir.Node) -> str:
    mean = node.inputs[3]
    assert mean is not None and mean.name is not None
    prefix, dot, _ = mean.name.rpartition(".")
    return f"{prefix}{dot}{COUNTER}"


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
