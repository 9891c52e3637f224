"""What an optimizer's `state_dict` says. It names no class: what is kept for a parameter tells which it can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onward.checkpoint.description import Group, Optimizer

_ADAMS: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda group: (
    ("nadam",) if "momentum_decay" in group
    else ("adamw",) if group.get("decoupled_weight_decay") is True
    else ("adam",) if "amsgrad" in group and group.get("decoupled_weight_decay") is False
    else ("adam", "adamw", "radam")
)  # fmt: skip

FAMILIES: dict[frozenset[str], Callable[[Mapping[str, Any]], tuple[str, ...]]] = {
    frozenset({"momentum_buffer"}): lambda group: ("muon",) if "ns_coefficients" in group else ("sgd",),
    frozenset({"exp_avg", "exp_avg_sq"}): _ADAMS,
    frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}): _ADAMS,
    frozenset({"exp_avg", "exp_avg_sq", "mu_product"}): lambda group: ("nadam",),
    frozenset({"exp_avg"}): lambda group: ("lion",),
    frozenset({"exp_avg", "exp_inf"}): lambda group: ("adamax",),
    frozenset({"sum"}): lambda group: ("adagrad",),
    frozenset({"square_avg"}): lambda group: ("rmsprop",),
    frozenset({"square_avg", "momentum_buffer"}): lambda group: ("rmsprop",),
    frozenset({"square_avg", "grad_avg"}): lambda group: ("rmsprop",),
    frozenset({"square_avg", "momentum_buffer", "grad_avg"}): lambda group: ("rmsprop",),
    frozenset({"square_avg", "acc_delta"}): lambda group: ("adadelta",),
    frozenset({"eta", "mu", "ax"}): lambda group: ("asgd",),
    frozenset({"prev", "step_size"}): lambda group: ("rprop",),
    frozenset({"row_var", "col_var"}): lambda group: ("adafactor",),
    frozenset({"row_var", "col_var", "variance"}): lambda group: ("adafactor",),
    frozenset({"variance"}): lambda group: ("adafactor",),
}
"""By the slots of PyTorch's optimizers, but for `step`, which most have."""


def is_optimizer_state(tree: Any) -> bool:
    """Whether a tree is what an optimizer of PyTorch saves."""
    return (
        isinstance(tree, Mapping)
        and isinstance(tree.get("state"), Mapping)
        and isinstance(tree.get("param_groups"), list)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in tree["param_groups"])
    )


def optimizer_of(tree: Mapping[str, Any]) -> Optimizer:
    """The optimizer that saved this."""
    groups: list[Group] = []
    names: dict[Any, Any] = {}
    for group in tree["param_groups"]:
        numbers = group["params"]
        known = group.get("param_names")
        named = known if isinstance(known, list) and len(known) == len(numbers) else numbers
        names |= dict(zip(numbers, named, strict=True))
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(Group(settings, tuple(named)))
    slots = {names.get(key, key): kept for key, kept in tree["state"].items() if isinstance(kept, Mapping)}
    return Optimizer(_families(slots, groups), tuple(groups), slots)


def _families(slots: Mapping[Any, Mapping[str, Any]], groups: list[Group]) -> tuple[str, ...]:
    kept = {frozenset(map(str, each)) - {"step"} for each in slots.values()}
    settings = groups[0].settings if groups else {}
    if not slots or kept == {frozenset()}:
        return ("sgd",) if "momentum" in settings and "dampening" in settings else ()
    found = {FAMILIES[each](settings) if each in FAMILIES else () for each in kept}
    return found.pop() if len(found) == 1 else ()
