"""Training on DeepSpeed: its ZeRO around the forward pass, our update on its partitions.

DeepSpeed averages gradients, and from stage 1 on gives each process a part of all numbers in a row (a flat partition);
stage 3 divides parameters, too, and gathers a block while it is computed. What it takes for an optimizer is one that
runs the update of the training model: on the parts of tensors that are in the partition, each a row of numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from onward.engines.distributed import join_group
from onward.engines.distributed.deepspeed_config import read_deepspeed_config, settle
from onward.engines.distributed.torch_forward import ForwardModule
from onward.engines.distributed.torch_parallel import Tensors, TorchParallel
from onward.engines.engine import Arrays
from onward.errors import ArgumentError, TrainingError, UnsupportedError
from onward.lowering.rounds import Steps
from onward.model import Model


@dataclasses.dataclass(frozen=True)
class _Fragment:
    """What a process has of a parameter: numbers in a row, and where they are in its partition."""

    start: int
    size: int
    partition: torch.Tensor
    at: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.at : self.at + self.size]


class TorchDeepSpeed(TorchParallel):
    """A step of a training model in one of several processes, of which DeepSpeed divides the state."""

    def __init__(
        self, model: Model, step: Steps = None, *, deepspeed_config: Any = None, device: str = "cpu", **options: Any
    ):
        given = read_deepspeed_config(deepspeed_config)
        if given is None:
            raise ArgumentError(
                "DeepSpeed needs a configuration, which says what it divides",
                hint='name its file, such as {"zero_optimization": {"stage": 2}}: `--deepspeed-config ds.json`',
            )
        self._settings = settle(given, model, join_group(device).size)
        self._stage = self._settings["zero_optimization"].get("stage", 0)
        super().__init__(model, step, **{**options, "strategy": "fsdp" if self._stage else "ddp", "device": device})

    def _wrap(self, module: ForwardModule) -> nn.Module:
        self._forward = module
        other = next((name for name in module.places if module.parameter(name).dtype != torch.float32), None)
        if other is not None:
            raise UnsupportedError(
                f"DeepSpeed trains parameters in float32, and `{other}` is not: it would keep its own copies",
                hint='take `strategy="fsdp"` (`--strategy fsdp`)',
            )
        deepspeed = _import_deepspeed(self._device, "steps_per_print" in self._settings)
        self._update_runner = _UpdateRunner(module.parameters())
        with contextlib.redirect_stdout(sys.stderr):  # it prints what it builds
            self._deepspeed, *_ = deepspeed.initialize(
                model=module, optimizer=self._update_runner, config=self._settings, dist_init_required=False
            )
        self._fragments = {name: self._find_fragment(module.parameter(name)) for name in module.places if self._stage}
        spans = {name: (part.start, part.size) for name, part in self._fragments.items()}
        self._spans = self.group.gather(spans)
        return self._deepspeed

    def _find_fragment(self, parameter: nn.Parameter) -> _Fragment:
        """By DeepSpeed's own notes about where it has put what."""
        zero = self._deepspeed.optimizer
        if self._stage < 3:
            found = parameter._hp_mapping
            partition = zero.single_partition_of_fp32_groups[0]
            if found is None:
                return _Fragment(0, 0, partition, 0)
            inner, at = found.lp_fragment_address, found.hp_fragment_address.start
            return _Fragment(inner.start, inner.numel, partition, at)
        if len(zero.fp32_partitioned_groups_flat) > 1:
            raise UnsupportedError(
                "DeepSpeed would update one group of parameters after the other, and the update is of all at once",
                hint="leave `sub_group_size` out of its configuration",
            )
        _, at, padded = zero.grad_position[zero.get_param_id(parameter)]
        start = min(self.group.rank * padded, parameter.ds_numel)
        return _Fragment(start, min(padded, parameter.ds_numel - start), zero.fp32_partitioned_groups_flat[0], at)

    # ---- what state is where -----------------------------------------------------------------------------------------

    def _fragment(self, name: str) -> _Fragment | None:
        """Where the numbers of a parameter, or of state that follows it, are divided."""
        return self._fragments.get(self._follows(name) or name)

    def _own(self, name: str, array: np.ndarray) -> torch.Tensor:
        part = self._fragment(name)
        if not self.is_sharded or part is None:
            return self._framework.tensor(np.array(array))
        return self._framework.tensor(np.array(array.reshape(-1)[part.start : part.start + part.size]))

    def _local(self, name: str) -> torch.Tensor:
        if name not in self._fragments:
            return super()._local(name)
        return self._shaped(name, self._fragments[name].of(self._fragments[name].partition).detach())

    def _shaped(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """A row of numbers, unless it is all of a tensor."""
        return part if self.is_sharded else part.view(self._shape(name))

    def _gathered(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """All of a tensor of which each process has a row of numbers; all processes must ask for it."""
        spans = [spans[self._follows(name) or name] for spans in self._spans]
        longest = max(size for _, size in spans)
        mine = part.new_zeros(longest)
        mine[: len(part)] = part
        found = [torch.empty_like(mine).view(torch.uint8) for _ in spans]
        dist.all_gather(found, mine.view(torch.uint8))
        rows = [(start, row.view(part.dtype)[:size]) for (start, size), row in zip(spans, found, strict=True) if size]
        return torch.cat([row for _, row in sorted(rows, key=lambda row: row[0])]).view(self._shape(name))

    def _start_of(self, name: str) -> int | None:
        part = self._fragment(name)
        return part.start if part is not None else super()._start_of(name)

    # ---- what an engine does -----------------------------------------------------------------------------------------

    def _backward(self, loss: torch.Tensor) -> None:
        self._deepspeed.backward(loss)

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """Nothing yet: DeepSpeed keeps gradients to itself until its step."""
        return parameter.new_empty(0)

    def _commit(self, outputs: dict[str, Any], gradients: Tensors) -> None:
        commit = super()._commit
        with self._updating_by(lambda: commit(outputs, self._gradients())):
            self._deepspeed.step()
        if not self._update_runner.has_run and bool(outputs[self.loss].isfinite()):
            raise TrainingError(
                "the norm of gradients is not finite, and ZeRO 3 leaves out such an update",
                hint="take stage 1 or 2, or look for extreme values in the data",
            )

    def gradients(self, batch: Arrays) -> dict[str, np.ndarray]:
        found: Tensors = {}
        self._differentiate(batch, self._contract.batch)
        with self._updating_by(lambda: found.update(self._gradients())):
            self._deepspeed.step()
        parameters = self._update_contract.gradients
        whole = {parameters[name]: tensor for name, tensor in found.items()}
        if self.is_sharded:
            whole = {x: self._gathered(x, part) if x in self._fragments else part for x, part in whole.items()}
        return {x: self._framework.owned(tensor) for x, tensor in whole.items()}

    @contextlib.contextmanager
    def _updating_by(self, update: Callable[[], None]) -> Iterator[None]:
        """Within it, a step of DeepSpeed calls that when gradients are where they belong."""
        self._update_runner.prepare(update)
        try:
            yield
        finally:
            self._update_runner.prepare(None)

    def _gradients(self) -> Tensors:
        return {name: self._gradient_by(x) for name, x in self._update_contract.gradients.items()}

    def _gradient_by(self, x: str) -> torch.Tensor:
        if x not in self._forward.places:
            return torch.zeros_like(self._local(x))
        if x not in self._fragments:
            return super()._gradient(self._forward.parameter(x))
        part = self._fragments[x]
        return self._shaped(x, part.of(part.partition.grad))

    @torch.no_grad()
    def load_state(self, state: Arrays) -> None:
        super().load_state(state)
        for name in self._fragments.keys() & state.keys():  # and what DeepSpeed computes with
            parameter, whole = self._forward.parameter(name), self._framework.tensor(np.array(state[name]))
            if self._stage == 3:
                part = self._fragments[name]
                parameter.ds_tensor[: part.size].copy_(whole.reshape(-1)[part.start : part.start + part.size])
            if parameter.numel() == whole.numel():
                parameter.copy_(whole)

    def held_tensors(self) -> list[torch.Tensor]:
        computed = [self._forward.parameter(name) for name in self._fragments]
        return super().held_tensors() + [x.ds_tensor if self._stage == 3 else x.detach() for x in computed]

    def close(self) -> None:
        super().close()
        self._deepspeed.destroy()


class _UpdateRunner(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer to DeepSpeed, which runs the update of a training model."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        super().__init__(parameters, {"lr": 0.0})  # which is in the training model
        self.prepare(None)

    def prepare(self, update: Callable[[], None] | None) -> None:
        self._update = update
        if update is not None:
            self.has_run = False

    def step(self, closure: Any = None) -> None:
        if self._update is not None:
            self.has_run = True
            self._update()


def _import_deepspeed(device: torch.device, speaks: bool) -> Any:
    """DeepSpeed, with the processes that are there: this one alone, too. It speaks if it is asked to, and to stderr."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it looks for a GPU
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"`{error.name}` is not installed", hint="pip install deepspeed") from error
    logger = deepspeed.utils.logger
    logger.setLevel(logging.INFO if speaks else logging.ERROR)
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    if not dist.is_initialized():
        os.environ.setdefault("LOCAL_RANK", "0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(dist.destroy_process_group)
    return deepspeed
