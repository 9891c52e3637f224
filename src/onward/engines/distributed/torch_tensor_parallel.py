"""Tensor parallelism on PyTorch: processes have the same samples, and divide products among them.

Which weights are divided along which axis says the layout that meshes of JAX have, too. Such parameters are DTensors,
and operators that read them compute on parts (see divided.py). Along the axis `data` of the mesh, processes have other
samples.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from onward.engines.distributed import copies_of
from onward.engines.distributed.layout import DATA, FSDP, MODEL, Layout, Rules
from onward.engines.torch import Torch
from onward.engines.torch.divided import Division
from onward.engines.torch.exchange import Together
from onward.engines.distributed.torch_parallel import Tensors, TorchParallel
from onward.engines.distributed.torch_forward import Forward
from onward.errors import UnsupportedError
from onward.lowering.rounds import Steps
from onward.lowering.step import Manner
from onward.model import Model


class TensorParallel(TorchParallel):
    """A step of a training model in one of several processes that divide its products."""

    def __init__(
        self, model: Model, step: Steps = None, *, mesh: str | None = None, shard: Rules | None = None, **options: Any
    ):
        self._axes, self._rules = mesh or MODEL, shard
        super().__init__(model, step, **options)
        refuse_fixed_batches(self.inputs)

    def _make_mesh(self, strategy: str) -> DeviceMesh:
        self._layout = Layout(self._one.model, self._one.index, self._axes, self.group.size, self._rules)
        sizes = {DATA: 1, MODEL: 1} | self._layout.mesh
        if sizes.pop(FSDP, 1) > 1:
            raise UnsupportedError(
                "on PyTorch, a mesh has no axis `fsdp`", hint="take `data` in its place, or `--strategy fsdp` alone"
            )
        if math.prod(sizes.values()) != self.group.size:
            said = ",".join(f"{axis}={size}" for axis, size in sizes.items())
            raise UnsupportedError(
                f"the mesh `{said}` is for {math.prod(sizes.values())} processes, and there are {self.group.size}",
                hint="an axis without a size takes those that are left, as in `data=2,model`",
            )
        self._whole_mesh = init_device_mesh(self._device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self._division = Division(self._whole_mesh[MODEL])
        return self._whole_mesh[MODEL]

    def _forward_framework(self, **options: Any) -> Torch:
        return _Dividing(self._division, self._device, None, **options)

    def _manner_of_steps(self) -> Manner:
        data = self._whole_mesh[DATA]
        share = self._manner.share._replace(rank=data.get_local_rank(), size=data.size())
        return self._manner._replace(share=share)

    # ---- what state is where -----------------------------------------------------------------------------------------

    def _axis(self, name: str) -> int | None:
        """The axis along which state is divided."""
        spec = self._layout.spec(name, self._shape(name))
        return next((axis for axis, along in enumerate(spec) if MODEL in along), None)

    def _is_split(self, name: str) -> bool:
        return self._axis(name) is not None

    def _sharded_names(self) -> set[str]:
        gradients = {name for name, x in self._update_contract.gradients.items() if self._is_split(x)}
        return {*gradients, *(name for name in self._carried if self._is_split(name))}

    def _parameter(self, name: str) -> torch.Tensor:
        part, axis = self._own(name, self._whole[name]), self._axis(name)
        return part if axis is None else self._division.join(part, axis)

    def _wrap(self, module: Forward) -> nn.Module:
        self._forward = module
        return module

    def _own(self, name: str, array: np.ndarray) -> torch.Tensor:
        axis = self._axis(name)
        return self._framework.tensor(np.array(array if axis is None else self._division.part(array, axis)))

    def _gathered(self, name: str, local: torch.Tensor) -> torch.Tensor:
        axis = self._axis(name)
        assert axis is not None
        return self._division.join(local, axis).full_tensor()

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _samples(self, batch: Any, inputs: Any) -> dict[str, Any]:
        """Those of all processes that divide products with this one."""
        model = self._whole_mesh[MODEL]
        copies = copies_of(batch, self.group)
        self.group.copies = max(copies, model.size())
        given = self._fitting(batch, inputs)
        return given if copies > 1 else gather_samples(given, model.get_group(), model.size())

    def _differentiate(self, batch: Any, inputs: Any) -> tuple[dict[str, Any], Tensors]:
        outputs, gradients = super()._differentiate(batch, inputs)
        data = self._whole_mesh[DATA]
        if data.size() > 1:
            _average(list(gradients.values()), data)
        return outputs, gradients

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        if isinstance(parameter, DTensor) and parameter.grad is not None:
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        return super()._gradient(parameter)


class _Dividing(Together):
    """PyTorch, with operators that compute on parts, which depends on the parts."""

    can_be_recorded = False

    def __init__(self, division: Division, *rest: Any, **options: Any):
        super().__init__(*rest, **options)
        self._division = division
        division.wrap(self.operators)

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        return super().array(self._division.whole(tensor))

    def typed(self, tensor: torch.Tensor, dtype: ir.DataType | None) -> torch.Tensor:
        """What a stage hands on is whole."""
        return super().typed(self._division.whole(tensor), dtype)


def refuse_fixed_batches(inputs: Mapping[str, ir.Value]) -> None:
    fixed = [name for name, value in inputs.items() if value.shape and isinstance(value.shape[0], int)]
    if fixed:
        raise UnsupportedError(
            f"`{fixed[0]}` takes batches of one size, of which processes cannot have parts",
            hint="export the model with a batch size that may vary, or train in one process",
        )


def gather_samples(own: dict[str, Any], group: dist.ProcessGroup | None, size: int) -> dict[str, Any]:
    """The samples that the processes of a group have, each of them its own."""
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, own, group=group)
    return {
        name: np.concatenate([part[name] for part in parts]) if np.ndim(array) else array for name, array in own.items()
    }


def _average(tensors: Collection[torch.Tensor], mesh: DeviceMesh) -> None:
    """Replace tensors by their means over processes; those of a type travel as one."""
    for dtype in {tensor.dtype for tensor in tensors}:
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = _flatten_dense_tensors(alike)
        dist.all_reduce(flat, group=mesh.get_group())
        for tensor, mean in zip(alike, _unflatten_dense_tensors(flat / mesh.size(), alike), strict=True):
            tensor.copy_(mean)
