"""Matches between the tensors of a checkpoint and those of a graph.

Names differ by wrappers around modules, tying and the order of axes. The rules that were used are
reported. No tensor is matched by its shape alone.
"""

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
    """Names of a checkpoint and a graph that belong together."""

    names: Mapping[str, str]
    """From the checkpoint's names to those of the graph."""
    transposed: frozenset[str] = frozenset()
    """Names of the checkpoint whose matrices are transposed in the graph."""
    rules: tuple[str, ...] = ()
    """How names were changed, in text."""
    left: tuple[str, ...] = ()
    """Tensors of the checkpoint that the graph does not have."""
    absent: tuple[str, ...] = ()
    """Weights of the graph that the checkpoint does not have."""

    @functools.cached_property
    def theirs(self) -> dict[str, str]:
        """Names of the graph -> names of the checkpoint; of tied names, the first."""
        return {ours: theirs for theirs, ours in reversed(list(self.names.items()))}

    def orient(self, theirs: Any, tensor: Tensor) -> Tensor:
        """Return a tensor of the checkpoint in the graph's orientation, or the other way round."""
        return transpose(tensor) if theirs in self.transposed and len(tensor.shape) == 2 else tensor


def match(
    tensors: Mapping[str, Tensor],
    model: Model,
    named: Mapping[str, str] | None = None,
    tied: Mapping[str, str] | None = None,
    stored: Mapping[str, str] | None = None,
) -> Match:
    """Match by name.

    Args:
        named: pairs that the user gives, checkpoint -> graph
        tied: further names of the checkpoint's tensors
        stored: pairs that the framework defines, checkpoint -> graph
    """
    graph = {name: value for name, value in model.graph.initializers.items() if value.const_value is not None}
    weights = {weight.name for weight in describe(model).weights if weight.role != "constant"}
    rules: list[str] = []
    names = _match_named(named or {}, tensors, graph)
    if names:
        rules.append(f"{len(names)} names as they were given")
    usual = {theirs: ours for theirs, ours in (stored or {}).items() if theirs in tensors and ours in graph}
    if in_files := {theirs: ours for theirs, ours in usual.items() if theirs not in names}:
        rules.append(f"{len(in_files)} names as the framework has them in files")
        names |= in_files
    names |= by_name([name for name in tensors if name not in names], set(graph) - {*names.values()}, weights, rules)
    names |= _match_tied(tied or {}, names, graph, rules)
    names |= _by_value(tensors, names, graph, weights, rules)
    names |= _match_copies(tensors, names, rules)
    names = {name: names[name] for name in tensors if name in names}  # optimizers count a tied tensor at its first name
    transposed = _transposed_matrices(names, tensors, graph, rules)
    used = {*names.values()}
    left = [name for name in tensors if name not in names and not name.endswith(_COUNTERS)]
    return Match(names, frozenset(transposed), tuple(rules), tuple(left), tuple(sorted(weights - used)))


def _match_named(
    named: Mapping[str, str], tensors: Mapping[str, Tensor], graph: Mapping[str, ir.Value]
) -> dict[str, str]:
    problems = Problems("the names that were given")
    hint = "list its names: `onward describe --params`"
    for theirs, ours in named.items():
        if theirs not in tensors:
            problems.add(f"the checkpoint has no `{theirs}`", hint)
        if ours not in graph:
            problems.add(f"the model has no `{ours}`", hint)
    problems.refuse()
    return dict(named)


def by_name(theirs: list[str], ours: set[str], weights: set[str], rules: list[str]) -> dict[str, str]:
    """Match equal names, without wrappers and with one prefix replaced by another."""
    unwrapped = {name: _unwrap_name(name) for name in theirs}
    of_ours = {_unwrap_name(name): name for name in ours}
    old_prefix, new_prefix = _prefixes(set(unwrapped.values()), set(of_ours), {_unwrap_name(name) for name in weights})
    renamed = {
        name: f"{new_prefix}{bare.removeprefix(old_prefix)}"
        for name, bare in unwrapped.items()
        if bare.startswith(old_prefix)
    }
    matches = {name: of_ours[bare] for name, bare in renamed.items() if bare in of_ours}
    words, target_words = (set(".".join(names).split(".")) for names in (matches, matches.values()))
    if wrappers := (words & _WRAPPERS) - target_words:
        rules.append(f"left out of names: {list_names(sorted(wrappers), 4)}")
    if old_prefix and new_prefix and old_prefix != new_prefix:
        rules.append(f"names begin with `{new_prefix}` instead of `{old_prefix}`")
    elif old_prefix != new_prefix:
        change = f"lose `{old_prefix}`" if old_prefix else f"get `{new_prefix}`"
        rules.append(f"names {change} at their beginning")
    return matches


def pair_names(a: Checkpoint, b: Checkpoint, rules: list[str], *, shared: bool = False) -> dict[str, str]:
    """Return names of tensors of the first -> names of the second, which tied tensors may share."""
    names = by_name(list(a.tensors), set(b.tensors), set(b.tensors), rules)
    taken = {*names.values()}
    for alias, name in (*a.tied.items(), *((name, alias) for alias, name in b.tied.items())):
        if name in a.tensors and name not in names and alias in b.tensors and (shared or alias not in taken):
            names[name] = alias
            taken.add(alias)
            rules.append(f"`{name}` is `{alias}` there: they are tied")
    return {name: names[name] for name in a.tensors if name in names}


def _unwrap_name(name: str) -> str:
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def _prefixes(theirs: set[str], ours: set[str], weights: set[str]) -> tuple[str, str]:
    """Return the change of a prefix that matches most weights; ("", "") if it matches less than half."""

    def matched_weights(change: tuple[str, str]) -> int:
        old, new = change
        changed = {f"{new}{name.removeprefix(old)}" for name in theirs if name.startswith(old)}
        return len(changed & weights)

    changes = [(old, new) for old in _beginnings(theirs) for new in _beginnings(ours) if old != new or not old]
    best = max(sorted(changes, key=lambda change: len(change[0]) + len(change[1])), key=matched_weights)
    return best if 2 * matched_weights(best) >= min(len(theirs), len(weights)) else ("", "")


def _beginnings(names: Iterable[str]) -> list[str]:
    """Return the beginnings of names, up to their second dot or slash."""
    beginnings = {""}
    for name in names:
        beginnings |= {name[: end.end()] for end in itertools.islice(re.finditer("[./]", name), 2)}
    return sorted(beginnings) if len(beginnings) < 200 else [""]


def _match_tied(
    tied: Mapping[str, str], names: Mapping[str, str], graph: Mapping[str, ir.Value], rules: list[str]
) -> dict[str, str]:
    """Match tied tensors. A graph has a tied tensor once, under one of its names."""
    taken = {*names.values()}
    bare = {_unwrap_name(name): name for name in graph if name not in taken}
    matches = {
        name: bare[_unwrap_name(other)]
        for other, name in tied.items()
        if name not in names and _unwrap_name(other) in bare
    }
    rules.extend(f"`{theirs}` is `{ours}` there: they are tied" for theirs, ours in matches.items())
    return matches


def _by_value(
    tensors: Mapping[str, Tensor],
    names: Mapping[str, str],
    graph: Mapping[str, ir.Value],
    weights: set[str],
    rules: list[str],
) -> dict[str, str]:
    """Match tensors by equal values that occur once: exporters rename what they fold."""
    taken = {*names.values()}
    unmatched_graph = [name for name in weights if name not in taken and name in graph]
    shapes = {tuple(sorted(graph[name].const_value.shape.numpy())) for name in unmatched_graph}  # type: ignore[union-attr]
    unmatched_tensors = [
        name for name in tensors if name not in names and tuple(sorted(tensors[name].shape)) in shapes - {()}
    ]
    if not unmatched_graph or not unmatched_tensors:
        return {}
    by_value: dict[tuple[tuple[int, ...], bytes], list[str]] = {}
    for name in unmatched_tensors:
        array = tensors[name].array()
        for oriented in (array, array.T) if array.ndim == 2 else (array,):
            by_value.setdefault((oriented.shape, _digest(oriented)), []).append(name)
    matches: dict[str, str] = {}
    for ours in unmatched_graph:
        tensor = graph[ours].const_value
        assert tensor is not None
        equal = by_value.get((tuple(tensor.shape.numpy()), _digest(tensor.numpy())), [])
        if len(equal) == 1 and equal[0] not in matches:
            matches[equal[0]] = ours
    if matches:
        listed = list_names([f"{theirs} = {ours}" for theirs, ours in matches.items()], 4)
        rules.append(f"{len(matches)} tensors by equal values: {listed}")
    return matches


def _match_copies(tensors: Mapping[str, Tensor], names: Mapping[str, str], rules: list[str]) -> dict[str, str]:
    """Match tied tensors that the file has under each of their names, to what one of these has matched.

    Equal values are the evidence. Constant tensors, such as new biases, are equal without being tied.
    """
    matches: dict[str, str] = {}
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        by_shape.setdefault(tensors[name].shape, []).append(name)
    for name, tensor in tensors.items():
        if name in names or len(tensor.shape) < 2 or tensor.shape not in by_shape:
            continue
        array = tensor.array()
        equal = (other for other in by_shape[tensor.shape] if np.array_equal(array, tensors[other].array()))
        if array.min() != array.max() and (other := next(equal, None)) is not None:
            matches[name] = names[other]
            rules.append(f"`{name}` and `{other}` are tied")
    return matches


def _digest(array: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).digest()


def _transposed_matrices(
    names: Mapping[str, str], tensors: Mapping[str, Tensor], graph: Mapping[str, ir.Value], rules: list[str]
) -> list[str]:
    """Return matrices that the graph has transposed: by shape, and squares if all others are."""
    problems = Problems("the tensors of the checkpoint")
    transposed: list[str] = []
    straight: list[str] = []
    squares: list[str] = []
    for theirs, ours in names.items():
        tensor = graph[ours].const_value
        assert tensor is not None
        shape, other_shape = tuple(tensor.shape.numpy()), tensors[theirs].shape
        multiplied = any(use.node.op_type == "MatMul" and use.idx == 1 for use in graph[ours].uses())
        if shape == other_shape:
            if multiplied and len(shape) == 2:
                (squares if shape[0] == shape[1] else straight).append(theirs)
        elif len(shape) == 2 and shape == other_shape[::-1]:
            transposed.append(theirs)
        else:
            problems.add(
                f"`{theirs}` is {list(other_shape)}, and `{ours}` in the model is {list(shape)}", "give its own model"
            )
    problems.refuse()
    ambiguous = [name for name in squares if transposed and not _equal(tensors[name], graph[names[name]])]
    if transposed and not straight:
        transposed += ambiguous
    elif transposed and ambiguous:
        problems.add(
            f"some matrices are stored the other way round, and of {list_names(ambiguous, 3)} it cannot be told",
            "export the model without transposed weights: `torch.onnx.export(..., optimize=False)`",
        )
        problems.refuse()
    if transposed:
        rules.append(f"{len(transposed)} matrices are transposed: {list_names(transposed, 3)}")
    return transposed


def _equal(tensor: Tensor, value: ir.Value) -> bool:
    assert value.const_value is not None
    return np.array_equal(tensor.array(), value.const_value.numpy())


# ---- names of what optimizers keep -----------------------------------------------------------------------------------


_WITHOUT_DECAY = [
    re.compile(pattern)
    for pattern in ("bias", "layernorm", "layer_norm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
]
"""Patterns of parameters in the second group of the Trainer of transformers."""

TRAINER = "hf"
"""The format of the Trainer of transformers."""

Shapes = Mapping[str, tuple[int, ...]]


def with_names(
    optimizer: OptimizerState, orders: Mapping[str, Order], shapes: Shapes, *, in_trainer: bool = False
) -> tuple[OptimizerState, str]:
    """Return an optimizer with names for its parameters, and how they were derived.

    Args:
        optimizer: The optimizer, with numbers in place of names.
        orders: Possible orders of its parameters, by origin. One with a list for each group divides
            them.
        shapes: Shapes of all parameters.
        in_trainer: True if the Trainer of transformers made its groups.

    Raises:
        UnsupportedError: no order fits, or several ways to divide it into groups do.
    """
    if optimizer.has_names:
        return optimizer, ""
    numbers = [number for group in optimizer.groups for number in group.parameters]
    only = stored_shapes(optimizer).get(numbers[0], ()) if len(numbers) == 1 else ()
    if len(only) == 1 and only not in shapes.values():  # as fairseq and apex keep float32 copies
        raise UnsupportedError(
            f"the optimizer keeps the state of all parameters in one vector of {only[0]:,} numbers",
            hint="save it from an optimizer of the module's own parameters; or start a new run with the weights: "
            "`onward train --weights CHECKPOINT`",
        )
    reasons = []
    for origin, order in (_with_groups_of_trainer(orders, optimizer) if in_trainer else orders).items():
        named, proof = _divided(order, optimizer, shapes)
        if named is not None:
            renamed = _rename_slots(optimizer, dict(zip(numbers, named, strict=True)))
            return renamed, f"optimizer state is matched to parameters by {origin}; {proof}"
        reasons.append(f"{origin}: {proof}")
    raise UnsupportedError(
        f"the optimizer numbers its {len(numbers)} parameters, and their names are not stored",
        hint="give them in its order: `--names FILE` with a name in each line, or `names=[...]`; or a training model "
        "with its groups: `like=...`; " + "; ".join(reasons),
    )


def stored_shapes(optimizer: OptimizerState) -> dict[str | int, tuple[int, ...]]:
    """Return shapes of parameters, as far as slots tell them."""
    factored = {
        name: tuple(map(max, slots["row_var"].shape, slots["col_var"].shape))
        for name, slots in optimizer.slots.items()
        if {"row_var", "col_var"} <= slots.keys()
    }
    return factored | {
        name: value.shape
        for name, slots in optimizer.slots.items()
        for slot, value in slots.items()
        if slot in _ELEMENTWISE and isinstance(value, Tensor)
    }


_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def with_own_names(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with names in its optimizers, by the order of its tensors."""
    if checkpoint.has_names:
        return checkpoint
    if not checkpoint.keeps_order:
        raise UnsupportedError(
            f"`{checkpoint.path}` stores no parameter names, and its tensors are in another order",
            hint="give the model of the checkpoint: `onward convert ... --like model.onnx`",
        )
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    orders = {"the order of the state dict": [[name for name in shapes if not name.endswith(_BUFFERS)]]}
    in_trainer = checkpoint.format == TRAINER
    named = (with_names(optimizer, orders, shapes, in_trainer=in_trainer)[0] for optimizer in checkpoint.optimizers)
    return dataclasses.replace(checkpoint, optimizers=tuple(named))


def _with_groups_of_trainer(orders: Mapping[str, Order], optimizer: OptimizerState) -> dict[str, Order]:
    """Return orders, and before each its division into parameters with weight decay and without."""
    sizes = [len(group.parameters) for group in optimizer.groups]
    candidates: dict[str, Order] = {}
    for origin, order in orders.items():
        names = [name for group_names in order for name in group_names]
        plain = [name for name in names if any(pattern.search(name.lower()) for pattern in _WITHOUT_DECAY)]
        decayed = [name for name in names if name not in set(plain)]
        if len(order) == 1 and sizes == [len(decayed), len(plain)]:
            candidates[f"{origin}, those without weight decay behind the others"] = [decayed, plain]
        candidates[origin] = order
    return candidates


def _divided(order: Order, optimizer: OptimizerState, shapes: Shapes) -> tuple[list[str] | None, str]:
    """Return the names of an order as groups have them and a proof, or None and a reason."""
    sizes = [len(group.parameters) for group in optimizer.groups]
    numbers = [number for group in optimizer.groups for number in group.parameters]
    names = [name for group_names in order for name in group_names]
    stored = stored_shapes(optimizer)
    others: list[str] = []
    has_frozen = len(order) == 1 and len(names) > len(numbers) == len(stored)  # a program gave it the others only
    if not has_frozen:
        if len(names) != len(numbers) or (len(order) > 1 and sizes != [len(group_names) for group_names in order]):
            return None, f"{' and '.join(str(len(group_names)) for group_names in order)} parameters"
        others = [name for name, n in zip(names, numbers, strict=True) if n in stored and stored[n] != shapes.get(name)]
        first = optimizer.groups[0]
        is_alike = all((row.settings, row.optimizer) == (first.settings, first.optimizer) for row in optimizer.groups)
        if len(order) == len(sizes) or (is_alike and not stored):
            if others:
                return None, f"shapes differ at {list_names(others, 3)}"
            return names, "all shapes agree" if stored else "no state has shapes that could tell"
        if not stored:
            return None, f"{len(sizes)} groups with different settings, and no state whose shapes tell them apart"
    groups = [[stored.get(number) for number in group.parameters] for group in optimizer.groups]
    group_numbers = _divide([shapes.get(name, ()) for name in names], groups, has_frozen)
    proof = "shapes fit its groups in one way"
    if group_numbers is None and not has_frozen:
        if not others:
            return names, f"groups are taken in a row, {NOT_PROVEN}"
        group_numbers = _divide_by_kind(names, shapes, groups)
        proof = f"groups are taken as biases, normalizations and others, {NOT_PROVEN}"
    if group_numbers is None:
        several = f"shapes fit its {len(sizes)} groups in several ways"
        return None, f"{several}; name the frozen parameters: `--freeze PATTERN`" if has_frozen else several
    if not group_numbers:
        return None, "shapes differ"
    grouped = [
        [name for name, number in zip(names, group_numbers, strict=True) if number == i] for i in range(len(sizes) + 1)
    ]
    if frozen := grouped.pop():
        proof += f", without {list_names(frozen, 3)}: frozen"
    return [name for group_names in grouped for name in group_names], proof


NOT_PROVEN = "and shapes fit in other ways, too (`--names`)"
"""End of a note if shapes do not prove the groups of an optimizer."""

_MOST_DIVISIONS = 4096
"""Divisions that are followed at once. More occur if shapes do not tell groups apart."""


def _divide(
    shapes: Sequence[tuple[int, ...]], groups: Sequence[Sequence[tuple[int, ...] | None]], has_frozen: bool
) -> list[int] | None:
    """Return the group of each shape, if the shapes of a group keep their order.

    Return None if several divisions fit, and an empty list if none does. A shape of None is
    unknown. Frozen parameters belong to no group: their number is the number of groups.
    """
    paths: dict[tuple[int, ...], tuple[Any, ...] | None] = {(0,) * len(groups): ()}
    """Number taken of each group -> the division, last group first; None if there are several."""
    for shape in shapes:
        further: dict[tuple[int, ...], tuple[Any, ...] | None] = {}
        for taken, path in paths.items():
            ends = {
                (*taken[:i], taken[i] + 1, *taken[i + 1 :]): i
                for i, group in enumerate(groups)
                if taken[i] < len(group) and group[taken[i]] in (None, shape)
            } | ({taken: len(groups)} if has_frozen else {})
            for end, i in ends.items():
                further[end] = None if path is None or end in further else (i, path)
        if len(further) > _MOST_DIVISIONS:
            return None
        paths = further
    path = paths.get(tuple(len(group) for group in groups), ())
    division: list[int] = []
    while path:
        number, path = path
        division.append(number)
    return None if path is None else division[::-1]


def _divide_by_kind(
    names: Sequence[str], shapes: Shapes, groups: Sequence[Sequence[tuple[int, ...] | None]]
) -> list[int] | None:
    """Return the group of each parameter if groups are of kinds: biases, other vectors, the rest.

    Return None if none or several of these divisions fit.
    """
    kinds = [0 if name.endswith("bias") else 1 if len(shapes.get(name, ())) < 2 else 2 for name in names]
    fitting: set[tuple[int, ...]] = set()
    for group_of_kind in itertools.product(range(len(groups)), repeat=3) if len(groups) <= 3 else ():
        division = tuple(group_of_kind[kind] for kind in kinds)
        grouped = [
            [shapes.get(name) for name, at in zip(names, division, strict=True) if at == i] for i in range(len(groups))
        ]
        if all(
            len(group) == len(expected)
            and all(theirs in (None, ours) for theirs, ours in zip(group, expected, strict=True))
            for group, expected in zip(groups, grouped, strict=True)
        ):
            fitting.add(division)
    return list(fitting.pop()) if len(fitting) == 1 else None


def _rename_slots(optimizer: OptimizerState, names: Mapping[Any, str]) -> OptimizerState:
    groups = tuple(
        dataclasses.replace(group, parameters=tuple(names[number] for number in group.parameters))
        for group in optimizer.groups
    )
    slots = {names.get(number, number): values for number, values in optimizer.slots.items()}
    return dataclasses.replace(optimizer, groups=groups, slots=slots)


_ELEMENTWISE = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum",
    "exp_inf", "master",
)  # fmt: skip
"""Slots with the shape of their parameter."""
