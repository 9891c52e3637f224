"""Rows of `optimizers.py`: optimizers of PyTorch, Keras and optax."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from onward.recipe.optimizers import ConfiguredOptimizer, optimizer
from onward.recipe.optimizers.definition import Settings, Update
from onward.recipe.spec import Spec


class Condition(NamedTuple):
    """Settings for which a row applies."""

    words: str
    """For tables in the documentation: "without amsgrad"."""
    holds: Callable[[Mapping[str, Any]], bool]


@dataclasses.dataclass(frozen=True)
class OptimizerRow:
    """A class of a framework and the optimizers of a recipe that it computes."""

    path: str
    """Path of the class: "torch.optim.AdamW", "keras.optimizers.AdamW", "optax.adamw"."""
    optimizers: tuple[str, ...]
    """Names in a recipe. The class is read as the first."""
    variants: tuple[str, ...]
    """Frameworks with its arithmetic: "torch", "keras", "optax", "transformers"."""
    settings: Mapping[str, Any]
    """Settings: names in a recipe -> names in the class, where several may form one tuple."""
    slots: Mapping[str, str]
    """Slots of a recipe -> their names in the class."""
    applies: Condition | None = None

    @property
    def name(self) -> str:
        """Return the name of the class."""
        return self.path.rpartition(".")[2]

    def fits(self, configured: ConfiguredOptimizer) -> bool:
        """True if the class computes what a configured optimizer of a recipe does."""
        is_named = configured.definition.name in self.optimizers and configured.options["variant"] in self.variants
        return is_named and (self.applies is None or self.applies.holds({**configured.values, **configured.options}))


Row = TypeVar("Row", bound=OptimizerRow)


def row_for(rows: Iterable[Row], configured: ConfiguredOptimizer) -> Row | None:
    """Return the first row that fits."""
    return next((row for row in rows if row.fits(configured)), None)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TorchOptimizer(OptimizerRow):
    """A class of torch.optim, or a class of Onward for an update that torch.optim does not have."""

    flags: tuple[str, ...] = ()
    """Settings of `FLAGS` in a group of the class."""
    states: tuple[frozenset[str], ...] = ()
    """Slots by which a saved state is recognized as of this class."""
    counts: bool = True
    """True if the class stores the number of updates in the slot `step`."""
    variant_by_decay: bool = False
    """True if decoupled weight decay means the variant of Keras, else that of optax."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of a printed class of Onward."""
    updates: Mapping[str, Update] = dataclasses.field(default_factory=dict)
    """Updates of a printed class, by the condition on its settings; the last condition is empty."""

    @property
    def is_native(self) -> bool:
        """True for a class of torch.optim."""
        return self.path.startswith("torch.optim.")

    def read(self, settings: Mapping[str, Any]) -> tuple[str, str]:
        """Return the recipe's name and variant for the settings of a group."""
        if self.variant_by_decay:
            return self.optimizers[0], "keras" if settings["decoupled_weight_decay"] else "optax"
        return self.optimizers[0], self.variants[0]

    def words(
        self, name: str, settings: Mapping[str, Any], *, number: Callable[[Any], Any] = float, **fixed: Any
    ) -> Spec:
        """Return the words of a recipe for the settings of a group.

        Args:
            name: the optimizer in the recipe
            settings: the settings of the group, by PyTorch's names
            number: converts a number that is not Python's
            fixed: options that replace settings
        """
        options: dict[str, Any] = {}
        for theirs, ours in self._names().items():
            value = settings.get(theirs)
            if len(ours) == 1:
                options[ours[0]] = value
            elif isinstance(value, tuple | list):
                options |= zip(ours, value, strict=False)
        options |= fixed
        if not options.get("momentum"):
            options.pop("dampening", None)  # PyTorch ignores it without momentum
        definition = optimizer(name)
        chosen = {key: options[key] for key in (*definition.hyper, *definition.choices) if options.get(key) is not None}
        return Spec(name, {k: x if isinstance(x, bool | str | int) else float(number(x)) for k, x in chosen.items()})

    def settings_for(self, configured: ConfiguredOptimizer) -> dict[str, Any]:
        """Return the settings of the class for a configured optimizer of a recipe."""
        options = {**configured.values, **configured.options}
        always = options["variant"] == "keras" or (configured.decouples and not self.variant_by_decay)
        options["decoupled_weight_decay"] = always or options.get("decoupled_weight_decay", False)
        if not options.get("fused"):
            options.pop("fused", None)  # PyTorch chooses, and the numbers are the same
        return {
            theirs: options[ours[0]] if len(ours) == 1 else tuple(options[name] for name in ours)
            for theirs, ours in self._names().items()
            if ours[0] in options
        }

    def _names(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = {}
        for ours, theirs in self.settings.items():
            names.setdefault(theirs, []).append(ours)
        return names


# ---- Keras -----------------------------------------------------------------------------------------------------------

ONLY_WITH = {"max_exp_avg_sq": "amsgrad", "grad_avg": "centered", "momentum_buffer": "momentum"}
"""Slot -> the setting of Keras that it requires."""
_WORDS = {"_m": "momentum", "_u": "norm", "_velocities": "velocity"}
"""Attributes -> names of variables that are not their singular."""


@dataclasses.dataclass(frozen=True)
class KerasRow(OptimizerRow):
    """Optimizer class of Keras. A slot is an attribute with a list of variables by parameter."""

    flags: tuple[str, ...] = ()
    """Boolean settings, which have the same names in a recipe."""
    apart: tuple[str, ...] = ()
    """Slots whose variables are created together, and not parameter by parameter."""
    shared: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Slots that Keras stores once for all parameters -> attribute with the variable."""

    @functools.cached_property
    def words(self) -> dict[str, str]:
        """Return slots -> the last word in the names of their variables."""
        return {slot: _WORDS.get(name, name.strip("_").removesuffix("s")) for slot, name in self.slots.items()}

    @functools.cached_property
    def attributes(self) -> set[str]:
        """Return the attributes with slots."""
        return {*self.slots.values(), *self.shared.values()}

    @functools.cached_property
    def always(self) -> set[str]:
        """Return the slots that all settings have."""
        return self.slots.keys() - ONLY_WITH.keys()

    def slots_for(self, config: Mapping[str, Any]) -> list[str]:
        """Return the slots for some settings, in the order of their creation."""
        return [slot for slot in self.slots if slot in self.always or config.get(ONLY_WITH[slot])]

    def read(self, config: Mapping[str, Any], lr: float) -> Spec:
        """Return the optimizer of a recipe for settings of the class."""
        decay = float(config.get("weight_decay") or 0.0)
        numbers = {ours: float(config[theirs]) for ours, theirs in self.settings.items()}
        flags = {flag: bool(config[flag]) for flag in self.flags}
        if flags.get("nesterov") and not numbers["momentum"]:
            flags["nesterov"] = False  # Keras has no look ahead without a momentum either
        name = "adam" if self.name == "AdamW" and not decay else self.optimizers[0]
        return Spec(name, {"lr": lr, **numbers, **flags, "variant": "keras", "weight_decay": decay})

    def write(self, configured: ConfiguredOptimizer) -> dict[str, Any]:
        """Return the settings of the class, without the learning rate and weight decay."""
        numbers = {theirs: configured.values[ours] for ours, theirs in self.settings.items()}
        return {**numbers, **{flag: bool(configured.options.get(flag, False)) for flag in self.flags}}

    def fits(self, configured: ConfiguredOptimizer) -> bool:
        """True if the class has the same update and the same fixed numbers."""
        if configured.definition.name not in self.optimizers or configured.options["maximize"]:
            return False
        theirs = optimizer(self.optimizers[0])
        options = {flag: configured.options.get(flag, False) for flag in theirs.options}
        keras_options = {**theirs.configure(variant="keras").options, **options}
        twin = ConfiguredOptimizer(theirs, {**theirs.hyper, **configured.values}, keras_options)
        fixed = {**theirs.hyper, **theirs.variants["keras"]}
        free = {"lr", "weight_decay", *self.settings}
        if any(configured.values[number] != fixed[number] for number in configured.effective - free):
            return False
        return _update_name(configured) == _update_name(twin)


def _update_name(configured: ConfiguredOptimizer) -> str:
    """Return the name of the update. A weight decay of 0 is none."""
    name = configured.definition.choose(configured.settings, None).function.name
    return name if configured.values.get("weight_decay") else name.removesuffix("W")


# ---- optax -----------------------------------------------------------------------------------------------------------


class TransformationRow(NamedTuple):
    """Function of optax that makes a transformation of gradients."""

    settings: Mapping[str, str] = {}
    """Argument -> setting of a recipe, with "-" before a negated one."""
    slots: Mapping[str, str] = {}
    """Field of its state -> slot."""
    counts: bool = False
    """True if its state counts updates."""
    fixed: Mapping[str, Any] = {}
    """Arguments that no recipe can set -> their value in all recipes."""


class ChainStage(NamedTuple):
    """A transformation in the chain of an optimizer."""

    name: str
    row: TransformationRow
    fixed: Mapping[str, Any] = {}
    """Arguments that do not depend on settings."""
    when: Callable[[Settings], bool | None] = lambda s: True
    """Returns False if the chain lacks it, and None for `optax.identity` in its place."""


Chain = tuple[ChainStage, ...]
OptaxCall = tuple[str, dict[str, Any]]
"""The name of a function of optax, and its arguments."""


@dataclasses.dataclass(frozen=True)
class OptaxRow(OptimizerRow):
    """Optimizer of optax as a chain of transformations, in the order of `optax.<name>`."""

    stages: Chain = ()
    difference: str = ""
    """Part that optax computes differently, with the same state; empty if the numbers are equal."""

    def fits(self, configured: ConfiguredOptimizer) -> bool:
        return not configured.options["maximize"] and super().fits(configured)

    def calls(self, configured: ConfiguredOptimizer, **replaced: Any) -> list[OptaxCall]:
        """Return the chain for these settings, some replaced, such as the rate by a schedule."""
        settings, calls = configured.settings, []
        settings.decoupled = configured.decouples
        values = {**vars(settings), **replaced}
        for stage in self.stages:
            if there := stage.when(settings):
                arguments = {
                    theirs: -values[ours[1:]] if ours[0] == "-" else values[ours]
                    for theirs, ours in stage.row.settings.items()
                    if theirs not in stage.fixed
                }
                calls.append((stage.name, {**arguments, **stage.fixed}))
            elif there is None:
                calls.append(("identity", {}))
        return calls
