"""The graph of a module: what executes, apart from the tensors that the module holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onward.analysis.blocks import cut_into_parts
from onward.engines.torch.types import CODES, to_array
from onward.frameworks.torch.module_engine import Live
from onward.frameworks.torch.program import Program, Segment, make_segments, where
from onward.frameworks.torch.tags import ALSO, COUNTER, KIND, LEARNS, PERSISTENT
from onward.model import Model
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
    """What a module executes, and what it holds; copies of a module share it, since it holds no state."""

    program: Program
    inputs: list[str]
    outputs: list[str]
    state: dict[str, ir.TensorProtocol]
    learns: dict[str, bool]
    """Parameters, and whether they require gradients."""
    constants: set[str]
    """State that is no part of a `state_dict`."""
    also: dict[str, dict[str, int]]
    """Other names of tied weights, and their places in the order of all."""
    counters: list[str]
    inner: Sequence[str] = ()
    """Those outputs that the model itself does not have."""
    segments: Sequence[Segment] = ()
    """The same as `program`, cut into blocks, if that is asked for and it repeats any."""

    @classmethod
    def of(
        cls,
        model: Model,
        trainable: Collection[str] | None,
        statistics: Variance,
        inner: Sequence[str] = (),
        *,
        blocks: bool = False,
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
        state = {name: value.const_value for name, value in held.items() if value.const_value is not None}
        program = Program(
            model, statistics, [node.name or "" for node in switched], {name: x.dtype for name, x in state.items()}
        )
        graph = cls(
            program,
            inputs=[value.name or "" for value in model.inputs],
            outputs=[value.name or "" for value in model.outputs],
            state=state,
            learns=learns,
            constants={n for n, v in held.items() if n not in learns and not _is_kept(v, switched)},
            also={name: json.loads(v.metadata_props[ALSO]) for name, v in held.items() if ALSO in v.metadata_props},
            counters=[name for node in switched if (name := _counter(node)) in held],
            inner=inner,
        )
        parts = cut_into_parts(model, learns) if blocks else []
        for name in held:
            as_input(model.graph, name)
        if any(part.kind is not None for part in parts):
            graph.segments = make_segments(program, parts, graph.also)
        return graph

    @property
    def model(self) -> Model:
        """Without the tensors that the module holds: they are inputs."""
        return self.program.model

    def names(self) -> list[tuple[str, str]]:
        """All names in their order, and what they are names of."""
        names = [(name, name) for name in self.state]
        others = sorted((place, other, main) for main, also in self.also.items() for other, place in also.items())
        for place, other, main in others:
            names.insert(place, (other, main))
        return names

    def __deepcopy__(self, memo: Any) -> Graph:
        return self

    def change_programs(self, change: Callable[[Program], Program]) -> Graph:
        """The same with other programs; segments that shared one share it still."""
        programs = {program: change(program) for program in dict.fromkeys(s.program for s in self.segments)}
        segments = [dataclasses.replace(segment, program=programs[segment.program]) for segment in self.segments]
        return dataclasses.replace(self, program=change(self.program), segments=segments)

    def with_state(self, state: Mapping[str, torch.Tensor]) -> Model:
        """The model with the tensors that a module holds."""
        _, dtype = where(state, self.program.held)
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
        state = {name: (tensor.numpy(), tensor.dtype) for name, tensor in self.state.items()}
        return {**vars(self), "state": state}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        state = {name: ir.Tensor(array, dtype=dtype, name=name) for name, (array, dtype) in kept["state"].items()}
        vars(self).update({**kept, "state": state})


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
