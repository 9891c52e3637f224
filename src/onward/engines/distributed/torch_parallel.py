"""Training on PyTorch in several processes: DDP or FSDP2 around the forward pass, then the training model's update.

The forward pass is a module (see torch_forward.py), which PyTorch wraps as any other: DDP averages gradients; FSDP
shards parameters, gradients and optimizer state and gathers one block at a time. The update is the graph that all
engines run, on whole tensors or on shards.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from onward.engines.distributed import copies_of, join_group
from onward.engines.distributed.layout import MODEL
from onward.engines.distributed.torch_forward import (
    ForwardModule,
    ParallelTorch,
    SumUnderWay,
    derivative_of_common_sum,
    make_parts,
    run_parts,
)
from onward.engines.engine import Arrays, Engine, StateShard
from onward.engines.framework_engine import FetchedResults, if_finite, interpreter
from onward.engines.step_errors import memory_of
from onward.engines.torch import Torch
from onward.engines.torch.layers import batch_normalization_at_once
from onward.errors import ArgumentError, UnsupportedError
from onward.lowering.contract import contract_of
from onward.lowering.data_parallel import (
    DataParallel,
    is_all_reduce,
    leave_last_sums,
    reads_statistics,
    split_off_first_sums,
    split_update,
)
from onward.lowering.rounds import Steps
from onward.lowering.step import LoweringOptions, lower_for_engine
from onward.model import Model
from onward.model.state import carried_state
from onward.model.storage import describe_tensor

Tensors = dict[str, torch.Tensor]
_LOSS = "loss of the step"
"""Name of the loss among the inputs of the update."""


class TorchParallel(Engine):
    """A step of a training model with `ddp`, `fsdp` or `hybrid`, and the base of the other strategies."""

    def __init__(
        self,
        model: Model,
        step: Steps = None,
        *,
        strategy: str,
        device: str = "cpu",
        sync_batch_norm: bool = True,
        compile: bool = True,
        recompute: bool | int | str | Sequence[str] | None = None,
        **options: Any,
    ):
        super().__init__(model, step)
        self.group = join_group(device)
        own = int(os.environ.get("LOCAL_RANK", "0")) if device == "cuda" else None
        self._device = torch.device(device, own) if own is not None else torch.device(device)
        self._mesh = self._make_mesh(strategy)
        self.is_sharded = self._mesh is not None
        options["threads"] = options.get("threads") or self.group.threads
        self._framework = self._forward_framework(**options)
        self._updating = ParallelTorch(self._device, self._mesh, **options)
        self._in_rows = self.is_sharded and strategy in ("fsdp", "hybrid")
        self._lowering_options = LoweringOptions(
            differentiate=False,
            data_parallel=DataParallel(self.group.rank, self.group.size, sync_batch_norm, gradients=False),
        )
        self._whole = {s.name: s.array for s in carried_state(self._one.model, self._one.index)}
        self._load_parts(compile, bool(recompute))
        del self._whole

    def _make_mesh(self, strategy: str) -> DeviceMesh | None:
        """Return the mesh that tensors are sharded over: None, all processes, or those of a machine."""
        group, device = self.group, self._device.type
        if strategy == "ddp" or group.size == 1:
            return None
        here = int(os.environ.get("LOCAL_WORLD_SIZE", group.size))
        if strategy == "fsdp" or here == group.size:
            return init_device_mesh(device, (group.size,))
        return init_device_mesh(device, (group.size // here, here), mesh_dim_names=("replicate", "shard"))

    def _forward_framework(self, **options: Any) -> Torch:
        return ParallelTorch(self._device, None, **options)

    def _load_parts(self, compile: bool, recompute: bool) -> None:
        update = lower_for_engine(self.model, self._steps, "apply")
        self._update_contract = contract_of(update)
        parameters = list(self._update_contract.gradients.values())
        forward = lower_for_engine(self.model, self._steps, "forward", self._step_options())
        self._contract = contract_of(forward)
        self.inputs = {v.name: v for v in forward.graph.inputs if v.name and v.name in self._contract.batch}
        self.loss = self._contract.loss or self.loss
        self._trained = trained = [name for name in parameters if name in self._contract.state]
        self._module = self._wrap(self._forward_module(forward, trained, recompute))
        self._state = {
            name: self._own(name, array) for name, array in self._whole.items() if name not in self._forward.places
        }
        self._evaluation: tuple[Any, Any] | None = None
        if self.is_sharded:
            split_update(update, self._sharded_names())
        self._update = self._update_step(update, compile)

    def _step_options(self) -> LoweringOptions:
        """Return the options for lowering the forward pass of a step."""
        return self._lowering_options

    def _update_step(self, update: Model, compile: bool) -> Callable[..., tuple[Tensors, dict[str, Any]]]:
        """Return a function (state, (), gradients and loss) -> (new state, metrics)."""
        contract, exchanges = self._update_contract, any(map(is_all_reduce, update.graph.all_nodes()))
        execute = interpreter(update, self._updating)

        def compute(state: Tensors, _: Tensors, inputs: Tensors) -> tuple[Tensors, dict[str, Any]]:
            results = execute({**state, **inputs})
            new = {name: self._updating.place(results[value]) for name, value in contract.update.items()}
            if not contract.skips_overflows:
                new = if_finite(self._updating, inputs[_LOSS], new, state)
            return new, {n: results[n] for n in contract.metrics}

        captures = self._device.type == "cuda" and exchanges  # CUDA graphs with collectives are untested
        return self._updating.compile(compute) if compile and not captures else compute

    def _forward_module(self, forward: Model, trained: Sequence[str], recompute: bool) -> ForwardModule:
        tensors = {name: self._parameter(name) for name in trained}
        first = split_off_first_sums(forward, self._contract.batch)
        self._first_sums = None if first is None else interpreter(first, self._framework)
        self._last_sums = leave_last_sums(forward)
        hold_as_initializers(forward, trained, self._carried)
        if not reads_statistics(forward, self.loss):
            self._framework.operators["BatchNormalization"] = batch_normalization_at_once
        parts = make_parts(forward, trained, self._framework)
        return ForwardModule(parts, tensors, [value.name or "" for value in forward.outputs], recompute=recompute)

    def _parameter(self, name: str) -> torch.Tensor:
        """Return a parameter for the forward pass, before DDP or FSDP wraps that."""
        return self._framework.tensor(np.array(self._whole[name]))

    def _wrap(self, module: ForwardModule) -> nn.Module:
        self._forward = module
        if self._mesh is None:
            return DistributedDataParallel(module, gradient_as_bucket_view=True) if self.group.size > 1 else module
        scalars = {x for x in module.parameters() if x.ndim == 0}
        if scalars:
            raise UnsupportedError(
                "FSDP cannot shard scalar parameters",
                hint='use `strategy="ddp"` (`--strategy ddp`), or freeze them',
            )
        for block in module.blocks():
            fully_shard(block, mesh=self._mesh)
        return fully_shard(module, mesh=self._mesh)

    # ---- state -------------------------------------------------------------------------------------------------------

    def _sharded_names(self) -> set[str]:
        """Return the sharded inputs of the update: parameters, gradients, and state of their shape."""
        gradients = {name for name, x in self._update_contract.gradients.items() if x in self._trained}
        return {*self._trained, *gradients, *(s.name for s in self.states() if self._is_split(s.name))}

    def _is_split(self, name: str) -> bool:
        return self.is_sharded and (name in self._trained or self._follows(name) is not None)

    def _follows(self, name: str) -> str | None:
        """Return the parameter of a state of the same shape."""
        owner = self._owners.get(name)
        if owner not in self._trained or name == owner:
            return None
        return owner if self._shape(name) == self._shape(owner) else None

    @functools.cached_property
    def _owners(self) -> dict[str, str | None]:
        return {state.name: state.parameter for state in self.states()}

    def _own(self, name: str, array: np.ndarray) -> torch.Tensor:
        """Return this process's shard of a state, or all of it if it is not sharded."""
        if not self._is_split(name):
            return self._framework.tensor(np.array(array))
        assert self._mesh is not None
        rows = _rows_of_shard(len(array), self._mesh)
        return self._framework.tensor(np.array(array[rows]))

    def _local(self, name: str) -> torch.Tensor:
        if name not in self._forward.places:
            return self._state[name]
        parameter = self._forward.parameter(name)
        return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()

    def _full(self, name: str) -> torch.Tensor:
        """Return the whole of a state. All processes must call this."""
        if not self._is_split(name):
            return self._local(name)
        return self._gathered(name, self._local(name))

    def _gathered(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Return the whole of a tensor that is sharded like the state of this name."""
        assert self._mesh is not None
        placements = [*([Replicate()] * (self._mesh.ndim - 1)), Shard(0)]
        whole = torch.empty(self._shape(name), device="meta")
        return DTensor.from_local(
            local, self._mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        ).full_tensor()

    def _shape(self, name: str) -> tuple[int, ...]:
        tensor = self._carried[name].const_value
        assert tensor is not None
        return tuple(tensor.shape.numpy())

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self, batch: Arrays | Sequence[Arrays]) -> Mapping[str, np.ndarray]:
        with memory_of("torch"):
            outputs, gradients = self._differentiate(batch, self.inputs)
            self._commit(outputs, gradients)
        metrics = [*self._contract.metrics, *self._update_contract.metrics]
        return FetchedResults(self._framework, {name: outputs[name] for name in metrics if name in outputs})

    def _differentiate(self, batch: Any, inputs: Any) -> tuple[dict[str, Any], Tensors]:
        samples = self._samples(batch, inputs)
        tensors = {name: self._framework.adopt(samples[name]) for name in self._contract.batch}
        state = {name: self._local(name) for name in self._contract.state if name not in self._forward.places}
        local = {} if self._first_sums is None else self._first_sums(tensors)
        first = {name: SumUnderWay(self._framework.place(x)) for name, x in local.items()}
        outputs = self._module({**state, **tensors, **first})
        last = {name: SumUnderWay(self._framework.place(outputs[name])) for name in self._last_sums}
        factor = derivative_of_common_sum() if self.loss in last else 1
        self._backward(outputs[self.loss].sum() * factor)
        outputs.update({name: total.wait() for name, total in last.items()})
        gradients = {
            name: self._gradient(self._forward.parameter(x))
            if x in self._forward.places
            else torch.zeros_like(self._local(x))
            for name, x in self._update_contract.gradients.items()
        }
        return {name: _detach(value) for name, value in outputs.items()}, gradients

    def _samples(self, batch: Any, inputs: Any) -> dict[str, Any]:
        """Return the arrays of a batch that this process computes with."""
        self.group.copies = copies_of(batch, self.group)
        return self._fitting(batch, inputs)

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    @torch.no_grad()
    def _commit(self, outputs: dict[str, Any], gradients: Tensors) -> None:
        """Write the new state over the old one, unless the loss is not finite."""
        loss = self._framework.place(outputs[self.loss])
        changed = {name: self._framework.place(outputs[new]) for name, new in self._contract.update.items()}
        if changed and not self._update_contract.skips_overflows:
            changed = if_finite(self._framework, loss, changed, {name: self._local(name) for name in changed})
        self._write(changed)
        state = {name: self._local(name) for name in {*self._update_contract.state, *self._update_contract.update}}
        new, shown = self._update(state, {}, {**gradients, _LOSS: loss})
        self._write(new)
        outputs.update(shown)

    def _write(self, new: Tensors) -> None:
        for name, tensor in new.items():
            self._local(name).copy_(tensor)

    def gradients(self, batch: Arrays) -> dict[str, np.ndarray]:
        _, gradients = self._differentiate(batch, self._contract.batch)
        parameters = self._update_contract.gradients
        whole = {
            x: self._gathered(x, gradients[name]) if self._is_split(x) else gradients[name]
            for name, x in parameters.items()
        }
        return {name: self._framework.owned(tensor) for name, tensor in whole.items()}

    @torch.no_grad()
    def evaluate(self, batch: Arrays) -> dict[str, np.ndarray]:
        if self._evaluation is None:
            lowered = lower_for_engine(self.model, self._steps, "evaluation", self._lowering_options)
            contract = contract_of(lowered)
            names = [name for name in contract.state if name in self._trained]
            hold_as_initializers(lowered, names, self._carried)
            self._evaluation = make_parts(lowered, names, self._framework), contract
        parts, contract = self._evaluation
        self.group.copies = copies_of(batch, self.group)
        samples = self._fitting(batch, contract.batch)
        values = {name: self._framework.adopt(samples[name]) for name in contract.batch}
        results = run_parts(parts, values, self._full)
        return {name: self._framework.owned(results[name]) for name in (*contract.metrics, *contract.outputs)}

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Model | None]:
        """Yield the updated model on rank 0, which gathers each sharded tensor when it is read."""
        if not self.is_sharded:
            yield self.updated()
        elif self.group.is_first:
            try:
                yield self._lazily_updated()
            finally:
                self.group.gather(None)  # ends the loop of the other processes
        else:
            while (name := self.group.gather(None)[0]) is not None:
                self._full(name)
            yield None

    def _lazily_updated(self) -> Model:
        def read(name: str) -> ir.Tensor:
            if self._is_split(name):
                self.group.gather(name)
            return ir.Tensor(self._framework.owned(self._full(name)), dtype=self._carried[name].dtype)

        def hold(name: str, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
            return ir.LazyTensor(functools.partial(read, name), tensor.dtype, **describe_tensor(tensor))

        return self.with_state(hold)

    def shards(self) -> dict[str, StateShard] | None:
        if not self._in_rows or any(value.dtype and value.dtype.bitwidth < 8 for value in self._carried.values()):
            return None
        starts = {name: start for name in self._carried if (start := self._start_of(name)) is not None}
        return {
            name: StateShard(start, self._framework.owned(self._local(name)), math.prod(self._shape(name)))
            for name, start in starts.items()
        }

    def _start_of(self, name: str) -> int | None:
        """Return the index of a shard's first element in the flat tensor; None if another process saves the shard."""
        if self._mesh is None or not self._is_split(name):
            return 0 if self.group.is_first else None
        if self._mesh.ndim > 1 and self._mesh.get_local_rank(0):
            return None
        rows, *columns = self._shape(name)
        return int(_rows_of_shard(rows, self._mesh).start * math.prod(columns))

    @torch.no_grad()
    def find_not_finite(self) -> str | None:
        learned = [state.name for state in self.states() if state.role in ("parameter", "statistics")]
        strange = next((name for name in learned if not self._local(name).isfinite().all()), None)
        return next(filter(None, self.group.gather(strange)), None)

    def state(self) -> dict[str, np.ndarray]:
        return {name: self._framework.owned(self._full(name)) for name in self._carried}

    @torch.no_grad()
    def load_state(self, state: Arrays) -> None:
        for name, value in self._fitting_state(state).items():
            self._local(name).copy_(self._own(name, np.asarray(value)))

    def close(self) -> None:
        self._state = {}


def _rows_of_shard(count: int, mesh: DeviceMesh) -> slice:
    """Return the rows of a tensor that FSDP gives to this process."""
    last = mesh.ndim - 1
    rows = -(-count // mesh.size(last))
    start = min(mesh.get_local_rank(last) * rows, count)
    return slice(start, min(start + rows, count))


def hold_as_initializers(model: Model, names: Sequence[str], carried: Mapping[str, ir.Value]) -> None:
    """Turn parameters from inputs of a lowered graph into initializers, by which its blocks are recognized."""
    graph = model.graph
    for value in [value for value in graph.inputs if value.name in names]:
        graph.inputs.remove(value)
        value.const_value = carried[value.name or ""].const_value
        graph.register_initializer(value)


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


# ---- strategies by name ----------------------------------------------------------------------------------------------


def start_together(model: Model, step: Steps = None, *, strategy: str | None = None, **options: Any) -> TorchParallel:
    """Start the engine of a strategy."""
    mesh, shard, micro_batches = (options.pop(name, None) for name in ("mesh", "shard", "micro_batches"))
    strategy = strategy or "tensor"
    if (mesh or shard) and strategy != "tensor":
        raise ArgumentError(
            f"strategy `{strategy}` takes no `mesh` and no `shard`",
            hint='use `strategy="tensor"` (`--strategy tensor`), or remove `mesh` and `shard`',
        )
    if strategy == "deepspeed":
        from onward.engines.distributed.torch_deepspeed import TorchDeepSpeed

        return TorchDeepSpeed(model, step, strategy=strategy, **options)
    if join_group(options.get("device", "cpu")).size == 1:
        return TorchParallel(model, step, strategy="ddp", **options)
    if strategy == "tensor":
        from onward.engines.distributed.torch_tensor_parallel import TorchTensorParallel

        return TorchTensorParallel(model, step, strategy=strategy, mesh=mesh or MODEL, shard=shard, **options)
    if strategy == "pipeline":
        from onward.engines.distributed.torch_pipeline import TorchPipeline

        return TorchPipeline(model, step, strategy=strategy, micro_batches=micro_batches, **options)
    return TorchParallel(model, step, strategy=strategy, **options)
