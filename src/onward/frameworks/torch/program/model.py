"""A live module as a class: its state in `__init__`, its computation in `forward`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from onward.build import Names
from onward.frameworks.program.calls import ProgramStep, Value, without_unused
from onward.frameworks.program.printing import LETTERS, Expression, FunctionWriter
from onward.frameworks.program.source_text import Identifiers, identifier, literal, number, quote
from onward.frameworks.torch import exact
from onward.frameworks.torch.arguments import defaults_of
from onward.frameworks.torch.module import OnnxModule
from onward.frameworks.torch.program.blocks import Block, fold_blocks
from onward.frameworks.torch.program.expressions import TorchPrinter
from onward.frameworks.torch.program.layers import F_, Structure, layer_of
from onward.frameworks.torch.program.operators import ForwardCalls, collapse
from onward.frameworks.torch.program.recording import TRAINING

_ROLES = {"torch.nn.functional.scaled_dot_product_attention": ("q", "k", "v", "mask")}
"""Usual names of arguments of functions."""
_FILE_NAMES = ("torch", "nn", "F", "math", "Tensor", "population_batch_norm", "block")
"""Names of the file that `forward` may read."""
_SHORT = 12
"""Number of elements up to which a constant is written into the program, not the state file."""
_OFF = {"ceil_mode": False, "return_indices": False}


def argument_names(program: ForwardCalls) -> list[str]:
    """Return the names of the arguments of `forward`."""
    names = Identifiers(_FILE_NAMES)
    return [names.like(value.name) for value in program.inputs]


def _forward_lines(program: ForwardCalls, access: Callable[[Value], str]) -> Iterator[str]:
    """Yield the body of `forward`. `access` returns the expression of a tensor of the module."""
    arguments = argument_names(program)
    names = Identifiers([*_FILE_NAMES, *arguments, *LETTERS])
    sizes = {symbol: names.like(name) for symbol, name in program.sizes.items()}
    used_sizes: set[str] = set()
    device = f"{arguments[0]}.device" if arguments else '"cpu"'
    writer = FunctionWriter(
        program.steps,
        list(program.outputs.values()),
        dict(zip(program.inputs, arguments, strict=True)),
        lambda name: TorchPrinter(name, sizes, device, used_sizes),
        lambda value: Expression(access(value)),
        taken=sizes.values(),
        roles={
            value: role
            for step in program.steps
            for value, role in zip(step.arguments, _ROLES.get(step.function, ()), strict=False)
            if isinstance(value, Value)
        },
    )
    body = writer.lines()
    results = {name: writer.name(value).text for name, value in program.outputs.items()}
    yield from _size_lines(program, arguments, {s: name for s, name in sizes.items() if s in used_sizes})
    yield from body
    pairs = ", ".join(f"{quote(name)}: {text}" for name, text in results.items())
    yield f"return {next(iter(results.values()))}" if len(results) == 1 else f"return {{{pairs}}}"


def _size_lines(program: ForwardCalls, arguments: Sequence[str], unread: dict[str, str]) -> Iterator[str]:
    """Yield lines that read sizes from the inputs."""
    for value, argument in zip(program.inputs, arguments, strict=True):
        symbols = [str(size) for size in value.tensor.shape]
        if len(set(symbols)) == len(symbols) > 1 and all(symbol in unread for symbol in symbols):
            yield f"{', '.join(unread.pop(symbol) for symbol in symbols)} = {argument}.shape"
        for axis, symbol in enumerate(symbols):
            if symbol in unread:
                yield f"{unread.pop(symbol)} = {argument}.shape[{axis}]"


@dataclasses.dataclass
class ModelSource:
    """Class of a module, and what it needs."""

    text: str
    constants: dict[str, torch.Tensor]
    """Buffers outside of the `state_dict` that are too large for the text."""
    helpers: list[Any]
    """Classes and functions whose source the file must contain."""


class ClassWriter:
    """Writer of a live module as a class."""

    def __init__(self, live: OnnxModule, program: ForwardCalls, name: str = "Model", outputs: Sequence[str] = ()):
        self._live = live
        self._program = program
        self._name = name
        self._outputs = outputs
        """Arguments that are entries of a first one, `outputs`: those of a loss."""
        self._structure = Structure(live)
        self._class_names = Identifiers([*_FILE_NAMES, name, "Model", "Loss", "LRScheduler"])
        self._names = Names({*dir(nn.Module()), *(path.partition(".")[0] for path in live.state_dict())})
        self._dropouts: dict[float, str] = {}
        self._buffers: dict[Value, str] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._literals: dict[str, str] = {}
        self._helpers: list[Any] = []
        self._layers: dict[ProgramStep, str] = {}
        """Calls of layers -> their paths."""

    def source(self) -> ModelSource:
        """Return the class. The calls of the program become calls of layers."""
        steps = [self._called(step) for step in self._program.steps]
        self._program.steps = without_unused(steps, list(self._program.outputs.values()))
        persistent = self._live.state_dict().keys()
        for path, buffer in self._live.named_buffers():
            if path not in persistent:
                self._add_constant(path, buffer.detach().cpu())
        self._program.steps, blocks = fold_blocks(self._program, self._structure, self._layers, self._literals)
        classes = [self._block_class(block) for block in blocks]
        forward = list(_forward_lines(self._program, self._access))
        body = [
            "super().__init__()",
            *self._structure.lines(self._literals),
            *(self._buffer_line(value, name) for value, name in self._buffers.items()),
            *self._dropout_lines(self._program.steps),
        ]
        names = dict(zip((value.name for value in self._program.inputs), argument_names(self._program), strict=True))
        entries = [f"{names.pop(name)} = outputs[{quote(name)}]" for name in self._outputs if name in names]
        outputs = ", outputs: dict[str, Tensor]" if entries else ""
        arguments = "".join(f", {name}: Tensor" for name in names.values())
        result = "Tensor" if len(self._program.outputs) == 1 else "dict[str, Tensor]"
        lines = [
            f"class {self._name}({self._structure.container('')}):",
            "    def __init__(self) -> None:",
            *(f"        {line}" for line in body),
            "",
            f"    def forward(self{outputs}{arguments}) -> {result}:",
            *(f"        {line}" for line in entries),
            *(f"        {line}" for line in forward),
        ]
        return ModelSource("\n\n\n".join([*classes, "\n".join(lines)]), self._constants, self._helpers)

    def _block_class(self, block: Block) -> str:
        """Return the class of blocks, and let the model create a list of them."""
        first = f"{block.path}.0"
        name = self._class_names.like(re.sub(r"[^a-zA-Z]", "", block.path.rpartition(".")[2].removesuffix("s").title()))
        self._structure.lists[block.path] = f"nn.ModuleList({name}() for _ in range({block.count}))"
        inside = self._structure.access(first)
        forward = _forward_lines(block.program, lambda value: self._access(value).replace(inside, "self", 1))
        body = ["super().__init__()", *self._structure.lines_of(first, self._literals)]
        lines = [
            f"class {name}(nn.Module):",
            "    def __init__(self) -> None:",
            *(f"        {line}" for line in [*body, *self._dropout_lines(block.program.steps)]),
            "",
            f"    def forward(self{''.join(f', {x}: Tensor' for x in argument_names(block.program))}) -> Tensor:",
            *(f"        {line}" for line in forward),
        ]
        return "\n".join(lines)

    def _dropout_lines(self, steps: Sequence[ProgramStep]) -> list[str]:
        called = {step.function for step in steps}
        names = {name: ratio for ratio, name in self._dropouts.items() if f"self.{name}" in called}
        return [f"self.{name} = nn.Dropout({number(ratio)})" for name, ratio in names.items()]

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _called(self, step: ProgramStep) -> ProgramStep:
        """Return the call as the class makes it, of a layer where possible."""
        if step.function == "nn.Dropout":
            x, ratio = step.arguments
            if ratio not in self._dropouts:
                self._dropouts[ratio] = self._names.fresh("dropout")
            return _replaced(step, f"self.{self._dropouts[ratio]}", [x])
        layer = layer_of(step)
        path = self._structure.claim(layer) if layer is not None else None
        if layer is not None and path is not None:
            if layer.expression.startswith(exact.PopulationBatchNorm.__name__):
                self._helpers.append(exact.PopulationBatchNorm)
            step.pattern = layer.pattern
            call = _replaced(step, self._structure.access(path), layer.inputs)
            self._layers[call] = path
            return call
        if step.function.startswith("nn.BatchNorm"):
            arguments = [*step.arguments, TRAINING, step.named["momentum"], step.named["eps"]]
            if step.function.endswith("sample"):
                return _replaced(step, f"{F_}batch_norm", arguments)
            self._helpers.append(exact.population_batch_norm)
            return _replaced(step, exact.population_batch_norm.__name__, arguments)
        _shorten_arguments(step)
        return step

    # ---- constants ---------------------------------------------------------------------------------------------------

    def _access(self, value: Value) -> str:
        """Return the expression of a parameter, a buffer or a constant in `forward`."""
        if value.path:
            return self._structure.access(value.path)
        assert value.array is not None
        if value.array.ndim == 0:
            return _literal(value.array)
        if value not in self._buffers:
            self._buffers[value] = self._names.fresh(identifier(value.name or "constant"))
        return f"self.{self._buffers[value]}"

    def _add_constant(self, path: str, tensor: torch.Tensor) -> None:
        """Write a constant into the text, or into the state file if it is long."""
        if tensor.numel() <= _SHORT:
            self._literals[path] = _literal(tensor.numpy())
        else:
            self._constants[path] = tensor

    def _buffer_line(self, constant: Value, name: str) -> str:
        tensor = torch.tensor(constant.array)
        self._add_constant(name, tensor)
        value = self._literals.get(name, f"torch.zeros({', '.join(map(str, tensor.shape))}, dtype={tensor.dtype})")
        return f"self.register_buffer({quote(name)}, {value}, persistent=False)"


def _replaced(step: ProgramStep, function: str, arguments: list[Any]) -> ProgramStep:
    call = ProgramStep(function, arguments, {}, step.results, step.is_tuple, pattern=step.pattern)
    for value in step.results:
        value.step = call
    return call


def _shorten_arguments(step: ProgramStep) -> None:
    """Leave out arguments that have their defaults, and write lists of equal numbers as one number."""
    if "_pool" in step.function:
        x, kernel, *rest = step.arguments
        named = dict(zip(("stride", "padding", "dilation"), rest, strict=False)) | step.named
        defaults = {"padding": 0, "dilation": 1, "count_include_pad": True, **_OFF, **defaults_of(step.call)}
        defaults["stride"] = collapse(kernel)
        step.arguments = [x, collapse(kernel)]
        settings = {key: collapse(value) for key, value in named.items()}
        step.named = {key: value for key, value in settings.items() if key not in defaults or value != defaults[key]}
    elif step.function in ("torch.Tensor.squeeze", "torch.Tensor.sum", "torch.Tensor.mean", "torch.amax", "torch.amin"):
        step.arguments = [x[0] if isinstance(x, list | tuple) and len(x) == 1 else x for x in step.arguments]
        dtype = step.results[0].tensor.dtype
        if step.named.get("dtype") == dtype == step.arguments[0].tensor.dtype and dtype.is_floating_point:
            del step.named["dtype"]


def _literal(array: np.ndarray) -> str:
    tensor = torch.tensor(array)
    # `torch.tensor` infers these types from numbers, and float32 from an empty list.
    is_inferred = tensor.dtype == torch.float32 or (array.size and tensor.dtype in (torch.int64, torch.bool))
    return f"torch.tensor({literal(array)}{'' if is_inferred else f', dtype={tensor.dtype}'})"
