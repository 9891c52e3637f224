"""Operators of PyTorch on tensors of which each process has a part.

A value is a plain tensor, which all processes have and compute alike, or a DTensor that is divided along one axis. What
leaves that axis alone is computed on the parts. For all else the parts are put together first: always right. Terms of a
sum, which a product of divided rows gives, are added up at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from onward.engines.framework import Function, Operators

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
        own: dict[str, Callable[[Function], Function]] = {
            "Attention": self._attention,
            "CastLike": self._cast_like,
            "Gather": self._gather,
            "Gemm": lambda _: _gemm(operators),
            "Slice": lambda f: self._along_others(f, lambda inputs, given: _sliced(*inputs)),
            "onward.Linear": lambda _: lambda x, weight, bias: operators["Add"](operators["MatMul"](x, weight), bias),
            **dict.fromkeys(_ALONG_AXIS, lambda f: self._along_others(f, lambda inputs, given: [given["axis"]])),
            **dict.fromkeys(_BY_DTENSOR, self._by_dtensor),
            **dict.fromkeys(ELEMENTWISE, self._elementwise),
        }
        for name, function in list(operators.items()):
            make = own.get(name, self._on_wholes)
            operators[name] = function if name in _OF_SHAPES else self._unless_whole(function, make(function))

    def _unless_whole(self, plain: Function, divided: Function) -> Function:
        @functools.wraps(plain)
        def call(*inputs: Any, **given: Any) -> Any:
            return (divided if _any_divided(inputs) else plain)(*inputs, **given)

        return call

    def _on_wholes(self, function: Function) -> Function:
        return lambda *inputs, **given: function(*map(self.whole, inputs), **given)

    def _by_dtensor(self, function: Function) -> Function:
        def call(*inputs: Any, **given: Any) -> Any:
            try:
                result = function(*map(self._spread, inputs), **given)
            except RuntimeError as error:  # before anything was sent, and in all processes
                if "Sharding propagation failed" not in str(error):
                    raise
                return self._on_wholes(function)(*inputs, **given)
            (placement,) = result.placements
            if type(placement) in (Replicate, Partial):
                return self.whole(result)
            is_even = type(placement) is Shard and result.shape[placement.dim] % self._size == 0
            return result if is_even else self._on_wholes(function)(*inputs, **given)

        return call

    def _spread(self, value: Any) -> Any:
        """A plain tensor as a DTensor, which all have; its derivative is the sum of what each finds."""
        if isinstance(value, DTensor) or not isinstance(value, torch.Tensor):
            return value
        return DTensor.from_local(value, self._mesh, [Replicate()], run_check=False)

    def _elementwise(self, function: Function) -> Function:
        """On parts, if all are divided along the same axis, counted from the last one as broadcasting does."""

        def call(*inputs: Any, **given: Any) -> Any:
            ends = {x.ndim - x.placements[0].dim for x in inputs if isinstance(x, DTensor)}
            if len(ends) > 1:
                return self._on_wholes(function)(*inputs, **given)
            (end,) = ends
            result = function(*(self._broadcast_part(x, end) for x in inputs), **given)
            return self.join(result, result.ndim - end)

        return call

    def _broadcast_part(self, value: Any, end: int) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_broadcast = value.ndim < end or value.shape[-end] == 1
        return self._shared(value) if is_broadcast else self._local_part(value, value.ndim - end)

    def _cast_like(self, function: Function) -> Function:
        """Of the other, it is only the type."""

        def call(x: Any, other: Any, **given: Any) -> Any:
            like = torch.empty((), dtype=other.dtype, device=other.device)
            convert = self._elementwise(function) if isinstance(x, DTensor) else function
            return convert(x, like, **given)

        return call

    def _along_others(self, function: Function, axes_of: Callable[[Any, Any], Sequence[int]]) -> Function:
        """On parts, if they are divided along other axes than those that an operator works on."""

        def call(*inputs: Any, **given: Any) -> Any:
            divided = [x for x in inputs if isinstance(x, DTensor)]
            worked_on = {axis % divided[0].ndim for axis in axes_of(inputs, given)}
            axes = {x.placements[0].dim for x in divided}
            if len(axes) > 1 or axes & worked_on:
                return self._on_wholes(function)(*inputs, **given)
            (axis,) = axes
            return self._on_local(functools.partial(function, **given), axis, inputs)

        return call

    def _on_local(self, function: Function, axis: int, inputs: Sequence[Any]) -> Any:
        """A function of the parts along an axis, which all of its results have, too."""
        parts = (self._local_part(x, axis) if isinstance(x, torch.Tensor) else x for x in inputs)
        results = function(*parts)
        if isinstance(results, tuple):
            return tuple(self.join(result, axis) for result in results)
        return self.join(results, axis)

    def _local_part(self, value: torch.Tensor, axis: int) -> torch.Tensor:
        return self._spread(value).redistribute(placements=[Shard(axis)]).to_local()

    def _attention(self, function: Function) -> Function:
        """Each process has some of the heads."""

        def call(q: Any, k: Any, v: Any, mask: Any = None, **given: Any) -> Any:
            are_heads = all(isinstance(x, DTensor) and x.ndim == 4 and x.placements[0].dim == 1 for x in (q, k, v))
            if not are_heads or (mask is not None and mask.ndim > 2 and mask.shape[-3] > 1):
                return self._on_wholes(function)(q, k, v, mask, **given)

            def attend(*parts: Any) -> Any:
                return function(*parts, self._shared(mask), **given)

            return self._on_local(attend, 1, (q, k, v))

        return call

    def _shared(self, value: Any) -> Any:
        """What all parts read, as each reads it: what they find of its derivative is added up."""
        return None if value is None else self._spread(self.whole(value)).to_local(grad_placements=[Partial()])

    def _gather(self, function: Function) -> Function:
        """Rows of a table, each of which one process has: the others give zeros."""

        def call(table: Any, indices: Any, *, axis: int) -> Any:
            is_table = isinstance(table, DTensor) and torch.is_tensor(indices) and table.placements[0].dim == axis == 0
            if not is_table:
                return self._on_wholes(function)(table, indices, axis=axis)
            rows, indices = table.to_local(), self.whole(indices).long()
            places = torch.where(indices < 0, indices + len(table), indices) - self._rank * len(rows)
            is_here = (places >= 0) & (places < len(rows))
            found = function(rows, torch.where(is_here, places, 0), axis=0)
            found = torch.where(is_here.reshape(*is_here.shape, *[1] * (table.ndim - 1)), found, 0)
            return self.whole(DTensor.from_local(found, self._mesh, [Partial()], run_check=False))

        return call


def _any_divided(inputs: Sequence[Any]) -> bool:
    return any(isinstance(x, DTensor) or (isinstance(x, list | tuple) and _any_divided(x)) for x in inputs)


def _sliced(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> list[int]:
    return list(range(len(starts))) if axes is None else [int(axis) for axis in axes]


def _gemm(operators: Operators) -> Function:
    """As a product and a sum, so that terms of the product are added up before."""

    def gemm(a: Any, b: Any, c: Any = None, *, alpha: float, beta: float, transA: int, transB: int) -> Any:
        turned = (operators["Transpose"](x, perm=[1, 0]) if turn else x for x, turn in ((a, transA), (b, transB)))
        product = operators["MatMul"](*turned)
        product = product if alpha == 1 else operators["Mul"](product, alpha)
        if c is None:
            return product
        return operators["Add"](product, c if beta == 1 else operators["Mul"](c, beta))

    return gemm
