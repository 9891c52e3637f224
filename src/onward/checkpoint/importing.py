"""A checkpoint as a training model: its state, optimizer and schedule, in a graph that computes what its model did."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.arguments import checked
from onward.checkpoint.architecture import captured_of
from onward.checkpoint.description import COUNT, MASTER, Checkpoint, Group, Optimizer, Schedule
from onward.checkpoint.format import Captured
from onward.checkpoint.kept import keep
from onward.checkpoint.matching import Match, match
from onward.checkpoint.naming import Order, with_names
from onward.checkpoint.opening import open_checkpoint
from onward.checkpoint.optax_trees import of_adamax
from onward.checkpoint.optimizers import spec_of
from onward.checkpoint.placing import placed
from onward.checkpoint.scales import scaling_of
from onward.checkpoint.tensors import Tensor, as_tensor, count_of, turned
from onward.convert.problems import Problems
from onward.convert.rates import Factor, complete
from onward.convert.run import Group as RunGroup
from onward.convert.run import Run, assemble, disassemble
from onward.errors import ArgumentError, UnsupportedError, listed
from onward.inspect import describe
from onward.model import Model, read
from onward.recipe.optimizers import optimizer as known_optimizer
from onward.recipe.spec import Spec, parse
from onward.transform.training import without_steps

_NARROW = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an import would do."""

    checkpoint: Checkpoint
    """With names for all that its optimizers keep."""
    match: Match
    run: Run
    """But for the state of optimizers."""
    slots: Mapping[str, Tensor]
    """That state, by the names of a training model."""
    weights: Mapping[str, Tensor]
    """By the names of the graph."""
    notes: tuple[str, ...]
    """How names were found, and what whoever goes on should know."""


@checked()
def from_checkpoint(
    path: str | os.PathLike[str] | Checkpoint,
    like: Model | str | os.PathLike[str] | None = None,
    *,
    loss: Any = None,
    optimizer: str | Mapping[str, Any] | None = None,
    schedule: Any = None,
    names: Mapping[str, str] | Sequence[str] | None = None,
    module: Any = None,
    example_inputs: Any = None,
) -> Model:
    """The training model that goes on where a checkpoint of another framework is. Nothing in it is executed.

    - `like`: the ONNX model that computes what the checkpoint's model does; where it is a training model, its loss is
      taken. Not needed where the checkpoint has its graph, or a configuration of transformers, or `module` is given
    - `loss`: as `prepare` takes it, where neither says which it is
    - `optimizer`: its name, where the checkpoint does not tell; numbers given here win over stored ones
    - `schedule`: as `prepare` takes it, where the checkpoint does not tell
    - `names`: names of the checkpoint -> names of the graph where rules do not find them; or a list of the parameters
      in the order of the optimizer
    - `module`: in place of `like`, the nn.Module or LightningModule that was trained; its class, which is called with
      the hyper-parameters that Lightning stores; or where that is, `"package.module:Class"`. Its values do not matter
    - `example_inputs`: what the module takes, as for `from_torch`; a batch, where its `training_step` is the loss
    """
    return imported(
        plan(
            path, like, loss=loss, optimizer=optimizer, schedule=schedule, names=names, module=module,
            example_inputs=example_inputs,
        )
    )  # fmt: skip


def plan(
    path: str | os.PathLike[str] | Checkpoint,
    like: Model | str | os.PathLike[str] | None,
    *,
    loss: Any = None,
    optimizer: str | Mapping[str, Any] | None = None,
    schedule: Any = None,
    names: Mapping[str, str] | Sequence[str] | None = None,
    module: Any = None,
    example_inputs: Any = None,
    captured: Captured | None = None,
) -> Plan:
    """What an import would do, without doing it. `captured` is what the checkpoint computes, where that is known."""
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    if like is not None and module is not None:
        raise ArgumentError("both `like` and `module` are given", hint="leave one of them out")
    if captured is None:
        captured = captured_of(checkpoint, module, example_inputs, loss) if like is None else Captured(read(like), None)
    checkpoint = dataclasses.replace(checkpoint, tied={**checkpoint.tied, **captured.tied})
    given = captured.model
    base = disassemble(given) if given.steps else None
    model = without_steps(given)
    known = names if isinstance(names, Mapping) else None
    matched = match(checkpoint.tensors, model, known, checkpoint.tied, captured.stored)
    listed_names = None if isinstance(names, Mapping) else names
    checkpoint, notes = _named(checkpoint, matched, model, listed_names, captured.orders)
    _refuse_unmatched(checkpoint, matched, _own_constants(matched, model, base))
    if checkpoint.waiting:
        raise UnsupportedError(
            f"gradients of {checkpoint.waiting} batches wait for an update in `{checkpoint.path}`, and would be lost",
            hint="save it after an update, which makes use of them",
        )
    groups = _groups(checkpoint, matched, parse(optimizer) if optimizer is not None else None, base)
    checkpoint = _with_slots(checkpoint, matched, groups)
    weights, slots, has_masters = _state(checkpoint, matched, model, groups)
    step = _step(checkpoint, groups)
    recipe = _recipe(checkpoint, base, has_masters)
    if (scaling := scaling_of(checkpoint.scaler)) is not None and _computes_in_float16(model, groups):
        recipe["loss_scale"] = scaling.words
        slots |= scaling.state
    slots |= _averages(checkpoint, matched, groups, step) if "ema" in recipe else {}
    words, more = _schedule(checkpoint, schedule, step, groups, base)
    run = Run(
        model=model,
        loss=_loss(checkpoint, base, captured.loss if loss is None else loss),
        groups=groups,
        step=step,
        schedule=words,
        clip=base.clip if base and not _tells(checkpoint) else checkpoint.clip,
        statistics=base.statistics if base else ("sample" if _counts_as_pytorch(groups) else "population"),
        recipe=recipe,
    )
    return Plan(checkpoint, matched, run, slots, weights, (*matched.rules, *notes, *more, *checkpoint.remarks))


def imported(plan: Plan) -> Model:
    """The training model of a plan."""
    for name, tensor in plan.weights.items():
        value = plan.run.model.graph.initializers[name]
        assert value.const_value is not None
        value.const_value = placed(tensor, name, value.const_value.metadata_props)
    made = assemble(plan.run)
    problems = Problems("the state of the optimizer")
    for name, tensor in plan.slots.items():
        _fill(made, name, tensor, problems)
    problems.refuse()
    keep(made, plan.checkpoint, plan.match)
    _note_progress(made, plan)
    return made


def _note_progress(model: Model, plan: Plan) -> None:
    """Write down how far the run is, as whoever trains on will."""
    metadata = model.step().algorithm.metadata_props
    epoch = plan.checkpoint.progress.get("epoch")
    progress = {**json.loads(metadata["train.progress"]), "step": plan.run.step}
    metadata["train.progress"] = json.dumps({**progress, **({"epoch": epoch} if epoch is not None else {})})


def _fill(model: Model, name: str, tensor: Tensor, problems: Problems) -> None:
    """Give state of a model its value, which stays where it is unless it is a single number."""
    known = model.step().algorithm.initializers.get(name)
    if known is None or known.const_value is None:
        problems.add(f"the optimizer of a training model does not keep `{name}`", "say which optimizer it is")
        return
    held = known.const_value
    if tuple(held.shape.numpy()) != tensor.shape:
        what = f"`{name}` is {list(tensor.shape)}, not {list(held.shape.numpy())}"
        problems.add(what, "give the model that it is of")
    elif held.dtype.numpy() == tensor.dtype:
        known.const_value = placed(tensor, name, held.metadata_props)
    elif not tensor.shape:
        model.set(name, tensor.array())
    else:
        problems.add(f"`{name}` is {tensor.dtype}, not {held.dtype.numpy()}", "give a model of the type of its weights")


# ---- names -----------------------------------------------------------------------------------------------------------


def _named(
    checkpoint: Checkpoint, matched: Match, model: Model, given: Sequence[str] | None, known: Mapping[str, Order]
) -> tuple[Checkpoint, list[str]]:
    """The checkpoint with names for what its optimizers keep, and how these were found."""
    if all(optimizer.has_names for optimizer in checkpoint.optimizers):
        return checkpoint, []
    graph = list(model.graph.initializers)
    learns = {weight.name for weight in describe(model).weights if weight.role not in ("constant", "statistics")}
    stored = [name for name in checkpoint.tensors if matched.names.get(name) in learns]
    place = {ours: graph.index(ours) for ours in matched.names.values()}
    theirs = {ours: name for name, ours in matched.names.items()}
    orders: dict[str, Order] = {"the list that was given": [list(given)]} if given is not None else {}
    if given is None:
        orders = {origin: [[theirs.get(n, n) for n in part] for part in order] for origin, order in known.items()}
    if given is None and checkpoint.keeps_order:
        orders["the order of the state of the module"] = [stored]
    if given is None:
        orders["the order of the graph"] = [sorted(stored, key=lambda name: place[matched.names[name]])]
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    optimizers, notes = [], []
    for optimizer in checkpoint.optimizers:
        made, how = with_names(optimizer, orders, shapes)
        optimizers.append(made)
        notes += [how] if how else []
    return dataclasses.replace(checkpoint, optimizers=tuple(optimizers)), notes


def _own_constants(matched: Match, model: Model, base: Run | None) -> set[str]:
    """Tensors that a training model neither trains nor averages, while the checkpoint has nothing left over."""
    if base is None or matched.left:
        return set()
    changing = {weight.name for weight in describe(model).weights if weight.role == "statistics"}
    return {name for name in matched.absent if name not in changing | {*base.parameters}}


def _refuse_unmatched(checkpoint: Checkpoint, matched: Match, constants: set[str]) -> None:
    problems = Problems("the names of the checkpoint and of the model")
    hint = "give pairs: `--names FILE` (JSON), or `names={...}`; or the model that the checkpoint is of"
    if absent := [name for name in matched.absent if name not in constants]:
        problems.add(f"the checkpoint has no {listed(absent, 8)}", hint)
    optimized = {name for optimizer in checkpoint.optimizers for name in optimizer.slots}
    lost = [name for name in matched.left if name in optimized]
    if lost or (matched.absent and matched.left):
        problems.add(f"the model has no {listed(lost or matched.left, 8)}", hint)
    problems.refuse()


# ---- what is trained -------------------------------------------------------------------------------------------------


def _tells(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint says what its optimizers are, and not only what they keep."""
    return any(group.optimizer is not None for each in checkpoint.optimizers for group in each.groups)


def _groups(checkpoint: Checkpoint, matched: Match, said: Spec | None, base: Run | None) -> list[RunGroup]:
    if not checkpoint.optimizers:
        raise UnsupportedError(
            f"`{checkpoint.path}` has no state of an optimizer: there is no run to go on with",
            hint="take its weights into a model: `onward.prepare` begins a new run",
        )
    found = []
    for optimizer in checkpoint.optimizers:
        for group in optimizer.groups:
            own = [matched.names[str(name)] for name in group.parameters if str(name) in matched.names]
            if own and base and said is None and not _tells(checkpoint):
                found += _groups_of(base, own, group.numbers)
            elif own:
                found.append(RunGroup(_spec(optimizer, group, said), list(dict.fromkeys(own))))
    return found


def _with_slots(checkpoint: Checkpoint, matched: Match, groups: Sequence[RunGroup]) -> Checkpoint:
    """The checkpoint with names of slots that only the class of an optimizer tells."""
    ours = {name for group in groups if group.optimizer.name == "adamax" for name in group.parameters}
    theirs = {name for name, other in matched.names.items() if other in ours}
    return dataclasses.replace(checkpoint, optimizers=tuple(of_adamax(each, theirs) for each in checkpoint.optimizers))


def _groups_of(base: Run, own: Sequence[str], numbers: Mapping[str, float]) -> list[RunGroup]:
    """The optimizers that a training model has for parameters, with what the checkpoint tells of them."""
    found = []
    for each in base.groups:
        spec = each.optimizer
        if isinstance(spec, Spec):
            spec = Spec(spec.name, {key: numbers.get(key, value) for key, value in spec.options.items()})
        found.append(RunGroup(spec, [name for name in own if name in each.parameters]))
    return [group for group in found if group.parameters]


def _spec(optimizer: Optimizer, group: Group, said: Spec | None) -> Spec:
    if said is None and group.optimizer is not None:
        return group.optimizer
    if said is None:
        what = " or ".join(optimizer.families) or "of a kind that is not known"
        raise UnsupportedError(
            f"the checkpoint does not tell which optimizer it is: {what}",
            hint=f"say it: `--optimizer {(optimizer.families or ('adamw',))[0]}`, or `optimizer=...`",
        )
    stored, known = group.optimizer, known_optimizer(said.name)
    if stored is None or stored.name != said.name:
        is_torch = optimizer.variant == "torch"
        numbers = {key: value for key, value in group.numbers.items() if key in known.hyper}
        stored = spec_of(said.name, group.settings) if group.settings and is_torch else Spec(said.name, numbers)
    options = {**(stored.options if stored else {}), **said.options}
    if "lr" not in options:
        raise UnsupportedError(
            "the checkpoint does not say the learning rate", hint=f"give it: `--optimizer {said.name}:lr=1e-3`"
        )
    variant = optimizer.variant if optimizer.variant in known.variants else next(iter(known.variants))
    return Spec(said.name, {"variant": variant, **options})


def _state(
    checkpoint: Checkpoint, matched: Match, model: Model, groups: Sequence[RunGroup]
) -> tuple[dict[str, Tensor], dict[str, Tensor], bool | None]:
    """Weights and slots by the names of the training model; whether narrow weights have masters, or None."""
    weights = {
        ours: _turned(checkpoint.tensors[theirs], theirs in matched.turned) for theirs, ours in matched.names.items()
    }
    slots: dict[str, Tensor] = {}
    masters: dict[str, Tensor] = {}
    trained = {name for group in groups for name in group.parameters}
    for optimizer in checkpoint.optimizers:
        for theirs, kept in optimizer.slots.items():
            ours = matched.names.get(str(theirs))
            if ours is None or ours not in trained:
                continue
            for slot, value in kept.items():
                if slot == COUNT or value is None:
                    continue
                tensor = _turned(as_tensor(value), str(theirs) in matched.turned)
                (masters if slot == MASTER else slots)[ours if slot == MASTER else f"{ours}/{slot}"] = tensor
    wide = [name for name in masters if _type(model, name) == ir.DataType.FLOAT]
    weights |= {name: masters.pop(name) for name in wide}
    _check_types(weights, model)
    slots |= {f"{name}/{MASTER}": tensor for name, tensor in masters.items()}
    narrow = any(_type(model, name) in _NARROW for name in trained)
    return weights, slots, bool(masters) if narrow else None


def _type(model: Model, name: str) -> ir.DataType:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.dtype


def _check_types(weights: Mapping[str, Tensor], model: Model) -> None:
    problems = Problems("the tensors of the checkpoint")
    for name, tensor in weights.items():
        if _type(model, name).numpy() != tensor.dtype:
            what = f"`{name}` is {tensor.dtype}, and {_type(model, name).name.lower()} in the model"
            problems.add(what, "give a model of the type of its weights")
    problems.refuse()


def _turned(tensor: Tensor, is_turned: bool) -> Tensor:
    return turned(tensor) if is_turned and len(tensor.shape) == 2 else tensor


def _step(checkpoint: Checkpoint, groups: Sequence[RunGroup]) -> int:
    """Updates made; parameters that had fewer are refused, where it matters."""
    step = checkpoint.step or 0
    counts: dict[str, int] = {}
    for optimizer in checkpoint.optimizers:
        for name, slots in optimizer.slots.items():
            if COUNT in slots:
                counts[str(name)] = count_of(slots[COUNT])
    if not counts:
        return step
    most = max(counts.values())
    behind = [name for name, count in counts.items() if count != most]
    if behind:
        raise UnsupportedError(
            f"{listed(behind, 5)} had fewer updates than other parameters, and a training model counts once for all",
            hint="leave parameters without gradients out of the optimizer",
        )
    return most


# ---- the rest of a run -----------------------------------------------------------------------------------------------


def _schedule(
    checkpoint: Checkpoint, said: Any, step: int, groups: Sequence[RunGroup], base: Run | None
) -> tuple[list[Spec], list[str]]:
    """The schedule by updates, and what is to be said of it."""
    if said is not None:
        given = [said] if isinstance(said, str | Mapping | Spec) else list(said)
        return [parse(each) for each in given], ["the schedule is the one that was given"]
    found = [each for each in checkpoint.schedules if each.words != ()]
    if not found:
        return [], []
    schedule = found[0]
    if schedule.words is None and base and not _tells(checkpoint):
        return list(base.schedule), ["the schedule is that of the model, with its optimizer"]
    if schedule.words is None:
        raise UnsupportedError(
            "the checkpoint does not tell the shape of its schedule",
            hint="say it: `--schedule cosine:steps=1000,warmup=50`, or `schedule=...`; `constant` if the rate stays",
        )
    every = _updates_per_step(schedule, step, checkpoint)
    words = [_by_updates(spec, every) for spec in schedule.words]
    _check_rates(schedule, groups, checkpoint)
    return words, [f"the schedule steps once in {every} updates"] if every > 1 else []


def _updates_per_step(schedule: Schedule, step: int, checkpoint: Checkpoint) -> int:
    position = schedule.position
    if position is None or position == step or not position:
        return 1
    epoch = checkpoint.progress.get("epoch")
    if epoch == position and step % position == 0:
        return step // position
    raise UnsupportedError(
        f"its scheduler made {position} steps, and there were {step} updates",
        hint="say the schedule by updates: `--schedule step:size=2,gamma=0.1,every=100`, or `schedule=...`",
    )


def _by_updates(spec: Spec, every: int) -> Spec:
    if every == 1:
        return spec
    end = {"until": spec.options["until"] * every} if "until" in spec.options else {}
    return Spec(spec.name, {**spec.options, "every": every, **end})


def _check_rates(schedule: Schedule, groups: Sequence[RunGroup], checkpoint: Checkpoint) -> None:
    """The rates that the optimizer has are those of the schedule, or it is another one."""
    assert schedule.words is not None
    parts = complete([(spec.without("until"), spec.options.get("until", math.inf)) for spec in schedule.words])
    stored = [group.settings.get("lr") for each in checkpoint.optimizers for group in each.groups]
    for group, rate in zip(groups, stored, strict=False):
        expected = Factor(group.lr, parts).rate(schedule.position or 0)
        if isinstance(rate, float) and not math.isclose(expected, rate, rel_tol=1e-5, abs_tol=1e-6 * group.lr):
            raise UnsupportedError(
                f"the learning rate is {rate:g}, and by its schedule it would be {expected:g} after "
                f"{schedule.position} steps",
                hint="say the schedule: `--schedule cosine:steps=1000`, or `schedule=...`",
            )


def _loss(checkpoint: Checkpoint, base: Run | None, said: Any) -> Any:
    for known in (said, base.loss if base else None, checkpoint.loss):
        if known is not None:
            return known
    raise UnsupportedError(
        f"neither `{checkpoint.path}` nor the model says which loss was trained",
        hint="say it: `--loss cross_entropy`, or `loss=...`; or give a training model",
    )


def _recipe(checkpoint: Checkpoint, base: Run | None, has_masters: bool | None) -> dict[str, Any]:
    recipe = dict(base.recipe) if base else {}
    if checkpoint.accumulate > 1:
        recipe["accumulate"] = checkpoint.accumulate
    if checkpoint.average_decay is not None:
        recipe["ema"] = checkpoint.average_decay
    if has_masters is not None:
        recipe["master_weights"] = has_masters
    return recipe


def _averages(checkpoint: Checkpoint, matched: Match, groups: Sequence[RunGroup], step: int) -> dict[str, Tensor]:
    """Averages of what is trained, as state of the training model; those that have not begun are none."""
    trained = {name for group in groups for name in group.parameters}
    found = {
        f"ema/{matched.names[theirs]}": _turned(tensor, theirs in matched.turned)
        for theirs, tensor in checkpoint.averages.items()
        if matched.names.get(theirs) in trained
    }
    return {**found, "ema/n_averaged": as_tensor(np.int64(step))} if found else {}


def _computes_in_float16(model: Model, groups: Sequence[RunGroup]) -> bool:
    """Whether a scale of the loss makes a difference: with more exponents it does not."""
    return any(_type(model, name) == ir.DataType.FLOAT16 for group in groups for name in group.parameters)


def _counts_as_pytorch(groups: Sequence[RunGroup]) -> bool:
    return all(group.spec.options.get("variant") == "torch" for group in groups)
