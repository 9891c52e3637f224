"""Optimizers of PyTorch as they are saved, both ways. State names no class: what it keeps tells which it can be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from onward.checkpoint.description import COUNT, MASTER, Group, Optimizer
from onward.checkpoint.tensors import ArrayTensor, number_of
from onward.errors import UnsupportedError
from onward.recipe.optimizers import ConfiguredOptimizer, optimizer
from onward.recipe.spec import Spec

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


FAMILIES: dict[frozenset[str], Callable[[Settings], tuple[str, ...]]] = {
    frozenset({"momentum_buffer"}): lambda group: ("muon",) if "ns_coefficients" in group else ("sgd",),
    frozenset({"exp_avg", "exp_avg_sq"}): _adams,
    frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}): _adams,
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
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in tree["param_groups"])
    )


def optimizer_of(tree: Mapping[str, Any], family: str | None = None) -> Optimizer:
    """The optimizer that saved this; `family` is which it is, where something else says so."""
    groups: list[Group] = []
    names: dict[Any, Any] = {}
    for group in tree["param_groups"]:
        numbers = group["params"]
        known = group.get("param_names")
        named = known if isinstance(known, list) and len(known) == len(numbers) else numbers
        names |= dict(zip(numbers, named, strict=True))
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(Group(settings, tuple(named)))
    slots = {
        names.get(key, key): {slot: value for slot, value in kept.items() if value is not None}
        for key, kept in tree["state"].items()
        if isinstance(kept, Mapping)
    }
    families = (family,) if family else _families(slots, groups)
    if len(families) == 1:
        groups = [dataclasses.replace(group, optimizer=spec_of(families[0], group.settings)) for group in groups]
    return Optimizer(families, tuple(groups), slots)


def _families(slots: Mapping[Any, Mapping[str, Any]], groups: list[Group]) -> tuple[str, ...]:
    kept = {frozenset(map(str, each)) - {COUNT, MASTER} for each in slots.values()}
    settings = groups[0].settings if groups else {}
    if not slots or kept == {frozenset()}:
        return next((name(settings) for keys, name in _KEYS_ALONE if keys <= settings.keys()), ())
    found = {FAMILIES[each](settings) if each in FAMILIES else () for each in kept}
    return found.pop() if len(found) == 1 else ()


# ---- settings --------------------------------------------------------------------------------------------------------

_TUPLES: dict[str, tuple[str, ...]] = {"betas": ("beta1", "beta2"), "ns_coefficients": ("ns_a", "ns_b", "ns_c")}
_EPS_OF_ADAFACTOR = ("eps1", "eps2")
_READ: dict[str, str] = {"sgd": "torch", "lion": "optax", "muon": ""}
"""Whose arithmetic a family has; `torch` unless it is here. PyTorch's Muon rounds to bfloat16 inside."""


def spec_of(family: str, settings: Settings) -> Spec | None:
    """The words of a recipe for a group of PyTorch; None where there are none."""
    variant = _READ.get(family, "torch")
    if not variant or family in ("asgd", "rprop"):
        return None
    known = optimizer(family)
    given = {**_flattened(settings), "lr": base_rate(settings), "variant": variant}
    if not given.get("momentum"):
        given.pop("dampening", None)  # without momentum, PyTorch does not look at it
    wanted = {**known.hyper, **known.choices}
    options = {key: _plain(given[key]) for key in wanted if key in given}
    return Spec(family, {key: value for key, value in options.items() if value is not None})


def base_rate(settings: Settings) -> float:
    """The rate that a schedule multiplies: before it, or at the top of one cycle."""
    rate = settings.get("max_lr", settings.get("initial_lr", settings.get("lr", 0.0)))
    return float(_plain(rate))


def _plain(value: Any) -> Any:
    if isinstance(value, bool | str | int) or value is None:
        return value
    return float(number_of(value))


def _flattened(settings: Settings) -> dict[str, Any]:
    """Settings with one name for each number."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if key == "eps" and isinstance(value, tuple | list):
            flat |= zip(_EPS_OF_ADAFACTOR, value, strict=False)  # None is what the type of the parameter says
        elif key in _TUPLES and isinstance(value, tuple | list):
            flat |= zip(_TUPLES[key], value, strict=False)
        else:
            flat[key] = value
    return flat


# ---- the other way ---------------------------------------------------------------------------------------------------

FLAGS = ("foreach", "differentiable", "capturable", "fused")
"""Settings of PyTorch's classes that change no number."""

_EVERY = {"maximize": False, "foreach": None, "differentiable": False}
_FUSED = {**_EVERY, "capturable": False, "fused": None}
_ADAM = {"lr": 0.0, "betas": (), "eps": 0.0, "weight_decay": 0.0, "amsgrad": False, **_FUSED}
_PLAIN = {"lr": 0.0, "eps": 0.0, "weight_decay": 0.0, **_EVERY}

_SGDS = ("sgd", "momentum", "nesterov", "sgdw")
_TORCH: dict[tuple[str, ...], tuple[tuple[str, ...], dict[str, Any]]] = {
    _SGDS: (("torch", "optax"), {"lr": 0.0, "momentum": 0, "dampening": 0, "weight_decay": 0.0, "nesterov": False,
            **_EVERY, "fused": None}),
    ("adam", "amsgrad"): (("torch", "optax"), {**_ADAM, "decoupled_weight_decay": False}),
    ("adamw",): (("torch", "optax"), {**_ADAM, "decoupled_weight_decay": True}),
    ("adagrad",): (("torch",), {**_PLAIN, "lr_decay": 0, "initial_accumulator_value": 0, "fused": None}),
    ("adadelta",): (("torch", "optax", "keras"), {**_PLAIN, "rho": 0.9, "capturable": False}),
    ("adamax",): (("torch", "optax"), {**_PLAIN, "betas": (), "capturable": False}),
    ("nadam",): (("torch", "keras"), {**_PLAIN, "betas": (), "momentum_decay": 0.0, "capturable": False,
                 "decoupled_weight_decay": False}),
    ("radam",): (("torch",), {**_PLAIN, "betas": (), "capturable": False, "decoupled_weight_decay": False}),
    ("rmsprop",): (("torch",), {**_PLAIN, "momentum": 0, "alpha": 0.99, "centered": False, "capturable": False}),
    ("adafactor",): (("torch",), {"lr": 0.0, "beta2_decay": -0.8, "eps": (), "d": 1.0, "weight_decay": 0.0,
                     "foreach": None, "maximize": False}),
}  # fmt: skip
"""Optimizers of a recipe that are a class of PyTorch's own, the variants that it computes, and its settings."""


def settings_of(spec: Spec, rate: float) -> dict[str, Any]:
    """The settings that PyTorch's own class has for the words of a recipe. `rate` is the rate at the moment."""
    configured = optimizer(spec.name).configure(**spec.options)
    settings = {**configured.values, **configured.options}
    if not settings.get("fused"):
        settings.pop("fused", None)  # which leaves the choice to PyTorch
    template = _template(spec, configured)
    tuples = {**_TUPLES, **({"eps": _EPS_OF_ADAFACTOR} if "eps1" in settings else {})}
    settings |= {key: tuple(settings[part] for part in parts) for key, parts in tuples.items() if parts[0] in settings}
    if template.get("decoupled_weight_decay"):
        settings["decoupled_weight_decay"] = True
    return {**{key: settings.get(key, usual) for key, usual in template.items()}, "lr": rate}


def _template(spec: Spec, configured: ConfiguredOptimizer) -> dict[str, Any]:
    values = {**configured.values, **configured.options}
    variant, decay = values["variant"], values.get("weight_decay")
    for names, (variants, template) in _TORCH.items():
        if spec.name not in names:
            continue
        plain_descent = names == _SGDS and not values["momentum"] and not decay
        other = (
            (spec.name == "sgdw" and not plain_descent)
            or (variant not in variants and not plain_descent)
            or (variant == "optax" and values.get("amsgrad"))
            or (variant == "keras" and spec.name == "adadelta" and decay)
        )
        if not other:
            return template
    raise UnsupportedError(
        f"PyTorch has no optimizer of its own that computes what `{spec}` does",
        hint="write the run with a program of its own: `onward convert training.onnx --to torch`, or use "
        "`variant=torch` from the beginning",
    )


COUNTERLESS = frozenset({*_SGDS})
"""Optimizers whose class in PyTorch does not count updates."""


def counted(spec: Spec, slots: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The slots of a parameter as PyTorch keeps them: with a counter, unless the class has none."""
    kept = {slot: value for slot, value in slots.items() if slot != COUNT}
    if spec.name in COUNTERLESS:
        return kept
    return {COUNT: ArrayTensor(np.asarray(step, np.float32)), **kept}
