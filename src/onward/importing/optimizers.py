"""The optimizers of a checkpoint as groups of a run: as it tells, as the user says, or as the given model has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.matching import Match
from onward.checkpoint.pytorch.optimizers import spec_of
from onward.checkpoint.pytree.optax_trees import of_adamax
from onward.errors import UnsupportedError
from onward.recipe.optimizers import configure
from onward.recipe.optimizers import optimizer as known_optimizer
from onward.recipe.spec import Spec
from onward.run_state.state import Group, Optimizer, RunState


def tells_optimizers(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint says what its optimizers are, and not only what they keep."""
    return any(group.optimizer is not None for each in checkpoint.optimizers for group in each.groups)


def run_groups(checkpoint: Checkpoint, matched: Match, said: Spec | None, base: RunState | None) -> list[Group]:
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
                found.append(Group(_spec(optimizer, group, said), list(dict.fromkeys(own))))
    return found


def with_state(checkpoint: Checkpoint, matched: Match, groups: Sequence[Group]) -> set[str]:
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


def with_slot_names(checkpoint: Checkpoint, matched: Match, groups: Sequence[Group]) -> Checkpoint:
    """The checkpoint with names of slots that only the class of an optimizer tells."""
    ours = {name for group in groups if group.optimizer_name == "adamax" for name in group.parameters}
    theirs = {name for name, other in matched.names.items() if other in ours}
    return dataclasses.replace(checkpoint, optimizers=tuple(of_adamax(each, theirs) for each in checkpoint.optimizers))


def _groups_of(base: RunState, own: Sequence[str], optimizer: Optimizer, group: Group) -> list[Group]:
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
        found.append(Group(spec, [name for name in own if name in each.parameters]))
    return [group for group in found if group.parameters]


def _spec(optimizer: Optimizer, group: Group, said: Spec | None) -> Spec:
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
