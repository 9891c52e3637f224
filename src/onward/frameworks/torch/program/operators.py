"""Forward passes of live modules as idiomatic calls of PyTorch. Dynamic sizes are symbols."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.nn import functional as F

from onward.engines.framework import Function, NotOnHost
from onward.engines.framework_engine import interpreter
from onward.engines.shared.windows import paddings
from onward.engines.torch.types import TYPES
from onward.errors import Error, UnsupportedError, first_line
from onward.frameworks.program.calls import ProgramStep, Value, without_unused
from onward.frameworks.program.short_forms import slice_places
from onward.frameworks.program.sizes import array_of, on_host
from onward.frameworks.torch.module import LIVE, OnnxModule
from onward.frameworks.torch.module_engine import Live, torch_momentum
from onward.frameworks.torch.program import recurrent
from onward.frameworks.torch.program.recording import Recorder, is_always_zero
from onward.options import Variance

_SYMBOLS = torch.SymInt | torch.SymFloat | torch.SymBool


def is_open(array: Any) -> bool:
    """True if an array contains symbols."""
    return isinstance(array, np.ndarray) and array.dtype == object and any(isinstance(x, _SYMBOLS) for x in array.flat)


def _elementwise(function: Callable[..., Any]) -> Function:
    vectorized = np.frompyfunc(function, function.__code__.co_argcount, 1)
    return lambda *arrays: np.asarray(vectorized(*arrays), object)


def _converted(array: np.ndarray, floating: bool) -> np.ndarray:
    convert = torch.sym_float if floating else torch.sym_int
    return np.asarray(np.frompyfunc(convert, 1, 1)(array), object)


def _quotient(x: Any, y: Any) -> Any:
    return x / y if any(isinstance(operand, float | torch.SymFloat) for operand in (x, y)) else x // y


_ON_SYMBOLS: dict[str, Function] = {
    "Cast": lambda x, *, to: _converted(x, ir.DataType(to).is_floating_point()),
    "CastLike": lambda x, like: _converted(x, like.dtype.is_floating_point),
    "Div": _elementwise(_quotient),
    "Mod": _elementwise(lambda x, y: x % y),
    "Neg": _elementwise(lambda x: -x),
    "Equal": _elementwise(lambda x, y: bool(x == y)),
}
"""Operators on arrays that contain symbols."""


class Writing(Live):
    """Operators as idiomatic calls. Those that training switches read `self.training`."""

    def __init__(self, recorder: Recorder, statistics: Variance):
        super().__init__(torch.device("cpu"), statistics)
        self.recorder = recorder
        self.statistics = statistics
        own: dict[str, Function] = {
            "Shape": lambda x, *, start, end: array_of(list(x.shape)[start:end]),
            "Size": lambda x: array_of(math.prod(x.shape)),
            "Range": _range,
            "ConstantOfShape": _full,
            "Reshape": _reshape,
            "Flatten": _flatten,
            "Slice": functools.partial(_slice, self.operators["Slice"]),
            "Concat": lambda *inputs, axis: torch.cat(inputs, axis),
            "Expand": lambda x, shape: x.expand(torch.broadcast_shapes(x.shape, tuple(shape.tolist()))),
            "Tile": lambda x, repeats: x.repeat(repeats.tolist()),
            "Squeeze": lambda x, axes=None: x.squeeze() if axes is None else x.squeeze(tuple(np.ravel(axes).tolist())),
            "Unsqueeze": _unsqueeze,
            "Split": _split,
            "SplitToSequence": _split_to_sequence,
            "Gather": self._gather,
            "Pad": functools.partial(self._pad, self.operators["Pad"]),
            "MatMul": self._matmul,
            "Gemm": self._gemm,
            "onward.Linear": self._linear,
            "onward.InTraining": _refuse_modes,
            "Conv": self._conv,
            "Dropout": self._dropout,
            "BatchNormalization": self._batch_norm,
            **recurrent.rows(recorder),
        }
        rest = {name: function for name, function in self.operators.items() if name not in own}
        self.operators = type(self.operators)({**rest, **own})
        self.on_host = on_host(self.operators, self.place, _ON_SYMBOLS)

    def is_tracing(self) -> bool:
        return False  # so that each constant is created once

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with self.recorder.fake, self.recorder:
            yield

    def supports(self, dtype: np.dtype) -> bool:
        return dtype.kind == "O" or super().supports(dtype)  # sizes that are symbols

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        if not is_open(array):
            return self.recorder.constant(array)
        if array.ndim:
            return torch.stack([torch.scalar_tensor(x) for x in array.flat]).reshape(array.shape)
        return torch.scalar_tensor(array.item())

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        value = self.recorder.known.get(id(tensor))
        if value is None or value.array is None:
            raise NotOnHost
        return value.array

    # ---- operators ---------------------------------------------------------------------------------------------------

    def _transposed(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the source of a matrix that is a transpose."""
        value = self.recorder.known.get(id(tensor))
        step = value.step if value is not None else None
        if step is None or step.function != "torch.Tensor.permute" or tensor.ndim != 2:
            return None
        source: Value = step.arguments[0]
        return source.tensor

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        source = self._transposed(weight)
        return F.linear(x, weight.T if source is None else source, bias)

    def _matmul(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        source = self._transposed(y)
        return x @ y if source is None else F.linear(x, source)

    def _gemm(self, a, b, c=None, *, alpha, beta, transA, transB):  # type: ignore[no-untyped-def]
        a = a.T if transA else a
        if alpha == 1 and (c is None or (beta == 1 and c.ndim == 1)) and (transB or c is not None):
            return F.linear(a, b if transB else b.T, c)
        product = a @ (b.T if transB else b)
        product = product if alpha == 1 else alpha * product
        return product if c is None else product + (c if beta == 1 else beta * c)

    def _gather(self, x: torch.Tensor, indices: Any, *, axis: int) -> torch.Tensor:
        if isinstance(indices, np.ndarray) and not is_open(indices):
            return x.select(axis, indices.item())
        if x.ndim == 2 and axis in (0, -2) and x.is_floating_point():
            return F.embedding(indices if indices.dtype == torch.int32 else indices.long(), x)
        axis %= x.ndim
        flat = x.index_select(axis, indices.long().remainder(x.shape[axis]).flatten())
        return flat.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])

    def _pad(self, by_numbers: Function, x: Any, pads: Any, value: Any = None, axes: Any = None, *, mode: str) -> Any:
        if isinstance(value, torch.Tensor) and (constant := self.recorder.known[id(value)].array) is not None:
            value = constant
        along = range(x.ndim) if axes is None else [axis % x.ndim for axis in axes.tolist()]
        amounts = dict(zip(along, zip(*np.reshape(pads, (2, -1)).tolist(), strict=True), strict=True))
        outermost = min((axis for axis, pair in amounts.items() if any(pair)), default=x.ndim)
        flat = [amount for axis in range(x.ndim - 1, outermost - 1, -1) for amount in amounts.get(axis, (0, 0))]
        is_plain = value is None or isinstance(value, np.ndarray)
        if mode != "constant":  # which PyTorch has for one to three axes, after one or two others
            is_plain = x.ndim - outermost in (1, 2, 3) and outermost in (1, 2) and all(pad >= 0 for pad in flat)
        if not is_plain:
            return by_numbers(x, pads, value, axes, mode=mode)
        named: dict[str, Any] = {} if mode == "constant" else {"mode": _PAD_MODES[mode]}
        named |= {"value": value.item()} if mode == "constant" and value is not None and value.item() else {}
        with torch._C.DisableTorchFunction():  # `F.pad` itself fails on symbols
            padded = x.new_empty([size + sum(amounts.get(axis, (0, 0))) for axis, size in enumerate(x.shape)])
        return self.recorder.imagine("torch.nn.functional.pad", [x, tuple(flat)], named, padded, F.pad)

    def _conv(self, x, w, b=None, *, auto_pad, dilations, group, kernel_shape, pads, strides):  # type: ignore[no-untyped-def]
        rank = x.ndim - 2
        strides, dilations = strides or [1] * rank, dilations or [1] * rank
        amounts = paddings(auto_pad, pads, x.shape[2:], w.shape[2:], strides, dilations)
        before = [before for before, _ in amounts]
        if any(low != high for low, high in amounts):
            flat = [amount for pair in reversed(amounts) for amount in pair]
            x, before = F.pad(x, flat), [0] * rank
        b = None if b is not None and is_always_zero(self.recorder.value(b)) else b  # exporters write zeros for no bias
        function = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
        options = {"stride": (strides, 1), "padding": (before, 0), "dilation": (dilations, 1), "groups": (group, 1)}
        collapsed = {key: (collapse(value), default) for key, (value, default) in options.items()}
        return function(x, w, b, **{key: value for key, (value, default) in collapsed.items() if value != default})

    def _dropout(self, x, ratio=None, training_mode=None, *, seed, outputs):  # type: ignore[no-untyped-def]
        if outputs > 1 or seed is not None:
            raise UnsupportedError("a Dropout has its own seed, or returns its mask")
        p = 0.5 if ratio is None else float(ratio)
        if float(np.float32(p)) == p:
            p = float(str(np.float32(p)))  # 0.1, not 0.10000000149011612
        if training_mode is not None and training_mode:
            return F.dropout(x, p)
        return self.recorder.imagine("nn.Dropout", [x, p], {}, _like(x))

    def _batch_norm(self, x, scale, bias, mean, variance, *, epsilon, momentum, training_mode, outputs):  # type: ignore[no-untyped-def]
        if not training_mode:
            return F.batch_norm(x, mean, variance, scale, bias, eps=epsilon)
        arguments = [x, mean, variance, scale, bias]
        named = {"momentum": torch_momentum(momentum), "eps": epsilon}
        return self.recorder.imagine(f"nn.BatchNorm:{self.statistics}", arguments, named, _like(x))


_PAD_MODES = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def _like(x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return torch.empty_like(x)


def collapse(numbers: Any) -> Any:
    """Return a number in place of a list of equal ones, and other lists as tuples."""
    if not isinstance(numbers, list | tuple):
        return numbers
    return numbers[0] if len(set(numbers)) == 1 else tuple(numbers)


_DEVICE = torch.device("cpu")
"""Argument that is printed as the device of an input."""


def _range(start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> torch.Tensor:
    first, end, step = (x.item() for x in (start, limit, delta))
    if isinstance(first, int) and first == 0 and isinstance(step, int) and step == 1:
        return torch.arange(end, device=_DEVICE)
    return torch.arange(first, end, step, device=_DEVICE)


def _full(shape: np.ndarray, *, value: Any) -> torch.Tensor:
    number = np.zeros(1, np.float32) if value is None else value
    return torch.full(shape.tolist(), number.item(), dtype=TYPES[ir.DataType.from_numpy(number.dtype)], device=_DEVICE)


def _reshape(x: torch.Tensor, shape: np.ndarray, *, allowzero: int) -> torch.Tensor:
    sizes = shape.tolist()
    if not allowzero:
        sizes = [x.shape[i] if isinstance(size, int) and size == 0 else size for i, size in enumerate(sizes)]
    if len(sizes) == 2 and x.ndim > 2 and isinstance(sizes[1], int) and sizes[1] == math.prod(x.shape[1:]):
        return x.flatten(1)
    return x.reshape(sizes)


def _flatten(x: torch.Tensor, *, axis: int) -> torch.Tensor:
    if axis == 1 and x.ndim > 1:
        return x.flatten(1) if x.ndim > 2 else x
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _unsqueeze(x: torch.Tensor, axes: Any) -> torch.Tensor:
    rank = x.ndim + axes.size
    for axis in sorted(axis % rank for axis in np.ravel(axes).tolist()):
        x = x.unsqueeze(axis)
    return x


def _split(x: torch.Tensor, sizes: Any = None, *, axis: int, num_outputs: int | None, outputs: int) -> Any:
    size, chunk = x.shape[axis], -(-x.shape[axis] // outputs)
    equal = [min(chunk, max(0, size - i * chunk)) for i in range(outputs)]
    return x.split(equal if sizes is None else sizes.tolist(), axis)


def _split_to_sequence(x: torch.Tensor, sizes: Any = None, *, axis: int, keepdims: int) -> list[torch.Tensor]:
    if sizes is None:
        return [item if keepdims else item.squeeze(axis) for item in x.split(1, axis)]
    return list(x.split(sizes.tolist(), axis))


def _slice(by_numbers: Function, x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> torch.Tensor:
    """Return a Python slice, which takes symbols, except for negative steps."""
    bounds: list[Any] = [None if array is None else array.tolist() for array in (starts, ends, axes, steps)]
    slices = slice_places(x.shape, *bounds)
    if slices is None:
        return by_numbers(x, starts, ends, axes, steps)
    return x[tuple(slices)] if slices else x


@dataclasses.dataclass
class ForwardCalls:
    """Forward pass of a module as calls."""

    inputs: list[Value]
    outputs: dict[str, Value]
    steps: list[ProgramStep]
    sizes: dict[str, str]
    """Symbol -> name of the size in the model."""


def trace(module: OnnxModule, first_size: int) -> ForwardCalls:
    """Return the calls of a module. The first dynamic size is traced as `first_size`."""
    graph = module._graph
    recorder = Recorder()
    framework = Writing(recorder, graph.program.statistics)
    model = graph.model.copy()
    for node in model.graph.all_nodes():
        if node.name in graph.program.switched:  # the module reads `self.training`
            node.attributes.add(ir.AttrInt64("training_mode", 1))
    values = {value.name or "": value for value in model.graph.inputs}
    tensors = {}
    for name, tensor in module._state().items():
        stand_in = recorder.stand_in(tensor.detach(), [False] * tensor.ndim).requires_grad_(tensor.requires_grad)
        tensors[name] = recorder.add(Value(stand_in, path=module._paths[name]))
    sizes = _Sizes(first_size)
    inputs = [sizes.input(recorder, values[name]) for name in graph.inputs]
    tensors |= {value.name: recorder.add(value) for value in inputs}
    try:
        results = interpreter(model, framework)(tensors)
    except Error as error:
        raise UnsupportedError(f"the module cannot be written as a program: {first_line(error)}", hint=LIVE) from error
    outputs = {name: recorder.value(framework.place(result)) for name, result in results.items()}
    return ForwardCalls(inputs, outputs, without_unused(recorder.steps, list(outputs.values())), sizes.names)


class _Sizes:
    """Dynamic sizes: one number per name, and no number twice."""

    def __init__(self, first: int):
        self._first = first
        self._numbers: dict[Any, int] = {}
        self.names: dict[str, str] = {}
        """Symbol -> name."""

    def input(self, recorder: Recorder, value: ir.Value) -> Value:
        """Return a stand-in for an input."""
        if value.shape is None or value.dtype is None:
            raise UnsupportedError(f"the number of axes of `{value.name}` is unknown", hint="give it a shape")
        sizes = [
            size
            if isinstance(size, int)
            else self._numbers.setdefault(size.value or (value.name, i), self._first + 2 * len(self._numbers))
            for i, size in enumerate(value.shape)
        ]
        is_dynamic = [not isinstance(size, int) for size in value.shape]
        tensor = recorder.stand_in(torch.zeros(sizes, dtype=TYPES[value.dtype]), is_dynamic)
        for i, (size, symbol) in enumerate(zip(value.shape, tensor.shape, strict=True)):
            if isinstance(symbol, torch.SymInt) and not isinstance(size, int):
                self.names.setdefault(str(symbol.node.expr), str(size.value or f"{value.name}_{i}"))
        return Value(tensor, name=value.name or "")


def _refuse_modes(inference: torch.Tensor, training: torch.Tensor) -> torch.Tensor:
    raise UnsupportedError(
        "a layer computes something else in training, which a written module does not",
        hint="use the live module: `onward.to_torch(training)`",
    )
