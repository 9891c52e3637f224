"""The forward pass of a live module as a program."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir
import torch

from onward.engines.framework_engine import interpreter
from onward.engines.torch.types import TYPES
from onward.errors import Error, UnsupportedError, first_line
from onward.frameworks.program.calls import Step, Value, without_unused
from onward.frameworks.torch.graph import Graph
from onward.frameworks.torch.module import OnnxModule
from onward.frameworks.torch.source.framework import Writing
from onward.frameworks.torch.source.program import LIVE, Recorder
from onward.model import Model


@dataclasses.dataclass
class Program:
    """What a module computes from its inputs."""

    inputs: list[Value]
    outputs: dict[str, Value]
    steps: list[Step]
    sizes: dict[str, str]
    """Symbols in formulas, and what the model calls these sizes."""


def trace(module: OnnxModule, first_size: int) -> Program:
    """The program for some sizes; sizes that vary begin with this one."""
    graph = module._graph
    recorder = Recorder()
    framework = Writing(recorder, graph.program.statistics)
    model = _in_training(graph)
    values = {value.name or "": value for value in model.graph.inputs}
    given = {
        name: recorder.add(_hold_tensor(recorder, tensor, module._paths[name]))
        for name, tensor in module._state().items()
    }
    sizes = _Sizes(first_size)
    inputs = [sizes.input(recorder, values[name]) for name in graph.inputs]
    given |= {value.name: recorder.add(value) for value in inputs}
    try:
        results = interpreter(model, framework)(given)
    except Error as error:
        raise UnsupportedError(f"the module cannot be written as a program: {first_line(error)}", hint=LIVE) from error
    outputs = {name: recorder.value(framework.place(result)) for name, result in results.items()}
    return Program(inputs, outputs, without_unused(recorder.steps, list(outputs.values())), sizes.names(inputs))


def _in_training(graph: Graph) -> Model:
    """The model with the normalizations that follow their batches marked; a module asks whether it is in training."""
    model = graph.model.copy()
    for node in model.graph.all_nodes():
        if node.name in graph.program.switched:
            node.attributes.add(ir.AttrInt64("training_mode", 1))
    return model


def _hold_tensor(recorder: Recorder, tensor: torch.Tensor, path: str) -> Value:
    made = recorder.stand_in(tensor.detach(), [False] * tensor.ndim)
    return Value(made.requires_grad_(tensor.requires_grad), path=path)


class _Sizes:
    """Different numbers for sizes of different names: those of one name are the same."""

    def __init__(self, first: int):
        self._next = first
        self._numbers: dict[Any, int] = {}
        self._dimensions: list[list[str | None]] = []

    def input(self, recorder: Recorder, value: ir.Value) -> Value:
        if value.shape is None or value.dtype is None:
            raise UnsupportedError(f"nobody knows how many axes `{value.name}` has", hint="give it a shape")
        names = [
            None if isinstance(size, int) else str(size.value or f"{value.name}_{i}")
            for i, size in enumerate(value.shape)
        ]
        sizes = [
            size if isinstance(size, int) else self._number(size.value or (value.name, i))
            for i, size in enumerate(value.shape)
        ]
        self._dimensions.append(names)
        example = torch.zeros(sizes, dtype=TYPES[value.dtype])
        return Value(recorder.stand_in(example, [name is not None for name in names]), name=value.name or "")

    def _number(self, size: Any) -> int:
        """By its name, or where it is."""
        if size not in self._numbers:
            self._numbers[size] = self._next
            self._next += 2
        return self._numbers[size]

    def names(self, inputs: list[Value]) -> dict[str, str]:
        """Symbols, and the names that they stand for."""
        found: dict[str, str] = {}
        for value, names in zip(inputs, self._dimensions, strict=True):
            for size, name in zip(value.tensor.shape, names, strict=True):
                if name is not None and isinstance(size, torch.SymInt):
                    found.setdefault(str(size.node.expr), name)
        return found
