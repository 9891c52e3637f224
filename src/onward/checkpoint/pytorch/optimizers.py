"""Optimizers of PyTorch as they are saved, both ways. State names no class: what it keeps tells which it can be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from onward.errors import UnsupportedError
from onward.recipe.optimizers import configure
from onward.recipe.spec import Spec
from onward.run_state.state import COUNT, MASTER, OptimizerState, ParameterGroup
from onward.run_state.tensors import ArrayTensor, number_of
from onward.vocabulary.torch import NATIVE, SETTINGS, settings_in, words_of

# ---- which it is -----------------------------------------------------------------------------------------------------

Settings = Mapping[str, Any]


def _adams(group: Settings) -> tuple[str, ...]:
    if "momentum_decay" in group:
        return ("nadam",)
    if "decoupled_weight_decay" not in group:  # of older versions
        return ("adam", "adamw", "radam")
    if "amsgrad" not in group:
        return ("radam",)
    return ("adamw",) if group["decoupled_weight_decay"] else ("adam",)


FAMILIES: dict[frozenset[str], tuple[str, ...]] = {
    frozenset({"momentum_buffer"}): ("sgd",),
    frozenset({"exp_avg", "exp_avg_sq", "mu_product"}): ("nadam",),
    frozenset({"exp_avg"}): ("lion",),
    frozenset({"exp_avg", "exp_inf"}): ("adamax",),
    frozenset({"sum"}): ("adagrad",),
    frozenset({"square_avg"}): ("rmsprop",),
    frozenset({"square_avg", "momentum_buffer"}): ("rmsprop",),
    frozenset({"square_avg", "grad_avg"}): ("rmsprop",),
    frozenset({"square_avg", "momentum_buffer", "grad_avg"}): ("rmsprop",),
    frozenset({"square_avg", "acc_delta"}): ("adadelta",),
    frozenset({"eta", "mu", "ax"}): ("asgd",),
    frozenset({"prev", "step_size"}): ("rprop",),
    frozenset({"row_var", "col_var"}): ("adafactor",),
    frozenset({"row_var", "col_var", "variance"}): ("adafactor",),
    frozenset({"variance"}): ("adafactor",),
}
"""Optimizers by their slots, but for `step`, which most have, where slots alone tell them apart."""

_OF_ADAM = ({"exp_avg", "exp_avg_sq"}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
_KEYS_ALONE: tuple[tuple[frozenset[str], Callable[[Settings], tuple[str, ...]]], ...] = (
    (frozenset({"momentum", "dampening", "nesterov"}), lambda group: ("sgd",)),
    (frozenset({"betas", "amsgrad"}), _adams),
)
"""By the settings of those that have kept nothing so far."""


def is_optimizer_state(tree: Any) -> bool:
    """Whether a tree is what an optimizer of PyTorch saves."""
    return (
        isinstance(tree, Mapping)
        and isinstance(tree.get("state"), Mapping)
        and isinstance(tree.get("param_groups"), list)
        and all(isinstance(group, Mapping) and _are_numbers(group.get("params")) for group in tree["param_groups"])
    )


def _are_numbers(parameters: Any) -> bool:
    """True if these are parameters as optimizers list them: by number, or by name in distributed checkpoints."""
    return isinstance(parameters, list) and all(isinstance(each, int | str) for each in parameters)


def optimizer_of(tree: Mapping[str, Any], family: str | None = None) -> OptimizerState:
    """The optimizer that saved this; `family` is which it is, where something else says so."""
    groups: list[ParameterGroup] = []
    names: dict[Any, Any] = {}
    for group in tree["param_groups"]:
        numbers = group["params"]
        known = group.get("param_names")
        named = known if isinstance(known, list) and len(known) == len(numbers) else numbers
        names |= dict(zip(numbers, named, strict=True))
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(ParameterGroup(None, tuple(named), settings))
    slots = {
        names.get(key, key): {slot: value for slot, value in kept.items() if value is not None}
        for key, kept in tree["state"].items()
        if isinstance(kept, Mapping)
    }
    families = (family,) if family else _families(slots, groups)
    if len(families) == 1:
        groups = [dataclasses.replace(group, optimizer=spec_of(families[0], group.settings)) for group in groups]
    return OptimizerState(families, tuple(groups), slots)


def _families(slots: Mapping[Any, Mapping[str, Any]], groups: list[ParameterGroup]) -> tuple[str, ...]:
    kept = {frozenset(map(str, each)) - {COUNT, MASTER} for each in slots.values()}
    settings = groups[0].settings if groups else {}
    if not slots or kept == {frozenset()}:
        return next((name(settings) for keys, name in _KEYS_ALONE if keys <= settings.keys()), ())
    found = {_adams(settings) if each in _OF_ADAM else FAMILIES.get(each, ()) for each in kept}
    if found == {("sgd",)} and "ns_coefficients" in settings:
        return ("muon",)
    return found.pop() if len(found) == 1 else ()


# ---- settings --------------------------------------------------------------------------------------------------------

_READ: dict[str, str] = {"sgd": "torch", "lion": "optax", "muon": ""}
"""Whose arithmetic a family has; `torch` unless it is here. PyTorch's Muon rounds to bfloat16 inside."""


def spec_of(family: str, settings: Settings) -> Spec | None:
    """The words of a recipe for a group of PyTorch; None where there are none."""
    variant = _READ.get(family, "torch")
    if not variant or family in ("asgd", "rprop"):
        return None
    return words_of(family, settings, number=number_of, lr=base_rate(settings), variant=variant)


def base_rate(settings: Settings) -> float:
    """The rate that a schedule multiplies: before it, or at the top of one cycle."""
    rate = settings.get("max_lr", settings.get("initial_lr", settings.get("lr", 0.0)))
    return float(rate if isinstance(rate, int) else number_of(rate))


# ---- the other way ---------------------------------------------------------------------------------------------------

FLAGS = ("foreach", "differentiable", "capturable", "fused")
"""Settings of PyTorch's classes that change no number."""


def settings_of(spec: Spec, rate: float) -> dict[str, Any]:
    """The settings that PyTorch's own class has for the words of a recipe. `rate` is the rate at the moment."""
    configured = configure(spec)
    kind = next((row.made for row in NATIVE if row.fits(configured)), None)
    if kind is None:
        raise UnsupportedError(
            f"PyTorch has no optimizer of its own that computes what `{spec}` does",
            hint="write the run with a program of its own: `onward convert training.onnx --to torch --program`, or use "
            "`variant=torch` from the beginning",
        )
    settings = settings_in(configured)
    return {**{key: settings.get(key, usual) for key, usual in SETTINGS[kind].items()}, "lr": rate}


_COUNTERLESS = ("sgd", "momentum", "nesterov", "sgdw")
"""Optimizers whose class in PyTorch does not count updates."""


def with_step(spec: Spec, slots: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The slots of a parameter as PyTorch keeps them: with a counter, unless the class has none."""
    kept = {slot: value for slot, value in slots.items() if slot != COUNT}
    if spec.name in _COUNTERLESS:
        return kept
    return {COUNT: ArrayTensor(np.asarray(step, np.float32)), **kept}
