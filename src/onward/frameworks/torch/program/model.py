"""A live module as a class: what it holds in `__init__`, and what it computes in `forward`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from onward.frameworks.program.calls import ProgramStep, Value, without_unused
from onward.frameworks.program.printing import LETTERS, Expression, FunctionWriter
from onward.frameworks.program.source_text import Identifiers, identifier, literal, number, quote
from onward.frameworks.torch import exact
from onward.frameworks.torch.forward import OnnxModule
from onward.frameworks.torch.program.expressions import TorchPrinter
from onward.frameworks.torch.program.layers import F_, Structure, layer_of
from onward.frameworks.torch.program.operators import ForwardCalls, one
from onward.frameworks.torch.program.recording import TRAINING, defaults_of

_ROLES = {"torch.nn.functional.scaled_dot_product_attention": ("q", "k", "v", "mask")}
"""What arguments of functions are usually called."""


def forward_lines(program: ForwardCalls, place: Callable[[Value], str]) -> Iterator[str]:
    """The body of `forward`. `place` says where the module holds a parameter, a buffer or a constant."""
    arguments = argument_names(program)
    names = Identifiers([*MENTIONED, *arguments, *LETTERS])
    sizes = {symbol: names.like(name) for symbol, name in program.sizes.items()}
    device = f"{arguments[0]}.device" if arguments else '"cpu"'
    printers: list[TorchPrinter] = []

    def printer(name: Callable[[Value], Expression]) -> TorchPrinter:
        printers.append(TorchPrinter(name, sizes, device))
        return printers[0]

    written = FunctionWriter(
        program.steps,
        list(program.outputs.values()),
        dict(zip(program.inputs, arguments, strict=True)),
        printer,
        lambda value: Expression(place(value)),
        taken=sizes.values(),
        roles={
            value: role
            for step in program.steps
            for value, role in zip(step.arguments, _ROLES.get(step.function, ()), strict=False)
            if isinstance(value, Value)
        },
    )
    body = written.lines()
    results = {name: written.name(value).text for name, value in program.outputs.items()}
    whole = ", ".join(f"{quote(name)}: {text}" for name, text in results.items())
    yield from _size_lines(program, {s: name for s, name in sizes.items() if s in printers[0].used_sizes})
    yield from body
    yield f"return {next(iter(results.values()))}" if len(results) == 1 else f"return {{{whole}}}"


def _size_lines(program: ForwardCalls, left: dict[str, str]) -> Iterator[str]:
    """Sizes that formulas use, read from the inputs."""
    for value, argument in zip(program.inputs, argument_names(program), strict=True):
        symbols = [str(size) for size in value.tensor.shape]
        if len(set(symbols)) == len(symbols) > 1 and all(symbol in left for symbol in symbols):
            yield f"{', '.join(left.pop(symbol) for symbol in symbols)} = {argument}.shape"
        for axis, symbol in enumerate(symbols):
            if symbol in left:
                yield f"{left.pop(symbol)} = {argument}.shape[{axis}]"


# ---- names -----------------------------------------------------------------------------------------------------------


def argument_names(program: ForwardCalls) -> list[str]:
    """What `forward` calls the inputs of the graph."""
    names = Identifiers(MENTIONED)
    return [names.like(value.name) for value in program.inputs]


MENTIONED = ("torch", "nn", "F", "math", "Tensor", "population_batch_norm")
"""What `forward` reads of what the file imports and defines."""


_SHORT = 12
"""Constants with more elements than this are not written out."""


@dataclasses.dataclass
class ModelSource:
    """The class, and what goes with it."""

    text: str
    constants: dict[str, torch.Tensor]
    """Buffers that no `state_dict` has, and that are too large to be written out."""
    helpers: list[Any]
    """Classes and functions whose source has to be there."""


def model_source(live: OnnxModule, program: ForwardCalls) -> ModelSource:
    """Return the class of a live module, whose forward pass makes these calls."""
    return _Class(live, program).source()


class _Class:
    def __init__(self, live: OnnxModule, program: ForwardCalls):
        self._live = live
        self._program = program
        self._structure = Structure(live)
        self._taken = set(dir(nn.Module())) | {path.partition(".")[0] for path in live.state_dict()}
        self._dropouts: dict[float, str] = {}
        self._buffers: dict[Value, str] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._written: dict[str, str] = {}
        self._helpers: list[Any] = []

    def source(self) -> ModelSource:
        steps = [self._called(step) for step in self._program.steps]
        self._program.steps = without_unused(steps, list(self._program.outputs.values()))
        forward = list(forward_lines(self._program, self._place))
        self._settle_constants()
        body = [
            "super().__init__()",
            *self._structure.lines(self._written),
            *self._buffer_lines(),
            *(f"self.{name} = nn.Dropout({number(share)})" for share, name in self._dropouts.items()),
        ]
        arguments = "".join(f", {name}: Tensor" for name in argument_names(self._program))
        result = "Tensor" if len(self._program.outputs) == 1 else "dict[str, Tensor]"
        lines = [
            f"class Model({self._structure.kind('')}):",
            "    def __init__(self) -> None:",
            *(f"        {line}" for line in body),
            "",
            f"    def forward(self{arguments}) -> {result}:",
            *(f"        {line}" for line in forward),
        ]
        return ModelSource("\n".join(lines), self._constants, self._helpers)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _called(self, step: ProgramStep) -> ProgramStep:
        """The call as the class makes it: of a layer, if it is one."""
        if step.function == "nn.Dropout":
            x, share = step.arguments
            if share not in self._dropouts:
                self._dropouts[share] = self._fresh("dropout")
            return _instead(step, f"self.{self._dropouts[share]}", [x])
        layer = layer_of(step)
        path = self._structure.claim(layer) if layer is not None else None
        if layer is not None and path is not None:
            if layer.made.startswith(exact.PopulationBatchNorm.__name__):
                self._helpers.append(exact.PopulationBatchNorm)
            step.pattern = layer.pattern
            return _instead(step, self._structure.access(path), layer.inputs)
        if step.function.startswith("nn.BatchNorm"):
            arguments = [*step.arguments, TRAINING, step.named["momentum"], step.named["eps"]]
            if step.function.endswith("sample"):
                return _instead(step, f"{F_}batch_norm", arguments)
            self._helpers.append(exact.population_batch_norm)
            return _instead(step, exact.population_batch_norm.__name__, arguments)
        return _tidy(step)

    def _fresh(self, name: str) -> str:
        plain, count = name, 1
        while name in self._taken:
            count += 1
            name = f"{plain}_{count}"
        self._taken.add(name)
        return name

    # ---- constants ---------------------------------------------------------------------------------------------------

    def _place(self, value: Value) -> str:
        """How `forward` reaches a parameter, a buffer or a constant."""
        if value.path:
            return self._structure.access(value.path)
        assert value.array is not None
        if value.array.ndim == 0:
            return _literal(value.array)
        if value not in self._buffers:
            self._buffers[value] = self._fresh(identifier(value.name or "constant"))
        return f"self.{self._buffers[value]}"

    def _settle_constants(self) -> None:
        """Which constants of the live module are written out, and which go into the file."""
        kept = self._live.state_dict().keys()
        for path, buffer in self._live.named_buffers():
            if path not in kept:
                self._settle(path, buffer.detach().cpu())

    def _settle(self, path: str, tensor: torch.Tensor) -> None:
        if tensor.numel() <= _SHORT:
            self._written[path] = _literal(tensor.numpy())
        else:
            self._constants[path] = tensor

    def _buffer_lines(self) -> list[str]:
        lines = []
        for value, name in self._buffers.items():
            assert value.array is not None
            tensor = torch.tensor(value.array)
            self._settle(name, tensor)
            made = self._written.get(name, f"torch.zeros({', '.join(map(str, tensor.shape))}, dtype={tensor.dtype})")
            lines.append(f"self.register_buffer({quote(name)}, {made}, persistent=False)")
        return lines


def _instead(step: ProgramStep, function: str, arguments: list[Any]) -> ProgramStep:
    made = ProgramStep(function, arguments, {}, step.results, step.is_tuple, pattern=step.pattern)
    for value in step.results:
        value.step = made
    return made


def _tidy(step: ProgramStep) -> ProgramStep:
    """The same call with fewer words."""
    if "_pool" in step.function:
        x, kernel, *rest = step.arguments
        names = ("stride", "padding", "dilation")
        named = {**dict(zip(names, map(_one, rest), strict=False)), **{k: _one(v) for k, v in step.named.items()}}
        usual = {
            "stride": _one(kernel),
            "padding": 0,
            "dilation": 1,
            "count_include_pad": True,
            **_OFF,
            **defaults_of(step.call),
        }
        usual["stride"] = _one(kernel)
        step.arguments = [x, _one(kernel)]
        step.named = {key: value for key, value in named.items() if key not in usual or value != usual[key]}
    elif step.function in ("torch.Tensor.squeeze", "torch.Tensor.sum", "torch.Tensor.mean", "torch.amax", "torch.amin"):
        arguments = step.arguments
        step.arguments = [x[0] if isinstance(x, list | tuple) and len(x) == 1 else x for x in arguments]
        dtype = step.results[0].tensor.dtype
        first = step.arguments[0]
        if step.named.get("dtype") == dtype == first.tensor.dtype and dtype.is_floating_point:
            del step.named["dtype"]
    return step


_OFF = {"ceil_mode": False, "return_indices": False}


def _one(numbers: Any) -> Any:
    return one(numbers) if isinstance(numbers, list | tuple) else numbers


def _literal(array: np.ndarray) -> str:
    tensor = torch.tensor(array)
    usual = {torch.float32, torch.int64, torch.bool}
    empty = array.size == 0 and tensor.dtype != torch.float32
    dtype = f", dtype={tensor.dtype}" if tensor.dtype not in usual or empty else ""
    return f"torch.tensor({literal(array)}{dtype})"
