"""Execution of live modules: PyTorch operators with gradients on and statistics as buffers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.distributed as dist
from torch.nn import functional as F

from onward.analysis.blocks import Part, PartInterface, models_of_parts
from onward.engines.framework_engine import interpreter
from onward.engines.interpreter import Interpreter
from onward.engines.shared.arrays import per_channel
from onward.engines.torch import Torch
from onward.engines.torch.compilation import Recording, kinds_of
from onward.engines.torch.layers import batch_normalization
from onward.engines.torch.types import CODES
from onward.model import Model, load
from onward.options import Variance
from onward.recipe.step_builder import in_training
from onward.transform.float_type import convert_floats


class Live(Torch):
    """PyTorch with gradients on, and with statistics as buffers, of one or all processes."""

    def __init__(self, device: torch.device, statistics: Variance, *, of_all_processes: bool = False):
        super().__init__(str(device))
        normalize = functools.partial(_batch_normalization, statistics, of_all_processes)
        self.operators["BatchNormalization"] = normalize
        self.operators["onward.InTraining"] = lambda inference, training: inference  # see `_train`

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        yield


def _batch_normalization(
    statistics: Variance,
    of_all_processes: bool,
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
    """Normalize, and update running statistics in place in training, as PyTorch's own layer does."""
    weight = torch_momentum(momentum)
    if training_mode and of_all_processes and dist.is_initialized() and dist.get_world_size() > 1:
        y, *batch_statistics = _normalize_together(x, scale, bias, epsilon, statistics)
        _follow((mean, variance), batch_statistics, weight)
        return y
    if training_mode and statistics == "sample":
        return F.batch_norm(x, mean, variance, scale, bias, True, weight, epsilon)
    if training_mode:
        _follow((variance, mean), torch.var_mean(x.detach(), (0, *range(2, x.ndim)), correction=0), weight)
    return batch_normalization(
        x, scale, bias, mean, variance, epsilon=epsilon, momentum=momentum, training_mode=training_mode, outputs=1
    )


@torch.no_grad()  # type: ignore[untyped-decorator]
def _follow(running: Iterable[torch.Tensor], batch_statistics: Iterable[torch.Tensor], weight: float) -> None:
    for old, new in zip(running, batch_statistics, strict=True):
        old.mul_(1 - weight).add_(new, alpha=weight)


def torch_momentum(momentum: float) -> float:
    """Return PyTorch's momentum, rounded: 0.1, not 0.10000002."""
    return round(1 - float(str(np.float32(momentum))), 9)


# ---- several processes -----------------------------------------------------------------------------------------------


class _SumOverProcesses(torch.autograd.Function):  # type: ignore[misc]
    """Differentiable sum over all processes. PyTorch's own is for GPUs, or deprecated."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _SumOverProcesses.apply(gradient)


def _normalize_together(
    x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, epsilon: float, statistics: Variance
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return normalized values, and statistics of all processes, whose batches may differ in size."""
    axes = (0, *range(2, x.ndim))
    wide = x.float() if x.element_size() < 4 else x
    count = wide.new_full((1,), x.numel() // x.shape[1])
    sums, number = _SumOverProcesses.apply(torch.cat([wide.sum(axes), count])).split([x.shape[1], 1])
    mean = sums / number
    centred = wide - per_channel(mean, x)
    squares = _SumOverProcesses.apply((centred * centred).sum(axes))
    factor = torch.rsqrt(squares / number + epsilon) * scale
    y = centred * per_channel(factor, x) + per_channel(bias, x)
    return y.to(x.dtype), mean, squares / (number - 1 if statistics == "sample" else number)


@dataclasses.dataclass(eq=False)
class Executable:
    """Program without state, shared by copies of a module and by equal blocks."""

    model: Model
    """Model in which tensors of modules are inputs."""
    statistics: Variance
    switched: list[str]
    """Names of normalizations that update their statistics."""
    types: dict[str, ir.DataType]
    """Types of the inputs that are tensors of modules."""
    of_all_processes: bool = False
    """True if normalizations use the batches of all processes."""
    _interpreters: dict[Any, Interpreter] = dataclasses.field(default_factory=dict, init=False)
    _compiled: dict[Any, Recording] = dataclasses.field(default_factory=dict, init=False)

    def __deepcopy__(self, memo: Any) -> Executable:
        return self

    @functools.cached_property
    def inputs(self) -> list[str]:
        return [value.name or "" for value in self.model.graph.inputs]

    def run(self, tensors: Iterable[Any], *, training: bool) -> list[Any]:
        """Return the outputs for the inputs, both in order."""
        values = dict(zip(self.inputs, tensors, strict=True))
        device, dtype = device_and_type({name: values[name] for name in self.types}, self.types)
        results = self._interpreter(training, device, dtype)(values)
        return [results[value.name or ""] for value in self.model.graph.outputs]

    def run_compiled(self, tensors: Sequence[Any], options: Mapping[str, Any], *, training: bool) -> list[Any]:
        """Run with `torch.compile`, cached by the sizes of tensors and the values of host arrays."""
        key = training, repr(options), *kinds_of(tensors)
        if key not in self._compiled:
            compiler = functools.partial(torch.compile, **options)
            self._compiled[key] = Recording(functools.partial(self.run, training=training), tensors, compiler)
        return self._compiled[key](tensors)

    def _interpreter(self, training: bool, device: torch.device, dtype: ir.DataType | None) -> Interpreter:
        key = training, device, dtype
        if key not in self._interpreters:
            model = self.model.copy()
            if training:
                _train(model, self.switched)
            if dtype is not None:
                model = convert_floats(model, dtype)
            live = Live(device, self.statistics, of_all_processes=self.of_all_processes)
            self._interpreters[key] = interpreter(model, live)
        return self._interpreters[key]

    def part(self, model: Model) -> Executable:
        """Return the program of a part of the graph."""
        types = {name: self.types[name] for value in model.graph.inputs if (name := value.name or "") in self.types}
        return dataclasses.replace(self, model=model, types=types)

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "_interpreters": {}, "_compiled": {}}
        return {**state, "model": self.model.to_proto().SerializeToString()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "model": load(state["model"])})


@dataclasses.dataclass(frozen=True, eq=False)
class GraphSegment:
    """Part of a graph, with a program that equal parts share."""

    piece: PartInterface
    program: Executable
    own: list[str]
    """Tensors that a block holds."""

    @property
    def inputs(self) -> list[str]:
        """Return the inputs that the block does not hold."""
        return [name for name in self.piece.reads if name not in self.own]


def make_segments(whole: Executable, parts: Iterable[Part], tied: Collection[str]) -> list[GraphSegment]:
    """Return the parts of the graph of a program. Tied tensors belong to the whole module."""
    pieces = models_of_parts(whole.model, parts, whole.types)
    programs = {model: whole.part(model) for model in {model for _, model in pieces}}
    return [
        GraphSegment(piece, programs[model], [name for name in piece.own if piece.is_block and name not in tied])
        for piece, model in pieces
    ]


def device_and_type(
    state: Mapping[str, torch.Tensor], declared: Mapping[str, ir.DataType]
) -> tuple[torch.device, ir.DataType | None]:
    """Return the device of tensors, and their type if they were converted."""
    name = next((name for name, tensor in state.items() if tensor.is_floating_point()), None)
    if name is None:
        return torch.device("cpu"), None
    dtype = CODES[state[name].dtype]
    return state[name].device, None if dtype == declared[name] else dtype


def _train(model: Model, switched: Collection[str]) -> None:
    """Switch nodes to training mode in place."""
    on = ir.Value(name=model.names().fresh("training"), const_value=ir.Tensor(np.array(True)))
    model.graph.register_initializer(on)
    for node in model.graph.all_nodes():
        if node.op_type == "Dropout" and node.domain == "":
            node.resize_inputs(3)
            node.replace_input_with(2, on)
        elif node.op_type == in_training.name and node.domain:
            node.replace_input_with(0, node.inputs[1])  # in place: outputs of the graph keep their names
        elif node.name in switched:
            node.attributes.add(ir.AttrInt64("training_mode", 1))
