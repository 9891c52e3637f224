"""Tensor parallelism on PyTorch: processes have the same samples, and divide products among them.

Which weights are divided along which axis says the layout that meshes of JAX have, too. Such parameters are DTensors,
and operators that read them compute on parts (see `Division`). Along the axis `data` of the mesh, processes have other
samples.
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
    """A step of a training model in one of several processes that divide its products."""

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

    def _step_options(self) -> LoweringOptions:
        data = self._whole_mesh[DATA]
        share = self._lowering_options.data_parallel._replace(rank=data.get_local_rank(), size=data.size())
        return self._lowering_options._replace(data_parallel=share)

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


class _Dividing(ParallelTorch):
    """PyTorch, with operators that compute on parts, which depends on the parts."""

    can_be_recorded = False

    def __init__(self, division: Division, *rest: Any, **options: Any):
        super().__init__(*rest, **options)
        self._division = division
        division.wrap(self.operators)

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        return super().array(self._division.whole(tensor))

    def typed(self, tensor: torch.Tensor, dtype: ir.DataType | None) -> torch.Tensor:
        """What a part of the graph hands on is whole."""
        return super().typed(self._division.whole(tensor), dtype)


def _average(tensors: Collection[torch.Tensor], mesh: DeviceMesh) -> None:
    """Replace tensors by their means over processes; those of a type travel as one."""
    for dtype in {tensor.dtype for tensor in tensors}:
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = _flatten_dense_tensors(alike)
        dist.all_reduce(flat, group=mesh.get_group())
        for tensor, mean in zip(alike, _unflatten_dense_tensors(flat / mesh.size(), alike), strict=True):
            tensor.copy_(mean)


# ---- operators on tensors of which each process has a shard ----------------------------------------------------------

# A value is a plain tensor, which all processes have and compute alike, or a DTensor that is divided along one axis.
# Operators that leave that axis alone are computed on the shards. For all else the shards are gathered first: always
# right. Terms of a sum, which a matmul of divided rows gives, are added up at once.

ELEMENTWISE = {
    "Abs", "Add", "And", "Cast", "Ceil", "Celu", "Clip", "Cos", "Div", "Elu", "Equal", "Erf", "Exp",
    "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu",
    "Less", "LessOrEqual", "Log", "Max", "Min", "Mish", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "Reciprocal", "Relu",
    "Round", "Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tanh",
    "ThresholdedRelu", "Where",
}  # fmt: skip
_BY_DTENSOR = ("Expand", "Flatten", "MatMul", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that DTensor knows to compute on parts, or puts them together by itself where it cannot."""
_ALONG_AXIS = ("Concat", "LogSoftmax", "Softmax", "Split")
_OF_SHAPES = ("Shape", "Size")


class Division:
    """What the processes along one axis of a mesh divide among them."""

    def __init__(self, mesh: DeviceMesh):
        self._mesh = mesh
        self._size, self._rank = mesh.size(), mesh.get_local_rank()

    def part(self, array: np.ndarray, axis: int) -> np.ndarray:
        """This process's part of an array, which can be divided evenly."""
        return np.split(array, self._size, axis)[self._rank]

    def join(self, part: torch.Tensor, axis: int) -> DTensor:
        """The tensor that this is a part of."""
        return DTensor.from_local(part, self._mesh, [Shard(axis)], run_check=False)

    def whole(self, value: Any) -> Any:
        """A value as a plain tensor. What is put together is kept, since several may read it, but for parameters, whose
        numbers change."""
        if isinstance(value, list | tuple):
            return type(value)(map(self.whole, value))
        if not isinstance(value, DTensor):
            return value
        found = getattr(value, "put_together", None)
        if found is None:
            found = value.redistribute(placements=[Replicate()]).to_local()
        if not value.is_leaf:
            value.put_together = found
        return found

    def wrap(self, operators: Operators) -> None:
        """Let all operators of a table take values that are divided."""
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
        except RuntimeError as error:  # before anything was sent, and in all processes
            if "Sharding propagation failed" not in str(error):
                raise
            return self._on_wholes(function, *inputs, **given)
        (placement,) = result.placements
        if type(placement) in (Replicate, Partial):
            return self.whole(result)
        is_even = type(placement) is Shard and result.shape[placement.dim] % self._size == 0
        return result if is_even else self._on_wholes(function, *inputs, **given)

    def _spread(self, value: Any) -> Any:
        """A plain tensor as a DTensor, which all have; its derivative is the sum of what each finds."""
        if isinstance(value, DTensor) or not isinstance(value, torch.Tensor):
            return value
        return DTensor.from_local(value, self._mesh, [Replicate()], run_check=False)

    def _elementwise(self, function: Function, *inputs: Any, **given: Any) -> Any:
        """On shards, if all are divided along the same axis, counted from the last one as broadcasting does."""
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
        """Of the other, it is only the type."""
        like = torch.empty((), dtype=other.dtype, device=other.device)
        return self._elementwise(function, x, like, **given) if isinstance(x, DTensor) else function(x, like, **given)

    def _along_others(self, axes_of: Callable[..., list[int]], function: Function, *inputs: Any, **given: Any) -> Any:
        """On shards, if they are divided along other axes than those that an operator works on."""
        divided = [x for x in inputs if isinstance(x, DTensor)]
        worked_on = {axis % divided[0].ndim for axis in axes_of(*inputs, **given)}
        axes = {x.placements[0].dim for x in divided}
        if len(axes) > 1 or axes & worked_on:
            return self._on_wholes(function, *inputs, **given)
        return self._on_local(functools.partial(function, **given), axes.pop(), inputs)

    def _on_local(self, function: Function, axis: int, inputs: Sequence[Any]) -> Any:
        """A function of the shards along an axis, which all of its results have, too."""
        results = function(*(self._local_part(x, axis) if isinstance(x, torch.Tensor) else x for x in inputs))
        if isinstance(results, tuple):
            return tuple(self.join(result, axis) for result in results)
        return self.join(results, axis)

    def _local_part(self, value: torch.Tensor, axis: int) -> torch.Tensor:
        return self._spread(value).redistribute(placements=[Shard(axis)]).to_local()

    def _attention(self, function: Function, q: Any, k: Any, v: Any, mask: Any = None, **given: Any) -> Any:
        """Each process has some of the heads."""
        are_heads = all(isinstance(x, DTensor) and x.ndim == 4 and x.placements[0].dim == 1 for x in (q, k, v))
        if not are_heads or (mask is not None and mask.ndim > 2 and mask.shape[-3] > 1):
            return self._on_wholes(function, q, k, v, mask, **given)
        return self._on_local(lambda *heads: function(*heads, self._shared(mask), **given), 1, (q, k, v))

    def _shared(self, value: Any) -> Any:
        """What all shards read, as each reads it: what they find of its derivative is added up."""
        return None if value is None else self._spread(self.whole(value)).to_local(grad_placements=[Partial()])

    def _gather(self, function: Function, table: Any, indices: Any, *, axis: int) -> Any:
        """Rows of a table, each of which one process has: the others give zeros."""
        is_table = isinstance(table, DTensor) and torch.is_tensor(indices) and table.placements[0].dim == axis == 0
        if not is_table:
            return self._on_wholes(function, table, indices, axis=axis)
        rows, indices = table.to_local(), self.whole(indices).long()
        places = torch.where(indices < 0, indices + len(table), indices) - self._rank * len(rows)
        is_here = (places >= 0) & (places < len(rows))
        found = function(rows, torch.where(is_here, places, 0), axis=0)
        found = torch.where(is_here.reshape(*is_here.shape, *[1] * (table.ndim - 1)), found, 0)
        return self.whole(DTensor.from_local(found, self._mesh, [Partial()], run_check=False))


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
    """A matmul and a sum, so that terms of the matmul are added up before."""
    turns = (a, given["transA"]), (b, given["transB"])
    product = operators["MatMul"](*(operators["Transpose"](x, perm=[1, 0]) if turn else x for x, turn in turns))
    product = product if given["alpha"] == 1 else operators["Mul"](product, given["alpha"])
    if c is None:
        return product
    return operators["Add"](product, c if given["beta"] == 1 else operators["Mul"](c, given["beta"]))
