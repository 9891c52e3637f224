"""What a live module executes: operators of PyTorch with gradients left on, and with statistics that are buffers."""

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

from onward.agreement.steps import without_dropout
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
from onward.transform.float_type import convert_floats


class Live(Torch):
    """PyTorch with gradients left on, and with statistics that are buffers of a module: those of its own batch, or of
    the batches of all processes."""

    def __init__(self, device: torch.device, statistics: Variance, *, of_all_processes: bool = False):
        super().__init__(str(device))
        normalize = functools.partial(_batch_normalization, statistics, of_all_processes)
        self.operators["BatchNormalization"] = normalize

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
    """In training the running statistics change in place, as those of PyTorch's own layer do."""
    share = share_of_batch(momentum)
    if training_mode and of_all_processes and dist.is_initialized() and dist.get_world_size() > 1:
        y, *of_batch = _normalize_together(x, scale, bias, epsilon, statistics)
        _follow((mean, variance), of_batch, share)
        return y
    if training_mode and statistics == "sample":
        return F.batch_norm(x, mean, variance, scale, bias, True, share, epsilon)
    if training_mode:
        _follow((variance, mean), torch.var_mean(x.detach(), (0, *range(2, x.ndim)), correction=0), share)
    return batch_normalization(
        x, scale, bias, mean, variance, epsilon=epsilon, momentum=momentum, training_mode=training_mode, outputs=1
    )


@torch.no_grad()  # type: ignore[untyped-decorator]
def _follow(running: Iterable[torch.Tensor], of_batch: Iterable[torch.Tensor], share: float) -> None:
    for old, new in zip(running, of_batch, strict=True):
        old.mul_(1 - share).add_(new, alpha=share)


def share_of_batch(momentum: float) -> float:
    """What PyTorch calls the momentum of its layers: 0.1, not 0.10000002."""
    return round(1 - float(str(np.float32(momentum))), 9)


# ---- several processes -----------------------------------------------------------------------------------------------


class _SumOverProcesses(torch.autograd.Function):  # type: ignore[misc]
    """The sum over all processes, through which derivatives go: PyTorch's own is for GPUs, or deprecated."""

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
    """What is normalized by the statistics of all processes, and these. The batches of some may be smaller."""
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
    """What executes; copies of a module share it, since it holds no state, and so do blocks that are equal."""

    model: Model
    """All that modules hold is an input of it."""
    statistics: Variance
    switched: list[str]
    """Names of the normalizations that follow their batches."""
    held: dict[str, ir.DataType]
    """The types of those inputs that modules hold."""
    of_all_processes: bool = False
    """Whether normalizations follow the batches of all processes."""

    def __deepcopy__(self, memo: Any) -> Executable:
        return self

    @functools.cached_property
    def inputs(self) -> list[str]:
        return [value.name or "" for value in self.model.graph.inputs]

    def run(self, tensors: Iterable[Any], *, training: bool) -> list[Any]:
        """The outputs in their order, from the inputs in theirs."""
        given = dict(zip(self.inputs, tensors, strict=True))
        device, dtype = where({name: given[name] for name in self.held}, self.held)
        results = self._interpreter(training, device, dtype)(given)
        return [results[value.name or ""] for value in self.model.graph.outputs]

    def run_compiled(self, tensors: Sequence[Any], options: Mapping[str, Any], *, training: bool) -> list[Any]:
        """The same by what `torch.compile` makes of it for tensors of these sizes, and for these arrays on the host."""
        key = training, repr(options), *kinds_of(tensors)
        if key not in self._compiled:
            compile = functools.partial(torch.compile, **options)
            self._compiled[key] = Recording(functools.partial(self.run, training=training), tensors, compile)
        return self._compiled[key](tensors)

    @functools.cached_property
    def _compiled(self) -> dict[Any, Recording]:
        return {}

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
            live = Live(device, self.statistics, of_all_processes=self.of_all_processes)
            self._made[key] = interpreter(model, live)
        return self._made[key]

    def part(self, model: Model) -> Executable:
        """The program of a part of the graph."""
        held = {name: self.held[name] for value in model.graph.inputs if (name := value.name or "") in self.held}
        return dataclasses.replace(self, model=model, held=held)

    def without_dropout(self) -> Executable:
        return dataclasses.replace(self, model=without_dropout(self.model))

    def normalizing_together(self, together: bool) -> Executable:
        return dataclasses.replace(self, of_all_processes=together)

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in vars(self).items() if key not in ("_made", "_compiled", "inputs")}
        return {**kept, "model": self.model.to_proto().SerializeToString()}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        vars(self).update({**kept, "model": load(kept["model"])})


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A piece of a graph, which a program computes that it shares with those that are equal."""

    piece: PartInterface
    program: Executable
    own: list[str]
    """What a block holds."""

    @property
    def given(self) -> list[str]:
        """What it is handed."""
        return [name for name in self.piece.reads if name not in self.own]


def make_segments(whole: Executable, parts: Iterable[Part], tied: Collection[str]) -> list[Segment]:
    """The parts of the graph of a program. What has several names is held by the whole."""
    pieces = models_of_parts(whole.model, parts, whole.held)
    programs = {model: whole.part(model) for model in {model for _, model in pieces}}
    return [
        Segment(piece, programs[model], [name for name in piece.own if piece.is_block and name not in tied])
        for piece, model in pieces
    ]


def where(
    state: Mapping[str, torch.Tensor], declared: Mapping[str, ir.DataType]
) -> tuple[torch.device, ir.DataType | None]:
    """Where tensors are now, and the type that they were converted to, if they were."""
    floats = (name for name, tensor in state.items() if tensor.is_floating_point())
    name = next(floats, None)
    if name is None:
        return torch.device("cpu"), None
    dtype = CODES[state[name].dtype]
    return state[name].device, None if dtype == declared[name] else dtype


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
