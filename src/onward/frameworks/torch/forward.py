"""Training models as PyTorch objects: module, optimizer, scheduler, loss. Inference models as modules."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from onward.arguments import checked
from onward.engines.torch.types import from_array, to_array
from onward.errors import UnsupportedError
from onward.frameworks.inference import open_parameters, try_outputs
from onward.frameworks.run_files import TrainedResults
from onward.frameworks.torch.arguments import tensors_of
from onward.frameworks.torch.loss import inner_values, make_loss, summands
from onward.frameworks.torch.module import OnnxModule, to_module
from onward.frameworks.torch.module_capture import GROUP, STEP, batch_counters
from onward.frameworks.torch.optimizer import ClipHook, clipped_optimizer, make_optimizer, read_optimizer
from onward.frameworks.torch.probe import NativeRun, probe_live
from onward.frameworks.torch.schedule import make_schedule, read_schedule, updates_per_step
from onward.frameworks.torch.traced.optimizer_state import parameters_of
from onward.model import Model, Source, load
from onward.recipe.objective import read_values
from onward.recipe.objective import terms as terms_of
from onward.run_state.problems import Problems
from onward.run_state.standard_steps import adopt
from onward.run_state.state import RunState
from onward.run_state.training_models import from_training_model, one_step_of, step_names, step_of
from onward.transform.declare import require_shapes
from onward.transform.opset import of_one_opset
from onward.transform.training import keep_only, without_steps


class TorchTraining(NamedTuple):
    """Training run as PyTorch objects.

    For a training model with several steps, all but `module` are dictionaries by the name of the
    step, and `module.steps[name]` is the forward pass of a step.
    """

    module: nn.Module
    optimizer: Any
    """`Optimizer`, with clipping"""
    scheduler: Any
    """`LRScheduler` or None"""
    loss: Any
    """`nn.Module`"""


@checked(types=False)
def to_torch(
    training: Source,
    *,
    step: int | None = None,
    probe: bool = True,
    live: bool = True,
    blocks: bool = False,
    sync_batch_norm: bool = False,
) -> Any:
    """Convert a training model to PyTorch objects that continue its run, an inference model to a module.

        module, optimizer, scheduler, loss = onward.to_torch("training.onnx")
        module = onward.to_torch("model.onnx")

    A training model becomes a `TorchTraining`. Use its objects in an ordinary training loop. The
    scheduler steps after the optimizer, once per epoch if it counts epochs. If the training model
    clips gradients, the step of the optimizer does. A module with several outputs returns them by
    name, with inner values that the loss reads: `loss(module(x), y)`. Several steps become
    dictionaries by name with one module: `loss["generator"](module.steps["generator"](z))`.

    An inference model becomes an `nn.Module` in eval mode, with its weights as parameters. Train it
    with any loss and optimizer of PyTorch.

    - `training`: a training model, or an inference model
    - `step`: index of the only step to convert (default: all)
    - `probe`: run a few steps on both sides with generated inputs, and compare; for an inference
      model, compare its outputs with those of ONNX Runtime
    - `live`: let the module execute the graph (default: yes); otherwise return a generated class of
      torch.nn layers that needs no Onward, as `onward convert --to torch` writes it
    - `blocks`: split the module into the blocks that its graph repeats (`module.repeated_blocks()`),
      each a module that can be sharded (`fully_shard`), recomputed or compiled alone
    - `sync_batch_norm`: let BatchNorm in training use the statistics of all processes, also on the CPU
    """
    if (blocks or sync_batch_norm) and not live:
        option = "blocks" if blocks else "sync_batch_norm"
        raise UnsupportedError(
            f"a written class has its own layers and no `{option}`", hint=f"leave out `{option}` or `live=False`"
        )
    model = load(training)
    if not model.steps and step is None:
        return _module(model, probe=probe, live=live, blocks=blocks, sync_batch_norm=sync_batch_norm)
    model = of_one_opset(model)
    if step is None and len(model.steps) > 1:
        if blocks or not live:
            raise UnsupportedError(
                f"several steps share one module, which is live and has no {'`blocks`' if blocks else 'source'}",
                hint="convert one step: `onward.to_torch(training, step=0)`",
            )
        return _several(model, probe=probe, sync_batch_norm=sync_batch_norm)
    index = step_of(model, step)
    model = adopt(one_step_of(model, index)[0] if len(model.steps) > 1 else model)
    run = _read(model, probe)
    training_objects = _make_objects(run, blocks=blocks)
    if probe:
        _probe(training_objects, run)
    if live:
        training_objects.module.sync_batch_norm(sync_batch_norm)
        return training_objects
    from onward.frameworks.torch.program.source import run_program, write_program

    return TorchTraining(*run_program(write_program(model, training_objects), training_objects))


def _read(model: Model, probe: bool) -> RunState:
    """Return the run of a training model with one step."""
    if probe:
        require_shapes(model, 0, "a comparison of both sides (`probe`)")
    run, problems = from_training_model(model), Problems("the training model")
    for key, words in _WITHOUT_OBJECT.items():
        if key in run.recipe:
            problems.add(f"{words}, which no PyTorch object does", f"prepare without `{key}`, and do this in the loop")
    problems.refuse()
    return run


def _probe(objects: TorchTraining, run: RunState) -> None:
    copies = copy.deepcopy(objects[:3])  # without the hook that clips
    terms = summands(objects.loss, None)
    probe_live(NativeRun(*copies, objects.loss, terms, run.clip, updates_per_step(run)), run)


def _several(model: Model, *, probe: bool, sync_batch_norm: bool) -> TorchTraining:
    """Return one module, and the other objects of all steps by name."""
    names = step_names(model)
    runs = {name: _read(adopt(one_step_of(model, index)[0]), probe) for index, name in enumerate(names)}
    if updated := [name for run in runs.values() for name in run.updates]:
        raise UnsupportedError(
            f"several steps and a forward pass that changes the buffer `{updated[0]}`",
            hint="convert one step: `onward.to_torch(training, step=0)`",
        )
    trained = {name for run in runs.values() for name in run.parameters}
    module = to_module(without_steps(model), trainable=trained).eval()
    module.sync_batch_norm(sync_batch_norm)
    result, parameters = TorchTraining(module, {}, {}, {}), module.parameters_by_name()
    for name, run in runs.items():
        model = run.model.copy()
        keep_only(model, read_values(model, terms_of(run.loss)))
        run = dataclasses.replace(run, model=model)
        module.add_step(name, [value.name or "" for value in model.outputs], run.parameters, run.statistics)
        objects = _objects(run, module.steps[name], {own: parameters[own] for own in run.parameters})
        if probe:
            _probe(objects, run)
        for by_name, own in zip(result[1:], objects[1:], strict=True):
            by_name[name] = own
    return result


def live_module(model: Model, *, blocks: bool = False) -> OnnxModule:
    """Return an inference model as a live module in eval mode."""
    opened, parameters = open_parameters(model)
    return to_module(opened, trainable=parameters, blocks=blocks).eval()


def _module(model: Model, *, probe: bool, live: bool, blocks: bool, sync_batch_norm: bool) -> nn.Module:
    module = live_module(model, blocks=blocks)
    if probe:

        def compute(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            with torch.no_grad():
                results = module(*(from_array(inputs[value.name or ""]) for value in model.inputs))
            results = results if isinstance(results, dict) else {module.output_names[0]: results}
            return {name: to_array(x) for name, x in results.items() if isinstance(x, torch.Tensor)}

        try_outputs(model, compute, "torch")
    if live:
        module.sync_batch_norm(sync_batch_norm)
        return module
    from onward.frameworks.torch.program.source import run_program, write_program

    objects = module, None, None, None
    return run_program(write_program(model, objects), objects).eval()


def _make_objects(run: RunState, *, blocks: bool = False) -> TorchTraining:
    for value in batch_counters(run.model):  # add the batches of training outside of PyTorch
        assert value.const_value is not None and value.name is not None
        since = run.step - int(value.metadata_props.get(STEP, run.step))
        run.model.set(value.name, value.const_value.numpy() + since)
    watched = inner_values(run.loss, run.model)
    module = to_module(
        run.model,
        trainable=run.parameters,
        statistics=run.statistics,
        inner=watched,
        updates=run.updates,
        blocks=blocks,
    )
    return _objects(run, module.train(), module.parameters_by_name(), watched)


def _objects(
    run: RunState, module: nn.Module, parameters: Mapping[str, nn.Parameter], watched: Collection[str] = ()
) -> TorchTraining:
    outputs = [value.name or "" for value in run.model.outputs]
    optimizer = make_optimizer(run, parameters)
    scheduler = make_schedule(run, optimizer)
    _add_idle(optimizer, run, parameters)
    if run.clip is not None:
        inner = clipped_optimizer(optimizer)
        inner.register_step_pre_hook(ClipHook(run.clip, sum(parameter.numel() for parameter in parameters_of(inner))))
    return TorchTraining(module, optimizer, scheduler, make_loss(run.loss, watched, outputs))


_WITHOUT_OBJECT = {
    "accumulate": "it accumulates gradients",
    "ema": "it averages its parameters",
    "loss_scale": "it scales its loss",
}


def _add_idle(optimizer: Optimizer, run: RunState, parameters: Mapping[str, nn.Parameter]) -> None:
    """Return frozen parameters to their optimizer groups, in the order of the module."""
    order = {id(parameter): i for i, parameter in enumerate(parameters.values())}
    for name, parameter in parameters.items():
        group = run.model.graph.initializers[name].metadata_props.get(GROUP)
        if group is not None and name not in run.parameters:
            params = optimizer.param_groups[min(int(group), len(optimizer.param_groups) - 1)]["params"]
            params.append(parameter)
            params.sort(key=lambda other: order[id(other)])


def load_into(target: nn.Module, results: TrainedResults, *, optimizer: Any, scheduler: Any) -> nn.Module:
    """Copy tensors into a module, and state into its optimizer and scheduler."""
    tensors = dict(tensors_of(target))
    arrays = results.arrays({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    if scheduler is not None and optimizer is None:
        raise UnsupportedError("a `scheduler` is given without its optimizer", hint="give `optimizer=` as well")
    state = None
    if optimizer is not None:
        state = _states_of(results, optimizer, scheduler, dict(target.named_parameters()))
    with torch.no_grad():
        for name, array in arrays.items():
            tensors[name].copy_(from_array(array).to(tensors[name].dtype))
    if state is not None:
        optimizer.load_state_dict(state[0])
        if scheduler is not None:
            scheduler.load_state_dict(state[1])
    return target


def _states_of(
    results: TrainedResults, optimizer: Any, scheduler: Any, named: dict[str, nn.Parameter]
) -> tuple[Any, Any]:
    """Return the state dicts that an optimizer and a scheduler load."""
    run = results.run
    module, other, others_scheduler, _ = to_torch(results.model, probe=False)
    for ours, theirs in ((optimizer, other), (scheduler, others_scheduler)):
        if type(ours) is not type(theirs):
            names = ["none" if x is None else type(x).__name__ for x in (theirs, ours)]
            subject = "optimizer" if theirs is other else "scheduler"
            raise UnsupportedError(
                f"the training model has the {subject} {names[0]}, not {names[1]}",
                hint="create the objects with `onward.to_torch(training)`",
            )
    others = module.parameters_by_name()
    numbers = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state = optimizer.state_dict()
    rates = {id(p): group for group in other.param_groups for p in group["params"]}
    for group, stored in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for name in (name for name, p in named.items() if any(p is own for own in group["params"])):
            if name in others and id(others[name]) in rates:
                theirs = rates[id(others[name])]
                stored |= {key: theirs[key] for key in ("lr", "initial_lr") if key in theirs}
    state["state"] = {
        numbers[id(named[name])]: copy.deepcopy(dict(other.state[parameter]))
        for name, parameter in others.items()
        if name in named and id(named[name]) in numbers and parameter in other.state
    }
    schedule_state = None if scheduler is None else others_scheduler.state_dict()
    trial, trial_scheduler = copy.deepcopy((optimizer, scheduler))
    trial.load_state_dict(state)
    if trial_scheduler is not None:
        trial_scheduler.load_state_dict(schedule_state)
    copies = [p for group in trial.param_groups for p in group["params"]]
    by_number = {number: name for name, p in named.items() if (number := numbers.get(id(p))) is not None}
    copied_names = {id(copies[n]): name for n, name in by_number.items() if name in run.parameters}
    schedule = read_schedule(trial_scheduler, updates_per_step(run)) if trial_scheduler is not None else None
    groups, slots, step = read_optimizer(trial, copied_names, schedule)
    depends_on_count = step or schedule is not None
    results.confirm(
        dataclasses.replace(
            run, groups=groups, state=_with_others(run.state, slots), step=step if depends_on_count else run.step,
            schedule=schedule.specs if schedule else (),
        )
    )  # fmt: skip
    return state, schedule_state


def _with_others(state: Any, slots: dict[str, Any]) -> dict[str, Any]:
    """Return slots with the state of a run that is not of the optimizer, such as random keys."""
    owners = {key.rpartition("/")[0] for key in slots}
    return {**{key: array for key, array in state.items() if key.rpartition("/")[0] not in owners}, **slots}
