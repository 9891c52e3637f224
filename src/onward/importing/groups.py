"""Names of what optimizers keep, and whether those of the checkpoint and of the graph go together."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from onward.checkpoint.comparing import same
from onward.checkpoint.format import Checkpoint, Order
from onward.checkpoint.matching import NOT_PROVEN, TRAINER, Match, Shapes, stored_shapes, with_names
from onward.checkpoint.pytorch.states import spec_of
from onward.checkpoint.pytree.optax_states import of_adamax
from onward.errors import UnsupportedError, list_names
from onward.inspect import describe
from onward.model import Model
from onward.recipe.optimizers import configure
from onward.recipe.optimizers import optimizer as known_optimizer
from onward.recipe.spec import Spec
from onward.run_state.problems import Problems
from onward.run_state.state import OptimizerState, ParameterGroup, RunState


def with_optimizer_names(
    checkpoint: Checkpoint,
    matched: Match,
    model: Model,
    base: RunState | None,
    given: Sequence[str] | None,
    known: Mapping[str, Order],
) -> tuple[Checkpoint, dict[str, bool]]:
    """Return the checkpoint with names for what its optimizers keep, and notes on how these were found.

    A note has True if it is on an assumption that changes numbers where it is wrong.
    """
    if checkpoint.has_names:
        return checkpoint, {}
    graph, theirs = list(model.graph.initializers), matched.theirs
    learns = {weight.name for weight in describe(model).weights if weight.role not in ("constant", "statistics")}
    stored = [name for name in checkpoint.tensors if matched.names.get(name) in learns]
    place = {ours: graph.index(ours) for ours in matched.names.values()}
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    in_trainer = checkpoint.format == TRAINER
    optimizers, notes = [], dict[str, bool]()
    for optimizer in checkpoint.optimizers:
        orders: dict[str, Order] = {}
        if given is not None:
            orders["the list that was given"] = _by_group(given, optimizer)
        else:
            for origin, order in known.items():
                if in_trainer or len(order) == 1:  # only the Trainer is known to divide parameters as it does
                    orders[origin] = [[theirs.get(name, name) for name in part] for part in order]
            if base:
                place_there = {theirs[name]: at for name, at in place.items()}
                if checkpoint.keeps_order:
                    place_there = {name: at for at, name in enumerate(checkpoint.tensors)}
                parts = [
                    (each, sorted((theirs[n] for n in each.parameters if n in theirs), key=place_there.__getitem__))
                    for each in base.groups
                ]
                if order := _as_grouped(optimizer, parts, shapes):
                    orders["the groups of the training model"] = order
            if checkpoint.keeps_order:
                orders["the order of the state of the module"] = [stored]
            orders["the order of the graph"] = [sorted(stored, key=lambda name: place[matched.names[name]])]
        named, how = with_names(optimizer, orders, shapes, in_trainer=in_trainer)
        optimizers.append(named)
        notes |= {how: how.endswith(NOT_PROVEN)} if how else {}
    return dataclasses.replace(checkpoint, optimizers=tuple(optimizers)), notes


def _by_group(names: Sequence[str], optimizer: OptimizerState) -> Order:
    """Divide names as the groups of an optimizer are, if their number agrees."""
    sizes = [len(group.parameters) for group in optimizer.groups]
    if sum(sizes) != len(names):
        return [list(names)]
    ends = list(itertools.accumulate(sizes))
    return [list(names[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _as_grouped(optimizer: OptimizerState, parts: Sequence[tuple[ParameterGroup, list[str]]], shapes: Shapes) -> Order:
    """Return parts in the order of the groups of an optimizer, or none where that is not certain.

    A group has the size and the shapes of its part. Where several do, the settings in which groups differ tell: all of
    them, or all but the rate.
    """
    stored = stored_shapes(optimizer)
    settings = [
        group.spec.options if group.optimizer else {"lr": group.settings.get("lr"), **group.numbers}
        for group in optimizer.groups
    ]
    varying = {key for each in settings for key in each if any(each[key] != other.get(key) for other in settings)}

    def fits(
        group: ParameterGroup, settings: Mapping[str, Any], part: tuple[ParameterGroup, list[str]], keys: set[str]
    ) -> bool:
        run_group, names = part
        if len(names) != len(group.parameters):
            return False
        pairs = zip(group.parameters, names, strict=True)
        if any(stored.get(number, shapes[name]) != shapes[name] for number, name in pairs):
            return False
        ours = run_group.spec.options if isinstance(run_group.optimizer, Spec) else {}
        return all(same(settings.get(key, 0), ours.get(key, 0)) for key in keys)  # training models omit zeros

    for keys in (varying, varying - {"lr"}, set[str]()):
        chosen = [
            [i for i, part in enumerate(parts) if fits(group, numbers, part, keys)]
            for group, numbers in zip(optimizer.groups, settings, strict=True)
        ]
        if all(len(each) == 1 for each in chosen) and len({each[0] for each in chosen}) == len(parts):
            return [parts[i][1] for (i,) in chosen]
    return [parts[0][1]] if len(parts) == 1 else []


def own_constants(matched: Match, model: Model, base: RunState | None) -> set[str]:
    """Tensors that a training model neither trains nor averages, while the checkpoint has nothing left over."""
    if base is None or matched.left:
        return set()
    changing = {weight.name for weight in describe(model).weights if weight.role == "statistics"}
    return {name for name in matched.absent if name not in changing | {*base.parameters}}


def refuse_unmatched(checkpoint: Checkpoint, matched: Match, constants: set[str]) -> None:
    problems = Problems("the names of the checkpoint and of the model")
    hint = "give pairs: `--names FILE` (JSON), or `names={...}`; or the model that the checkpoint is of"
    if absent := [name for name in matched.absent if name not in constants]:
        problems.add(f"the checkpoint has no {list_names(absent, 8)}", hint)
    optimized = {name for optimizer in checkpoint.optimizers for name in optimizer.slots}
    lost = [name for name in matched.left if name in optimized]
    if lost or (matched.absent and matched.left):
        problems.add(f"the model has no {list_names(lost or matched.left, 8)}", hint)
    problems.refuse()


def tells_optimizers(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint says what its optimizers are, and not only what they keep."""
    return any(group.optimizer is not None for group in checkpoint.stored_groups)


def run_groups(
    checkpoint: Checkpoint, matched: Match, said: Spec | None, base: RunState | None
) -> list[ParameterGroup]:
    if not checkpoint.optimizers:
        raise UnsupportedError(
            f"`{checkpoint.path}` has no state of an optimizer: there is no run to go on with",
            hint="take its weights into a model: `onward.prepare` begins a new run",
        )
    found = []
    for optimizer in checkpoint.optimizers:
        for group in optimizer.groups:
            own = [matched.names[str(name)] for name in group.parameters if str(name) in matched.names]
            if own and base and said is None and not tells_optimizers(checkpoint):
                found += _groups_of(base, own, optimizer, group)
            elif own:
                found.append(ParameterGroup(_spec(optimizer, group, said), list(dict.fromkeys(own))))
    return found


def with_state(checkpoint: Checkpoint, matched: Match, groups: Sequence[ParameterGroup]) -> set[str]:
    """Return the parameters of groups without those that an optimizer has no state of, where it has some of others.

    Optimizers of PyTorch are often given all parameters, and those that are frozen never get any state.
    """
    ours = matched.names
    kept = {ours[str(name)] for o in checkpoint.optimizers for name, slots in o.slots.items() if slots and name in ours}
    found = set[str]()
    for group in groups:
        configured = configure(group.optimizer) if isinstance(group.optimizer, Spec) else None
        is_stateful = configured is None or bool(configured.kind.choose(configured.settings, None).slots)
        found |= {name for name in group.parameters if name in kept or not kept or not is_stateful}
    return found


def with_slot_names(checkpoint: Checkpoint, matched: Match, groups: Sequence[ParameterGroup]) -> Checkpoint:
    """The checkpoint with names of slots that only the class of an optimizer tells."""
    ours = {name for group in groups if group.optimizer_name == "adamax" for name in group.parameters}
    theirs = {name for name, other in matched.names.items() if other in ours}
    return dataclasses.replace(checkpoint, optimizers=tuple(of_adamax(each, theirs) for each in checkpoint.optimizers))


def _groups_of(
    base: RunState, own: Sequence[str], optimizer: OptimizerState, group: ParameterGroup
) -> list[ParameterGroup]:
    """Return the optimizers that a training model has for parameters, with what the checkpoint tells of them."""
    found = []
    for each in base.groups:
        spec = each.optimizer
        if isinstance(spec, Spec):
            numbers: Mapping[str, Any] = group.numbers
            if group.settings and optimizer.variant == "torch" and spec.name in optimizer.families:
                stored = spec_of(spec.name, group.settings)
                numbers = stored.options if stored is not None else numbers
            spec = Spec(spec.name, {key: numbers.get(key, value) for key, value in spec.options.items()})
        found.append(ParameterGroup(spec, [name for name in own if name in each.parameters]))
    return [group for group in found if group.parameters]


def _spec(optimizer: OptimizerState, group: ParameterGroup, said: Spec | None) -> Spec:
    if said is None and group.optimizer is not None:
        return group.spec
    if said is None:
        raise UnsupportedError(
            f"the checkpoint does not tell which optimizer it is: {optimizer.title}",
            hint=f"say it: `--optimizer {(optimizer.families or ('adamw',))[0]}`, or `optimizer=...`",
        )
    stored = None if group.optimizer is None else group.spec
    known = known_optimizer(said.name)
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
