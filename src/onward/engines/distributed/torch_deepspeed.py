"""Training on DeepSpeed: ZeRO around the forward pass, and the training model's update on its flat partitions.

DeepSpeed averages gradients. From stage 1 on, each process has a partition of all elements in one row; stage 3 also
shards parameters, and gathers a block while it computes. The optimizer that DeepSpeed sees runs the update of the
training model on the fragments of tensors in the partition, which are flat.
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
    """A process's elements of a parameter: where they are in the flat parameter, and in the flat partition."""

    start: int
    size: int
    partition: torch.Tensor
    at: int
    """Index in the partition."""

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.at : self.at + self.size]


class TorchDeepSpeed(TorchParallel):
    """A step of a training model on DeepSpeed."""

    def __init__(
        self, model: Model, step: Steps = None, *, deepspeed_config: Any = None, device: str = "cpu", **options: Any
    ):
        config = read_deepspeed_config(deepspeed_config)
        if config is None:
            raise ArgumentError(
                "DeepSpeed needs a configuration",
                hint='`deepspeed_config={"zero_optimization": {"stage": 2}}`, or `--deepspeed-config ds.json`',
            )
        self._settings = settle(config, model, join_group(device).size)
        self._stage = self._settings["zero_optimization"].get("stage", 0)
        super().__init__(model, step, **{**options, "strategy": "fsdp" if self._stage else "ddp", "device": device})

    def _wrap(self, module: ForwardModule) -> nn.Module:
        self._forward = module
        other = next((name for name in module.places if module.parameter(name).dtype != torch.float32), None)
        if other is not None:
            raise UnsupportedError(
                f"DeepSpeed trains only float32 parameters, and `{other}` is not float32",
                hint='use FSDP: `strategy="fsdp"` (`--strategy fsdp`)',
            )
        deepspeed = _import_deepspeed(self._device, "steps_per_print" in self._settings)
        self._update_runner = _UpdateRunner(module.parameters())
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints
            self._deepspeed, *_ = deepspeed.initialize(
                model=module, optimizer=self._update_runner, config=self._settings, dist_init_required=False
            )
        self._fragments = {name: self._find_fragment(module.parameter(name)) for name in module.places if self._stage}
        spans = {name: (fragment.start, fragment.size) for name, fragment in self._fragments.items()}
        self._spans = self.group.gather(spans)
        return self._deepspeed

    def _find_fragment(self, parameter: nn.Parameter) -> _Fragment:
        """Return the fragment of a parameter, by DeepSpeed's own mapping."""
        zero = self._deepspeed.optimizer
        if self._stage < 3:
            mapping = parameter._hp_mapping
            partition = zero.single_partition_of_fp32_groups[0]
            if mapping is None:
                return _Fragment(0, 0, partition, 0)
            address, at = mapping.lp_fragment_address, mapping.hp_fragment_address.start
            return _Fragment(address.start, address.numel, partition, at)
        if len(zero.fp32_partitioned_groups_flat) > 1:
            raise UnsupportedError(
                "DeepSpeed must update all parameters at once, not in groups",
                hint="remove `sub_group_size` from its configuration",
            )
        _, at, padded = zero.grad_position[zero.get_param_id(parameter)]
        start = min(self.group.rank * padded, parameter.ds_numel)
        return _Fragment(start, min(padded, parameter.ds_numel - start), zero.fp32_partitioned_groups_flat[0], at)

    # ---- what state is where -----------------------------------------------------------------------------------------

    def _fragment(self, name: str) -> _Fragment | None:
        """Return the fragment of a parameter, or of state of its shape."""
        return self._fragments.get(self._follows(name) or name)

    def _own(self, name: str, array: np.ndarray) -> torch.Tensor:
        fragment = self._fragment(name)
        if not self.is_sharded or fragment is None:
            return self._framework.tensor(np.array(array))
        return self._framework.tensor(np.array(array.reshape(-1)[fragment.start : fragment.start + fragment.size]))

    def _local(self, name: str) -> torch.Tensor:
        if name not in self._fragments:
            return super()._local(name)
        return self._shaped(name, self._fragments[name].of(self._fragments[name].partition).detach())

    def _shaped(self, name: str, row: torch.Tensor) -> torch.Tensor:
        """Return a fragment: flat if state is sharded, else in the shape of the parameter."""
        return row if self.is_sharded else row.view(self._shape(name))

    def _gathered(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor from the flat fragments of all processes, which must all call this."""
        spans = [spans[self._follows(name) or name] for spans in self._spans]
        longest = max(size for _, size in spans)
        mine = local.new_zeros(longest)
        mine[: len(local)] = local
        buffers = [torch.empty_like(mine).view(torch.uint8) for _ in spans]
        dist.all_gather(buffers, mine.view(torch.uint8))
        rows = [
            (start, row.view(local.dtype)[:size]) for (start, size), row in zip(spans, buffers, strict=True) if size
        ]
        return torch.cat([row for _, row in sorted(rows, key=lambda row: row[0])]).view(self._shape(name))

    def _start_of(self, name: str) -> int | None:
        fragment = self._fragment(name)
        return fragment.start if fragment is not None else super()._start_of(name)

    # ---- what an engine does -----------------------------------------------------------------------------------------

    def _backward(self, loss: torch.Tensor) -> None:
        self._deepspeed.backward(loss)

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return an empty tensor: DeepSpeed has the gradients until its step."""
        return parameter.new_empty(0)

    def _commit(self, outputs: dict[str, Any], gradients: Tensors) -> None:
        commit = super()._commit
        with self._updating_by(lambda: commit(outputs, self._gradients())):
            self._deepspeed.step()
        if not self._update_runner.has_run and bool(outputs[self.loss].isfinite()):
            raise TrainingError(
                "ZeRO 3 skipped an update: the gradient norm is not finite",
                hint="use stage 1 or 2, or look for extreme values in the data",
            )

    def gradients(self, batch: Arrays) -> dict[str, np.ndarray]:
        rows: Tensors = {}
        self._differentiate(batch, self._contract.batch)
        with self._updating_by(lambda: rows.update(self._gradients())):
            self._deepspeed.step()
        parameters = self._update_contract.gradients
        whole = {parameters[name]: tensor for name, tensor in rows.items()}
        if self.is_sharded:
            whole = {x: self._gathered(x, row) if x in self._fragments else row for x, row in whole.items()}
        return {x: self._framework.owned(tensor) for x, tensor in whole.items()}

    @contextlib.contextmanager
    def _updating_by(self, update: Callable[[], None]) -> Iterator[None]:
        """Let DeepSpeed's step call `update`, once gradients are in the partitions."""
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
        fragment = self._fragments[x]
        return self._shaped(x, fragment.of(fragment.partition.grad))

    @torch.no_grad()
    def load_state(self, state: Arrays) -> None:
        super().load_state(state)
        for name in self._fragments.keys() & state.keys():  # also the copies that the forward pass reads
            parameter, whole = self._forward.parameter(name), self._framework.tensor(np.array(state[name]))
            if self._stage == 3:
                fragment = self._fragments[name]
                parameter.ds_tensor[: fragment.size].copy_(
                    whole.reshape(-1)[fragment.start : fragment.start + fragment.size]
                )
            if parameter.numel() == whole.numel():
                parameter.copy_(whole)

    def close(self) -> None:
        super().close()
        self._deepspeed.destroy()


class _UpdateRunner(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer for DeepSpeed that runs the update of a training model."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        super().__init__(parameters, {"lr": 0.0})  # ignored: the learning rate is in the training model
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
    """Import DeepSpeed, which also needs a process group for one process, and send its log to stderr."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed looks for a GPU
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
