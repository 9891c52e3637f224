"""PyTorch, both ways: a module with its loss, optimizer and scheduler as a training model, and back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import onnx_ir as ir
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onward.arguments import checked
from onward.errors import UnsupportedError
from onward.frameworks.torch.capture import (
    COUNTER,
    GROUP,
    STEP,
    capture_module,
    check_copyable,
    into_training,
    unwrap_module,
)
from onward.frameworks.torch.exact import MasterWeights
from onward.frameworks.torch.forward import OnnxModule, to_module
from onward.frameworks.torch.loss import inner_values, make_loss, read_objective, summands
from onward.frameworks.torch.optimizer import (
    HALVES,
    Clip,
    clip_of,
    clipping_part,
    make_optimizer,
    read_optimizer,
)
from onward.frameworks.torch.probe import NativeRun, probe_made, probe_native
from onward.frameworks.torch.schedule import make_schedule, read_schedule, updates_per_step
from onward.frameworks.torch.traced.optimizer_state import copy_optimizer, parameters_of
from onward.model import Model, Source, load
from onward.recipe import objective
from onward.recipe.trainable import gradient_edges
from onward.run_state.problems import Parts, Problems
from onward.run_state.standard_steps import adopt
from onward.run_state.state import RunState
from onward.run_state.training_models import from_training_model, nothing_learns, only_step_of, to_training_model
from onward.transform.declare import require_shapes
from onward.transform.opset import of_one_opset

__all__ = ["TorchTraining", "capture_module", "from_torch", "to_module", "to_torch"]


class TorchTraining(NamedTuple):
    """A training run as PyTorch has it."""

    module: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    loss: nn.Module


# ---- from PyTorch ----------------------------------------------------------------------------------------------------


@checked(types=False, step="updates", steps_per_epoch="updates_per_epoch")
def from_torch(
    module: nn.Module,
    example_inputs: Any,
    *,
    loss: Any,
    optimizer: Optimizer,
    scheduler: LRScheduler | None = None,
    example_targets: Any = None,
    clip: float | Mapping[str, float] | None = None,
    updates_per_epoch: int = 1,
    updates: int | None = None,
    dynamic_shapes: Mapping[str, Any] | None = None,
    probe: bool = True,
) -> Model:
    """A run of PyTorch, at any moment, as a training model that goes on from there. What is given stays as it is.

        training = onward.from_torch(net, images, loss=nn.CrossEntropyLoss(), optimizer=optimizer)

    - `module`, `optimizer`: what is trained, and by what
    - `example_inputs`: what the module takes: a tensor, a sequence of arguments, or a mapping by their names
    - `loss`: of torch.nn or torch.nn.functional, such as `nn.CrossEntropyLoss()`; a mapping of output -> loss where the
      module has several outputs; or the name of the output that is the loss. Losses are added up: in place of one there
      may be a list of several, or a pair `(0.5, loss)`
    - `example_targets`: what the loss takes beside an output: a tensor, or a tuple of several; in a mapping or list, as
      the losses are. To a cross entropy, floats are class probabilities; without an example it takes classes
    - `scheduler`, `updates_per_epoch`: how many updates there are between two of its steps
    - `updates`: those made so far, for an optimizer that does not count them (SGD) in the middle of an epoch;
      without it, its scheduler has just stepped
    - `clip`: what happens to gradients before each update: `clip_grad_norm_` to a number, or `{"value": 0.5}`
    - `dynamic_shapes`: argument -> axis -> name, for axes of any size; without it, the first axis of all tensors
    - `probe`: make three steps on both sides with the example, and compare
    """
    module, optimizer, scheduler = unwrap_module(module), bare_optimizer(optimizer), bare_scheduler(scheduler)
    check_copyable(module)
    terms = summands(loss, example_targets)
    clip = clip_of(optimizer, clip)
    if isinstance(module, OnnxModule):
        example_inputs = module.named(example_inputs)
    memo: dict[int, Any] = {}
    twins = (copy.deepcopy(module, memo), copy_optimizer(optimizer, memo), copy.deepcopy(scheduler, memo))
    native = NativeRun(*twins, loss, terms, clip, updates_per_epoch)
    into_training(native.module)
    if isinstance(native.module, OnnxModule):
        native.module.sync_batch_norm(False)  # other processes do not make the steps that are compared
    _freeze_others(native)
    run = _read(native, example_inputs, dynamic_shapes, updates)
    if probe:
        probe_native(native, run, example_inputs)
    return to_training_model(run)


def _freeze_others(native: NativeRun) -> None:
    """Parameters that no optimizer has do not learn, whatever they require."""
    named = {id(parameter) for parameter in native.module.parameters()}
    optimized = {id(parameter) for group in native.optimizer.param_groups for parameter in group["params"]}
    if optimized - named:
        raise UnsupportedError(
            f"the optimizer has {len(optimized - named)} parameters that the module does not have",
            hint="make them parameters of the module, of one that holds the other and the loss, for example; "
            f"for copies in float32 use `{MasterWeights.__module__}.MasterWeights`",
        )
    for parameter in native.module.parameters():
        if id(parameter) not in optimized:
            parameter.requires_grad_(False)


def _read(
    native: NativeRun, example_inputs: Any, dynamic_shapes: Mapping[str, Any] | None, given: int | None
) -> RunState:
    parts, schedule = Parts(), None
    with parts.reading():
        is_ours = isinstance(native.module, OnnxModule)
        model = native.module.to_model() if is_ours else capture_module(native.module, example_inputs, dynamic_shapes)
    with parts.reading():
        loss = read_objective(native.loss, native.summands)
    with parts.reading():
        schedule = read_schedule(native.scheduler, native.every) if native.scheduler is not None else None
    named = dict(native.module.named_parameters())
    if parts.errors:
        with parts.reading():  # what else there is to say, of all parameters that had updates
            begun = {id(p): name for name, p in named.items() if p in native.optimizer.state}
            read_optimizer(native.optimizer, begun or {id(p): name for name, p in named.items()}, schedule)
        parts.refuse()
    edges = gradient_edges(objective.predictions(model, objective.terms(loss)))
    trained = {
        id(parameter): name
        for name, parameter in named.items()
        if parameter.requires_grad and model.graph.initializers[name] in edges
    }
    if not trained:
        raise nothing_learns()
    groups, state, found = read_optimizer(native.optimizer, trained, schedule)
    step = _step(native, found, given)
    is_half = any(parameter.dtype in HALVES and id(parameter) in trained for parameter in named.values())
    _tag(model, native.optimizer, {id(p): name for name, p in named.items() if id(p) not in trained}, step)
    return RunState(
        model=model,
        loss=loss,
        groups=groups,
        state=state,
        step=step,
        schedule=schedule.specs if schedule else (),
        clip=native.clip,
        statistics=native.module.statistics if isinstance(native.module, OnnxModule) else "sample",
        recipe={"master_weights": any(key.endswith("/master") for key in state)} if is_half else {},
    )


def _step(native: NativeRun, found: int, given: int | None) -> int:
    """The updates that the user says there were, if that is what optimizer and scheduler say, too."""
    if given is None:
        return found
    counts = any("step" in state for state in native.optimizer.state.values())
    unit = 1 if counts else native.every
    if (counts or native.scheduler is not None) and given // unit != found // unit:
        raise UnsupportedError(
            f"by its optimizer or scheduler the run has made {found} updates, and not {given}",
            hint="leave `updates` out, or correct `updates_per_epoch`",
        )
    return given


def _tag(model: Model, optimizer: Optimizer, idle: Mapping[int, str], step: int) -> None:
    """Write down what a training model has no place for, and the way back needs."""
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) in idle:
                model.graph.initializers[idle[id(parameter)]].metadata_props[GROUP] = str(i)
    for value in _counters(model):
        value.metadata_props[STEP] = str(step)


def _counters(model: Model) -> Iterator[ir.Value]:
    return (value for name, value in model.graph.initializers.items() if name.rpartition(".")[2] == COUNTER)


# ---- wrappers --------------------------------------------------------------------------------------------------------
# Accelerate and others wrap optimizers and schedulers. A wrapper is recognized by its structure, so that it need not be
# installed: it holds no groups of parameters, or is not a scheduler, but has an attribute that does or is.


def bare_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer inside of a wrapper, if that does nothing else; or what was given."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer) and "param_groups" not in vars(optimizer):
        problems = Problems(f"the wrapper {type(optimizer).__name__} of the optimizer")
        inside = "give the optimizer inside, `optimizer.optimizer`, and leave that to the loop"
        batches = getattr(getattr(optimizer, "gradient_state", None), "num_steps", 1)
        if batches != 1:
            problems.add(f"it accumulates the gradients of {batches} batches", inside)
        if getattr(optimizer, "scaler", None) is not None:
            problems.add("it scales the loss", inside)
        problems.refuse()
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedError(
            f"{optimizer!r} is no optimizer of PyTorch", hint="give one: `torch.optim.AdamW(module.parameters())`"
        )
    return optimizer


def bare_scheduler(scheduler: Any) -> Any:
    """The scheduler inside of a wrapper, with the bare optimizer; or what was given."""
    while not isinstance(scheduler, LRScheduler) and hasattr(scheduler, "scheduler"):
        scheduler = scheduler.scheduler
    held = getattr(scheduler, "optimizer", None)
    if not isinstance(held, Optimizer) or (bare := bare_optimizer(held)) is held:
        return scheduler
    made = copy.copy(scheduler)
    made.optimizer = bare
    return made


# ---- to PyTorch ------------------------------------------------------------------------------------------------------


@checked(types=False)
def to_torch(
    training: Source,
    *,
    step: int | None = None,
    probe: bool = True,
    live: bool = True,
    blocks: bool = False,
    sync_batch_norm: bool = False,
) -> TorchTraining:
    """The run that a training model holds, as objects of PyTorch that go on from there.

        module, optimizer, scheduler, loss = onward.to_torch("training.onnx")

    A training loop is as usual: the scheduler steps after the optimizer (once in an epoch, where it counts epochs), and
    gradients are clipped by the optimizer's own step, where the training model clips. A module with several outputs
    returns them by name, and among them values inside of the model that the loss looks at: `loss(module(x), y)`.

    - `training`: a training model
    - `step`: which one; a training model with several is refused, since PyTorch has no place for the others
    - `probe`: make a few steps on both sides with inputs that are made up, and compare
    - `live`: the module executes the graph as it is; without, it is of a class that is written for it, of layers of
      torch.nn, and needs nothing of Onward: what `onward convert --to torch` writes
    - `blocks`: cut the module into the blocks that its graph repeats (`module.repeated_blocks()`), each a module with
      its own parameters and `forward`, to be sharded (`fully_shard`), recomputed or compiled one at a time
    - `sync_batch_norm`: in training, BatchNorm has the statistics of the batches of all processes, on the CPU, too
    """
    if (blocks or sync_batch_norm) and not live:
        option = "blocks" if blocks else "sync_batch_norm"
        raise UnsupportedError(
            "a class that is written has its own layers", hint=f"leave out `{option}`, or `live=False`"
        )
    model = adopt(of_one_opset(load(training)))
    index = only_step_of(model, step)
    if probe:
        require_shapes(model, index, "a comparison of both sides (`probe`)")
    run = from_training_model(model, index)
    made = _make_objects(run, blocks=blocks)
    if probe:
        twins, terms = copy.deepcopy(made[:3]), summands(made.loss, None)  # without the hook that clips
        probe_made(NativeRun(*twins, made.loss, terms, run.clip, updates_per_step(run)), run)
    if live:
        made.module.sync_batch_norm(sync_batch_norm)
        return made
    from onward.frameworks.torch.program.source import run_program, write_program

    return TorchTraining(*run_program(write_program(model, made), made))


def _make_objects(run: RunState, *, blocks: bool = False) -> TorchTraining:
    problems = Problems("the training model")
    for key, words in _WITHOUT_OBJECT.items():
        if key in run.recipe:
            problems.add(f"{words}, of which PyTorch has no object", "prepare it without, and do so in the loop")
    problems.refuse()
    for value in _counters(run.model):  # which count what was trained elsewhere, too
        assert value.const_value is not None and value.name is not None
        since = run.step - int(value.metadata_props.get(STEP, run.step))
        run.model.set(value.name, value.const_value.numpy() + since)
    inner = inner_values(run.loss, run.model)
    module = to_module(run.model, trainable=run.parameters, statistics=run.statistics, inner=inner, blocks=blocks)
    parameters = module.parameters_by_name()
    optimizer = make_optimizer(run, parameters)
    scheduler = make_schedule(run, optimizer)
    _add_idle(optimizer, run, parameters)
    if run.clip is not None:
        part = clipping_part(optimizer)
        part.register_step_pre_hook(Clip(run.clip, sum(parameter.numel() for parameter in parameters_of(part))))
    return TorchTraining(module.train(), optimizer, scheduler, make_loss(run.loss, inner))


_WITHOUT_OBJECT = {
    "accumulate": "it accumulates gradients",
    "ema": "it averages its parameters",
    "loss_scale": "it scales its loss",
}


def _add_idle(optimizer: Optimizer, run: RunState, parameters: Mapping[str, nn.Parameter]) -> None:
    """Give the optimizer back the parameters that it had without training them, in the order of the module."""
    order = {id(parameter): i for i, parameter in enumerate(parameters.values())}
    for name, parameter in parameters.items():
        at = run.model.graph.initializers[name].metadata_props.get(GROUP)
        if at is not None and name not in run.parameters:
            params = optimizer.param_groups[min(int(at), len(optimizer.param_groups) - 1)]["params"]
            params.append(parameter)
            params.sort(key=lambda other: order[id(other)])
