"""A model as a live nn.Module: real parameters under their names, and a graph that PyTorch's operators execute."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from onward.convert.torch.graph import Graph
from onward.engines.torch.types import from_array, to_array
from onward.model import Model, Source, load
from onward.options import Variance


def to_module(
    source: Source,
    *,
    trainable: Collection[str] | None = None,
    statistics: Variance = "sample",
    inner: Sequence[str] = (),
) -> OnnxModule:
    """The inference graph of a model as a module.

    Without a list of what is trainable, all that looks like a parameter is. `statistics` is the running variance that
    BatchNorm keeps in training: that of the sample, as PyTorch has it, or of the population. `inner` are values that it
    returns beside its outputs.
    """
    return OnnxModule(Graph.of(load(source), trainable, statistics, inner))


class OnnxModule(nn.Module):  # type: ignore[misc]
    """A graph of ONNX operators, computed by PyTorch.

    It takes the inputs of the graph by position or name, and returns its output, or several by name. In training,
    Dropout drops and BatchNorm follows its batches; in inference both are as the model has them.
    """

    def __init__(self, graph: Graph):
        super().__init__()
        self._graph = graph
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in graph.state.items():
            made = from_array(tensor.numpy()).clone()
            tensors[name] = nn.Parameter(made, graph.learns[name]) if name in graph.learns else made
        for name, main in graph.names():
            self._hold(name, tensors[main], is_constant=main in graph.constants)
        paths = {id(x): path for path, x in (*self.named_parameters(), *self.named_buffers())}
        self._paths = {name: paths[id(tensor)] for name, tensor in tensors.items()}

    def _hold(self, name: str, tensor: torch.Tensor, *, is_constant: bool) -> None:
        owner, attribute = _place(self, name)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(attribute, tensor)
        else:
            owner.register_buffer(attribute, tensor, persistent=not is_constant)

    def _state(self) -> dict[str, torch.Tensor]:
        held = dict(self.named_parameters()) | dict(self.named_buffers())
        return {name: held[path] for name, path in self._paths.items()}

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in the model, which PyTorch may not allow."""
        held = dict(self.named_parameters())
        return {name: held[path] for name, path in self._paths.items() if path in held}

    def arrays(self) -> dict[str, np.ndarray]:
        """What a `state_dict` holds, by the names in the model."""
        return {n: to_array(x) for n, x in self._state().items() if n not in self._graph.constants}

    def forward(self, *inputs: Any, **named: Any) -> Any:
        given = dict(zip(self._graph.inputs, inputs, strict=False)) | named
        if given.keys() != set(self._graph.inputs) or len(given) != len(inputs) + len(named):
            raise TypeError(f"the module takes {', '.join(self._graph.inputs)}")
        state = self._state()
        if self.training:
            for counter in self._graph.counters:
                state[counter] += 1
        results = self._graph.execute(state, given, training=self.training)
        return results if len(results) > 1 else next(iter(results.values()))

    @property
    def output_names(self) -> list[str]:
        """What the tensors are called that it returns, a single one too."""
        return self._graph.outputs

    def named(self, inputs: Any) -> dict[str, Any]:
        """Inputs by name, where they are a tensor or a sequence of them."""
        if isinstance(inputs, Mapping):
            return dict(inputs)
        return dict(zip(self._graph.inputs, [inputs] if isinstance(inputs, torch.Tensor) else inputs, strict=True))

    def leave_out_dropout(self) -> None:
        """Drop nothing from now on, while all else is as in training."""
        self._graph = self._graph.without_dropout()

    def to_model(self) -> Model:
        """The model that this is, with the weights as they are now."""
        return self._graph.with_state(self._state())

    def extra_repr(self) -> str:
        return f"{', '.join(self._graph.inputs)} -> {', '.join(self._graph.outputs)}"


# ---- names -----------------------------------------------------------------------------------------------------------


class _Folder(nn.Module):  # type: ignore[misc]
    """A part of the names of parameters: what is before a dot."""


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Where a module keeps what has this name; parts that PyTorch cannot take get an underscore."""
    *folders, last = name.split(".")
    owner = root
    for part in folders:
        part = _free(owner, part, _Folder)
        if not hasattr(owner, part):
            owner.add_module(part, _Folder())
        owner = getattr(owner, part)
    return owner, _free(owner, last)


def _free(owner: nn.Module, part: str, kind: type | None = None) -> str:
    part = part or "_"
    while hasattr(owner, part) and not (kind is not None and isinstance(getattr(owner, part), kind)):
        part += "_"
    return part
