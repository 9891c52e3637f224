"""PyTorch's optimizers in words of a recipe, by the names of their classes and settings. Nothing here needs PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from onward.recipe.optimizers import ConfiguredOptimizer, optimizer
from onward.recipe.spec import Spec

_TUPLES: dict[str, tuple[str, ...]] = {"betas": ("beta1", "beta2"), "ns_coefficients": ("ns_a", "ns_b", "ns_c")}
_EPS_OF_ADAFACTOR = ("eps1", "eps2")


def words_of(name: str, settings: Mapping[str, Any], *, number: Callable[[Any], Any] = float, **given: Any) -> Spec:
    """The words of a recipe for the settings of a group; `number` makes a number of what is none of Python's.

    What is `given` counts in place of settings.
    """
    known, every = optimizer(name), {**_flatten(settings), **given}
    if not every.get("momentum"):
        every.pop("dampening", None)  # without momentum, PyTorch does not look at it
    options = {key: every[key] for key in (*known.hyper, *known.choices) if every.get(key) is not None}
    plain = {key: x if isinstance(x, bool | str | int) else float(number(x)) for key, x in options.items()}
    return Spec(name, plain)


def _flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with one name for each number."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        names = _EPS_OF_ADAFACTOR if key == "eps" else _TUPLES.get(key, ())
        if names and isinstance(value, tuple | list):
            flat |= zip(names, value, strict=False)
        else:
            flat[key] = value
    return flat


def settings_in(configured: ConfiguredOptimizer) -> dict[str, Any]:
    """What classes of PyTorch, and ours for it, have as settings."""
    settings = {**configured.values, **configured.options}
    decoupled = configured.kind.name in ("adamw", "sgdw", "lion", "muon") or settings["variant"] == "keras"
    settings["decoupled_weight_decay"] = decoupled or settings.get("decoupled_weight_decay", False)
    tuples = {**_TUPLES, **({"eps": _EPS_OF_ADAFACTOR} if "eps1" in settings else {})}
    settings |= {key: tuple(settings[part] for part in parts) for key, parts in tuples.items() if parts[0] in settings}
    if not settings.get("fused"):
        settings.pop("fused", None)  # which leaves the choice to PyTorch, where it makes no difference
    return settings


# ---- which class it is -----------------------------------------------------------------------------------------------


class Condition(NamedTuple):
    """Settings for which a row is meant."""

    words: str
    holds: Callable[[Mapping[str, Any]], bool]


class Native(NamedTuple):
    """A row: optimizers of a recipe, whose arithmetic they have, and the class of PyTorch that computes the same."""

    optimizers: tuple[str, ...]
    variants: tuple[str, ...]
    made: str
    when: Condition | None = None

    def fits(self, configured: ConfiguredOptimizer) -> bool:
        named = configured.kind.name in self.optimizers and configured.options["variant"] in self.variants
        return named and (self.when is None or self.when.holds({**configured.values, **configured.options}))


_SGD = ("sgd", "momentum", "nesterov")
_PLAIN = Condition("without momentum and weight decay", lambda s: not s["momentum"] and not s["weight_decay"])
_NO_AMSGRAD = Condition("without amsgrad", lambda s: not s["amsgrad"])
_NO_DECAY = Condition("without weight decay", lambda s: not s["weight_decay"])

NATIVE = [
    Native(_SGD, ("torch", "optax"), "SGD"),
    Native((*_SGD, "sgdw"), ("torch", "optax", "keras"), "SGD", _PLAIN),
    Native(("adam", "amsgrad"), ("torch",), "Adam"),
    Native(("adam", "amsgrad"), ("optax",), "Adam", _NO_AMSGRAD),
    Native(("adamw",), ("torch",), "AdamW"),
    Native(("adamw",), ("optax",), "AdamW", _NO_AMSGRAD),
    Native(("adamax",), ("torch", "optax"), "Adamax"),
    Native(("nadam",), ("torch", "keras"), "NAdam"),
    Native(("radam",), ("torch",), "RAdam"),
    Native(("adagrad",), ("torch",), "Adagrad"),
    Native(("rmsprop",), ("torch",), "RMSprop"),
    Native(("adadelta",), ("torch", "optax"), "Adadelta"),
    Native(("adadelta",), ("keras",), "Adadelta", _NO_DECAY),
    Native(("adafactor",), ("torch",), "Adafactor"),
]
"""The first row that fits counts."""

_EVERY = {"maximize": False, "foreach": None, "differentiable": False}
_RATE = {"lr": 0.0, "eps": 0.0, "weight_decay": 0.0, **_EVERY}
_ADAM = {**_RATE, "betas": (), "amsgrad": False, "capturable": False, "fused": None, "decoupled_weight_decay": False}
_BETAS = {**_RATE, "betas": (), "capturable": False}

SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.0, "momentum": 0, "dampening": 0, "weight_decay": 0.0, "nesterov": False, **_EVERY, "fused": None},
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adagrad": {**_RATE, "lr_decay": 0, "initial_accumulator_value": 0, "fused": None},
    "Adadelta": {**_RATE, "rho": 0.9, "capturable": False},
    "Adamax": _BETAS,
    "NAdam": {**_BETAS, "momentum_decay": 0.0, "decoupled_weight_decay": False},
    "RAdam": {**_BETAS, "decoupled_weight_decay": False},
    "RMSprop": {**_RATE, "momentum": 0, "alpha": 0.99, "centered": False, "capturable": False},
    "Adafactor": {"lr": 0.0, "beta2_decay": -0.8, "eps": (), "d": 1.0, "weight_decay": 0.0, "foreach": None,
                  "maximize": False},
}  # fmt: skip
"""What a class has in its groups, and the usual values of what no recipe speaks of."""
