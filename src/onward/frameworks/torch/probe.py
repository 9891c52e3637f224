"""Comparison of a PyTorch run, and of a written program, with the training model."""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from onward.agreement.inputs import example_inputs
from onward.agreement.steps import (
    FACTOR,
    MODULUS,
    OFFSET,
    StepResult,
    compare_steps,
    epsilon_in,
    types_in,
    with_fixed_draws,
    without_dropout,
)
from onward.agreement.tolerance import Sides, Tolerance
from onward.engines.engine import Arrays
from onward.engines.torch.types import from_array, to_array
from onward.errors import Error, UnsupportedError
from onward.frameworks.program.trial import step_trial, try_out
from onward.frameworks.torch.arguments import Flat, hollow_copy, named_tensors, tensors_of
from onward.frameworks.torch.exporter import fault_of_example
from onward.frameworks.torch.loss import Summand, inner_values, make_loss, summands, takes_all
from onward.frameworks.torch.module import LIVE, OnnxModule
from onward.frameworks.torch.optimizer import ClipHook, clip_gradients, clipped_optimizer
from onward.frameworks.torch.schedule import updates_per_step
from onward.inspect import describe
from onward.model import Model
from onward.model.core import values
from onward.recipe import objective
from onward.recipe.losses.definitions import LENGTHS
from onward.recipe.spec import Spec
from onward.recipe.trainable import gradient_edges
from onward.run_state.reading import LossTerm
from onward.run_state.state import ParameterGroup, RunState
from onward.run_state.training_models import from_training_model, to_training_model

_LABELS_PER_SEQUENCE = 2
"""Labels per sequence, for CTC."""


def drawn_targets(
    rng: np.random.Generator,
    term: LossTerm,
    prediction: torch.Tensor,
    inputs: Mapping[str, ir.Value],
    sizes: Mapping[str, int],
) -> dict[str, np.ndarray]:
    """Return random classes, or numbers from 0 to 1, which may be probabilities or variances."""
    if term.name == "ctc":  # labels that are not blank, of sequences that are as long as they can be
        is_first = term.options.get("batch_first")
        batch, time = prediction.shape[:2] if is_first else (prediction.shape[1], len(prediction))
        blank, classes = term.options.get("blank", 0), prediction.shape[2]
        labels = (blank + rng.integers(1, classes, (batch, _LABELS_PER_SEQUENCE))) % classes
        given = LENGTHS.get(term.options.get("lengths", "both"), ())
        lengths = [np.full(batch, time if name == "input_lengths" else _LABELS_PER_SEQUENCE) for name in given]
        return dict(zip(term.inputs, (labels, *lengths), strict=True))
    axis = term.options.get("axis", 1)
    classes = prediction.shape[axis] if prediction.ndim > 1 else 2
    targets = {}
    for name in term.inputs:
        target = inputs[name]
        assert target.shape is not None and target.dtype is not None
        shape = [size if isinstance(size, int) else sizes.get(str(size), 1) for size in target.shape]
        values = rng.random(shape) if target.dtype.is_floating_point() else rng.integers(0, classes, shape)
        targets[name] = values.astype(target.dtype.numpy())
    return targets


_RATE = 1e-3
"""Learning rate of a probe without an optimizer. Gradients are compared by themselves."""


@dataclasses.dataclass
class NativeRun:
    """Objects of a training loop."""

    module: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    loss: Any
    summands: Sequence[Summand]
    """Summands of the loss, unless the module computes it."""
    clip: Mapping[str, Any] | None
    every: int
    """Updates per step of the scheduler."""


def probe_native(
    native: NativeRun, run: RunState, example_inputs: Any, steps: int = 3, training: Model | None = None
) -> None:
    """Compare steps of a run, which is changed, with its training model without dropout.

    Targets may be generated.
    """
    model = training or to_training_model(dataclasses.replace(run, model=without_dropout(with_fixed_draws(run.model))))
    terms = describe(model).steps[0].loss.terms
    for layer in native.module.modules():
        # Attention and other layers have dropout inside; stochastic depth holds nothing.
        if not layer.state_dict() or any("drop" in name for name in vars(layer)):
            layer.training = False
        elif isinstance(layer, OnnxModule):
            layer.leave_out_dropout()
    is_live = isinstance(native.module, OnnxModule) and isinstance(example_inputs, Mapping)
    flat = _OwnNames(native.module, example_inputs) if is_live else Flat(native.module, example_inputs)
    prober = _Prober(native, run.step, flat, terms)
    with torch.random.fork_rng(), NothingDropped(), FixedDraws(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a copy of a scheduler does not know that its optimizer steps before it
        batches = [prober.batch(model)] * steps
        compare_steps(model, batches, prober.step, framework="PyTorch", engine="torch")


def probe_live(native: NativeRun, run: RunState) -> None:
    """Compare a run with its live objects, on generated inputs if the module accepts any."""
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
    """Compare a step of a captured model with one of its module, after copying the weights to it.

    Raises: MismatchError if the loss, a gradient or a statistic differs.
    """
    module = hollow_copy(module)
    tensors = {name: x for name, x in tensors_of(module) if name in model.graph.initializers}  # tied ones once
    for name, tensor in tensors.items():
        tensor.data = from_array(model.array(name)).to(tensor.dtype)
    try:
        loss_module = make_loss(loss, inner_values(loss, model))
    except UnsupportedError:  # a custom loss graph, which PyTorch has no module for, is not compared
        loss = [{value.name: "mse"} for value in model.outputs if value.dtype and value.dtype.is_floating_point()]
        loss_module = make_loss(loss)
    edges = gradient_edges(objective.read_values(model, objective.terms(loss)))
    trained = {name: x for name, x in tensors.items() if x.requires_grad and model.graph.initializers[name] in edges}
    if not trained:
        return
    group = ParameterGroup(Spec("sgd", {"lr": _RATE}), list(trained))
    run = RunState(model=model, loss=loss, groups=[group], statistics="sample")
    optimizer = torch.optim.SGD(trained.values(), _RATE)
    native = NativeRun(module, optimizer, None, loss_module, summands(loss_module, None), clip=None, every=1)
    probe_native(native, run, example_inputs, steps=1)


class _OwnNames(nn.Module):  # type: ignore[misc]
    """Live module in the form of `Flat`, with names that Python may not allow as arguments."""

    def __init__(self, module: OnnxModule, inputs: Mapping[str, torch.Tensor]):
        super().__init__()
        self.module = module
        self.inputs = {name: inputs[name] for name in module._graph.inputs}

    def result(self, *tensors: torch.Tensor) -> Any:
        return self.module(*tensors)


class _Prober:
    def __init__(self, native: NativeRun, updates: int, forward: Flat | _OwnNames, terms: Sequence[LossTerm]):
        self._native = native
        self._made = updates
        """Updates so far."""
        self._forward = forward
        for name, x in forward.inputs.items():
            # With a constant example, a BatchNorm returns nothing but rounding errors.
            if x.is_floating_point() and x.numel() > 1 and bool((x == x.flatten()[0]).all()):
                forward.inputs[name] = torch.rand_like(x)
        self._terms = terms
        self._clip = native.clip
        """Clipping before a step, unless the optimizer clips gradients of its copies itself."""
        inner = clipped_optimizer(native.optimizer)
        if inner is not native.optimizer and native.clip is not None:
            inner.register_step_pre_hook(ClipHook(native.clip))
            self._clip = None

    def batch(self, model: Model) -> Arrays:
        """Return the example with its targets, or random ones that fit."""
        inputs = self._forward.inputs
        try:
            with torch.no_grad():
                outputs = self._outputs(copy.deepcopy(self._forward))
        except Error:
            raise
        except Exception as error:  # tracing checks less than PyTorch itself
            raise (fault_of_example(self._forward) or error) from error
        shapes = {name: x.shape for name, x in {**inputs, **outputs}.items()}
        sizes = {
            str(dim): size
            for value in values(model.graph)
            if value.name in shapes and value.shape is not None
            for dim, size in zip(value.shape, shapes[value.name], strict=True)
            if not isinstance(dim, int)
        }
        rng = np.random.default_rng(0)
        targets = {value.name or "": value for value in model.step().algorithm.inputs}
        arrays = {name: to_array(tensor) for name, tensor in inputs.items()}
        for term, summand in zip(self._terms, self._native.summands, strict=bool(self._native.summands)):
            if summand.targets:
                arrays |= {name: to_array(x) for name, x in zip(term.inputs, summand.targets, strict=True)}
            else:
                arrays |= drawn_targets(rng, term, outputs[term.output], targets, sizes)
        return arrays

    def _outputs(self, forward: Flat | _OwnNames) -> dict[str, torch.Tensor]:
        return self._named(forward, forward.result(*forward.inputs.values()))

    def _named(self, forward: Flat | _OwnNames, result: Any) -> dict[str, torch.Tensor]:
        """Return outputs by their names in the model. A live module does not name a single one."""
        outputs = named_tensors(result)
        if not isinstance(forward.module, OnnxModule):
            return outputs
        return dict(zip(forward.module.output_names, outputs.values(), strict=True))

    def step(self, batch: Arrays) -> StepResult:
        native = self._native
        native.optimizer.zero_grad()
        named = dict(native.module.named_parameters())
        loss = self._loss(batch)
        with torch.autocast(loss.device.type, enabled=False):  # autocast is for the forward pass only
            loss.backward()
            gradients = {name: to_array(x.grad).copy() for name, x in named.items() if x.grad is not None}
            if self._clip is not None:
                clip_gradients(list(native.module.parameters()), self._clip)
            native.optimizer.step()
        torch.clear_autocast_cache()  # of weights as they were before this step
        self._made += 1
        if native.scheduler is not None and self._made % native.every == 0:
            native.scheduler.step()
        tensors = {**named, **dict(native.module.named_buffers())}
        weights = {name: to_array(x) for name, x in tensors.items() if x.is_floating_point()}
        return StepResult(float(loss.detach()), gradients, weights)

    def _loss(self, batch: Arrays) -> torch.Tensor:
        result = self._forward.result(*self._forward.inputs.values())
        outputs = self._named(self._forward, result)
        if not self._native.summands:
            return outputs[self._terms[0].output]
        total = torch.zeros(())
        for term, summand in zip(self._terms, self._native.summands, strict=True):
            prediction = result if summand.output is None and summand.is_function else outputs[term.output]
            targets = [from_array(batch[name]).to(outputs[term.output].device) for name in term.inputs]
            total = total + summand.loss(prediction, *targets) * summand.scale
        return total


def try_files(program: Path, state: Path, live: OnnxModule, model: Model) -> None:
    """Load the files in a separate process, compute outputs and steps, and compare."""
    inputs, expected = _example(live)
    trial, settings = step_trial(model) if model.steps else None, {}
    if trial is not None and any(value.name not in trial.batch for value in model.inputs):
        trial = None  # the module takes more inputs than the steps
    if trial is not None:
        terms, run = describe(model).steps[0].loss.terms, from_training_model(model)
        settings = {  # see the heading of a program
            "inputs": [value.name for value in model.inputs],
            "terms": [[term.output, list(term.inputs)] for term in terms],
            "takes_all": takes_all(terms),
            "every": updates_per_step(run),
            "step": run.step,
        }
    with tempfile.TemporaryDirectory() as folder:
        inputs_file, results_file = Path(folder, "inputs.pt"), Path(folder, "results.pt")
        torch.save(inputs, inputs_file)
        batch = [] if trial is None else [trial.save(Path(folder), **settings)]
        script = str(Path(__file__).with_name("program") / "trial_script.py")
        if not try_out(script, program, state, inputs_file, results_file, *batch):
            return
        results = torch.load(results_file, weights_only=True)
    _compare_state(results["state"], live)
    _compare(results["outputs"], expected, live)
    if trial is not None:
        trial.compare(results["losses"], same_random_numbers=False)


def try_module(module: nn.Module, live: OnnxModule) -> None:
    """Compare a module that a program created here with the live module."""
    _compare_state({name: list(x.shape) for name, x in module.state_dict().items()}, live)
    inputs, expected = _example(live)
    if inputs is not None:
        _compare(_outputs(module, inputs), expected, live)


def _example(live: OnnxModule) -> tuple[list[torch.Tensor] | None, dict[str, Any]]:
    """Return generated inputs and the outputs of the live module, or None if it runs on none."""
    for named in example_inputs(live.to_model()):
        inputs = [from_array(array) for array in named.values()]
        try:
            return inputs, _outputs(live, inputs)
        except (Error, RuntimeError, IndexError):
            continue
    return None, {}


def _outputs(module: nn.Module, inputs: list[torch.Tensor]) -> dict[str, Any]:
    with torch.no_grad():
        outputs = copy.deepcopy(module).eval()(*inputs)
    return outputs if isinstance(outputs, dict) else {"": outputs}


def _compare_state(shapes: Mapping[str, list[int]], live: OnnxModule) -> None:
    if list(shapes.items()) != [(name, list(x.shape)) for name, x in live.state_dict().items()]:
        raise UnsupportedError("parameter names are not valid in Python", hint=LIVE)


def _compare(written: Mapping[str, Any], expected: Mapping[str, Any], live: OnnxModule) -> None:
    arrays, expected_arrays = ({name: to_array(x) for name, x in outputs.items()} for outputs in (written, expected))
    tolerance = Tolerance(epsilon=epsilon_in(types_in(live.to_model())), least=0.0, equal_nan=True)
    hint = "report the model; use the live module: `onward.to_torch(training)`"
    compare = Sides("that of the live module", hint, tolerance, lambda n: f"`{n or 'the output'}` of the program")
    compare(arrays, expected_arrays)


class NothingDropped(TorchFunctionMode):  # type: ignore[misc]
    """Mode that disables dropout, also where a module calls it as a function."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = dict(kwargs or {})
        if function in _DROPOUTS:
            return args[0] if args else keywords["input"]
        if function is torch.Tensor.bernoulli_:
            return args[0].fill_(keywords.get("p", (*args[1:], 0.5)[0]))
        if function is F.scaled_dot_product_attention:
            args, keywords = args[:4], {**keywords, **dict(zip(_AFTER_MASK, args[4:], strict=False)), "dropout_p": 0.0}
        return function(*args, **keywords)


_DROPOUTS = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.feature_dropout, torch.alpha_dropout),
)
_AFTER_MASK = ("dropout_p", "is_causal")
"""Positional arguments of attention after queries, keys, values and the mask."""


# ---- random numbers --------------------------------------------------------------------------------------------------


def _fixed(draw: torch.Tensor) -> torch.Tensor:
    """Return the numbers of `with_fixed_draws`, from 0 to 1, in the shape of a draw."""
    numbers = (torch.arange(draw.numel()) * FACTOR + OFFSET) % MODULUS
    return (numbers.float() / MODULUS).reshape(draw.shape)


def _fixed_normal(draw: torch.Tensor, mean: Any = 0.0, scale: Any = 1.0, *_: Any, **__: Any) -> torch.Tensor:
    return draw.copy_(_fixed(draw) * (math.sqrt(12) * scale) + (mean - math.sqrt(12) * scale / 2))


def _fixed_integers(draw: torch.Tensor, *arguments: Any, **_: Any) -> torch.Tensor:
    low, high = (0, *(x for x in arguments if isinstance(x, int)))[-2:]
    return draw.copy_((_fixed(draw) * (high - low) + low).floor())


_FIXED: Mapping[Any, Callable[..., torch.Tensor]] = {
    **dict.fromkeys((torch.ops.aten.rand, torch.ops.aten.rand_like), lambda draw, *_, **__: draw.copy_(_fixed(draw))),
    **dict.fromkeys((torch.ops.aten.randn, torch.ops.aten.randn_like), lambda draw, *_, **__: _fixed_normal(draw)),
    **dict.fromkeys((torch.ops.aten.randint, torch.ops.aten.randint_like), _fixed_integers),
    torch.ops.aten.randperm: lambda draw, *_, **__: draw.copy_(_fixed(draw).argsort()),
    torch.ops.aten.normal: _fixed_normal,
    torch.ops.aten.normal_: lambda draw, _, *moments, **__: _fixed_normal(draw, *moments),
    torch.ops.aten.uniform_: lambda draw, _, low=0.0, high=1.0, **__: draw.copy_(_fixed(draw) * (high - low) + low),
    torch.ops.aten.exponential_: lambda draw, _, rate=1.0, **__: draw.copy_(_fixed(draw).log() / -rate),
    torch.ops.aten.bernoulli: lambda draw, p, *_, **__: draw.copy_(_fixed(draw) < p),
}
"""Operators -> functions of what they drew and of their arguments."""


class FixedDraws(TorchDispatchMode):  # type: ignore[misc]
    """Mode in which each draw returns the same sequence of numbers."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, fixed = function(*args, **(kwargs or {})), _FIXED.get(function.overloadpacket)
        return result if fixed is None else fixed(result, *args, **(kwargs or {}))
