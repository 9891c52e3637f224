"""Models as live modules: parameters of PyTorch, and a graph that PyTorch's operators execute.

The graph can be split into the blocks that it repeats, each a module that can be sharded,
recomputed or compiled alone.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onward.agreement.steps import with_fixed_draws, without_dropout
from onward.analysis.blocks import cut_into_parts
from onward.engines.torch.types import CODES, from_array, to_array
from onward.frameworks.torch.module_capture import ALSO, COUNTER, KIND, LEARNS, PERSISTENT
from onward.frameworks.torch.module_engine import Executable, GraphSegment, Live, device_and_type, make_segments
from onward.model import Model, Source, load
from onward.model.core import as_input, values
from onward.options import Variance
from onward.recipe.trainable import judge
from onward.recipe.training_mode import functions_to_inline, is_switchable
from onward.standard import OLDEST_OPSET
from onward.transform.float_type import convert_floats
from onward.transform.inline import inline
from onward.transform.opset import of_one_opset
from onward.transform.training import keep_only

LIVE = "use the live module: `onward.to_torch(training)`"
"""Hint for models that cannot be written as programs."""


@dataclasses.dataclass(eq=False)
class Graph:
    """Graph of a module and its initial tensors, shared by copies of the module."""

    program: Executable
    inputs: list[str]
    outputs: list[str]
    state: dict[str, ir.TensorProtocol]
    learns: dict[str, bool]
    """Parameter -> `requires_grad`."""
    constants: set[str]
    """Tensors that are not in the `state_dict`."""
    also: dict[str, dict[str, int]]
    """Other names of tied weights, and their positions in the order of all names."""
    counters: list[str]
    inner: Sequence[str] = ()
    """Outputs that the model itself does not have."""
    updates: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Buffer -> the value that replaces it in training."""
    hidden: Sequence[str] = ()
    """Inner outputs that only update buffers."""
    segments: Sequence[GraphSegment] = ()
    """Parts of `program` if it is split into blocks."""
    frozen: Collection[str] = ()
    """Parameters without a gradient, whatever their `requires_grad` is."""

    @classmethod
    def of(
        cls,
        model: Model,
        trainable: Collection[str] | None,
        statistics: Variance,
        inner: Sequence[str] = (),
        *,
        updates: Mapping[str, str] | None = None,
        blocks: bool = False,
    ) -> Graph:
        updates = updates or {}
        model = of_one_opset(model, OLDEST_OPSET)
        table = Live(torch.device("cpu"), statistics).operators
        local_functions = [name for f in model.functions.values() if (name := f"{f.domain}.{f.name}") not in table]
        if hidden := [*functions_to_inline(model), *local_functions]:
            model = inline(model, hidden)
        model = model.copy()
        names = model.names()
        for node in model.graph.all_nodes():
            node.name = node.name or names.fresh(node.op_type)
        values_by_name = {value.name: value for value in values(model.graph)}
        returned = {*inner, *(value.name for value in model.outputs)}
        hidden = [name for name in dict.fromkeys(updates.values()) if name not in returned]
        inner = [*inner, *hidden]
        model.graph.outputs.extend(values_by_name[name] for name in inner)
        learns = _parameters(model, trainable)
        stored: dict[str, ir.Value] = {}  # parameters, buffers, and float tensors that are not scalars
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            assert tensor is not None
            is_buffer = value.metadata_props.get(KIND) == "BUFFER"
            if (
                name in learns
                or name in updates
                or is_buffer
                or (tensor.dtype.is_floating_point() and len(tensor.shape))
            ):
                stored[name] = value
        frozen = [name for name, learn in learns.items() if not learn]
        normalizations = [node for node in model.graph.all_nodes() if node.op_type == "BatchNormalization"]
        switched = [node for node in normalizations if is_switchable(node, frozen)]
        followed = {value for node in switched for value in node.inputs}
        persistent = {
            name
            for name, value in stored.items()
            if name in updates
            or (value.metadata_props.get(PERSISTENT) == "True" if KIND in value.metadata_props else value in followed)
        }
        state = {name: value.const_value for name, value in stored.items() if value.const_value is not None}
        types = {name: tensor.dtype for name, tensor in state.items()}
        program = Executable(model, statistics, [node.name or "" for node in switched], types)
        graph = cls(
            program,
            inputs=[value.name or "" for value in model.inputs],
            outputs=[value.name or "" for value in model.outputs],
            state=state,
            learns=learns,
            constants={name for name in stored if name not in learns and name not in persistent},
            also={name: json.loads(v.metadata_props[ALSO]) for name, v in stored.items() if ALSO in v.metadata_props},
            counters=[name for node in switched if (name := _counter(node)) in stored],
            inner=inner,
            updates=updates,
            hidden=hidden,
        )
        parts = cut_into_parts(model, learns) if blocks else []
        for name in stored:
            as_input(model.graph, name)
        if any(p.pattern is not None for p in parts):
            graph.segments = make_segments(program, parts, graph.also)
        return graph

    @property
    def model(self) -> Model:
        """Return the model in which the tensors of the module are inputs."""
        return self.program.model

    def names(self) -> list[tuple[str, str]]:
        """Return all names in order, each with the main name of its tensor."""
        names = [(name, name) for name in self.state]
        others = ((index, other, main) for main, also in self.also.items() for other, index in also.items())
        for index, other, main in sorted(others):
            names.insert(index, (other, main))
        return names

    def __deepcopy__(self, memo: Any) -> Graph:
        return self

    def change_programs(self, change: Callable[[Executable], Executable]) -> Graph:
        """Return a copy with other programs. Segments that share one still do."""
        programs = {program: change(program) for program in dict.fromkeys(s.program for s in self.segments)}
        segments = [dataclasses.replace(segment, program=programs[segment.program]) for segment in self.segments]
        return dataclasses.replace(self, program=change(self.program), segments=segments)

    def of_step(self, outputs: Collection[str], trainable: Collection[str], statistics: Variance) -> Graph:
        """Return what one of several steps computes: these outputs, with the tensors of the whole graph."""
        model, frozen = self.model.copy(), [name for name in self.learns if name not in trainable]
        tensors = [value for value in model.graph.inputs if value.name in self.state]
        keep_only(model, [value for value in values(model.graph) if value.name in outputs])
        inputs = [value for value in model.graph.inputs if value not in tensors]
        model.graph.inputs[:] = [*inputs, *tensors]
        switched = [node for node in model.graph.all_nodes() if node.name in self.program.switched]
        switched = [node for node in switched if node.inputs[1] is None or node.inputs[1].name not in frozen]
        names = [node.name or "" for node in switched]
        return dataclasses.replace(
            self,
            program=dataclasses.replace(self.program, model=model, statistics=statistics, switched=names),
            inputs=[value.name or "" for value in inputs],
            outputs=[value.name or "" for value in model.outputs],
            counters=[name for node in switched if (name := _counter(node)) in self.state],
            frozen=frozen,
        )

    def with_state(self, state: Mapping[str, torch.Tensor]) -> Model:
        """Return the model with the tensors of a module."""
        _, dtype = device_and_type(state, self.program.types)
        model = self.model.copy() if dtype is None else convert_floats(self.model, dtype)
        constants = list(model.graph.initializers.values())
        del model.graph.outputs[len(model.graph.outputs) - len(self.inner) :]
        model.graph.initializers.clear()
        inputs = {value.name: value for value in model.graph.inputs if value.name in state}
        for name, tensor in state.items():
            model.graph.inputs.remove(inputs[name])
            inputs[name].const_value = ir.Tensor(to_array(tensor).copy(), dtype=CODES[tensor.dtype], name=name)
            if name in self.learns:
                inputs[name].metadata_props[LEARNS] = str(tensor.requires_grad)
            model.graph.register_initializer(inputs[name])
        for value in constants:
            model.graph.register_initializer(value)
        return model

    def __getstate__(self) -> dict[str, Any]:
        state = {name: (tensor.numpy(), tensor.dtype) for name, tensor in self.state.items()}
        return {**vars(self), "state": state}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        state = {name: ir.Tensor(array, dtype=dtype, name=name) for name, (array, dtype) in kept["state"].items()}
        vars(self).update({**kept, "state": state})


def _parameters(model: Model, trainable: Collection[str] | None) -> dict[str, bool]:
    """Return parameter -> `requires_grad`."""
    by_rule = {choice.name for choice in judge(model, model.outputs) if choice.role == "parameter"}
    learns = {}
    for name, value in model.graph.initializers.items():
        declared = value.metadata_props.get(KIND)
        if declared == "PARAMETER" or (declared is None and name in by_rule) or name in (trainable or ()):
            requires_grad = value.metadata_props.get(LEARNS)
            learns[name] = (
                requires_grad != "False" if trainable is None else name in trainable or requires_grad == "True"
            )
    return learns


def _counter(node: ir.Node) -> str:
    mean = node.inputs[3]
    assert mean is not None and mean.name is not None
    prefix, dot, _ = mean.name.rpartition(".")
    return f"{prefix}{dot}{COUNTER}"


def to_module(
    source: Source,
    *,
    trainable: Collection[str] | None = None,
    statistics: Variance = "sample",
    inner: Sequence[str] = (),
    updates: Mapping[str, str] | None = None,
    blocks: bool = False,
) -> OnnxModule:
    """Return the inference graph of a model as a module.

    By default all likely parameters are trainable. `statistics` selects BatchNorm's running
    variance: of the sample as in PyTorch, or of the population. `inner` are values to return beside
    the outputs, and `updates` names values that replace buffers in training. With `blocks`, the
    graph is split into the blocks that it repeats.
    """
    return OnnxModule(Graph.of(load(source), trainable, statistics, inner, updates=updates, blocks=blocks))


class _Folder(nn.Module):  # type: ignore[misc]
    """Module for a prefix of parameter names."""


class Block(_Folder):
    """Block that a graph repeats, with the parameters that only it reads.

    Equal blocks execute the same program, so that it is compiled once. With `recomputes`, a block
    keeps only its inputs for the backward pass.
    """

    def __init__(self, segment: GraphSegment):
        super().__init__()
        self.recomputes = False
        self._compiles: dict[str, Any] | None = None
        self._program: Executable = segment.program
        self._sources: list[str | None] = []
        """Path of the tensor for each input of the program, or None for an input of the block."""

    def forward(self, *inputs: Any) -> Any:
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(self._compute, *inputs, use_reentrant=False, early_stop=False)
        return self._compute(*inputs)

    def compile(self, **options: Any) -> None:
        """Compile with `torch.compile` and these options, once per set of sizes for equal blocks."""
        self._compiles = options

    def _compute(self, *inputs: Any) -> Any:
        tensors_by_path, remaining = _tensors_of(self), iter(inputs)
        tensors = [next(remaining) if path is None else tensors_by_path[path] for path in self._sources]
        if self._compiles is None:
            results = self._program.run(tensors, training=self.training)
        else:
            results = self._program.run_compiled(tensors, self._compiles, training=self.training)
        return tuple(results) if len(results) > 1 else results[0]


class OnnxModule(nn.Module):  # type: ignore[misc]
    """Graph of ONNX operators, computed by PyTorch.

    It takes the inputs of the graph by position or name, and returns its output, or several by
    name. In training, Dropout drops and BatchNorm updates its statistics; in inference both follow
    the model. `steps` has the forward pass of each of several steps, in modules that share all
    tensors.
    """

    def __init__(self, graph: Graph):
        super().__init__()
        self._graph = graph
        self.steps: dict[str, OnnxModule] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in graph.state.items():
            parameter_data = from_array(tensor.numpy()).clone()
            tensors[name] = nn.Parameter(parameter_data, graph.learns[name]) if name in graph.learns else parameter_data
        homes = _block_paths(graph)
        keys: dict[str, str] = {}  # a block has its own tensors, and no others that are read
        for home, segment in homes.items():
            keys |= {name: f"{home}.{name}" for name in segment.own if not name.startswith(f"{home}.")}
            keys |= {name: f"outside.{name}" for name in _names_read_elsewhere(graph, home, segment.own)}
        blocks = {home: Block(segment) for home, segment in homes.items()}
        for name, main in graph.names():
            owner, attribute = _owner_of(self, keys.get(name, name), blocks)
            if isinstance(tensor := tensors[main], nn.Parameter):
                owner.register_parameter(attribute, tensor)
            else:
                owner.register_buffer(attribute, tensor, persistent=main not in graph.constants)
        for home, block in blocks.items():
            if not homes[home].own:
                self.add_module(_free_attribute(self, home), block)
        paths = {id(x): path for path, x in _tensors_of(self).items()}
        self._paths = {name: paths[id(tensor)] for name, tensor in tensors.items()}
        path_of = {id(module): path for path, module in self.named_modules()}
        self._blocks = [path_of[id(block)] for block in blocks.values()]
        for path, block, segment in zip(self._blocks, blocks.values(), homes.values(), strict=True):
            block._sources = [
                self._paths[name][len(path) + 1 :] if name in segment.own else None for name in segment.piece.reads
            ]

    def _state(self) -> dict[str, torch.Tensor]:
        tensors = _tensors_of(self)
        return {name: tensors[path] for name, path in self._paths.items()}

    def _whole_state(self) -> dict[str, torch.Tensor]:
        """Return the state, gathered from all processes if it is sharded: all must call this."""
        return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in self._state().items()}

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Return parameters by their names in the model, which may be invalid in PyTorch."""
        parameters = dict(self.named_parameters())
        return {name: parameters[path] for name, path in self._paths.items() if path in parameters}

    def repeated_blocks(self) -> list[nn.Module]:
        """Return the blocks in order, if the graph was split."""
        return [self.get_submodule(path) for path in self._blocks]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the tensors of the `state_dict` by their names in the model."""
        return {n: to_array(x) for n, x in self._whole_state().items() if n not in self._graph.constants}

    def add_step(self, name: str, outputs: Collection[str], trainable: Collection[str], statistics: Variance) -> None:
        """Add the forward pass of one of several steps, in training."""
        step = copy.copy(self)  # has the same dictionaries of tensors, so that `to` converts all
        step._graph, step.steps = self._graph.of_step(outputs, trainable, statistics), {}
        step.training = True
        self.steps[name] = step

    def forward(self, *inputs: Any, **named: Any) -> Any:
        arguments = dict(zip(self._graph.inputs, inputs, strict=False)) | named
        if arguments.keys() != set(self._graph.inputs) or len(arguments) != len(inputs) + len(named):
            raise TypeError(f"the module takes {', '.join(self._graph.inputs)}")
        state = self._state()
        state |= {name: state[name].detach() for name in self._graph.frozen}
        if self.training:
            for counter in self._graph.counters:
                state[counter] += 1
        device, _ = device_and_type(state, self._graph.program.types)
        tensors = {
            n: x if isinstance(x, torch.Tensor) else torch.as_tensor(x, device=device) for n, x in arguments.items()
        }
        updated = self._graph.updates if self.training else {}
        copies = {name: state[name].clone() for name in updated}  # the backward pass reads the old values
        results = self._execute({**state, **copies, **tensors})
        with torch.no_grad():
            for name, new in updated.items():
                state[name].copy_(results[new])
        results = {name: result for name, result in results.items() if name not in self._graph.hidden}
        return results if len(results) > 1 else next(iter(results.values()))

    def _execute(self, values: dict[str, Any]) -> dict[str, Any]:
        program, outputs = self._graph.program, self._graph.outputs
        if not self._graph.segments:
            tensors = [values[name] for name in program.inputs]
            return dict(zip(outputs, program.run(tensors, training=self.training), strict=True))
        blocks = iter(self.repeated_blocks())
        for segment in self._graph.segments:
            arguments = [values[name] for name in segment.inputs]
            if segment.piece.is_block:
                results = next(blocks)(*arguments)
                results = results if len(segment.piece.makes) > 1 else [results]
            else:
                results = segment.program.run(arguments, training=self.training)
            segment.piece.hand_over(values, results)
        return {name: values[name] for name in outputs}

    @property
    def statistics(self) -> Variance:
        """The running variance that BatchNorm keeps."""
        return self._graph.program.statistics

    @property
    def output_names(self) -> list[str]:
        """Return the names of all results, also of a single one."""
        return [name for name in self._graph.outputs if name not in self._graph.hidden]

    def named(self, inputs: Any) -> dict[str, Any]:
        """Return inputs by name, from a mapping, a tensor or a sequence."""
        if isinstance(inputs, Mapping):
            return dict(inputs)
        return dict(zip(self._graph.inputs, [inputs] if isinstance(inputs, torch.Tensor) else inputs, strict=True))

    def leave_out_dropout(self) -> None:
        """Disable dropout in training, and randomness."""
        self._change_programs(
            lambda program: dataclasses.replace(program, model=without_dropout(with_fixed_draws(program.model)))
        )

    def sync_batch_norm(self, together: bool = True) -> None:
        """Let BatchNorm in training use the batches of all processes, or only its own.

        The processes are those of the default group of torch.distributed, under any strategy.
        """
        self._change_programs(lambda program: dataclasses.replace(program, of_all_processes=together))

    def _change_programs(self, change: Callable[[Executable], Executable]) -> None:
        self._graph = self._graph.change_programs(change)
        segments = (segment for segment in self._graph.segments if segment.piece.is_block)
        for block, segment in zip(self.repeated_blocks(), segments, strict=True):
            block._program = segment.program
        for step in self.steps.values():
            step._change_programs(change)

    def to_model(self) -> Model:
        """Return the model with the current weights."""
        return self._graph.with_state(self._whole_state())

    def extra_repr(self) -> str:
        return f"{', '.join(self._graph.inputs)} -> {', '.join(self._graph.outputs)}"


# ---- names -----------------------------------------------------------------------------------------------------------


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _block_paths(graph: Graph) -> dict[str, GraphSegment]:
    """Return paths of blocks: the common prefix of parameter names, or `block0`."""
    homes: dict[str, GraphSegment] = {}
    blocks = [segment for segment in graph.segments if segment.piece.is_block]
    owned = {name for segment in blocks for name in segment.own}
    for segment in blocks:
        others = _names_read_elsewhere(graph, segment.piece.name, segment.own)
        is_alone = owned.isdisjoint(others.values()) and len(others) < len(segment.own)
        fits = segment.piece.name and segment.piece.name not in homes and is_alone
        homes[segment.piece.name if fits else f"block{len(homes)}"] = segment
    return homes


def _names_read_elsewhere(graph: Graph, home: str, own: Collection[str]) -> dict[str, str]:
    """Return names with the prefix of a block for tensors that are read elsewhere."""
    read = {name for segment in graph.segments for name in segment.inputs}
    begins = f"{home}."
    return {name: x for name, x in graph.names() if name.startswith(begins) and x in read and x not in own}


def _owner_of(root: nn.Module, key: str, blocks: Mapping[str, Block]) -> tuple[nn.Module, str]:
    """Return the owner and attribute of a key, with underscores for invalid parts."""
    *folders, last = key.split(".")
    owner = root
    for i, attribute in enumerate(folders):
        attribute = _free_attribute(owner, attribute, _Folder)
        if not hasattr(owner, attribute):
            owner.add_module(attribute, blocks.get(".".join(folders[: i + 1])) or _Folder())
        owner = getattr(owner, attribute)
    return owner, _free_attribute(owner, last)


def _free_attribute(owner: nn.Module, name: str, kind: type | None = None) -> str:
    name = name or "_"
    while hasattr(owner, name) and not (kind is not None and isinstance(getattr(owner, name), kind)):
        name += "_"
    return name
