"""Tensor parallelism on PyTorch: processes have the same samples and share matmuls.

The sharding of weights is that of JAX meshes (layout.py). Sharded parameters are DTensors, and operators that read them
compute on shards (see `Division`). Along the mesh axis `data`, processes have different samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from onward.engines.distributed import copies_of, refuse_fixed_batches
from onward.engines.distributed.layout import DATA, FSDP, MODEL, MeshLayout, Rules
from onward.engines.distributed.torch_forward import ForwardModule, ParallelTorch, gather_samples
from onward.engines.distributed.torch_parallel import Tensors, TorchParallel
from onward.engines.framework import Function, Operators
from onward.engines.torch import Torch
from onward.errors import UnsupportedError
from onward.lowering.rounds import Steps
from onward.lowering.step import LoweringOptions
from onward.model import Model


class TorchTensorParallel(TorchParallel):
    """A step of a training model whose matmuls are sharded."""

    def __init__(
        self, model: Model, step: Steps = None, *, mesh: str | None = None, shard: Rules | None = None, **options: Any
    ):
        self._axes, self._rules = mesh or MODEL, shard
        super().__init__(model, step, **options)
        refuse_fixed_batches(self.inputs)

    def _make_mesh(self, strategy: str) -> DeviceMesh:
        self._layout = MeshLayout(self._one.model, self._one.index, self._axes, self.group.size, self._rules)
        sizes = {DATA: 1, MODEL: 1} | self._layout.mesh
        if sizes.pop(FSDP, 1) > 1:
            raise UnsupportedError(
                "on PyTorch, a mesh has no axis `fsdp`", hint="use `data` instead, or only `--strategy fsdp`"
            )
        if math.prod(sizes.values()) != self.group.size:
            shown = ",".join(f"{axis}={size}" for axis, size in sizes.items())
            raise UnsupportedError(
                f"the mesh `{shown}` needs {math.prod(sizes.values())} processes, but there are {self.group.size}",
                hint="an axis without a size takes the remaining processes: `--mesh data=2,model`",
            )
        self._whole_mesh = init_device_mesh(self._device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self._division = Division(self._whole_mesh[MODEL])
        return self._whole_mesh[MODEL]

    def _forward_framework(self, **options: Any) -> Torch:
        return _Dividing(self._division, self._device, None, **options)

    def _step_options(self) -> LoweringOptions:
        data = self._whole_mesh[DATA]
        share = self._lowering_options.data_parallel._replace(rank=data.get_local_rank(), size=data.size())
        return self._lowering_options._replace(data_parallel=share)

    # ---- state -------------------------------------------------------------------------------------------------------

    def _axis(self, name: str) -> int | None:
        """Return the axis along which state is sharded."""
        spec = self._layout.spec(name, self._shape(name))
        return next((axis for axis, along in enumerate(spec) if MODEL in along), None)

    def _is_split(self, name: str) -> bool:
        return self._axis(name) is not None

    def _sharded_names(self) -> set[str]:
        gradients = {name for name, x in self._update_contract.gradients.items() if self._is_split(x)}
        return {*gradients, *(name for name in self._carried if self._is_split(name))}

    def _parameter(self, name: str) -> torch.Tensor:
        shard, axis = self._own(name, self._whole[name]), self._axis(name)
        return shard if axis is None else self._division.join(shard, axis)

    def _wrap(self, module: ForwardModule) -> nn.Module:
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
        """Return the samples of all processes that share matmuls with this one."""
        model = self._whole_mesh[MODEL]
        copies = copies_of(batch, self.group)
        self.group.copies = max(copies, model.size())
        own = self._fitting(batch, inputs)
        return own if copies > 1 else gather_samples(own, model.get_group(), model.size())

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


class _Dividing(ParallelTorch):
    """PyTorch with operators that compute on shards."""

    can_be_recorded = False

    def __init__(self, division: Division, *rest: Any, **options: Any):
        super().__init__(*rest, **options)
        self._division = division
        division.wrap(self.operators)

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        return super().array(self._division.whole(tensor))

    def typed(self, tensor: torch.Tensor, dtype: ir.DataType | None) -> torch.Tensor:
        """Return a value in a type, gathered: values between parts of the graph are not sharded."""
        return super().typed(self._division.whole(tensor), dtype)


def _average(tensors: Collection[torch.Tensor], mesh: DeviceMesh) -> None:
    """Replace tensors by their means over processes, with one all-reduce per type."""
    for dtype in {tensor.dtype for tensor in tensors}:
        same_type = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = _flatten_dense_tensors(same_type)
        dist.all_reduce(flat, group=mesh.get_group())
        for tensor, mean in zip(same_type, _unflatten_dense_tensors(flat / mesh.size(), same_type), strict=True):
            tensor.copy_(mean)


# ---- operators on shards ---------------------------------------------------------------------------------------------

# A value is a plain tensor, which is the same on all processes, or a DTensor that is sharded along one axis. Operators
# that do not touch that axis compute on shards. All others gather first, which is always correct. Terms of a sum, which
# a matmul with sharded rows gives, are reduced at once.

ELEMENTWISE = {
    "Abs", "Add", "And", "Cast", "Ceil", "Celu", "Clip", "Cos", "Div", "Elu", "Equal", "Erf", "Exp",
    "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu",
    "Less", "LessOrEqual", "Log", "Max", "Min", "Mish", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "Reciprocal", "Relu",
    "Round", "Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tanh",
    "ThresholdedRelu", "Where",
}  # fmt: skip
_BY_DTENSOR = ("Expand", "Flatten", "MatMul", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that DTensor computes on shards, or gathers by itself."""
_ALONG_AXIS = ("Concat", "LogSoftmax", "Softmax", "Split")
_OF_SHAPES = ("Shape", "Size")


class Division:
    """Operators that the processes along one mesh axis compute on shards."""

    def __init__(self, mesh: DeviceMesh):
        self._mesh = mesh
        self._size, self._rank = mesh.size(), mesh.get_local_rank()

    def part(self, array: np.ndarray, axis: int) -> np.ndarray:
        """Return this process's shard of an array."""
        return np.split(array, self._size, axis)[self._rank]

    def join(self, shard: torch.Tensor, axis: int) -> DTensor:
        """Return the tensor of which this process has a shard."""
        return DTensor.from_local(shard, self._mesh, [Shard(axis)], run_check=False)

    def whole(self, value: Any) -> Any:
        """Return a value as a plain tensor. Gathered tensors are cached for other readers, except parameters, since
        these change."""
        if isinstance(value, list | tuple):
            return type(value)(map(self.whole, value))
        if not isinstance(value, DTensor):
            return value
        gathered = getattr(value, "put_together", None)
        if gathered is None:
            gathered = value.redistribute(placements=[Replicate()]).to_local()
        if not value.is_leaf:
            value.put_together = gathered
        return gathered

    def wrap(self, operators: Operators) -> None:
        """Let all operators of a table take sharded values."""
        own: dict[str, Function] = {
            "Attention": self._attention,
            "CastLike": self._cast_like,
            "Gather": self._gather,
            "Gemm": functools.partial(_gemm, operators),
            "Slice": functools.partial(self._along_others, _sliced_axes),
            "onward.Linear": lambda _, x, weight, bias: operators["Add"](operators["MatMul"](x, weight), bias),
            **dict.fromkeys(_ALONG_AXIS, functools.partial(self._along_others, lambda *inputs, axis, **given: [axis])),
            **dict.fromkeys(_BY_DTENSOR, self._by_dtensor),
            **dict.fromkeys(ELEMENTWISE, self._elementwise),
        }
        for name, function in list(operators.items()):
            if name not in _OF_SHAPES:
                operators[name] = _unless_whole(function, own.get(name, self._on_wholes))

    # ---- operators, by the function that computes them on plain tensors

    def _on_wholes(self, function: Function, *inputs: Any, **given: Any) -> Any:
        return function(*map(self.whole, inputs), **given)

    def _by_dtensor(self, function: Function, *inputs: Any, **given: Any) -> Any:
        try:
            result = function(*map(self._spread, inputs), **given)
        except RuntimeError as error:  # raised before communication, on all processes alike
            if "Sharding propagation failed" not in str(error):
                raise
            return self._on_wholes(function, *inputs, **given)
        (placement,) = result.placements
        if type(placement) in (Replicate, Partial):
            return self.whole(result)
        is_even = type(placement) is Shard and result.shape[placement.dim] % self._size == 0
        return result if is_even else self._on_wholes(function, *inputs, **given)

    def _spread(self, value: Any) -> Any:
        """Return a plain tensor as a replicated DTensor; its gradient is the sum over processes."""
        if isinstance(value, DTensor) or not isinstance(value, torch.Tensor):
            return value
        return DTensor.from_local(value, self._mesh, [Replicate()], run_check=False)

    def _elementwise(self, function: Function, *inputs: Any, **given: Any) -> Any:
        """Compute on shards if all inputs are sharded along the same axis, counted from the last as in broadcasting."""
        ends = {x.ndim - x.placements[0].dim for x in inputs if isinstance(x, DTensor)}
        if len(ends) > 1:
            return self._on_wholes(function, *inputs, **given)
        (end,) = ends
        result = function(*(self._broadcast_part(x, end) for x in inputs), **given)
        return self.join(result, result.ndim - end)

    def _broadcast_part(self, value: Any, end: int) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_broadcast = value.ndim < end or value.shape[-end] == 1
        return self._shared(value) if is_broadcast else self._local_part(value, value.ndim - end)

    def _cast_like(self, function: Function, x: Any, other: Any, **given: Any) -> Any:
        """Cast to the type of `other`, which need not be gathered."""
        like = torch.empty((), dtype=other.dtype, device=other.device)
        return self._elementwise(function, x, like, **given) if isinstance(x, DTensor) else function(x, like, **given)

    def _along_others(self, axes_of: Callable[..., list[int]], function: Function, *inputs: Any, **given: Any) -> Any:
        """Compute on shards if they are sharded along other axes than those that an operator works on."""
        divided = [x for x in inputs if isinstance(x, DTensor)]
        worked_on = {axis % divided[0].ndim for axis in axes_of(*inputs, **given)}
        axes = {x.placements[0].dim for x in divided}
        if len(axes) > 1 or axes & worked_on:
            return self._on_wholes(function, *inputs, **given)
        return self._on_local(functools.partial(function, **given), axes.pop(), inputs)

    def _on_local(self, function: Function, axis: int, inputs: Sequence[Any]) -> Any:
        """Apply a function to shards along an axis; its results are shards along the same axis."""
        results = function(*(self._local_part(x, axis) if isinstance(x, torch.Tensor) else x for x in inputs))
        if isinstance(results, tuple):
            return tuple(self.join(result, axis) for result in results)
        return self.join(results, axis)

    def _local_part(self, value: torch.Tensor, axis: int) -> torch.Tensor:
        return self._spread(value).redistribute(placements=[Shard(axis)]).to_local()

    def _attention(self, function: Function, q: Any, k: Any, v: Any, mask: Any = None, **given: Any) -> Any:
        """Compute some of the heads on each process."""
        are_heads = all(isinstance(x, DTensor) and x.ndim == 4 and x.placements[0].dim == 1 for x in (q, k, v))
        if not are_heads or (mask is not None and mask.ndim > 2 and mask.shape[-3] > 1):
            return self._on_wholes(function, q, k, v, mask, **given)
        return self._on_local(lambda *heads: function(*heads, self._shared(mask), **given), 1, (q, k, v))

    def _shared(self, value: Any) -> Any:
        """Return the local copy of a replicated value; its gradients are summed over processes."""
        return None if value is None else self._spread(self.whole(value)).to_local(grad_placements=[Partial()])

    def _gather(self, function: Function, table: Any, indices: Any, *, axis: int) -> Any:
        """Gather from a table with sharded rows: a process gives zeros for the rows of others."""
        is_table = isinstance(table, DTensor) and torch.is_tensor(indices) and table.placements[0].dim == axis == 0
        if not is_table:
            return self._on_wholes(function, table, indices, axis=axis)
        rows, indices = table.to_local(), self.whole(indices).long()
        indices_here = torch.where(indices < 0, indices + len(table), indices) - self._rank * len(rows)
        is_here = (indices_here >= 0) & (indices_here < len(rows))
        rows_or_zeros = function(rows, torch.where(is_here, indices_here, 0), axis=0)
        rows_or_zeros = torch.where(is_here.reshape(*is_here.shape, *[1] * (table.ndim - 1)), rows_or_zeros, 0)
        return self.whole(DTensor.from_local(rows_or_zeros, self._mesh, [Partial()], run_check=False))


def _unless_whole(plain: Function, divided: Function) -> Function:
    @functools.wraps(plain)
    def call(*inputs: Any, **given: Any) -> Any:
        return divided(plain, *inputs, **given) if _any_divided(inputs) else plain(*inputs, **given)

    return call


def _any_divided(inputs: Sequence[Any]) -> bool:
    return any(isinstance(x, DTensor) or (isinstance(x, list | tuple) and _any_divided(x)) for x in inputs)


def _sliced_axes(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> list[int]:
    return list(range(len(starts))) if axes is None else [int(axis) for axis in axes]


def _gemm(operators: Operators, _: Function, a: Any, b: Any, c: Any = None, **given: Any) -> Any:
    """Compute a matmul, then a sum, so that terms of the matmul are reduced before."""
    turns = (a, given["transA"]), (b, given["transB"])
    product = operators["MatMul"](*(operators["Transpose"](x, perm=[1, 0]) if turn else x for x, turn in turns))
    product = product if given["alpha"] == 1 else operators["Mul"](product, given["alpha"])
    if c is None:
        return product
    return operators["Add"](product, c if given["beta"] == 1 else operators["Mul"](c, given["beta"]))
