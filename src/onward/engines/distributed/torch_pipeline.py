"""Pipelines on PyTorch: each process has some of the repeated blocks, and passes micro-batches on to the next process.

`torch.distributed.pipelining` runs the schedule; a stage is several successive parts (see torch_forward.py). For the
update, a process has a shard of all rows of its own tensors, and a shard of no rows of the tensors of others.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from onward.engines.distributed import copies_of, refuse_fixed_batches
from onward.engines.distributed.torch_forward import ExecutablePart, ForwardModule, gather_samples, make_parts
from onward.engines.distributed.torch_parallel import Tensors, TorchParallel, hold_as_initializers
from onward.engines.framework_engine import interpreter
from onward.engines.interpreter import Interpreter
from onward.engines.torch.types import TYPES
from onward.errors import UnsupportedError
from onward.lowering.data_parallel import DataParallel, extract_values
from onward.lowering.micro_batches import COUNT, NUMBER, divide_into_micro_batches
from onward.lowering.rounds import Steps
from onward.lowering.step import LoweringOptions
from onward.model import Model
from onward.model.walk import ancestors

_GIVEN = "given: "
"""Prefix of input names, which are passed to a schedule as keywords and must not equal its own."""
_LARGE = 1024
"""Elements from which on a constant counts as a weight."""


class TorchPipeline(TorchParallel):
    """A step of a training model of which this process computes some blocks."""

    def __init__(self, model: Model, step: Steps = None, *, micro_batches: int | None = None, **options: Any):
        self._micro_batches = micro_batches
        super().__init__(model, step, **options)
        refuse_fixed_batches(self.inputs)
        self._schedule: tuple[Any, PipelineScheduleSingle] | None = None

    def _make_mesh(self, strategy: str) -> DeviceMesh:
        return init_device_mesh(self._device.type, (self.group.size,))

    def _step_options(self) -> LoweringOptions:
        """Return options that lower the step as for one of two processes: a micro-batch is a share of the batch."""
        return LoweringOptions(
            differentiate=False,
            data_parallel=DataParallel(0, 2, self._lowering_options.data_parallel.batch_norm, gradients=False),
        )

    def _forward_module(self, forward: Model, trained: Sequence[str], recompute: bool) -> ForwardModule:
        state = [value.name or "" for value in forward.inputs if value.name not in self._contract.batch]
        whole = divide_into_micro_batches(forward, state, self._contract.update.values())
        self._of_whole = interpreter(whole, self._framework)
        self._types = {value.name: TYPES[value.dtype] for value in forward.outputs if value.dtype is not None}
        hold_as_initializers(forward, trained, self._carried)
        stages = _deal_out(make_parts(forward, trained, self._framework), self.group.size)
        flow = _Flow(forward, stages, trained)
        self._flow = flow.of(self.group.rank, self._framework)
        self._readers = {name: flow.readers(name) for name in trained}
        self._groups = {
            readers: dist.new_group(readers) for readers in sorted({r for r in self._readers.values() if len(r) > 1})
        }
        own = {n: self._framework.tensor(np.array(self._whole[n])) for n in trained if self._reads(n)}
        return ForwardModule(stages[self.group.rank], own, self._flow.gives, recompute=recompute)

    def _wrap(self, module: ForwardModule) -> nn.Module:
        if any(not self._shape(name) for name in self._trained):
            raise UnsupportedError(
                "a pipeline cannot assign scalar parameters to processes",
                hint='use `strategy="ddp"` (`--strategy ddp`), or freeze them',
            )
        self._forward = module
        return _Stage(module, self._flow)

    # ---- state -------------------------------------------------------------------------------------------------------

    def _owner(self, name: str) -> int:
        """Return the rank that updates a parameter and its state: the first that reads it."""
        return self._readers[name if name in self._readers else self._follows(name) or ""][0]

    def _reads(self, name: str) -> bool:
        return self.group.rank in self._readers[name]

    def _own(self, name: str, array: np.ndarray) -> torch.Tensor:
        is_here = not self._is_split(name) or self._owner(name) == self.group.rank
        return self._framework.tensor(np.array(array if is_here else array[:0]))

    def _local(self, name: str) -> torch.Tensor:
        is_copy = name in self._forward.places and self._owner(name) != self.group.rank
        return self._copy(name)[:0] if is_copy else super()._local(name)

    def _copy(self, name: str) -> torch.Tensor:
        return self._forward.parameter(name).detach()

    def _gathered(self, name: str, local: torch.Tensor) -> torch.Tensor:
        owner = self._owner(name)
        whole = local.contiguous() if owner == self.group.rank else local.new_empty(self._shape(name))
        dist.broadcast(whole, owner)
        return whole

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _samples(self, batch: Any, inputs: Any) -> dict[str, Any]:
        """Return all samples, in each process."""
        own = self._fitting(batch, inputs)
        return own if copies_of(batch, self.group) > 1 else gather_samples(own, None, self.group.size)

    def _differentiate(self, batch: Any, inputs: Any) -> tuple[dict[str, Any], Tensors]:
        samples = self._samples(batch, inputs)
        tensors = {name: self._framework.adopt(samples[name]) for name in self._contract.batch}
        count = max((len(tensor) for tensor in tensors.values() if tensor.ndim), default=1)
        most = min(count, self._micro_batches or 4 * self.group.size)
        micro_batches = max(n for n in range(1, most + 1) if count % n == 0)  # which must be equal
        state = {name: self._local(name) for name in self._contract.state if name not in self._trained}
        with torch.no_grad():
            of_whole = self._of_whole({**tensors, **state})
            self._send_shared_parameters()
        chunks = {f"{_GIVEN}{n}": x for n, x in tensors.items() if x.ndim and len(x) == count}
        self._module.common = {**tensors, **state, **of_whole, COUNT: np.array(micro_batches, np.float32)}
        shapes = {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in chunks.items()}
        schedule = self._scheduled((micro_batches, count // micro_batches, shapes), micro_batches)
        target = torch.zeros(micro_batches, device=self._device)
        terms = schedule.step(target=target, **chunks, **{_GIVEN + NUMBER: torch.arange(micro_batches)})
        return {**of_whole, **self._sum_terms(terms)}, self._collect_gradients()

    def _scheduled(self, key: Any, micro_batches: int) -> PipelineScheduleSingle:
        """Return a schedule for the sizes in `key`."""
        if self._schedule is None or self._schedule[0] != key:
            stage = PipelineStage(self._module, self.group.rank, self.group.size, self._device)
            schedule_type = Schedule1F1B if micro_batches >= self.group.size else ScheduleGPipe
            schedule = schedule_type(
                stage,
                micro_batches,
                loss_fn=lambda terms, _: terms[self._flow.gives.index(self.loss)].sum(),
                scale_grads=False,
            )
            self._schedule = key, schedule
        return self._schedule[1]

    def _sum_terms(self, terms: Any) -> dict[str, torch.Tensor]:
        """Return metrics of the global batch, which the last process sends to the others."""
        last = self.group.size - 1
        metrics = {}
        for name in self._contract.metrics:
            total = torch.zeros((), dtype=self._types[name], device=self._device)
            if self.group.rank == last:
                total = terms[self._flow.gives.index(name)].detach().sum()
            dist.broadcast(total, last)
            metrics[name] = total
        return metrics

    def _collect_gradients(self) -> Tensors:
        gradients = {}
        for name, x in self._update_contract.gradients.items():
            if x not in self._forward.places:
                gradients[name] = torch.zeros_like(self._local(x))
                continue
            gradient = self._gradient(self._forward.parameter(x))
            if len(self._readers[x]) > 1:
                dist.all_reduce(gradient, group=self._groups[self._readers[x]])
            gradients[name] = gradient if self._owner(x) == self.group.rank else gradient[:0]
        return gradients

    def _send_shared_parameters(self) -> None:
        """Send parameters that several processes read from the owner to the others."""
        for name in (name for name in self._trained if self._reads(name) and len(self._readers[name]) > 1):
            dist.broadcast(self._copy(name), self._owner(name), group=self._groups[self._readers[name]])


class _Stage(nn.Module):  # type: ignore[misc]
    """The stage of a process, which computes one micro-batch."""

    def __init__(self, inner: ForwardModule, flow: _FlowOfOne):
        super().__init__()
        self._inner, self._flow = inner, flow
        self.common: dict[str, Any] = {}
        """Values that all micro-batches read."""

    def forward(self, *received: torch.Tensor, **chunks: Any) -> tuple[torch.Tensor, ...]:
        own = {name.removeprefix(_GIVEN): value for name, value in chunks.items()}
        own[NUMBER] = np.array([0, own[NUMBER].item()], np.uint32)
        values = {**self.common, **own, **dict(zip(self._flow.takes, received, strict=False))}
        if self._flow.beside is not None:
            values |= self._flow.beside(values)
        results = self._inner(values)
        return tuple(results[name].reshape(-1) if self._flow.is_last else results[name] for name in self._flow.gives)


# ---- stages and the values between them ------------------------------------------------------------------------------


def _deal_out(parts: Sequence[ExecutablePart], size: int) -> list[list[ExecutablePart]]:
    """Return the parts of each process: equal numbers of blocks, or one more; other parts follow the block before."""
    blocks = [index for index, executable in enumerate(parts) if executable.interface.is_block]
    if len(blocks) < size:
        raise UnsupportedError(
            f"the model has {len(blocks)} blocks, fewer than {size} processes",
            hint='use fewer processes, or `strategy="fsdp"` (`--strategy fsdp`)',
        )
    starts = [0, *(int(own[0]) for own in np.array_split(blocks, size)[1:]), len(parts)]
    return [list(parts[start:end]) for start, end in itertools.pairwise(starts)]


@dataclasses.dataclass
class _FlowOfOne:
    """The values that a stage receives and sends."""

    takes: list[str]
    gives: list[str]
    beside: Interpreter | None
    """Recomputes values of other stages that need no weights: masks, positions, sizes."""
    is_last: bool


class _Flow:
    """The values that go from stage to stage."""

    def __init__(self, forward: Model, dealt: Sequence[Sequence[ExecutablePart]], trained: Sequence[str]):
        self._forward, self._size = forward, len(dealt)
        self._values = {v.name: v for node in forward.graph for v in node.outputs}
        weights = {v for v in forward.graph.initializers.values() if v.name in trained or _is_large(v)}
        self._reads = [{name for executable in parts for name in executable.interface.reads} for parts in dealt]
        self._results = [value.name or "" for value in forward.outputs]
        self._reads[-1].update(self._results)
        self._made = [[name for executable in parts for name in executable.interface.makes] for parts in dealt]
        self._beside = {
            name
            for name in {name for names in self._made for name in names}
            if weights.isdisjoint(ancestors([self._values[name]])[1])
        }

    def readers(self, parameter: str) -> tuple[int, ...]:
        return tuple(rank for rank, reads in enumerate(self._reads) if parameter in reads)

    def of(self, rank: int, framework: Any) -> _FlowOfOne:
        others = self._reads[rank] & self._beside - set(self._made[rank])
        model = extract_values(self._forward, [self._values[name] for name in sorted(others)]) if others else None
        gives = self._results if rank == self._size - 1 else self._handed_on(rank)
        takes = self._handed_on(rank - 1) if rank else []
        return _FlowOfOne(takes, gives, interpreter(model, framework) if model else None, rank == self._size - 1)

    def _handed_on(self, rank: int) -> list[str]:
        later = {name for reads in self._reads[rank + 1 :] for name in reads} - self._beside
        handed = [name for names in self._made[: rank + 1] for name in names if name in later]
        for name in handed:
            dtype = self._values[name].dtype
            if dtype is not None and not dtype.is_floating_point():
                raise UnsupportedError(
                    f"a pipeline cannot send `{name}` between processes: it is not floating-point",
                    hint='use `strategy="fsdp"` (`--strategy fsdp`)',
                )
        return handed


def _is_large(value: Any) -> bool:
    tensor = value.const_value
    return tensor is not None and tensor.dtype.is_floating_point() and tensor.size >= _LARGE
