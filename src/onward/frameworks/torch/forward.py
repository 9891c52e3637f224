"""A model as a live nn.Module: real parameters under their names, and a graph that PyTorch's operators execute.

The graph can be cut into the blocks that it repeats. Each is then a module of its own, to be sharded, recomputed or
compiled block by block.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onward.analysis.blocks import cut_into_parts
from onward.engines.torch.types import CODES, from_array, to_array
from onward.frameworks.torch.capture import ALSO, COUNTER, KIND, LEARNS, PERSISTENT
from onward.frameworks.torch.module_engine import Executable, Live, Segment, make_segments, where
from onward.model import Model, Source, load
from onward.model.core import as_input, values
from onward.options import Variance
from onward.recipe.forward import functions_to_inline, is_switchable
from onward.recipe.trainable import judge
from onward.standard import OLDEST_OPSET
from onward.transform.float_type import convert_floats
from onward.transform.inline import inline
from onward.transform.opset import of_one_opset

LIVE = "take the live module, which computes all of them: `onward.to_torch`"
"""Hint where a program cannot be written."""


@dataclasses.dataclass(eq=False)
class Graph:
    """What a module executes, and what it holds; copies of a module share it, since it holds no state."""

    program: Executable
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
        names = model.names()
        for node in model.graph.all_nodes():
            node.name = node.name or names.fresh(node.op_type)
        known = {value.name: value for value in values(model.graph)}
        model.graph.outputs.extend(known[name] for name in inner)
        learns = _parameters(model, trainable)
        held: dict[str, ir.Value] = {}  # parameters, buffers, and floats that are more than a number
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            assert tensor is not None
            is_buffer = value.metadata_props.get(KIND) == "BUFFER"
            if name in learns or is_buffer or (tensor.dtype.is_floating_point() and len(tensor.shape)):
                held[name] = value
        frozen = [name for name, learn in learns.items() if not learn]
        normalizations = [node for node in model.graph.all_nodes() if node.op_type == "BatchNormalization"]
        switched = [node for node in normalizations if is_switchable(node, frozen)]
        followed = {value for node in switched for value in node.inputs}
        kept = {
            name
            for name, value in held.items()
            if (value.metadata_props.get(PERSISTENT) == "True" if KIND in value.metadata_props else value in followed)
        }
        state = {name: value.const_value for name, value in held.items() if value.const_value is not None}
        program = Executable(
            model, statistics, [node.name or "" for node in switched], {name: x.dtype for name, x in state.items()}
        )
        graph = cls(
            program,
            inputs=[value.name or "" for value in model.inputs],
            outputs=[value.name or "" for value in model.outputs],
            state=state,
            learns=learns,
            constants={name for name in held if name not in learns and name not in kept},
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

    def change_programs(self, change: Callable[[Executable], Executable]) -> Graph:
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
    blocks: bool = False,
) -> OnnxModule:
    """The inference graph of a model as a module.

    Without a list of what is trainable, all that looks like a parameter is. `statistics` is the running variance that
    BatchNorm keeps in training: that of the sample, as PyTorch has it, or of the population. `inner` are values that it
    returns beside its outputs. With `blocks`, it is cut into the blocks that it repeats.
    """
    return OnnxModule(Graph.of(load(source), trainable, statistics, inner, blocks=blocks))


class _Folder(nn.Module):  # type: ignore[misc]
    """A part of the names of parameters: what is before a dot."""


class Block(_Folder):
    """One of the blocks that a graph repeats: from what is handed to it to what it hands on.

    It holds the parameters that nothing else reads. Blocks that are equal execute the same program, so that what is
    compiled for one serves all. With `recomputes`, it keeps nothing for its derivative but what is handed to it.
    """

    def __init__(self, segment: Segment):
        super().__init__()
        self.recomputes = False
        self._compiles: dict[str, Any] | None = None
        self._program: Executable = segment.program
        self._sources: list[str | None] = []
        """For each input of the program: the path of what the block holds, or None for what is handed to it."""

    def forward(self, *inputs: Any) -> Any:
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(self._compute, *inputs, use_reentrant=False, early_stop=False)
        return self._compute(*inputs)

    def compile(self, **options: Any) -> None:
        """Let `torch.compile`, with these options, compile it for each set of sizes, once for all blocks like it."""
        self._compiles = options

    def _compute(self, *inputs: Any) -> Any:
        held, given = _tensors_of(self), iter(inputs)
        tensors = [next(given) if path is None else held[path] for path in self._sources]
        if self._compiles is None:
            results = self._program.run(tensors, training=self.training)
        else:
            results = self._program.run_compiled(tensors, self._compiles, training=self.training)
        return tuple(results) if len(results) > 1 else results[0]


class OnnxModule(nn.Module):  # type: ignore[misc]
    """A graph of ONNX operators, computed by PyTorch.

    It takes the inputs of the graph by position or name, and returns its output, or several by name. In training,
    Dropout drops and BatchNorm follows its batches; in inference both are as the model has them.
    """

    def __init__(self, graph: Graph):
        super().__init__()
        self._graph = graph
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in graph.state.items():
            made = from_array(tensor.numpy()).clone()
            tensors[name] = nn.Parameter(made, graph.learns[name]) if name in graph.learns else made
        homes = _homes(graph)
        keys: dict[str, str] = {}  # a block has all that it holds, and nothing else that is read
        for home, segment in homes.items():
            keys |= {name: f"{home}.{name}" for name in segment.own if not name.startswith(f"{home}.")}
            keys |= {name: f"outside.{name}" for name in _strangers(graph, home, segment.own)}
        blocks = {home: Block(segment) for home, segment in homes.items()}
        for name, main in graph.names():
            owner, attribute = _place(self, keys.get(name, name), blocks)
            if isinstance(tensor := tensors[main], nn.Parameter):
                owner.register_parameter(attribute, tensor)
            else:
                owner.register_buffer(attribute, tensor, persistent=main not in graph.constants)
        for home, block in blocks.items():
            if not homes[home].own:
                self.add_module(_free(self, home), block)
        paths = {id(x): path for path, x in _tensors_of(self).items()}
        self._paths = {name: paths[id(tensor)] for name, tensor in tensors.items()}
        at = {id(module): path for path, module in self.named_modules()}
        self._blocks = [at[id(block)] for block in blocks.values()]
        for path, block, segment in zip(self._blocks, blocks.values(), homes.values(), strict=True):
            block._sources = [
                self._paths[name][len(path) + 1 :] if name in segment.own else None for name in segment.piece.reads
            ]

    def _state(self) -> dict[str, torch.Tensor]:
        held = _tensors_of(self)
        return {name: held[path] for name, path in self._paths.items()}

    def _whole_state(self) -> dict[str, torch.Tensor]:
        """The state, gathered from all processes where it is sharded: all must ask for it."""
        return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in self._state().items()}

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in the model, which PyTorch may not allow."""
        held = dict(self.named_parameters())
        return {name: held[path] for name, path in self._paths.items() if path in held}

    def repeated_blocks(self) -> list[nn.Module]:
        """The blocks that the graph repeats, in their order; none, unless it was cut into them and there are any."""
        return [self.get_submodule(path) for path in self._blocks]

    def arrays(self) -> dict[str, np.ndarray]:
        """What a `state_dict` holds, by the names in the model."""
        return {n: to_array(x) for n, x in self._whole_state().items() if n not in self._graph.constants}

    def forward(self, *inputs: Any, **named: Any) -> Any:
        given = dict(zip(self._graph.inputs, inputs, strict=False)) | named
        if given.keys() != set(self._graph.inputs) or len(given) != len(inputs) + len(named):
            raise TypeError(f"the module takes {', '.join(self._graph.inputs)}")
        state = self._state()
        if self.training:
            for counter in self._graph.counters:
                state[counter] += 1
        device, _ = where(state, self._graph.program.held)
        tensors = {n: x if isinstance(x, torch.Tensor) else torch.as_tensor(x, device=device) for n, x in given.items()}
        results = self._execute({**state, **tensors})
        return results if len(results) > 1 else next(iter(results.values()))

    def _execute(self, values: dict[str, Any]) -> dict[str, Any]:
        program, outputs = self._graph.program, self._graph.outputs
        if not self._graph.segments:
            tensors = [values[name] for name in program.inputs]
            return dict(zip(outputs, program.run(tensors, training=self.training), strict=True))
        blocks = iter(self.repeated_blocks())
        for segment in self._graph.segments:
            given = [values[name] for name in segment.given]
            if segment.piece.is_block:
                results = next(blocks)(*given)
                results = results if len(segment.piece.makes) > 1 else [results]
            else:
                results = segment.program.run(given, training=self.training)
            segment.piece.hand_over(values, results)
        return {name: values[name] for name in outputs}

    @property
    def statistics(self) -> Variance:
        """The running variance that BatchNorm keeps."""
        return self._graph.program.statistics

    @property
    def output_names(self) -> list[str]:
        """What the tensors are called that it returns, a single one too."""
        return self._graph.outputs

    def named(self, inputs: Any) -> dict[str, Any]:
        """Inputs by name, where they are a tensor or a sequence of them."""
        if isinstance(inputs, Mapping):
            return dict(inputs)
        return dict(zip(self._graph.inputs, [inputs] if isinstance(inputs, torch.Tensor) else inputs, strict=True))

    def leave_out_dropout(self) -> None:
        """Drop nothing from now on, while all else is as in training."""
        self._change_programs(Executable.without_dropout)

    def sync_batch_norm(self, together: bool = True) -> None:
        """Let BatchNorm in training have the statistics of the batches of all processes, or of its own alone.

        The processes are those of the default group of torch.distributed, whichever strategy runs the module.
        """
        self._change_programs(lambda program: program.normalizing_together(together))

    def _change_programs(self, change: Callable[[Executable], Executable]) -> None:
        self._graph = self._graph.change_programs(change)
        segments = (segment for segment in self._graph.segments if segment.piece.is_block)
        for block, segment in zip(self.repeated_blocks(), segments, strict=True):
            block._program = segment.program

    def to_model(self) -> Model:
        """The model that this is, with the weights as they are now."""
        return self._graph.with_state(self._whole_state())

    def extra_repr(self) -> str:
        return f"{', '.join(self._graph.inputs)} -> {', '.join(self._graph.outputs)}"


# ---- names -----------------------------------------------------------------------------------------------------------


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _homes(graph: Graph) -> dict[str, Segment]:
    """Blocks by where they are in a module: what the names of their parameters begin with, if few others do."""
    homes: dict[str, Segment] = {}
    blocks = [segment for segment in graph.segments if segment.piece.is_block]
    held = {name for segment in blocks for name in segment.own}
    for segment in blocks:
        others = _strangers(graph, segment.piece.name, segment.own)
        is_alone = held.isdisjoint(others.values()) and len(others) < len(segment.own)
        fits = segment.piece.name and segment.piece.name not in homes and is_alone
        homes[segment.piece.name if fits else f"block{len(homes)}"] = segment
    return homes


def _strangers(graph: Graph, home: str, own: Collection[str]) -> dict[str, str]:
    """Names that begin as those of what a block holds, and what they are names of, which is read elsewhere."""
    read = {name for segment in graph.segments for name in segment.given}
    begins = f"{home}."
    return {name: x for name, x in graph.names() if name.startswith(begins) and x in read and x not in own}


def _place(root: nn.Module, key: str, blocks: Mapping[str, Block]) -> tuple[nn.Module, str]:
    """Where a module keeps what has this key; parts that PyTorch cannot take get an underscore."""
    *folders, last = key.split(".")
    owner = root
    for i, part in enumerate(folders):
        part = _free(owner, part, _Folder)
        if not hasattr(owner, part):
            owner.add_module(part, blocks.get(".".join(folders[: i + 1])) or _Folder())
        owner = getattr(owner, part)
    return owner, _free(owner, last)


def _free(owner: nn.Module, part: str, kind: type | None = None) -> str:
    part = part or "_"
    while hasattr(owner, part) and not (kind is not None and isinstance(getattr(owner, part), kind)):
        part += "_"
    return part
