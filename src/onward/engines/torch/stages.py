"""A graph that PyTorch executes stage by stage: the blocks that it repeats, and what is before, between and after."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onward.engines.framework_engine import interpreter
from onward.engines.interpreter import Interpreter
from onward.engines.torch import Torch
from onward.inspect.blocks import Part, cut_into_parts
from onward.model import Model


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """A part of a graph. Those that are equal share what executes them, and so what is compiled."""

    execute: Interpreter
    formal: list[str]
    """What the graph of `execute` calls its inputs,"""
    reads: list[str]
    """and what they are here,"""
    results: list[str]
    """the same for outputs"""
    makes: list[str]
    own: list[str]
    """Parameters that no other stage reads."""
    is_block: bool
    last: list[str] = dataclasses.field(default_factory=list)
    """What nothing reads after it."""

    def run(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """What it makes."""
        made = self.execute({formal: values[name] for formal, name in zip(self.formal, self.reads, strict=True)})
        return tuple(made[name] for name in self.results)


def make_stages(model: Model, parameters: Collection[str], framework: Torch) -> list[Stage]:
    """The stages of a graph whose parameters are initializers. The model is changed: it must be the caller's own."""
    parts = cut_into_parts(model, parameters)
    outputs = {value.name or "" for value in model.outputs}
    known: dict[int, Stage] = {}
    stages: list[Stage] = []
    for part in parts:
        stage = _stage(model, part, parameters, framework, known.get(part.kind) if part.kind is not None else None)
        if part.kind is not None:
            known.setdefault(part.kind, stage)
        stages.append(stage)
    needed = set(outputs)
    for stage in reversed(stages):
        stage.last.extend(name for name in dict.fromkeys((*stage.reads, *stage.makes)) if name not in needed)
        needed.update(stage.last)
    return stages


def _stage(model: Model, part: Part, parameters: Collection[str], framework: Torch, twin: Stage | None) -> Stage:
    constants = {value for value in (*part.initializers, *part.inputs) if value.is_initializer()}
    constants = {value for value in constants if value.name not in parameters}
    held = [value for value in (*part.inputs, *part.initializers) if value not in constants]
    makes = [value for value in part.outputs if value.name]
    reads, made = [value.name or "" for value in held], [value.name or "" for value in makes]
    own = [value.name or "" for value in part.initializers if value.name in parameters]
    is_block = part.kind is not None
    if twin is not None:
        return Stage(twin.execute, twin.formal, reads, twin.results, made, own, is_block)
    imports = dict(model.ir.opset_imports)
    view = ir.GraphView(held, makes, nodes=part.nodes, initializers=list(constants), opset_imports=imports)
    inner = Model(ir.Model(view.clone(), ir_version=model.ir.ir_version or 10))
    return Stage(interpreter(inner, framework), reads, reads, made, made, own, is_block)


class Forward(nn.Module):  # type: ignore[misc]
    """The forward pass of a training step, down to its loss: a module of modules, one for each stage."""

    def __init__(
        self,
        stages: Sequence[Stage],
        tensors: Mapping[str, torch.Tensor],
        outputs: Sequence[str],
        *,
        recompute: bool = False,
    ):
        super().__init__()
        self._makes = [stage.makes for stage in stages]
        self._last = [stage.last for stage in stages]
        self._outputs = list(outputs)
        self.places: dict[str, tuple[nn.Module, str]] = {}
        """Which module has which parameter, and under which name."""
        owned = {name for stage in stages for name in stage.own}
        for name in (name for name in tensors if name not in owned):
            self._hold(self, name, tensors[name])
        self.stages = nn.ModuleList(_StageModule(stage, recompute and stage.is_block) for stage in stages)
        for module, stage in zip(self.stages, stages, strict=True):
            for name in stage.own:
                self._hold(module, name, tensors[name])

    def _hold(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        key = f"p{len(list(module.parameters(recurse=False)))}"
        module.register_parameter(key, nn.Parameter(tensor))
        self.places[name] = module, key

    def parameter(self, name: str) -> nn.Parameter:
        module, key = self.places[name]
        return getattr(module, key)

    def blocks(self) -> list[nn.Module]:
        return [module for module in self.stages if module.stage.is_block]

    def forward(self, given: Mapping[str, Any]) -> dict[str, Any]:
        values = {**given, **{name: getattr(m, key) for name, (m, key) in self.places.items() if m is self}}
        for module, makes, last in zip(self.stages, self._makes, self._last, strict=True):
            handed = [values[name] for name in module.given]
            values.update(zip(makes, module(*handed), strict=True))
            for name in last:
                values.pop(name, None)
        return {name: values[name] for name in self._outputs}


class _StageModule(nn.Module):  # type: ignore[misc]
    """A stage with its own parameters."""

    def __init__(self, stage: Stage, recomputes: bool):
        super().__init__()
        self.stage = stage
        self.given = [name for name in stage.reads if name not in stage.own]
        self._recomputes = recomputes

    def forward(self, *given: Any) -> tuple[Any, ...]:
        if self._recomputes and torch.is_grad_enabled():
            return checkpoint(self._compute, *given, use_reentrant=False, early_stop=False)
        return self._compute(*given)

    def _compute(self, *given: Any) -> tuple[Any, ...]:
        own = {name: getattr(self, f"p{i}") for i, name in enumerate(self.stage.own)}
        return self.stage.run({**dict(zip(self.given, given, strict=True)), **own})


def run_stages(stages: Iterable[Stage], values: dict[str, Any], fetch: Any) -> dict[str, Any]:
    """The same without a module: parameters are fetched when a stage needs them, and given back after it."""
    for stage in stages:
        parameters = {name: fetch(name) for name in stage.reads if name not in values}
        values.update(zip(stage.makes, stage.run(values | parameters), strict=True))
        for name in stage.last:
            values.pop(name, None)
    return values
