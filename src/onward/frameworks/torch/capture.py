"""Capture of PyTorch runs (module, loss, optimizer, scheduler) as training models."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from onward.arguments import checked
from onward.engines.torch.types import to_array
from onward.errors import RecipeError, UnknownNameError, UnsupportedError, list_names, warn
from onward.frameworks.torch.exact import MasterWeights
from onward.frameworks.torch.exporter import FixedSizeError
from onward.frameworks.torch.loss import ROWS, Summand, read_objective, summands, trace_loss
from onward.frameworks.torch.module import OnnxModule
from onward.frameworks.torch.module_capture import (
    GROUP,
    LOSS,
    STEP,
    batch_counters,
    captured_in_place,
    check_copyable,
    configured,
    copy_module,
    into_training,
    training_step,
    unwrap_module,
)
from onward.frameworks.torch.optimizer import HALVES, clip_of, read_optimizer
from onward.frameworks.torch.probe import NativeRun, probe_native
from onward.frameworks.torch.schedule import read_schedule
from onward.frameworks.torch.traced.optimizer_state import copy_optimizer
from onward.model import Model
from onward.model.core import values
from onward.model.walk import is_random
from onward.recipe import objective
from onward.recipe.losses import LOSSES
from onward.recipe.trainable import gradient_edges
from onward.run_state.problems import ErrorCollector, Problems
from onward.run_state.state import RunState
from onward.run_state.training_models import nothing_learns, to_training_model


@checked(types=False, step="updates", steps_per_epoch="updates_per_epoch")
def from_torch(
    module: nn.Module,
    example_inputs: Any,
    *,
    loss: Any = None,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    example_targets: Any = None,
    clip: float | Mapping[str, float] | None = None,
    updates_per_epoch: int | None = None,
    updates: int | None = None,
    accumulate: int = 1,
    ema: AveragedModel | float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    dynamic_shapes: Mapping[str, Any] | None = None,
    probe: bool = True,
) -> Model:
    """Convert a PyTorch run, at any moment, to a training model that continues it. The objects are not changed.

        training = onward.from_torch(net, images, loss=nn.CrossEntropyLoss(), optimizer=optimizer)

    - `module`, `optimizer`: module to train, and its optimizer (default: the optimizer, scheduler and
      interval of `configure_optimizers` of a Lightning module)
    - `example_inputs`: inputs of the module: a tensor, a sequence of arguments, or a mapping by name
    - `loss`: a loss of torch.nn, such as `nn.CrossEntropyLoss()`; any function or module of tensors,
      which is called as `loss(result, *targets)` with all that the module returns; a mapping of
      output -> loss for several outputs; or the name of the output that is the loss. Losses are
      added: a list of losses, or a pair `(0.5, loss)`, may replace one. Default: the loss of
      `training_step` of a Lightning module, whose `example_inputs` are a batch
    - `example_targets`: further inputs of the loss: a tensor or a tuple of tensors, in a mapping or
      list like the losses. Floats are class probabilities for a cross entropy (default: classes).
      Required for a function
    - `scheduler`, `updates_per_epoch`: scheduler, and updates per step of the scheduler (default: 1)
    - `updates`: updates so far, for an optimizer that does not count them (SGD) in the middle of an
      epoch (default: the scheduler has just stepped)
    - `clip`: clipping before each update: a number for `clip_grad_norm_`, or `{"value": 0.5}`
    - `accumulate`: batches per update; your loop divides the loss by it
    - `ema`: `AveragedModel` with an exponential average, updated after each step of the optimizer;
      or its decay, to begin with the current parameters
    - `scaler`: `torch.amp.GradScaler` of the loop
    - `dynamic_shapes`: argument -> axis -> name of axes of any size (default: the first axis of all
      tensors, or none if the module or the loss fixes one)
    - `probe`: run three steps on both sides with the example, and compare
    """
    module, every = unwrap_module(module), 1
    if optimizer is None:
        optimizer, scheduler, every = _configured(module, updates_per_epoch)
    every = updates_per_epoch or every
    optimizer, scheduler = bare_optimizer(optimizer), bare_scheduler(scheduler)
    memo: dict[int, Any] = {id(getattr(module, "_trainer", None)): None}  # Lightning's, which has the data
    if loss is None:
        module, example_inputs, loss = *_step_of(module, example_inputs), LOSS
    terms = summands(loss, example_targets)
    clip = clip_of(optimizer, clip)
    if isinstance(module, OnnxModule):
        example_inputs = module.named(example_inputs)
    check_copyable(module, example_inputs)
    twins = (copy_module(module, memo), copy_optimizer(optimizer, memo), copy.deepcopy(scheduler, memo))
    native = NativeRun(*twins, loss, terms, clip, every)
    into_training(native.module)
    if isinstance(native.module, OnnxModule):
        native.module.sync_batch_norm(False)  # other processes do not make the steps that are compared
    _freeze_others(native)
    try:
        run = _read(native, example_inputs, dynamic_shapes, updates)
    except FixedSizeError as error:
        if dynamic_shapes is not None:
            raise
        warn(f"{error.message}: the training model takes the sizes of the example")
        run = _read(native, example_inputs, {}, updates)
    around = _Around.of(accumulate, ema, scaler, run.parameters)
    training = to_training_model(
        dataclasses.replace(run, recipe={**run.recipe, **around.recipe}, state={**run.state, **around.state})
    )
    if probe:
        draws = any(node.op_type == "Dropout" or is_random(node) for node in run.model.graph.all_nodes())
        probe_native(native, run, example_inputs, training=None if around.recipe or draws else training)
    return training


def _configured(module: Any, updates_per_epoch: int | None) -> tuple[Any, Any, int]:
    """Return the optimizer and scheduler of a Lightning module, and the updates per step of the scheduler."""
    if not hasattr(module, "configure_optimizers"):
        raise RecipeError("no optimizer given", hint="pass `optimizer=torch.optim.AdamW(module.parameters())`")
    optimizer, scheduler, every = configured(module)
    if every is None and updates_per_epoch is None:
        raise RecipeError(
            f"{type(scheduler).__name__} of `{type(module).__name__}` steps once per epoch",
            hint="pass the updates in an epoch: `updates_per_epoch=len(loader)`",
        )
    return optimizer, scheduler, every or 1


def _step_of(module: Any, batch: Any) -> tuple[nn.Module, Any]:
    """Return a Lightning module whose forward pass is the loss of a batch, and its input."""
    if not hasattr(module, "training_step"):
        raise RecipeError("no loss given", hint="pass `loss=torch.nn.CrossEntropyLoss()`")
    return training_step(module, batch)


def _freeze_others(native: NativeRun) -> None:
    """Freeze parameters that the optimizer does not have."""
    named = {id(parameter) for parameter in native.module.parameters()}
    optimized = {id(parameter) for group in native.optimizer.param_groups for parameter in group["params"]}
    if optimized - named:
        raise UnsupportedError(
            f"the optimizer has {len(optimized - named)} parameters that the module does not have",
            hint="put them into one module: `nn.ModuleList([model, loss])`; "
            f"for float32 copies use `{MasterWeights.__module__}.MasterWeights`",
        )
    for parameter in native.module.parameters():
        if id(parameter) not in optimized:
            parameter.requires_grad_(False)


def _read(
    native: NativeRun, example_inputs: Any, dynamic_shapes: Mapping[str, Any] | None, updates: int | None
) -> RunState:
    parts, schedule = ErrorCollector(), None
    with parts.collect():
        if isinstance(native.module, OnnxModule):
            model, changed = native.module.to_model(), dict(native.module._graph.updates)
        else:
            model, changed = captured_in_place(copy.deepcopy(native.module), example_inputs, dynamic_shapes)

    def trace(summand: Summand) -> Any:
        is_fixed = dynamic_shapes is not None
        return "" if parts.errors else trace_loss(summand, native.module, example_inputs, model, fixed=is_fixed)

    with parts.collect():
        loss = read_objective(native.loss, native.summands, trace)
    with parts.collect():
        schedule = read_schedule(native.scheduler, native.every) if native.scheduler is not None else None
    if not parts.errors and isinstance(native.loss, str):
        _refuse_loss_name(native.loss, model)
    named = dict(native.module.named_parameters())
    if parts.errors:
        with parts.collect():  # find further problems, of all parameters that had updates
            begun = {id(p): name for name, p in named.items() if p in native.optimizer.state}
            read_optimizer(native.optimizer, begun or {id(p): name for name, p in named.items()}, schedule)
        parts.refuse()
    edges = gradient_edges(objective.read_values(model, objective.terms(loss)))
    trained = {
        id(parameter): name
        for name, parameter in named.items()
        if parameter.requires_grad and model.graph.initializers[name] in edges
    }
    if not trained:
        raise nothing_learns()
    groups, state, count = read_optimizer(native.optimizer, trained, schedule)
    step = _step(native, count, updates)
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
        updates=changed,
        statistics=native.module.statistics if isinstance(native.module, OnnxModule) else "sample",
        recipe={"master_weights": any(key.endswith("/master") for key in state)} if is_half else {},
    )


def _refuse_loss_name(name: str, model: Model) -> None:
    """Name the module of a loss of PyTorch that was given in place of an output."""
    if name not in LOSSES or name in {value.name for value in values(model.graph)}:
        return
    rows = [row.module for row in ROWS if row.name == LOSSES[name].name]
    if rows:
        raise UnknownNameError(
            f"the module has no output `{name}`", hint=f"pass a loss: `loss=torch.nn.{rows[0].__name__}()`"
        )


def _step(native: NativeRun, count: int, updates: int | None) -> int:
    """Return the number of updates, checked against the optimizer and the scheduler."""
    if updates is None:
        return count
    counts = any("step" in state for state in native.optimizer.state.values())
    unit = 1 if counts else native.every
    if (counts or native.scheduler is not None) and updates // unit != count // unit:
        raise UnsupportedError(
            f"optimizer or scheduler count {count} updates, not {updates}",
            hint="leave `updates` out, or correct `updates_per_epoch`",
        )
    return updates


def _tag(model: Model, optimizer: Optimizer, idle: Mapping[int, str], step: int) -> None:
    """Store what a training model has no field for and `to_torch` needs."""
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) in idle:
                model.graph.initializers[idle[id(parameter)]].metadata_props[GROUP] = str(i)
    for value in batch_counters(model):
        value.metadata_props[STEP] = str(step)


# ---- around the step -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Around:
    """Options and state of what a loop does around the step of its optimizer."""

    recipe: dict[str, Any]
    state: dict[str, np.ndarray]

    @classmethod
    def of(cls, accumulate: int, ema: Any, scaler: Any, parameters: Sequence[str]) -> _Around:
        recipe: dict[str, Any] = {"accumulate": accumulate} if accumulate != 1 else {}
        state: dict[str, np.ndarray] = {}
        if scaler is not None and scaler.is_enabled():
            numbers = scaler.state_dict()
            options = ",".join(
                f"{key}={numbers[key]}" for key in ("growth_factor", "backoff_factor", "growth_interval")
            )
            recipe["loss_scale"] = f"dynamic:initial={numbers['scale']},{options}"
            state["scaler/growth_tracker"] = np.asarray(numbers["_growth_tracker"], np.int64)
        if isinstance(ema, AveragedModel):
            recipe["ema"] = _decay(ema)
            averages = dict(unwrap_module(ema.module).named_parameters())
            if missing := [name for name in parameters if name not in averages]:
                raise UnsupportedError(
                    f"`ema` has no average of {list_names(missing, 3)}", hint="pass the `AveragedModel` of this module"
                )
            state |= {f"ema/{name}": to_array(averages[name].detach()).copy() for name in parameters}
            state["ema/n_averaged"] = np.asarray(int(ema.n_averaged), np.int64)
        elif ema is not None:
            recipe["ema"] = float(ema)
        return cls(recipe, state)


def _decay(ema: AveragedModel) -> float:
    """Return the decay of an exponential average."""
    problems = Problems("`ema`")
    function = inspect.unwrap(ema.multi_avg_fn or ema.avg_fn or (lambda: None))  # behind `torch.no_grad`
    closure = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    if not getattr(function, "__qualname__", "").startswith("get_ema_") or "decay" not in closure:
        problems.add(
            "its average is not exponential",
            "create it with `multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)`",
        )
    if ema.use_buffers:
        problems.add("it averages buffers", "create it with `use_buffers=False`")
    if not int(ema.n_averaged):
        problems.add("its first update is a copy, not an average", "call `ema.update_parameters(module)` before")
    problems.refuse()
    return float(closure["decay"])


# ---- wrappers --------------------------------------------------------------------------------------------------------
# Accelerate and others wrap optimizers and schedulers. A wrapper is recognized by its structure,
# so that its library need not be installed: it has no parameter groups, or is not a scheduler, but
# has an attribute that does or is.


def bare_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer inside of a wrapper that does nothing else, or the optimizer itself."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer) and "param_groups" not in vars(optimizer):
        problems = Problems(f"the wrapper {type(optimizer).__name__} of the optimizer")
        hint = "pass `optimizer.optimizer`, and do this in your training loop"
        batches = getattr(getattr(optimizer, "gradient_state", None), "num_steps", 1)
        if batches != 1:
            problems.add(f"it accumulates the gradients of {batches} batches", hint)
        if getattr(optimizer, "scaler", None) is not None:
            problems.add("it scales the loss", hint)
        problems.refuse()
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedError(
            f"`optimizer` is a {type(optimizer).__name__}, not a PyTorch optimizer",
            hint="pass `torch.optim.AdamW(module.parameters())`",
        )
    return optimizer


def bare_scheduler(scheduler: Any) -> Any:
    """Return the scheduler inside of a wrapper, with the bare optimizer, or the scheduler itself."""
    while not isinstance(scheduler, LRScheduler) and hasattr(scheduler, "scheduler"):
        scheduler = scheduler.scheduler
    optimizer = getattr(scheduler, "optimizer", None)
    if not isinstance(optimizer, Optimizer) or (bare := bare_optimizer(optimizer)) is optimizer:
        return scheduler
    unwrapped = copy.copy(scheduler)
    unwrapped.optimizer = bare
    return unwrapped
