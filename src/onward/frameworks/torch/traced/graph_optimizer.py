"""PyTorch optimizer that executes a graph, for updates that PyTorch has no class for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from onward.engines.framework_engine import interpreter
from onward.engines.interpreter import Interpreter
from onward.engines.torch import Torch
from onward.engines.torch.types import from_array, to_array
from onward.errors import UnsupportedError
from onward.frameworks.torch.exact import evaluate
from onward.model import load
from onward.recipe.optimizers import FunctionOptimizer
from onward.recipe.optimizers.graph_optimizer import COUNT, RATE, gradient_of
from onward.transform.inline import inline


@dataclasses.dataclass(eq=False)
class _Update:
    """Program without state, shared by copies of an optimizer."""

    function: FunctionOptimizer
    _interpreters: dict[torch.device, Interpreter] = dataclasses.field(default_factory=dict, init=False)

    def __deepcopy__(self, memo: Any) -> _Update:
        return self

    def __call__(self, inputs: Mapping[str, Tensor], device: torch.device) -> list[Tensor]:
        if device not in self._interpreters:
            self._interpreters[device] = interpreter(inline(self.function.update), Torch(str(device)))
        results = self._interpreters[device](inputs)
        return [results[value.name or ""] for value in self.function.update.graph.outputs]

    def __getstate__(self) -> dict[str, Any]:
        update = self.function.update.to_proto().SerializeToString()
        return {"function": dataclasses.replace(self.function, update=update)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        function = state["function"]
        vars(self).update(function=dataclasses.replace(function, update=load(function.update)), _interpreters={})


class GraphOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Update of a group of parameters by the operators of a training model.

    State of a parameter is in `state`, that of all parameters in the settings of the only group.
    """

    def __init__(self, function: FunctionOptimizer, parameters: Mapping[str, Parameter], step: int) -> None:
        self._update = _Update(function)
        self._names = [name for name in parameters if name in function.parameters]
        super().__init__([parameters[name] for name in self._names], {RATE: function.lr})
        (group,) = self.param_groups
        group |= {COUNT: step, "common": {}}
        for value in function.state:
            slot = value.name or ""
            array = function.initial.get(slot, np.zeros(()))
            assert value.dtype is not None and value.shape is not None
            full = np.broadcast_to(array.astype(value.dtype.numpy()), tuple(value.shape.numpy()))
            owner = function.owner_of(slot)
            if owner is None:
                group["common"][slot] = from_array(full)
            else:
                tensor = from_array(full).to(parameters[owner].device)
                self.state[parameters[owner]][slot.removeprefix(f"{owner}/")] = tensor

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        (group,) = self.param_groups
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        if len(trained) != len(self._names):
            raise UnsupportedError(
                f"`{self._update.function.name}` updates {len(self._names)} parameters at once, "
                f"but {len(trained)} have gradients",
                hint="let the loss depend on all of them",
            )
        group[COUNT] += 1
        self._replace(dict(zip(self._names, trained, strict=True)), group)
        return loss

    def _replace(self, parameters: Mapping[str, Parameter], group: dict[str, Any]) -> None:
        function = self._update.function
        device = next(iter(parameters.values())).device
        state = self._state_by_name(parameters, group)
        scalars = {RATE: float(group[RATE]), COUNT: int(group[COUNT])}
        values: dict[str, Tensor] = {**parameters, **state}
        values |= {gradient_of(name): parameter.grad for name, parameter in parameters.items()}
        values |= {n: torch.tensor(x, dtype=torch.float64 if n == RATE else torch.int64) for n, x in scalars.items()}
        inputs = {value.name or "": values[value.name or ""] for value in function.inputs}
        results = self._update(inputs, device)
        old = [*(parameters[name] for name in function.parameters), *(state[v.name or ""] for v in function.state)]
        for tensor, new in zip(old, results, strict=True):
            tensor.copy_(new)

    def _state_by_name(self, parameters: Mapping[str, Parameter], group: dict[str, Any]) -> dict[str, Tensor]:
        state = dict(group["common"])
        for name, parameter in parameters.items():
            state |= {f"{name}/{slot}": tensor for slot, tensor in self.state[parameter].items()}
        return state

    def function(self, names: Mapping[int, str], rate: float) -> FunctionOptimizer:
        """Return the function with a learning rate, the current state, and names by `id`."""
        (group,) = self.param_groups
        trained = [p for p in group["params"] if p in self.state or id(p) in names]
        parameters = dict(zip(self._names, trained, strict=True))
        state = {slot: to_array(tensor).copy() for slot, tensor in self._state_by_name(parameters, group).items()}
        function = dataclasses.replace(self._update.function, lr=rate, initial=state)
        return function.with_names({name: names[id(parameter)] for name, parameter in parameters.items()})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_update": self._update, "_names": self._names}
