"""The forward pass on PyTorch as a sequence of parts: repeated blocks, and the nodes before, between and after them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from onward.analysis.blocks import PartInterface, cut_into_parts, models_of_parts
from onward.engines.distributed import join_group
from onward.engines.framework_engine import interpreter
from onward.engines.torch import Torch
from onward.engines.torch.compilation import Recorded, Run
from onward.model import Model
from onward.model.core import is_gradient


@dataclasses.dataclass(frozen=True, eq=False)
class ExecutablePart:
    """A part of a graph. Equal parts share `execute`, and thus what is compiled."""

    interface: PartInterface
    execute: Run

    def run(self, values: Mapping[str, Any]) -> Sequence[Any]:
        return self.execute([values[name] for name in self.interface.reads])


def make_parts(model: Model, parameters: Collection[str], framework: Torch) -> list[ExecutablePart]:
    """Return the parts of a graph whose parameters are initializers. This changes the model."""
    models = models_of_parts(model, cut_into_parts(model, parameters), parameters)
    executed = {submodel: _executed(submodel, framework) for submodel in {submodel for _, submodel in models}}
    return [ExecutablePart(interface, executed[submodel]) for interface, submodel in models]


def _executed(model: Model, framework: Torch) -> Run:
    """Return a model as a function from inputs to outputs, both in order."""
    inputs, outputs = ([value.name or "" for value in values] for values in (model.graph.inputs, model.graph.outputs))
    differs = any(is_gradient(node) or "seed" in node.attributes for node in model.graph.all_nodes())
    execute = interpreter(model.copy(), framework)

    def run(values: Sequence[Any]) -> list[Any]:
        results = execute(dict(zip(inputs, values, strict=True)))
        return [results[name] for name in outputs]

    if differs or not framework.can_be_recorded:  # gradients and random generators cannot be replayed
        return run
    recorded = Recorded(run)

    def run_recorded(values: Sequence[Any]) -> Sequence[Any]:
        with framework.active():
            return recorded(values)

    return run_recorded


class ForwardModule(nn.Module):  # type: ignore[misc]
    """The forward pass of a training step including the loss, with a submodule for each part."""

    def __init__(
        self,
        parts: Sequence[ExecutablePart],
        tensors: Mapping[str, torch.Tensor],
        outputs: Sequence[str],
        *,
        recompute: bool = False,
    ):
        super().__init__()
        self._outputs = list(outputs)
        self.places: dict[str, tuple[nn.Module, str]] = {}
        """Name of a parameter -> its module, and its name there."""
        owned = {name for executable in parts for name in executable.interface.own}
        for name in (name for name in tensors if name not in owned):
            self._hold(self, name, tensors[name])
        self.parts = nn.ModuleList(_PartModule(p, recompute and p.interface.is_block) for p in parts)
        for module in self.parts:
            for name in module.part.interface.own:
                self._hold(module, name, tensors[name])

    def _hold(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        key = f"p{len(list(module.parameters(recurse=False)))}"
        module.register_parameter(key, nn.Parameter(tensor))
        self.places[name] = module, key

    def parameter(self, name: str) -> nn.Parameter:
        module, key = self.places[name]
        return getattr(module, key)

    def blocks(self) -> list[nn.Module]:
        return [module for module in self.parts if module.part.interface.is_block]

    def forward(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        values = {**inputs, **{name: getattr(m, key) for name, (m, key) in self.places.items() if m is self}}
        for module in self.parts:
            inputs_of_part = (values[name] for name in module.given)
            results = module(*(x.wait() if isinstance(x, SumUnderWay) else x for x in inputs_of_part))
            module.part.interface.hand_over(values, results)
        return {name: values[name] for name in self._outputs}


class _PartModule(nn.Module):  # type: ignore[misc]
    """A part with the parameters that only it reads."""

    def __init__(self, part: ExecutablePart, recomputes: bool):
        super().__init__()
        self.part = part
        self.given = [name for name in part.interface.reads if name not in part.interface.own]
        self._recomputes = recomputes

    def forward(self, *given: Any) -> Sequence[Any]:
        if self._recomputes and torch.is_grad_enabled():
            return checkpoint(self._compute, *given, use_reentrant=False, early_stop=False)
        return self._compute(*given)

    def _compute(self, *given: Any) -> Sequence[Any]:
        own = {name: getattr(self, f"p{i}") for i, name in enumerate(self.part.interface.own)}
        return self.part.run({**dict(zip(self.given, given, strict=True)), **own})


def run_parts(parts: Iterable[ExecutablePart], values: dict[str, Any], fetch: Any) -> dict[str, Any]:
    """Run parts without a module: `fetch` returns a parameter when a part needs it, and it is freed after the part."""
    for executable in parts:
        parameters = {name: fetch(name) for name in executable.interface.reads if name not in values}
        executable.interface.hand_over(values, executable.run(values | parameters))
    return values


# ---- collectives as operators of PyTorch -----------------------------------------------------------------------------


def gather_samples(own: dict[str, Any], group: dist.ProcessGroup | None, size: int) -> dict[str, Any]:
    """Return the samples of all processes of a group."""
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, own, group=group)
    return {
        name: np.concatenate([arrays[name] for arrays in gathered]) if np.ndim(array) else array
        for name, array in own.items()
    }


class SumUnderWay:
    """An asynchronous sum over all shares of a batch."""

    def __init__(self, x: torch.Tensor):
        self._copies = join_group().copies
        self._total = x.detach().clone(memory_format=torch.contiguous_format)
        self._work = dist.all_reduce(self._total, async_op=True)

    def wait(self) -> torch.Tensor:
        self._work.wait()
        return self._total if self._copies == 1 else self._total / self._copies


def derivative_of_common_sum() -> float:
    """Return the factor that turns averaged gradients of a global sum, equal on all processes, into the gradient."""
    group = join_group()
    return group.size / group.copies


@torch.library.custom_op("onward::sum_over_shares", mutates_args=(), schema="(Tensor x, bool is_common) -> Tensor")
def sum_over_shares(x: torch.Tensor, is_common: bool) -> torch.Tensor:
    """Sum over all shares, as an operator, so that it can be recorded."""
    return SumUnderWay(x).wait()


@sum_over_shares.register_fake
def _(x: torch.Tensor, is_common: bool) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[torch.Tensor, bool], output: torch.Tensor) -> None:
    ctx.is_common = inputs[1]


def _differentiate(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Sum the derivatives of all processes, unless they all have the same."""
    return dy * derivative_of_common_sum() if ctx.is_common else sum_over_shares(dy, False), None


sum_over_shares.register_autograd(_differentiate, setup_context=_remember)


class ParallelTorch(Torch):
    """PyTorch with gradients left on, and all-reduces."""

    def __init__(self, device: torch.device, mesh: DeviceMesh | None, **options: Any):
        super().__init__(str(device), **options)
        over = mesh.get_group(mesh.ndim - 1) if mesh is not None else None

        def sum_over_all(x: torch.Tensor, *, common: int = 0) -> torch.Tensor:
            return sum_over_shares(x, bool(common))

        def sum_over_shards(x: torch.Tensor) -> torch.Tensor:
            return funcol.wait_tensor(funcol.all_reduce(x, "sum", over))

        self.operators["onward.AllReduce"] = sum_over_all if mesh is None else sum_over_shards

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        is_on = torch.is_grad_enabled()
        with super().active(), torch.set_grad_enabled(is_on):
            yield
