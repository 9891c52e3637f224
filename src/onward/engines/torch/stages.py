"""A graph that PyTorch executes stage by stage: the blocks that it repeats, and what is before, between and after."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onward.engines.framework_engine import interpreter
from onward.engines.interpreter import Interpreter
from onward.engines.pieces import Piece, make_pieces
from onward.engines.torch import Torch
from onward.inspect.blocks import cut_into_parts
from onward.model import Model


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """A piece of a graph. Those that are equal share what executes them, and so what is compiled."""

    piece: Piece
    model: Model
    execute: Interpreter

    def run(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """What it makes."""
        given = zip(self.model.graph.inputs, self.piece.reads, strict=True)
        made = self.execute({value.name or "": values[name] for value, name in given})
        return tuple(made[value.name or ""] for value in self.model.graph.outputs)


def make_stages(model: Model, parameters: Collection[str], framework: Torch) -> list[Stage]:
    """The stages of a graph whose parameters are initializers. The model is changed: it must be the caller's own."""
    pieces = make_pieces(model, cut_into_parts(model, parameters), parameters)
    executed = {inner: interpreter(inner.copy(), framework) for inner in {inner for _, inner in pieces}}
    return [Stage(piece, inner, executed[inner]) for piece, inner in pieces]


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
            module.stage.piece.hand_over(values, module(*(values[name] for name in module.given)))
        return {name: values[name] for name in self._outputs}


class _StageModule(nn.Module):  # type: ignore[misc]
    """A stage with its own parameters."""

    def __init__(self, stage: Stage, recomputes: bool):
        super().__init__()
        self.stage = stage
        self.given = [name for name in stage.piece.reads if name not in stage.piece.own]
        self._recomputes = recomputes

    def forward(self, *given: Any) -> tuple[Any, ...]:
        if self._recomputes and torch.is_grad_enabled():
            return checkpoint(self._compute, *given, use_reentrant=False, early_stop=False)
        return self._compute(*given)

    def _compute(self, *given: Any) -> tuple[Any, ...]:
        own = {name: getattr(self, f"p{i}") for i, name in enumerate(self.stage.piece.own)}
        return self.stage.run({**dict(zip(self.given, given, strict=True)), **own})


def run_stages(stages: Iterable[Stage], values: dict[str, Any], fetch: Any) -> dict[str, Any]:
    """The same without a module: parameters are fetched when a stage needs them, and given back after it."""
    for stage in stages:
        parameters = {name: fetch(name) for name in stage.piece.reads if name not in values}
        stage.piece.hand_over(values, stage.run(values | parameters))
    return values
