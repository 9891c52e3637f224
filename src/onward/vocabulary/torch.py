"""PyTorch's optimizers and losses in words of a recipe, both ways, by the names of classes, without PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from onward.recipe.optimizers import ConfiguredOptimizer, optimizer, updates
from onward.recipe.optimizers.definition import Update
from onward.recipe.spec import Spec
from onward.vocabulary.rows import Condition, OptimizerRow

# ---- optimizers ------------------------------------------------------------------------------------------------------

FLAGS = {"foreach": None, "differentiable": False, "capturable": False, "fused": None}
"""Settings that change no number, and their defaults."""
_PARTS = {"betas": ("beta1", "beta2"), "ns_coefficients": ("ns_a", "ns_b", "ns_c")}
_DECOUPLED_NAMES = ("adamw", "sgdw", "lion", "muon")
"""Recipe optimizers whose weight decay is always decoupled."""


@dataclasses.dataclass(frozen=True)
class TorchOptimizer(OptimizerRow):
    """A class of torch.optim, or a class of Onward for an update that torch.optim does not have."""

    flags: tuple[str, ...] = ()
    """Those of `FLAGS` that a group of the class has and a recipe does not."""
    states: tuple[frozenset[str], ...] = ()
    """Slots of a parameter, by which the class is recognized in a saved state. Empty if it is not."""
    counts: bool = True
    """True if the class keeps the number of updates in the slot `step`."""
    variant_by_decay: bool = False
    """True if decoupled weight decay tells Keras's variant from optax's."""
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
        kind = optimizer(name)
        chosen = {key: options[key] for key in (*kind.hyper, *kind.choices) if options.get(key) is not None}
        return Spec(name, {k: x if isinstance(x, bool | str | int) else float(number(x)) for k, x in chosen.items()})

    def settings_for(self, configured: ConfiguredOptimizer) -> dict[str, Any]:
        """Return the settings of the class for a configured optimizer of a recipe."""
        options = {**configured.values, **configured.options}
        is_decoupled = configured.kind.name in _DECOUPLED_NAMES or options["variant"] == "keras"
        options["decoupled_weight_decay"] = is_decoupled or options.get("decoupled_weight_decay", False)
        if not options.get("fused"):
            options.pop("fused", None)  # PyTorch chooses, and the numbers are the same
        return {
            theirs: options[ours[0]] if len(ours) == 1 else tuple(options[each] for each in ours)
            for theirs, ours in self._names().items()
            if ours[0] in options
        }

    def _names(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = {}
        for ours, theirs in self.settings.items():
            names.setdefault(theirs, []).append(ours)
        return names


def _settings(names: str) -> dict[str, str]:
    """Return recipe's names -> PyTorch's. A tuple of PyTorch's is several settings of a recipe: `eps=eps1,eps2`."""
    pairs = [name.partition("=") for name in names.split()]
    parts = {theirs: tuple(ours.split(",")) if ours else _PARTS.get(theirs, (theirs,)) for theirs, _, ours in pairs}
    return {each: theirs for theirs, ours in parts.items() for each in ours}


def _native(
    name: str,
    optimizers: str,
    variants: str,
    settings: str,
    flags: str,
    *states: str,
    counts: bool = True,
    applies: Condition | None = None,
) -> TorchOptimizer:
    slots = {slot: slot for state in states for slot in state.split()}
    return TorchOptimizer(
        f"torch.optim.{name}",
        tuple(optimizers.split()),
        tuple(variants.split()),
        _settings(f"lr weight_decay maximize {settings}"),
        slots,
        applies,
        tuple(flags.split()),
        tuple(frozenset(state.split()) for state in states),
        counts,
    )


def _ours(
    name: str,
    optimizers: str,
    variants: str,
    slots: str,
    defaults: Mapping[str, Any] | None = None,
    updates: Mapping[str, Update] | None = None,
    *,
    settings: str = "",
    states: tuple[frozenset[str], ...] = (),
    variant_by_decay: bool = False,
) -> TorchOptimizer:
    return TorchOptimizer(
        f"onward.frameworks.torch.exact.{name}",
        tuple(optimizers.split()),
        tuple(variants.split()),
        _settings(" ".join(["weight_decay", "decoupled_weight_decay", "maximize", *(defaults or {}), settings])),
        {slot: slot for slot in slots.split()},
        states=states,
        variant_by_decay=variant_by_decay,
        defaults=defaults or {},
        updates=updates or {},
    )


_PLAIN = Condition("without momentum and weight decay", lambda s: not s["momentum"] and not s["weight_decay"])
_NO_AMSGRAD = Condition("without amsgrad", lambda s: not s["amsgrad"])
_NO_DECAY = Condition("without weight decay", lambda s: not s["weight_decay"])

_SGD = "momentum dampening nesterov", "foreach differentiable fused", "momentum_buffer"
_ADAM = (
    "betas eps amsgrad fused decoupled_weight_decay",
    "foreach differentiable capturable fused",
    "exp_avg exp_avg_sq",
    "exp_avg exp_avg_sq max_exp_avg_sq",
)
_FLAGS = "foreach differentiable capturable"
_ADADELTA = "rho eps", _FLAGS, "square_avg acc_delta"
_RMSPROP = ("square_avg", "square_avg momentum_buffer", "square_avg grad_avg", "square_avg momentum_buffer grad_avg")

_BETAS = (0.9, 0.999)
_DECOUPLED = {"decoupled_weight_decay": True}
_NO_MOMENTUM, _NESTEROV = 'not group["momentum"]', 'group["nesterov"]'
_MOMENTS = "exp_avg exp_avg_sq"

OPTIMIZERS = [
    _native("SGD", "sgd momentum nesterov", "torch optax", *_SGD, counts=False),
    _native("SGD", "sgd momentum nesterov sgdw", "torch optax keras", *_SGD, counts=False, applies=_PLAIN),
    _native("Adam", "adam amsgrad", "torch", *_ADAM),
    _native("Adam", "adam amsgrad", "optax", *_ADAM, applies=_NO_AMSGRAD),
    _native("AdamW", "adamw", "torch", *_ADAM),
    _native("AdamW", "adamw", "optax", *_ADAM, applies=_NO_AMSGRAD),
    _native("Adamax", "adamax", "torch optax", "betas eps", _FLAGS, "exp_avg exp_inf"),
    _native(
        "NAdam", "nadam", "torch keras", "betas eps momentum_decay decoupled_weight_decay", _FLAGS,
        "exp_avg exp_avg_sq mu_product",
    ),
    _native("RAdam", "radam", "torch", "betas eps decoupled_weight_decay", _FLAGS, _MOMENTS),
    _native(
        "Adagrad", "adagrad", "torch", "lr_decay eps initial_accumulator_value", "foreach differentiable fused", "sum"
    ),
    _native("RMSprop", "rmsprop", "torch", "momentum alpha eps centered", _FLAGS, *_RMSPROP),
    _native("Adadelta", "adadelta", "torch optax", *_ADADELTA),
    _native("Adadelta", "adadelta", "keras", *_ADADELTA, applies=_NO_DECAY),
    _native(
        "Adafactor", "adafactor", "torch", "beta2_decay eps=eps1,eps2 d", "foreach",
        "row_var col_var", "row_var col_var variance", "variance",
    ),
    _ours(
        "KerasSGD", "sgd momentum nesterov sgdw", "keras", "momentum_buffer",
        {"lr": 1e-2, "momentum": 0.0, "nesterov": False, **_DECOUPLED},
        {_NO_MOMENTUM: updates.sgd, _NESTEROV: updates.sgd_nesterov_keras, "": updates.sgd_momentum_keras},
    ),
    _ours(
        "SGDW", "sgdw", "torch optax", "momentum_buffer",
        {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 1e-2, **_DECOUPLED},
        {_NO_MOMENTUM: updates.sgd, _NESTEROV: updates.sgd_nesterov, "": updates.sgd_momentum_dampened},
    ),
    _ours(
        "OptaxAMSGrad", "amsgrad adam adamw", "optax", "exp_avg exp_avg_sq max_exp_avg_sq",
        {"lr": 1e-3, "betas": _BETAS, "eps": 1e-8}, {"": updates.amsgrad_optax},
    ),
    _ours(
        "KerasAdam", "adam adamw amsgrad", "keras", "exp_avg exp_avg_sq max_exp_avg_sq",
        {"lr": 1e-3, "betas": _BETAS, "eps": 1e-7, "amsgrad": False, **_DECOUPLED},
        {'group["amsgrad"]': updates.amsgrad_keras, "": updates.adam_keras},
    ),
    _ours(
        "TransformersAdamW", "adamw", "transformers", _MOMENTS, {"lr": 1e-3, "betas": _BETAS, "eps": 1e-6},
        {"": updates.adamw_transformers},
    ),
    _ours(
        "KerasAdamax", "adamax", "keras", "exp_avg exp_inf",
        {"lr": 1e-3, "betas": _BETAS, "eps": 1e-7, **_DECOUPLED}, {"": updates.adamax_keras},
    ),
    _ours(
        "OptaxNAdam", "nadam", "optax", _MOMENTS, {"lr": 2e-3, "betas": _BETAS, "eps": 1e-8}, {"": updates.nadam_optax}
    ),
    _ours(
        "OptaxRAdam", "radam", "optax", _MOMENTS, {"lr": 1e-3, "betas": _BETAS, "eps": 1e-8}, {"": updates.radam_optax}
    ),
    _ours(
        "RootEpsAdagrad", "adagrad", "optax keras", "sum", {"lr": 1e-2, "initial_accumulator_value": 0.1, "eps": 1e-7},
        {"": updates.adagrad_keras}, variant_by_decay=True,
    ),
    _ours(
        "RootEpsRMSprop", "rmsprop", "optax keras", "square_avg momentum_buffer grad_avg",
        {"lr": 1e-2, "alpha": 0.9, "eps": 1e-7, "momentum": 0.0, "centered": False},
        {
            'group["centered"] and group["momentum"]': updates.rmsprop_centered_momentum_keras,
            'group["centered"]': updates.rmsprop_centered_keras,
            'group["momentum"]': updates.rmsprop_momentum_keras,
            "": updates.rmsprop_keras,
        },
        variant_by_decay=True,
    ),
    _ours(
        "AdadeltaW", "adadelta", "keras", "square_avg acc_delta",
        {"lr": 1e-3, "rho": 0.95, "eps": 1e-7, **_DECOUPLED}, {"": updates.adadelta},
    ),
    _ours(
        "OptaxAdafactor", "adafactor", "optax", "row_var col_var variance",
        settings="lr beta2_decay eps=eps1,eps2 d min_dim_size_to_factor",
    ),
    _ours(
        "Lion", "lion", "optax keras", "exp_avg", {"lr": 1e-4, "betas": (0.9, 0.99), **_DECOUPLED},
        {"": updates.lion}, states=(frozenset({"exp_avg"}),),
    ),
    _ours(
        "Lamb", "lamb", "optax keras", _MOMENTS, {"lr": 1e-3, "betas": _BETAS, "eps": 1e-6},
        {'group["decoupled_weight_decay"]': updates.lamb_keras, "": updates.lamb}, variant_by_decay=True,
    ),
    _ours(
        "Muon", "muon", "torch", "momentum_buffer",
        settings="lr momentum nesterov ns_coefficients ns_steps eps adjust_lr_fn",
        states=(frozenset({"momentum_buffer"}),),
    ),
]  # fmt: skip
"""The first row that fits counts."""

REFUSED_OPTIMIZERS = {
    "LBFGS": (
        "LBFGS evaluates the model several times for each step",
        "use an optimizer of one gradient for each update, such as AdamW",
    ),
    "SparseAdam": ("a training model has no sparse gradients", "use Adam, and `sparse=False` in embeddings"),
    "Muon": (
        "PyTorch's Muon orthogonalises in bfloat16, a training model in the type of the parameter",
        "use `onward.frameworks.torch.exact.Muon`, or another optimizer",
    ),
}
"""Classes of torch.optim: the problem, and the hint."""

# ---- saved optimizers ------------------------------------------------------------------------------------------------

FAMILIES: dict[frozenset[str], tuple[str, ...]] = {
    **{state: row.optimizers[:1] for row in reversed(OPTIMIZERS) for state in row.states},
    frozenset({"eta", "mu", "ax"}): ("asgd",),
    frozenset({"prev", "step_size"}): ("rprop",),
}
"""Optimizers by the slots of a parameter, but for `step`. Adam, AdamW and RAdam have the same slots."""
_ADAMS = {frozenset(state.split()) for state in _ADAM[2:]}


def families_of(states: Collection[frozenset[str]], settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the recipe's names of the optimizers that a saved state can be of.

    Args:
        states: the slots of each parameter, but for `step`
        settings: the settings of the first group
    """
    if set(states) <= {frozenset()}:
        if {"momentum", "dampening", "nesterov"} <= settings.keys():
            return ("sgd",)
        return _adams(settings) if {"betas", "amsgrad"} <= settings.keys() else ()
    families = {_adams(settings) if state in _ADAMS else FAMILIES.get(state, ()) for state in states}
    if families == {("sgd",)} and "ns_coefficients" in settings:
        return ("muon",)
    return families.pop() if len(families) == 1 else ()


def _adams(settings: Mapping[str, Any]) -> tuple[str, ...]:
    if "momentum_decay" in settings:
        return ("nadam",)
    if "decoupled_weight_decay" not in settings:  # of older versions
        return ("adam", "adamw", "radam")
    if "amsgrad" not in settings:
        return ("radam",)
    return ("adamw",) if settings["decoupled_weight_decay"] else ("adam",)


def saved_words(family: str, settings: Mapping[str, Any], rate: float, number: Callable[[Any], Any]) -> Spec | None:
    """Return the words of a recipe for a group of a saved optimizer; None if there are none."""
    row = next((row for row in OPTIMIZERS if family in row.optimizers), None)
    if row is None or row.name in REFUSED_OPTIMIZERS:
        return None
    variant = row.variants[0] if row.states else "torch"
    return row.words(family, settings, number=number, lr=rate, variant=variant)


# ---- losses ----------------------------------------------------------------------------------------------------------


class LossRow(NamedTuple):
    """A loss of a recipe, and its counterparts in PyTorch."""

    name: str
    module: str
    """The class in torch.nn; without a function, a class of Onward."""
    function: str = ""
    """The function in torch.nn.functional."""


LOSSES = [
    LossRow("cross_entropy", "CrossEntropyLoss", "cross_entropy"),
    LossRow("nll", "NLLLoss", "nll_loss"),
    LossRow("mse", "MSELoss", "mse_loss"),
    LossRow("l1", "L1Loss", "l1_loss"),
    LossRow("smooth_l1", "SmoothL1Loss", "smooth_l1_loss"),
    LossRow("huber", "HuberLoss", "huber_loss"),
    LossRow("binary_cross_entropy", "BCELoss", "binary_cross_entropy"),
    LossRow("bce_with_logits", "BCEWithLogitsLoss", "binary_cross_entropy_with_logits"),
    LossRow("kl_div", "KLDivLoss", "kl_div"),
    LossRow("poisson_nll", "PoissonNLLLoss", "poisson_nll_loss"),
    LossRow("gaussian_nll", "GaussianNLLLoss", "gaussian_nll_loss"),
    LossRow("ctc", "CTCLoss", "ctc_loss"),
    LossRow("triplet", "TripletMarginLoss", "triplet_margin_loss"),
    LossRow("hinge", "Hinge"),
    LossRow("squared_hinge", "SquaredHinge"),
    LossRow("cosine", "CosineDistance"),
    LossRow("binary_cross_entropy", "ClippedBCELoss"),
    LossRow("ctc", "CTC"),
]
"""The first row of a name counts, unless its options ask for the other."""
