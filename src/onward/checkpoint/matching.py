"""Which tensor of a checkpoint is which of a graph. Names differ by what frameworks put around modules, by tying and by
the order of axes; the rules that were used are said. Nothing is matched by its shape alone."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.checkpoint.format import Checkpoint, Order
from onward.errors import UnsupportedError, list_names
from onward.inspect import describe
from onward.model import Model
from onward.run_state.problems import Problems
from onward.run_state.state import OptimizerState
from onward.run_state.tensors import Tensor, transpose

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
"""Names that wrappers of modules add somewhere."""
_COUNTERS = "num_batches_tracked"


@dataclasses.dataclass(frozen=True)
class Match:
    """What belongs together."""

    names: Mapping[str, str]
    """From the checkpoint's names to those of the graph."""
    turned: frozenset[str] = frozenset()
    """Names of the checkpoint whose matrices the graph has the other way round."""
    rules: tuple[str, ...] = ()
    """How names were changed, in words."""
    left: tuple[str, ...] = ()
    """What the graph has no place for."""
    absent: tuple[str, ...] = ()
    """Weights of the graph that the checkpoint does not have."""

    @functools.cached_property
    def theirs(self) -> dict[str, str]:
        """From the graph's names to those of the checkpoint."""
        return {ours: theirs for theirs, ours in self.names.items()}

    def turn(self, theirs: Any, tensor: Tensor) -> Tensor:
        """Return a tensor that belongs to a name of the checkpoint with its axes as the other side has them."""
        return transpose(tensor) if theirs in self.turned and len(tensor.shape) == 2 else tensor


def match(
    tensors: Mapping[str, Tensor],
    model: Model,
    given: Mapping[str, str] | None = None,
    tied: Mapping[str, str] | None = None,
    stored: Mapping[str, str] | None = None,
) -> Match:
    """Match by name; `given` are pairs that the user knows, from the checkpoint to the graph, and `stored` those that
    the framework does."""
    graph = {name: value for name, value in model.graph.initializers.items() if value.const_value is not None}
    weights = {weight.name for weight in describe(model).weights if weight.role != "constant"}
    rules: list[str] = []
    names = _match_given(given or {}, tensors, graph)
    if names:
        rules.append(f"{len(names)} names as they were given")
    usual = {theirs: ours for theirs, ours in (stored or {}).items() if theirs in tensors and ours in graph}
    if known := {theirs: ours for theirs, ours in usual.items() if theirs not in names}:
        rules.append(f"{len(known)} names as the framework has them in files")
        names |= known
    names |= by_name([name for name in tensors if name not in names], set(graph) - {*names.values()}, weights, rules)
    names |= _match_tied(tied or {}, names, graph, rules)
    names |= _by_value(tensors, names, graph, weights, rules)
    turned = _transposed_matrices(names, tensors, graph, rules)
    found = {*names.values()}
    left = [name for name in tensors if name not in names and not name.endswith(_COUNTERS)]
    return Match(names, frozenset(turned), tuple(rules), tuple(left), tuple(sorted(weights - found)))


def _match_given(
    given: Mapping[str, str], tensors: Mapping[str, Tensor], graph: Mapping[str, ir.Value]
) -> dict[str, str]:
    problems = Problems("the names that were given")
    for theirs, ours in given.items():
        if theirs not in tensors:
            problems.add(f"the checkpoint has no `{theirs}`", "`onward describe --params` lists what it has")
        if ours not in graph:
            problems.add(f"the model has no `{ours}`", "`onward describe --params` lists what it has")
    problems.refuse()
    return dict(given)


def by_name(theirs: list[str], ours: set[str], weights: set[str], rules: list[str]) -> dict[str, str]:
    """By equal names, after what wrappers add is left out and one prefix is replaced by another."""
    plain = {name: _unwrap_name(name) for name in theirs}
    of_ours = {_unwrap_name(name): name for name in ours}
    old, new = _prefixes(set(plain.values()), set(of_ours), {_unwrap_name(name) for name in weights})
    found: dict[str, str] = {}
    for name, bare in plain.items():
        if bare.startswith(old) and (target := of_ours.get(f"{new}{bare.removeprefix(old)}")) is not None:
            found[name] = target
    wrappers = {part for name in found for part in name.split(".") if part in _WRAPPERS} - {
        part for name in found.values() for part in name.split(".")
    }
    if wrappers:
        rules.append(f"left out of names: {list_names(sorted(wrappers), 4)}")
    if old != new:
        change = f"names lose `{old}` at their beginning" if old else f"names get `{new}` at their beginning"
        rules.append(f"names begin with `{new}` instead of `{old}`" if old and new else change)
    return found


def _unwrap_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _prefixes(theirs: set[str], ours: set[str], weights: set[str]) -> tuple[str, str]:
    """The change of a prefix with which most weights of the graph are found; none if that does as well."""

    def found(change: tuple[str, str]) -> int:
        old, new = change
        changed = {f"{new}{name.removeprefix(old)}" for name in theirs if name.startswith(old)}
        return len(changed & weights)

    changes = [(old, new) for old in _beginnings(theirs) for new in _beginnings(ours) if old != new or not old]
    return max(sorted(changes, key=lambda change: len(change[0]) + len(change[1])), key=found)


def _beginnings(names: Iterable[str]) -> list[str]:
    """What names begin with, up to their second dot, or stroke where a framework has these."""
    found = {""}
    for name in names:
        found |= {name[: end.end()] for end in itertools.islice(re.finditer("[./]", name), 2)}
    return sorted(found) if len(found) < 200 else [""]


def _match_tied(
    tied: Mapping[str, str], names: Mapping[str, str], graph: Mapping[str, ir.Value], rules: list[str]
) -> dict[str, str]:
    """A graph has a tied tensor once, under one of its names."""
    taken = {*names.values()}
    bare = {_unwrap_name(name): name for name in graph if name not in taken}
    found = {
        name: bare[_unwrap_name(other)]
        for other, name in tied.items()
        if name not in names and _unwrap_name(other) in bare
    }
    rules.extend(f"`{theirs}` is `{ours}` there: they are tied" for theirs, ours in found.items())
    return found


def _by_value(
    tensors: Mapping[str, Tensor],
    names: Mapping[str, str],
    graph: Mapping[str, ir.Value],
    weights: set[str],
    rules: list[str],
) -> dict[str, str]:
    """What has no name in common but the same numbers, of which there is one each: exporters rename what they fold."""
    taken = {*names.values()}
    open_ours = [name for name in weights if name not in taken and name in graph]
    shapes = {tuple(sorted(graph[name].const_value.shape.numpy())) for name in open_ours}  # type: ignore[union-attr]
    open_theirs = [
        name for name in tensors if name not in names and tuple(sorted(tensors[name].shape)) in shapes - {()}
    ]
    if not open_ours or not open_theirs:
        return {}
    by_value: dict[tuple[tuple[int, ...], bytes], list[str]] = {}
    for name in open_theirs:
        array = tensors[name].array()
        for form in {array.shape, array.T.shape} if array.ndim == 2 else {array.shape}:
            turned = array if form == array.shape else array.T
            by_value.setdefault((form, _digest(turned)), []).append(name)
        if array.ndim == 2 and array.shape[0] == array.shape[1]:
            by_value.setdefault((array.shape, _digest(array.T)), []).append(name)
    found: dict[str, str] = {}
    for ours in open_ours:
        tensor = graph[ours].const_value
        assert tensor is not None
        same = by_value.get((tuple(tensor.shape.numpy()), _digest(tensor.numpy())), [])
        if len(same) == 1 and same[0] not in found:
            found[same[0]] = ours
    if found:
        rules.append(f"{len(found)} tensors by equal values: {list_names([f'{a} = {b}' for a, b in found.items()], 4)}")
    return found


def _digest(array: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).digest()


def _transposed_matrices(
    names: Mapping[str, str], tensors: Mapping[str, Tensor], graph: Mapping[str, ir.Value], rules: list[str]
) -> list[str]:
    """Matrices that the graph has the other way round: where shapes say so, and squares where all others are."""
    problems = Problems("the tensors of the checkpoint")
    turned: list[str] = []
    straight: list[str] = []
    squares: list[str] = []
    for theirs, ours in names.items():
        tensor = graph[ours].const_value
        assert tensor is not None
        here, there = tuple(tensor.shape.numpy()), tensors[theirs].shape
        multiplied = any(use.node.op_type == "MatMul" and use.idx == 1 for use in graph[ours].uses())
        if here == there:
            if multiplied and len(here) == 2:
                (squares if here[0] == here[1] else straight).append(theirs)
        elif len(here) == 2 and here == there[::-1]:
            turned.append(theirs)
        else:
            problems.add(
                f"`{theirs}` is {list(there)}, and `{ours}` in the model is {list(here)}", "give its own model"
            )
    problems.refuse()
    unsure = [name for name in squares if turned and not _equal(tensors[name], graph[names[name]])]
    if turned and not straight:
        turned += unsure
    elif turned and unsure:
        problems.add(
            f"some matrices are stored the other way round, and of {list_names(unsure, 3)} it cannot be told",
            "export the model with its weights as they are in the framework",
        )
        problems.refuse()
    if turned:
        rules.append(f"{len(turned)} matrices are turned: {list_names(turned, 3)}")
    return turned


def _equal(tensor: Tensor, value: ir.Value) -> bool:
    assert value.const_value is not None
    return np.array_equal(tensor.array(), value.const_value.numpy())


# ---- names of what optimizers keep -----------------------------------------------------------------------------------


_WITHOUT_DECAY = [
    re.compile(pattern)
    for pattern in ("bias", "layernorm", "layer_norm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
]
"""Names of parameters that the Trainer of transformers puts into its second group."""

TRAINER = "hf"
"""The format of the Trainer of transformers."""

Shapes = Mapping[str, tuple[int, ...]]


def with_names(
    optimizer: OptimizerState, orders: Mapping[str, Order], shapes: Shapes, *, in_trainer: bool = False
) -> tuple[OptimizerState, str]:
    """Return an optimizer with names for its parameters, and how they were found.

    Args:
        optimizer: What has numbers.
        orders: In which parameters may have been given to it, by what they come from. One with a part for each group
            says which parameters are in which.
        shapes: Of all parameters.
        in_trainer: Whether the Trainer of transformers made its groups.

    Raises:
        UnsupportedError: no order fits, or several ways to divide it into groups do.
    """
    if optimizer.has_names:
        return optimizer, ""
    numbers = [number for group in optimizer.groups for number in group.parameters]
    reasons = []
    for origin, order in (_with_groups_of_trainer(orders, optimizer) if in_trainer else orders).items():
        named, proof = _divided(order, optimizer, shapes)
        if named is not None:
            made = _rename_slots(optimizer, dict(zip(numbers, named, strict=True)))
            return made, f"parameters of the optimizer are named by {origin}; {proof}"
        reasons.append(f"{origin}: {proof}")
    raise UnsupportedError(
        f"the optimizer keeps {len(numbers)} parameters by number, and their names are not stored",
        hint="give them in its order: `--names FILE` with a name in each line, or `names=[...]`; or a training model "
        "with its groups: `like=...`; " + "; ".join(reasons),
    )


def stored_shapes(optimizer: OptimizerState) -> dict[str | int, tuple[int, ...]]:
    """Return shapes of parameters as far as slots show them."""
    return {
        name: kept.shape
        for name, slots in optimizer.slots.items()
        for slot, kept in slots.items()
        if slot in _ELEMENTWISE and isinstance(kept, Tensor)
    }


_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def with_own_names(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint whose optimizers have names, where its own tensors are in the order of the module."""
    if all(optimizer.has_names for optimizer in checkpoint.optimizers):
        return checkpoint
    if not checkpoint.keeps_order:
        raise UnsupportedError(
            f"`{checkpoint.path}` has no names for what its optimizer keeps, and its tensors are not in their order",
            hint="make a training model of it first: `onward convert ... --like model.onnx`",
        )
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    order = [name for name in checkpoint.tensors if not name.endswith(_BUFFERS)]
    orders = {"the order of the state of the module": [order]}
    named = tuple(
        with_names(optimizer, orders, shapes, in_trainer=checkpoint.format == TRAINER)[0]
        for optimizer in checkpoint.optimizers
    )
    return dataclasses.replace(checkpoint, optimizers=named)


def _with_groups_of_trainer(orders: Mapping[str, Order], optimizer: OptimizerState) -> dict[str, Order]:
    """Return orders, each behind its division by names into those with weight decay and those without."""
    sizes = [len(group.parameters) for group in optimizer.groups]
    found: dict[str, Order] = {}
    for origin, order in orders.items():
        names = [name for part in order for name in part]
        plain = [name for name in names if any(pattern.search(name.lower()) for pattern in _WITHOUT_DECAY)]
        decayed = [name for name in names if name not in set(plain)]
        if len(order) == 1 and sizes == [len(decayed), len(plain)]:
            found[f"{origin}, those without weight decay behind the others"] = [decayed, plain]
        found[origin] = order
    return found


def _divided(order: Order, optimizer: OptimizerState, shapes: Shapes) -> tuple[list[str] | None, str]:
    """Return the names of an order as groups have them and a proof, or None and why the order does not do."""
    sizes = [len(group.parameters) for group in optimizer.groups]
    numbers = [number for group in optimizer.groups for number in group.parameters]
    names = [name for part in order for name in part]
    if len(names) != len(numbers) or (len(order) > 1 and sizes != [len(part) for part in order]):
        return None, f"{' and '.join(str(len(part)) for part in order)} parameters"
    stored = stored_shapes(optimizer)
    others = [name for name, n in zip(names, numbers, strict=True) if n in stored and stored[n] != shapes.get(name)]
    first = optimizer.groups[0]
    is_alike = all((each.settings, each.optimizer) == (first.settings, first.optimizer) for each in optimizer.groups)
    if len(order) == len(sizes) or (is_alike and not stored):
        if others:
            return None, f"shapes differ at {list_names(others, 3)}"
        return names, "every shape fits" if stored else "no state has shapes that could tell"
    if not stored:
        return None, f"{len(sizes)} groups with different settings, and no state whose shapes tell them apart"
    groups = [[stored.get(number) for number in group.parameters] for group in optimizer.groups]
    places = _ways_to_divide([shapes.get(name, ()) for name in names], groups)
    if places is None and not others:
        return names, NOT_PROVEN
    if not places:
        return None, f"shapes fit its {len(sizes)} groups in several ways" if places is None else "shapes differ"
    grouped = [[name for name, place in zip(names, places, strict=True) if place == i] for i in range(len(sizes))]
    return [name for part in grouped for name in part], "shapes fit its groups in one way"


NOT_PROVEN = "groups are taken in a row, and shapes fit in other ways, too (`--names`)"
"""What a note ends in if the groups of an optimizer could be others."""

_MOST_WAYS = 256
"""Ways that are followed at once. Groups that need more are not told apart by shapes, such as those of equal layers."""


def _ways_to_divide(
    shapes: Sequence[tuple[int, ...]], groups: Sequence[Sequence[tuple[int, ...] | None]]
) -> list[int] | None:
    """Return the group of each shape, if groups keep their order and one way fits; none of them for no way.

    None stands for a shape that is not known, and in place of a result for several ways.
    """
    paths: dict[tuple[int, ...], list[int] | None] = {(0,) * len(groups): []}
    """How many are taken of each group -> how; None where there are several ways."""
    for shape in shapes:
        further: dict[tuple[int, ...], list[int] | None] = {}
        for taken, path in paths.items():
            for i, group in enumerate(groups):
                if taken[i] == len(group) or group[taken[i]] not in (None, shape):
                    continue
                after = (*taken[:i], taken[i] + 1, *taken[i + 1 :])
                further[after] = None if path is None or after in further else [*path, i]
        if len(further) > _MOST_WAYS:
            return None
        paths = further
    return next(iter(paths.values()), [])


def _rename_slots(optimizer: OptimizerState, names: Mapping[Any, str]) -> OptimizerState:
    groups = tuple(
        dataclasses.replace(group, parameters=tuple(names[number] for number in group.parameters))
        for group in optimizer.groups
    )
    return dataclasses.replace(
        optimizer, groups=groups, slots={names.get(number, number): kept for number, kept in optimizer.slots.items()}
    )


_ELEMENTWISE = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum",
    "exp_inf", "master",
)  # fmt: skip
"""Slots of the shape of their parameter."""
