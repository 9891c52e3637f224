"""A graph that PyTorch executes, apart from the tensors that it is given: a whole one, or a part of one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onward.agreement.steps import without_dropout
from onward.analysis.blocks import Part, PartInterface, models_of_parts
from onward.engines.framework_engine import interpreter
from onward.engines.interpreter import Interpreter
from onward.engines.torch.compilation import Recording, kinds_of
from onward.engines.torch.types import CODES
from onward.frameworks.torch.module_engine import Live
from onward.model import Model, load
from onward.options import Variance
from onward.transform.float_type import convert_floats


@dataclasses.dataclass(eq=False)
class Program:
    """What executes; copies of a module share it, since it holds no state, and so do blocks that are equal."""

    model: Model
    """All that modules hold is an input of it."""
    statistics: Variance
    switched: list[str]
    """Names of the normalizations that follow their batches."""
    held: dict[str, ir.DataType]
    """The types of those inputs that modules hold."""
    of_all_processes: bool = False
    """Whether normalizations follow the batches of all processes."""

    def __deepcopy__(self, memo: Any) -> Program:
        return self

    @functools.cached_property
    def inputs(self) -> list[str]:
        return [value.name or "" for value in self.model.graph.inputs]

    def run(self, tensors: Iterable[Any], *, training: bool) -> list[Any]:
        """The outputs in their order, from the inputs in theirs."""
        given = dict(zip(self.inputs, tensors, strict=True))
        device, dtype = where({name: given[name] for name in self.held}, self.held)
        results = self._interpreter(training, device, dtype)(given)
        return [results[value.name or ""] for value in self.model.graph.outputs]

    def run_compiled(self, tensors: Sequence[Any], options: Mapping[str, Any], *, training: bool) -> list[Any]:
        """The same by what `torch.compile` makes of it for tensors of these sizes, and for these arrays on the host."""
        key = training, repr(options), *kinds_of(tensors)
        if key not in self._compiled:
            compile = functools.partial(torch.compile, **options)
            self._compiled[key] = Recording(functools.partial(self.run, training=training), tensors, compile)
        return self._compiled[key](tensors)

    @functools.cached_property
    def _compiled(self) -> dict[Any, Recording]:
        return {}

    @functools.cached_property
    def _made(self) -> dict[Any, Interpreter]:
        return {}

    def _interpreter(self, training: bool, device: torch.device, dtype: ir.DataType | None) -> Interpreter:
        key = training, device, dtype
        if key not in self._made:
            model = self.model.copy()
            if training:
                _train(model, self.switched)
            if dtype is not None:
                model = convert_floats(model, dtype)
            live = Live(device, self.statistics, of_all_processes=self.of_all_processes)
            self._made[key] = interpreter(model, live)
        return self._made[key]

    def part(self, model: Model) -> Program:
        """The program of a part of the graph."""
        held = {name: self.held[name] for value in model.graph.inputs if (name := value.name or "") in self.held}
        return dataclasses.replace(self, model=model, held=held)

    def without_dropout(self) -> Program:
        return dataclasses.replace(self, model=without_dropout(self.model))

    def normalizing_together(self, together: bool) -> Program:
        return dataclasses.replace(self, of_all_processes=together)

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in vars(self).items() if key not in ("_made", "_compiled", "inputs")}
        return {**kept, "model": self.model.to_proto().SerializeToString()}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        vars(self).update({**kept, "model": load(kept["model"])})


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A piece of a graph, which a program computes that it shares with those that are equal."""

    piece: PartInterface
    program: Program
    own: list[str]
    """What a block holds."""

    @property
    def given(self) -> list[str]:
        """What it is handed."""
        return [name for name in self.piece.reads if name not in self.own]


def make_segments(whole: Program, parts: Iterable[Part], tied: Collection[str]) -> list[Segment]:
    """The parts of the graph of a program. What has several names is held by the whole."""
    pieces = models_of_parts(whole.model, parts, whole.held)
    programs = {model: whole.part(model) for model in {model for _, model in pieces}}
    return [
        Segment(piece, programs[model], [name for name in piece.own if piece.is_block and name not in tied])
        for piece, model in pieces
    ]


def where(
    state: Mapping[str, torch.Tensor], declared: Mapping[str, ir.DataType]
) -> tuple[torch.device, ir.DataType | None]:
    """Where tensors are now, and the type that they were converted to, if they were."""
    floats = (name for name, tensor in state.items() if tensor.is_floating_point())
    name = next(floats, None)
    if name is None:
        return torch.device("cpu"), None
    dtype = CODES[state[name].dtype]
    return state[name].device, None if dtype == declared[name] else dtype


def _train(model: Model, switched: Collection[str]) -> None:
    """Switch what computes something else in training, in place."""
    on = ir.Value(name=model.names().fresh("training"), const_value=ir.Tensor(np.array(True)))
    model.graph.register_initializer(on)
    for node in model.graph.all_nodes():
        if node.op_type == "Dropout" and node.domain == "":
            node.resize_inputs(3)
            node.replace_input_with(2, on)
        elif node.name in switched:
            node.attributes.add(ir.AttrInt64("training_mode", 1))
