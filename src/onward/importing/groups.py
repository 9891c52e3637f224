"""Names of optimizer state, and agreement between groups of a checkpoint and of a graph."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onward.checkpoint.comparison import same
from onward.checkpoint.exporting import weights_of
from onward.checkpoint.format import Checkpoint, Order
from onward.checkpoint.name_matching import NOT_PROVEN, TRAINER, Match, Shapes, by_name, stored_shapes, with_names
from onward.checkpoint.pytorch.contents import OF_AVERAGES, contents_of, modules_of, of_module
from onward.checkpoint.pytorch.state_dicts import spec_of
from onward.checkpoint.pytree.optax_states import of_adamax
from onward.errors import UnsupportedError, list_names
from onward.inspect import describe
from onward.model import Model
from onward.options import MissingOptions
from onward.recipe.exporter_notes import is_named_as_parameter
from onward.recipe.optimizers import configure
from onward.recipe.optimizers import optimizer as known_optimizer
from onward.recipe.spec import Spec
from onward.recipe.trainable import as_patterns, matching
from onward.run_state.problems import Problems
from onward.run_state.state import COUNT, MASTER, OptimizerState, ParameterGroup, RunState
from onward.run_state.tensors import Tensor
from onward.vocabulary.torch import OF_ADAFACTOR, REFUSED_OPTIMIZERS


def with_optimizer_names(
    checkpoint: Checkpoint,
    matched: Match,
    model: Model,
    base: RunState | None,
    orders_of_graph: Mapping[str, Order],
    options: MissingOptions,
) -> tuple[Checkpoint, dict[str, bool]]:
    """Return the checkpoint with names for its optimizer state, and notes on their origin.

    A note has True if it is an assumption that changes numbers if it is wrong.
    """
    if checkpoint.has_names:
        return checkpoint, {}
    graph, theirs = list(model.graph.initializers), matched.theirs
    learns = {weight.name for weight in describe(model).weights if weight.role not in ("constant", "statistics")}
    frozen = {*matching(as_patterns(options.freeze) or (), learns)}
    if options.trainable is not None:
        frozen |= learns - {*matching(as_patterns(options.trainable) or (), learns)}
    stored = [name for name, ours in matched.names.items() if ours in learns and theirs[ours] == name]
    index = {ours: graph.index(ours) for ours in matched.names.values()}
    first = _first_uses(model, index)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    in_trainer = checkpoint.format == TRAINER
    attempts: list[tuple[OptimizerState, str]] = []
    """Optimizers, and how their parameters were named."""
    failure = None
    for optimizer in checkpoint.optimizers:
        orders: dict[str, Order] = {}
        if options.names is not None and not isinstance(options.names, Mapping):
            orders["the list that was given"] = _by_group(options.names, optimizer)
        else:
            for origin, order in orders_of_graph.items():
                if in_trainer or len(order) == 1:  # only the Trainer has a known division
                    orders[origin] = [[theirs.get(name, name) for name in names] for names in order]
            if base:
                position = {theirs[name]: at for name, at in index.items()}
                if checkpoint.keeps_order:
                    position = {name: at for at, name in enumerate(checkpoint.tensors)}
                parts = [
                    (group, sorted((theirs[n] for n in group.parameters if n in theirs), key=position.__getitem__))
                    for group in base.groups
                ]
                if order := _as_grouped(optimizer, parts, shapes):
                    orders["the groups of the training model"] = order
            if checkpoint.keeps_order:
                orders["the order of the state dict"] = [stored]
            orders["the order of the graph"] = [sorted(stored, key=lambda name: index[matched.names[name]])]
            orders["the order of the graph, with tied parameters at their first use"] = [
                sorted(stored, key=lambda name: first[matched.names[name]])
            ]
        for origin, order in list(orders.items()):
            not_frozen = [[name for name in names if matched.names.get(name) not in frozen] for names in order]
            if not_frozen != order:
                orders[f"{origin}, without frozen parameters"] = not_frozen
        try:
            attempts.append(with_names(optimizer, orders, shapes, in_trainer=in_trainer))
        except UnsupportedError as error:
            attempts.append((optimizer, ""))
            failure = error
    named = [optimizer for optimizer, _ in attempts if optimizer.has_names]
    if failure is not None and not (checkpoint.module and named):
        raise failure
    notes = {rule: rule.endswith(NOT_PROVEN) for _, rule in attempts if rule}
    names = [name for optimizer in named for group in optimizer.groups for name in group.parameters]
    if checkpoint.module and len(names) > len({*names}):  # optimizers of several modules fit
        chosen, remark = _optimizer_of(checkpoint)
        notes = {rule: rule.endswith(NOT_PROVEN) for rule in (attempts[chosen][1], remark)}
        attempts = [pair if at == chosen else (checkpoint.optimizers[at], "") for at, pair in enumerate(attempts)]
    if others := [f"{at}" for at, (optimizer, _) in enumerate(attempts, 1) if not optimizer.has_names]:
        listed = f"{', '.join(others)} of {len(attempts)}"
        notes[f"optimizers of other modules than `{checkpoint.module}`: number {listed}"] = True
    return dataclasses.replace(checkpoint, optimizers=tuple(optimizer for optimizer, _ in attempts)), notes


def _first_uses(model: Model, index: Mapping[str, int]) -> dict[str, float]:
    """Return positions in which a tensor of several uses, such as a tied embedding, precedes those used after it."""
    positions = {node: at for at, node in enumerate(model.graph)}
    uses = {name: [positions.get(use.node, 0) for use in model.graph.initializers[name].uses()] for name in index}
    singles = [name for name in index if len(uses[name]) == 1]
    return {
        name: index[name]
        if len(uses[name]) < 2
        else min((index[n] - 0.5 for n in singles if uses[n][0] > min(uses[name])), default=index[name])
        for name in index
    }


def with_module(checkpoint: Checkpoint, model: Model) -> Checkpoint:
    """Return the checkpoint of the one among several modules that fits a model.

    Raises:
        UnsupportedError: several modules fit.
    """
    modules = modules_of(checkpoint)
    if len(modules) < 2:
        return checkpoint
    shapes = {name: tensor.shape for name, tensor in weights_of(model).tensors.items()}

    def fitting(tensors: Mapping[str, Tensor]) -> int:
        pairs = by_name(list(tensors), {*shapes}, {*shapes}, []).items()
        return sum(sorted(tensors[theirs].shape) == sorted(shapes[ours]) for theirs, ours in pairs)

    counts = {name: fitting(tensors) for name, tensors in modules.items() if not OF_AVERAGES.search(name)}
    best = [name for name, count in counts.items() if 2 * count > len(shapes) and count == max(counts.values())]
    if len(best) > 1:
        raise UnsupportedError(
            f"{len(best)} modules of `{checkpoint.path}` fit the model: {list_names(best, 8)}",
            hint=f"choose one: `--module {best[0]}` (`module={best[0]!r}`)",
        )
    is_of_one_state = sum(map(len, modules.values())) == len(checkpoint.tensors)
    return of_module(checkpoint, best[0]) if best and not is_of_one_state else checkpoint


def _optimizer_of(checkpoint: Checkpoint) -> tuple[int, str]:
    """Return the index of the module's optimizer if shapes fit several, and a note."""
    contents = contents_of(checkpoint.trees)
    modules, optimizers = [*modules_of(checkpoint)], [*contents["optimizers"]]
    endings, module_endings = _distinct(optimizers), _distinct(modules)
    own = module_endings[modules.index(checkpoint.module)]
    for matches in (str.__eq__, str.startswith):
        fitting = [at for at, ending in enumerate(endings) if matches(own, ending) and (ending or not own)]
        if len(fitting) == 1 and sum(matches(other, endings[fitting[0]]) for other in module_endings) == 1:
            return fitting[0], f"the optimizer of `{checkpoint.module}` is `{optimizers[fitting[0]]}`, by its name"
    if len(optimizers) != len(modules):
        raise UnsupportedError(
            f"{list_names(optimizers, 8)} fit `{checkpoint.module}`", hint="save the module alone with its optimizer"
        )
    at = modules.index(checkpoint.module)
    return at, f"the optimizer of `{checkpoint.module}` is `{optimizers[at]}`, by order, {NOT_PROVEN}"


def _distinct(names: Sequence[str]) -> list[str]:
    """Return names without their common beginning and end, in lower case."""
    for _ in range(2):  # the beginning, then the end
        common = sum(1 for _ in itertools.takewhile(lambda row: len({*row}) == 1, zip(*names, strict=False)))
        names = [name.lower()[common:][::-1] for name in names]
    return list(names)


def _by_group(names: Sequence[str], optimizer: OptimizerState) -> Order:
    """Return names divided like the groups of an optimizer, if their number agrees."""
    sizes = [len(group.parameters) for group in optimizer.groups]
    if sum(sizes) != len(names):
        return [list(names)]
    ends = list(itertools.accumulate(sizes))
    return [list(names[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _as_grouped(optimizer: OptimizerState, parts: Sequence[tuple[ParameterGroup, list[str]]], shapes: Shapes) -> Order:
    """Return parts in the order of an optimizer's groups; empty if that is not certain.

    A group has the size and the shapes of its part. Among several, the settings in which groups
    differ decide: all of them, or all but the rate.
    """
    stored = stored_shapes(optimizer)
    settings = [
        group.spec.options if group.optimizer else {"lr": group.settings.get("lr"), **group.numbers}
        for group in optimizer.groups
    ]
    varying = {key for row in settings for key in row if any(row[key] != other.get(key) for other in settings)}

    def fits(i: int, candidate: tuple[ParameterGroup, list[str]], keys: set[str]) -> bool:
        numbers, (run_group, names) = optimizer.groups[i].parameters, candidate
        if len(names) != len(numbers):
            return False
        if any(stored.get(number, shapes[name]) != shapes[name] for number, name in zip(numbers, names, strict=True)):
            return False
        ours = run_group.spec.options if isinstance(run_group.optimizer, Spec) else {}
        return all(same(settings[i].get(key, 0), ours.get(key, 0)) for key in keys)  # training models omit zeros

    for keys in (varying, varying - {"lr"}, set[str]()):
        chosen = [[at for at, candidate in enumerate(parts) if fits(i, candidate, keys)] for i in range(len(settings))]
        if all(len(match) == 1 for match in chosen) and len({match[0] for match in chosen}) == len(parts):
            return [parts[i][1] for (i,) in chosen]
    return [parts[0][1]] if len(parts) == 1 else []


def own_constants(matched: Match, model: Model, base: RunState | None) -> set[str]:
    """Return weights that a training model neither trains nor averages, if all tensors match."""
    if base is None or matched.left:
        return set()
    changing = {weight.name for weight in describe(model).weights if weight.role == "statistics"}
    return {name for name in matched.absent if name not in changing | {*base.parameters}}


def refuse_unmatched(
    checkpoint: Checkpoint, matched: Match, model: Model, constants: set[str], *, is_numbered: bool = False
) -> None:
    """Raise an UnsupportedError for tensors that only the checkpoint or only the model has.

    `is_numbered`: the optimizer may have state for any tensor of the checkpoint.
    """
    problems = Problems("the names of the checkpoint and of the model")
    absent = [name for name in matched.absent if name not in constants]
    optimized = {name for optimizer in checkpoint.optimizers for name in optimizer.slots}
    lost = [name for name in matched.left if name in optimized or is_numbered]
    lost = lost or list(matched.left if matched.absent else ())
    hints = [*_causes(checkpoint, absent, lost, model), "give pairs: `--names FILE` (JSON), or `names={...}`"]
    if absent:
        problems.add(f"the checkpoint has no {list_names(absent, 8)}", "; ".join(hints))
    if lost:
        problems.add(f"the model has no {list_names(lost, 8)}", "; ".join(hints))
    problems.refuse()


_STATISTICS = ("running_mean", "running_var", "moving_mean", "moving_variance")


def _causes(checkpoint: Checkpoint, absent: Sequence[str], left: Sequence[str], model: Model) -> Iterator[str]:
    """Yield likely reasons why tensors are only in the checkpoint or only in the model."""
    if any(name.endswith(_STATISTICS) for name in left):
        yield "the export folded BatchNormalization: `torch.onnx.export(..., dynamo=True, optimize=False)`"
    graph = {name: value for name, value in model.graph.initializers.items() if name in absent}
    shapes = [tuple(value.shape.numpy()) for value in graph.values() if value.shape is not None]
    for name in left:
        shape = checkpoint.tensors[name].shape
        cut = [own for own in shapes if len(shape) > 1 and own[-1:] == shape[-1:] and own[-2:-1] <= shape[-2:-1]]
        if cut and re.search("pos|wpe", name):
            yield f"the export folded `{name}` at length {cut[0][-2]}: export with a dynamic length (`dynamic_shapes`)"
    if unnamed := [name for name, value in graph.items() if not is_named_as_parameter(value)]:
        yield (
            f"{list_names(unnamed, 3)}: the exporter's own names, which `optimize=False` avoids; or export the weights "
            "of this checkpoint, which are matched by value"
        )
    modules = [
        *(modules_of(checkpoint) if len(checkpoint.optimizers) > 1 else contents_of(checkpoint.trees)["modules"])
    ]
    if not checkpoint.module and len(modules) > 1:
        others = {name.partition(".")[0] for name in left}
        likely = next((name for name in modules if name not in others), modules[0])
        yield f"choose one of its modules, {list_names(modules, 8)}: `--module {likely}`"


def tells_optimizers(checkpoint: Checkpoint) -> bool:
    """True if a checkpoint names its optimizers."""
    return any(group.optimizer is not None for group in checkpoint.stored_groups)


def run_groups(
    checkpoint: Checkpoint, matched: Match, stated: Spec | None, base: RunState | None
) -> list[ParameterGroup]:
    if not checkpoint.optimizers:
        raise UnsupportedError(
            f"`{checkpoint.path}` has no optimizer state, so that no run can continue",
            hint="start a new run with its weights: `onward train --weights CHECKPOINT`",
        )
    groups = []
    for optimizer in checkpoint.optimizers:
        for group in optimizer.groups:
            own = [matched.names[str(name)] for name in group.parameters if str(name) in matched.names]
            if own and base and stated is None and not tells_optimizers(checkpoint):
                groups += _groups_of(base, own, optimizer, group)
            elif own:
                groups.append(ParameterGroup(_spec(optimizer, group, stated), list(dict.fromkeys(own))))
    return groups


def with_state(checkpoint: Checkpoint, matched: Match, groups: Sequence[ParameterGroup]) -> set[str]:
    """Return the parameters of groups with optimizer state, if some have state.

    PyTorch programs often pass all parameters to an optimizer, and frozen ones never get state.
    """
    ours = matched.names
    stored = {ours[str(name)] for name, _, _ in checkpoint.stored_slots if name in ours}
    parameters = set[str]()
    for group in groups:
        configured = configure(group.optimizer) if isinstance(group.optimizer, Spec) else None
        is_stateful = configured is None or bool(configured.definition.choose(configured.settings, None).slots)
        parameters |= {name for name in group.parameters if name in stored or not stored or not is_stateful}
    return parameters


def with_slot_names(checkpoint: Checkpoint, matched: Match, groups: Sequence[ParameterGroup]) -> Checkpoint:
    """Return the checkpoint with slots named by the class of the optimizer."""
    ours = {name for group in groups if group.optimizer_name == "adamax" for name in group.parameters}
    theirs = {name for name, other in matched.names.items() if other in ours}
    optimizers = tuple(of_adamax(optimizer, theirs) for optimizer in checkpoint.optimizers)
    return dataclasses.replace(checkpoint, optimizers=optimizers)


def _groups_of(
    base: RunState, own: Sequence[str], optimizer: OptimizerState, group: ParameterGroup
) -> list[ParameterGroup]:
    """Return the groups of a training model for parameters, with numbers of the checkpoint."""
    groups = []
    for own_group in base.groups:
        spec = own_group.optimizer
        if isinstance(spec, Spec):
            numbers: Mapping[str, Any] = group.numbers
            if group.settings and optimizer.variant == "torch" and spec.name in optimizer.families:
                stored = spec_of(spec.name, group.settings)
                numbers = stored.options if stored is not None else numbers
            spec = Spec(spec.name, {key: numbers.get(key, value) for key, value in spec.options.items()})
        groups.append(ParameterGroup(spec, [name for name in own if name in own_group.parameters]))
    return [group for group in groups if group.parameters]


def _spec(optimizer: OptimizerState, group: ParameterGroup, stated: Spec | None) -> Spec:
    settings = group.settings
    if settings.keys() >= OF_ADAFACTOR.keys() and (settings.get("relative_step") or settings.get("beta1") is not None):
        raise UnsupportedError(
            "Adafactor has `relative_step` or `beta1`, which recipes do not have",
            hint="train with `Adafactor(..., lr=1e-3, relative_step=False, beta1=None)`",
        )
    if stated is None and group.optimizer is not None:
        return group.spec
    classes = {name.lower(): problem for name, problem in REFUSED_OPTIMIZERS.items()}
    refused = next((classes[family] for family in optimizer.families if family in classes), None)
    if stated is None and refused is not None:
        raise UnsupportedError(refused[0], hint=refused[1])
    slots = sorted({str(slot) for values in optimizer.slots.values() for slot in values} - {COUNT, MASTER})
    if stated is None and slots and not optimizer.families:
        raise UnsupportedError(
            f"no optimizer of recipes keeps {list_names(slots, 6)}, as that of the checkpoint",
            hint="start a new run with its weights: `onward train --weights CHECKPOINT`",
        )
    if stated is None:
        raise UnsupportedError(
            f"the checkpoint does not name its optimizer: {optimizer.title}",
            hint=f"set `--optimizer {(optimizer.families or ('adamw',))[0]}` (`optimizer=...`)",
        )
    stored = None if group.optimizer is None else group.spec
    definition = known_optimizer(stated.name)
    if stored is None or stored.name != stated.name:
        is_torch = optimizer.variant == "torch"
        numbers = {key: value for key, value in group.numbers.items() if key in definition.hyper}
        stored = spec_of(stated.name, group.settings) if group.settings and is_torch else Spec(stated.name, numbers)
    options = {**(stored.options if stored else {}), **stated.options}
    if "lr" not in options:
        raise UnsupportedError("the checkpoint has no learning rate", hint=f"set `--optimizer {stated.name}:lr=1e-3`")
    variant = optimizer.variant if optimizer.variant in definition.variants else next(iter(definition.variants))
    return Spec(stated.name, {"variant": variant, **options})
