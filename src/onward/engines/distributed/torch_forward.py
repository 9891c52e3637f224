"""A graph that PyTorch executes stage by stage: the blocks that it repeats, and what is before, between and after."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onward.analysis.blocks import cut_into_parts
from onward.engines.framework_engine import interpreter
from onward.engines.pieces import Piece, make_pieces
from onward.engines.torch import Torch
from onward.engines.torch.exchange import SumUnderWay
from onward.engines.torch.recording import Recorded, Run
from onward.model import Model
from onward.model.core import is_gradient


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """A piece of a graph. Those that are equal share what executes them, and so what is compiled."""

    piece: Piece
    execute: Run

    def run(self, values: Mapping[str, Any]) -> Sequence[Any]:
        """What it makes."""
        return self.execute([values[name] for name in self.piece.reads])


def make_stages(model: Model, parameters: Collection[str], framework: Torch) -> list[Stage]:
    """The stages of a graph whose parameters are initializers. The model is changed: it must be the caller's own."""
    pieces = make_pieces(model, cut_into_parts(model, parameters), parameters)
    executed = {inner: _executed(inner, framework) for inner in {inner for _, inner in pieces}}
    return [Stage(piece, executed[inner]) for piece, inner in pieces]


def _executed(model: Model, framework: Torch) -> Run:
    """A model as a function from its inputs to its outputs, in their order."""
    inputs, outputs = ([value.name or "" for value in values] for values in (model.graph.inputs, model.graph.outputs))
    differs = any(is_gradient(node) or "seed" in node.attributes for node in model.graph.all_nodes())
    execute = interpreter(model.copy(), framework)

    def run(values: Sequence[Any]) -> list[Any]:
        made = execute(dict(zip(inputs, values, strict=True)))
        return [made[name] for name in outputs]

    if differs or not framework.can_be_recorded:  # gradients within, and generators, are made anew each time
        return run
    recorded = Recorded(run)

    def run_recorded(values: Sequence[Any]) -> Sequence[Any]:
        with framework.active():
            return recorded(values)

    return run_recorded


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
        self._outputs = list(outputs)
        self.places: dict[str, tuple[nn.Module, str]] = {}
        """Which module has which parameter, and under which name."""
        owned = {name for stage in stages for name in stage.piece.own}
        for name in (name for name in tensors if name not in owned):
            self._hold(self, name, tensors[name])
        self.stages = nn.ModuleList(_StageModule(stage, recompute and stage.piece.is_block) for stage in stages)
        for module, stage in zip(self.stages, stages, strict=True):
            for name in stage.piece.own:
                self._hold(module, name, tensors[name])

    def _hold(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        key = f"p{len(list(module.parameters(recurse=False)))}"
        module.register_parameter(key, nn.Parameter(tensor))
        self.places[name] = module, key

    def parameter(self, name: str) -> nn.Parameter:
        module, key = self.places[name]
        return getattr(module, key)

    def blocks(self) -> list[nn.Module]:
        return [module for module in self.stages if module.stage.piece.is_block]

    def forward(self, given: Mapping[str, Any]) -> dict[str, Any]:
        values = {**given, **{name: getattr(m, key) for name, (m, key) in self.places.items() if m is self}}
        for module in self.stages:
            module.stage.piece.hand_over(values, module(*(_arrived(values[name]) for name in module.given)))
        return {name: values[name] for name in self._outputs}


def _arrived(value: Any) -> Any:
    return value.wait() if isinstance(value, SumUnderWay) else value


class _StageModule(nn.Module):  # type: ignore[misc]
    """A stage with its own parameters."""

    def __init__(self, stage: Stage, recomputes: bool):
        super().__init__()
        self.stage = stage
        self.given = [name for name in stage.piece.reads if name not in stage.piece.own]
        self._recomputes = recomputes

    def forward(self, *given: Any) -> Sequence[Any]:
        if self._recomputes and torch.is_grad_enabled():
            return checkpoint(self._compute, *given, use_reentrant=False, early_stop=False)
        return self._compute(*given)

    def _compute(self, *given: Any) -> Sequence[Any]:
        own = {name: getattr(self, f"p{i}") for i, name in enumerate(self.stage.piece.own)}
        return self.stage.run({**dict(zip(self.given, given, strict=True)), **own})


def run_stages(stages: Iterable[Stage], values: dict[str, Any], fetch: Any) -> dict[str, Any]:
    """The same without a module: parameters are fetched when a stage needs them, and given back after it."""
    for stage in stages:
        parameters = {name: fetch(name) for name in stage.piece.reads if name not in values}
        stage.piece.hand_over(values, stage.run(values | parameters))
    return values
