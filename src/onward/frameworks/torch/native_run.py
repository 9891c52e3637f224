"""A run as PyTorch executes it, to compare a training model with."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onward.agreement.data import example_inputs
from onward.agreement.steps import Step, compare_steps, without_dropout
from onward.engines.engine import Arrays
from onward.engines.torch.types import from_array, to_array
from onward.errors import Error, UnsupportedError
from onward.frameworks.torch.arguments import Flat, tensors_of
from onward.frameworks.torch.clipping import Clip, clip_gradients, clipping_part
from onward.frameworks.torch.failures import fault_of_example
from onward.frameworks.torch.losses import make_loss
from onward.frameworks.torch.module import OnnxModule
from onward.frameworks.torch.objective import Summand, inner_values, summands
from onward.frameworks.torch.placeholder_parameters import hollow_copy
from onward.frameworks.torch.randomness import NothingDropped
from onward.frameworks.torch.targets import drawn_targets
from onward.inspect import describe
from onward.model import Model
from onward.model.core import values
from onward.recipe import objective
from onward.recipe.spec import Spec
from onward.recipe.trainable import gradient_edges
from onward.run_state.reading import LossTerm
from onward.run_state.state import ParameterGroup, RunState
from onward.run_state.training_models import to_training_model

_STEPS = 3
_RATE = 1e-3
"""Learning rate of a probe without an optimizer. Gradients are compared by themselves."""


@dataclasses.dataclass
class NativeRun:
    """What a training loop works with."""

    module: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    loss: Any
    summands: Sequence[Summand]
    """Of the loss, unless the module computes it."""
    clip: Mapping[str, Any] | None
    every: int
    """Updates between two steps of the scheduler."""


def probe_native(native: NativeRun, run: RunState, example_inputs: Any, steps: int = _STEPS) -> None:
    """Compare a run with its training model. The run makes the steps: it must be the caller's own.

    Targets are made up where there are none.
    """
    model = to_training_model(dataclasses.replace(run, model=without_dropout(run.model)))
    terms = describe(model).steps[0].loss.terms
    _turn_dropout_off(native.module)
    prober = _Prober(native, run.step, _flat(native.module, example_inputs), terms)
    with torch.random.fork_rng(), NothingDropped(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a copy of a scheduler does not know that its optimizer steps before it
        batches = [prober.batch(model)] * steps
        compare_steps(model, batches, prober.step, framework="PyTorch", engine="torch")


def probe_made(native: NativeRun, run: RunState) -> None:
    """Compare a run with what was made of it, whose module is a live one, with inputs that are made up.

    Where the module runs on none of them, nothing is compared.
    """
    for arrays in example_inputs(run.model):
        inputs = {name: from_array(array) for name, array in arrays.items()}
        try:
            with torch.no_grad():
                copy.deepcopy(native.module)(*inputs.values())
        except (Error, RuntimeError, IndexError):
            continue
        owners = {*run.parameters, *(f"group{i}" for i in range(len(run.groups)))}
        slots = {key: array for key, array in run.state.items() if key.rpartition("/")[0] in owners}
        probe_native(native, dataclasses.replace(run, state=slots), inputs)  # without what Dropout draws from
        return


def probe_module(module: nn.Module, example_inputs: Any, model: Model, loss: Any) -> None:
    """Compare a step of a captured model with one of its module, which is given the weights of the model.

    Raises:
        MismatchError: the loss, a gradient or a statistic differs.
    """
    module = hollow_copy(module)
    held = {name: tensor for name, tensor in tensors_of(module) if name in model.graph.initializers}  # tied ones once
    for name, tensor in held.items():
        tensor.data = from_array(model.array(name)).to(tensor.dtype)
    try:
        given = make_loss(loss, inner_values(loss, model))
    except UnsupportedError:  # of a graph that PyTorch has no module for: it is not what is compared
        loss = [{value.name: "mse"} for value in model.outputs if value.dtype and value.dtype.is_floating_point()]
        given = make_loss(loss)
    edges = gradient_edges(objective.predictions(model, objective.terms(loss)))
    trained = {name: x for name, x in held.items() if x.requires_grad and model.graph.initializers[name] in edges}
    if not trained:
        return
    group = ParameterGroup(Spec("sgd", {"lr": _RATE}), list(trained))
    run = RunState(model=model, loss=loss, groups=[group], statistics="sample")
    native = NativeRun(
        module, torch.optim.SGD(trained.values(), _RATE), None, given, summands(given, None), clip=None, every=1
    )
    probe_native(native, run, example_inputs, steps=1)


def _turn_dropout_off(module: nn.Module) -> None:
    """Also in layers that have dropout inside, such as attention, or stochastic depth, which hold nothing."""
    for layer in module.modules():
        if not layer.state_dict() or any("drop" in name for name in vars(layer)):
            layer.training = False
        elif isinstance(layer, OnnxModule):
            layer.leave_out_dropout()


class _OwnNames(nn.Module):  # type: ignore[misc]
    """A live module as `Flat` has others. Its names are those of a model, which Python may have no argument for."""

    def __init__(self, module: OnnxModule, inputs: Mapping[str, torch.Tensor]):
        super().__init__()
        self.module = module
        self.inputs = {name: inputs[name] for name in module._graph.inputs}

    def forward(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.module(*tensors)
        return made if isinstance(made, dict) else {self.module._graph.outputs[0]: made}


def _flat(module: nn.Module, example_inputs: Any) -> Flat | _OwnNames:
    is_ours = isinstance(module, OnnxModule) and isinstance(example_inputs, Mapping)
    return _OwnNames(module, example_inputs) if is_ours else Flat(module, example_inputs)


class _Prober:
    def __init__(self, native: NativeRun, made: int, forward: Flat | _OwnNames, terms: Sequence[LossTerm]):
        self._native = native
        self._made = made
        """Updates so far."""
        self._forward = forward
        self._forward.inputs = {name: _vary(tensor) for name, tensor in forward.inputs.items()}
        self._terms = terms
        self._clip = native.clip
        """What happens to gradients before a step, unless it happens to those of copies, in it."""
        part = clipping_part(native.optimizer)
        if part is not native.optimizer and native.clip is not None:
            part.register_step_pre_hook(Clip(native.clip))
            self._clip = None

    def batch(self, model: Model) -> Arrays:
        """The example, and its targets or random ones that go with it."""
        inputs = self._forward.inputs
        try:
            with torch.no_grad():
                outputs = self._outputs(copy.deepcopy(self._forward))
        except Error:
            raise
        except Exception as error:  # tracing checks less than PyTorch itself
            raise (fault_of_example(self._forward) or error) from error
        sizes = _sizes(model, {**inputs, **outputs})
        rng = np.random.default_rng(0)
        targets = {value.name or "": value for value in model.step().algorithm.inputs}
        made = {name: to_array(tensor) for name, tensor in inputs.items()}
        for term, summand in self._summands():
            if summand.targets:
                made |= {name: to_array(x) for name, x in zip(term.inputs, summand.targets, strict=True)}
            else:
                made |= drawn_targets(rng, term, outputs[term.output], targets, sizes)
        return made

    def _summands(self) -> Iterator[tuple[LossTerm, Summand]]:
        return zip(self._terms, self._native.summands, strict=True) if self._native.summands else iter(())

    def _outputs(self, forward: Flat | _OwnNames) -> dict[str, torch.Tensor]:
        """By their names in the model; one that was made from a model returns a single output without its name."""
        outputs = forward(*forward.inputs.values())
        made = isinstance(forward.module, OnnxModule)
        return dict(zip(forward.module.output_names, outputs.values(), strict=True)) if made else outputs

    def step(self, batch: Arrays) -> Step:
        native = self._native
        native.optimizer.zero_grad()
        loss = self._loss(batch)
        with torch.autocast(loss.device.type, enabled=False):  # which is for the forward pass alone
            loss.backward()
            gradients = {name: to_array(x.grad).copy() for name, x in self._parameters() if x.grad is not None}
            if self._clip is not None:
                clip_gradients(list(native.module.parameters()), self._clip)
            native.optimizer.step()
        torch.clear_autocast_cache()  # of weights as they were before this step
        self._made += 1
        if native.scheduler is not None and self._made % native.every == 0:
            native.scheduler.step()
        held = {**dict(self._parameters()), **dict(native.module.named_buffers())}
        weights = {name: to_array(x) for name, x in held.items() if x.is_floating_point()}
        return Step(float(loss.detach()), gradients, weights)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._native.module.named_parameters()

    def _loss(self, batch: Arrays) -> torch.Tensor:
        outputs = self._outputs(self._forward)
        if not self._native.summands:
            return outputs[self._terms[0].output]
        total = torch.zeros(())
        for term, summand in self._summands():
            prediction = outputs[term.output]
            targets = [from_array(batch[name]).to(prediction.device) for name in term.inputs]
            total = total + summand.value(prediction, targets)
        return total


def _vary(tensor: torch.Tensor) -> torch.Tensor:
    """An example that is the same everywhere tells little, and leaves nothing but rounding errors of a BatchNorm."""
    if tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
        return torch.rand_like(tensor)
    return tensor


def _sizes(model: Model, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """What the sizes that may vary are in this batch, by their names."""
    return {
        str(dim): size
        for value in values(model.graph)
        if value.name and value.name in tensors and value.shape is not None
        for dim, size in zip(value.shape, tensors[value.name].shape, strict=True)
        if not isinstance(dim, int)
    }
