"""The optimizers of a recipe as classes of PyTorch, Keras and optax, by name, without importing
them.

One row per class and condition, read in both directions. A row applies where `fits` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onward.recipe.optimizers import updates
from onward.recipe.optimizers.definition import Settings, Update
from onward.vocabulary.rows import Chain, ChainStage, Condition, KerasRow, OptaxRow, TorchOptimizer, TransformationRow

# ---- PyTorch ---------------------------------------------------------------------------------------------------------

_PARTS = {"betas": ("beta1", "beta2"), "ns_coefficients": ("ns_a", "ns_b", "ns_c")}


def _settings(names: str) -> dict[str, str]:
    """Return settings -> names in PyTorch. `eps=eps1,eps2` is a tuple in PyTorch."""
    pairs = [name.partition("=") for name in names.split()]
    names_of = {theirs: tuple(ours.split(",")) if ours else _PARTS.get(theirs, (theirs,)) for theirs, _, ours in pairs}
    return {name: theirs for theirs, ours in names_of.items() for name in ours}


def _torch(path: str, optimizers: str, variants: str, settings: str, slots: str, **columns: Any) -> TorchOptimizer:
    names = {slot: slot for slot in slots.split()}
    return TorchOptimizer(path, (*optimizers.split(),), (*variants.split(),), _settings(settings), names, **columns)


def _native(
    name: str, optimizers: str, variants: str, settings: str, flags: str, *states: str, **columns: Any
) -> TorchOptimizer:
    columns |= {"flags": tuple(flags.split()), "states": tuple(frozenset(state.split()) for state in states)}
    settings = f"lr weight_decay maximize {settings}"
    return _torch(f"torch.optim.{name}", optimizers, variants, settings, " ".join(states), **columns)


def _ours(
    name: str,
    optimizers: str,
    variants: str,
    slots: str,
    defaults: Mapping[str, Any] = {},
    updates: Mapping[str, Update] = {},
    settings: str = "",
    **columns: Any,
) -> TorchOptimizer:
    settings = " ".join(["weight_decay", "decoupled_weight_decay", "maximize", *defaults, settings])
    columns |= {"defaults": defaults, "updates": updates}
    return _torch(f"onward.frameworks.torch.exact.{name}", optimizers, variants, settings, slots, **columns)


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

TORCH_ROWS = [
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
        "TransformersAdafactor", "adafactor", "transformers", "row_var col_var variance",
        settings="lr beta2_decay eps=eps1,eps2 d scale_parameter",
        states=(frozenset({"exp_avg_sq_row", "exp_avg_sq_col", "RMS"}), frozenset({"exp_avg_sq", "RMS"})),
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

# ---- Keras -----------------------------------------------------------------------------------------------------------


def _keras(
    name: str, optimizers: Sequence[str], settings: Mapping[str, str], slots: Mapping[str, str], **columns: Any
) -> KerasRow:
    return KerasRow(f"keras.optimizers.{name}", tuple(optimizers), ("keras",), settings, slots, **columns)


_KERAS_BETAS = {"beta1": "beta_1", "beta2": "beta_2"}
_KERAS_ADAM = {**_KERAS_BETAS, "eps": "epsilon"}
_KERAS_MOMENTS = {"exp_avg": "_momentums", "exp_avg_sq": "_velocities"}
_KERAS_AMSGRAD: dict[str, Any] = {"flags": ("amsgrad",), "apart": ("max_exp_avg_sq",)}
_HATS = {**_KERAS_MOMENTS, "max_exp_avg_sq": "_velocity_hats"}
KERAS_ROWS = {row.name: row for row in (
    _keras(
        "SGD", ["sgd", "momentum", "nesterov", "sgdw"], {"momentum": "momentum"}, {"momentum_buffer": "momentums"},
        flags=("nesterov",),
    ),
    _keras("Adam", ["adam", "amsgrad"], _KERAS_ADAM, _HATS, **_KERAS_AMSGRAD),
    _keras("AdamW", ["adamw"], _KERAS_ADAM, _HATS, **_KERAS_AMSGRAD),
    _keras(
        "Adagrad", ["adagrad"], {"eps": "epsilon", "initial_accumulator_value": "initial_accumulator_value"},
        {"sum": "_accumulators"},
    ),
    _keras(
        "Adadelta", ["adadelta"], {"rho": "rho", "eps": "epsilon"},
        {"square_avg": "_accumulated_grads", "acc_delta": "_accumulated_delta_vars"},
    ),
    _keras("Adamax", ["adamax"], _KERAS_ADAM, {"exp_avg": "_m", "exp_inf": "_u"}),
    _keras("Nadam", ["nadam"], _KERAS_ADAM, _KERAS_MOMENTS, shared={"mu_product": "_u_product"}),
    _keras(
        "RMSprop", ["rmsprop"], {"alpha": "rho", "eps": "epsilon", "momentum": "momentum"},
        {"square_avg": "_velocities", "momentum_buffer": "_momentums", "grad_avg": "_average_gradients"},
        flags=("centered",), apart=("square_avg", "momentum_buffer", "grad_avg"),
    ),
    _keras("Lion", ["lion"], _KERAS_BETAS, {"exp_avg": "_momentums"}),
    _keras("Lamb", ["lamb"], _KERAS_ADAM, _KERAS_MOMENTS),
)}  # fmt: skip
"""By the names of Keras's classes."""

# ---- optax -----------------------------------------------------------------------------------------------------------

_OPTAX_BETAS = {"b1": "beta1", "b2": "beta2", "eps": "eps"}
_OPTAX_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_NO_ROOT = {"eps_root": 0.0, "mu_dtype": None}
_ROOT_MEAN_SQUARE = {"decay": "alpha", "eps": "eps"}

TRANSFORMATIONS = {
    "trace": TransformationRow(
        {"decay": "momentum", "nesterov": "nesterov"}, {"trace": "momentum_buffer"}, fixed={"accumulator_dtype": None}),
    "scale_by_adam": TransformationRow(_OPTAX_BETAS, _OPTAX_MOMENTS, True, _NO_ROOT),
    "scale_by_amsgrad": TransformationRow(
        _OPTAX_BETAS, {**_OPTAX_MOMENTS, "nu_max": "max_exp_avg_sq"}, True,
        {**_NO_ROOT, "bias_correction_mu": True, "bias_correction_nu": True}),
    "scale_by_adamax": TransformationRow(_OPTAX_BETAS, {"mu": "exp_avg", "nu": "exp_inf"}, True),
    "scale_by_radam": TransformationRow(
        _OPTAX_BETAS, _OPTAX_MOMENTS, True, {"threshold": 5.0, "nesterov": False, "eps_root": 0.0}),
    "scale_by_lion": TransformationRow(
        {"b1": "beta1", "b2": "beta2"}, {"mu": "exp_avg"}, True, {"mode": "hard", "mu_dtype": None}),
    "scale_by_rss": TransformationRow(
        {"initial_accumulator_value": "initial_accumulator_value", "eps": "eps"}, {"sum_of_squares": "sum"}),
    "scale_by_rms": TransformationRow(_ROOT_MEAN_SQUARE, {"nu": "square_avg"}, fixed={"bias_correction": False}),
    "scale_by_stddev": TransformationRow(
        _ROOT_MEAN_SQUARE, {"nu": "square_avg", "mu": "grad_avg"}, fixed={"bias_correction": False}),
    "scale_by_adadelta": TransformationRow({"rho": "rho", "eps": "eps"}, {"e_g": "square_avg", "e_x": "acc_delta"}),
    "scale_by_factored_rms": TransformationRow(
        {"decay_rate": "-beta2_decay", "epsilon": "eps1", "min_dim_size_to_factor": "min_dim_size_to_factor"},
        {"v_row": "row_var", "v_col": "col_var", "v": "variance"}, True, {"step_offset": 0}),
    "clip_by_block_rms": TransformationRow({"threshold": "d"}),
    "scale_by_param_block_rms": TransformationRow({"min_scale": "eps2"}),
    "scale_by_trust_ratio": TransformationRow(fixed={"min_norm": 0.0, "trust_coefficient": 1.0, "eps": 0.0}),
    "add_decayed_weights": TransformationRow({"weight_decay": "weight_decay"}),
    "scale_by_learning_rate": TransformationRow({"learning_rate": "lr"}),
    "scale": TransformationRow(),
    "identity": TransformationRow(),
}  # fmt: skip

EPSILON, MOMENTUM = "epsilon", "momentum"


def _stage(
    name: str, fixed: Mapping[str, Any] | None = None, when: Callable[[Settings], bool | None] = lambda s: True
) -> ChainStage:
    return ChainStage(name, TRANSFORMATIONS[name], fixed or {}, when)


_RATE, _DECAY = _stage("scale_by_learning_rate"), "add_decayed_weights"


def _with_decay(*direction: ChainStage, momentum: ChainStage | None = None) -> Chain:
    """Return a chain with weight decay before or after a direction, the rate, and momentum."""
    before = _stage(_DECAY, when=lambda s: bool(s.weight_decay) and not s.decoupled)
    after = _stage(_DECAY, when=lambda s: bool(s.weight_decay) and s.decoupled)
    return (before, *direction, after, _RATE, *([momentum] if momentum else []))


_DECAY_OR_IDENTITY = _stage(_DECAY, when=lambda s: True if s.weight_decay else None)
_OPTAX_SGD = _with_decay(_stage("trace", when=lambda s: True if s.momentum else None))
_SGDS = "sgd momentum nesterov sgdw"
_OPTAX_AMSGRAD = Condition("with amsgrad", lambda s: s["amsgrad"])
_NO_DAMPENING = Condition("without dampening", lambda s: not s["dampening"])
_NO_LR_DECAY = Condition("without lr_decay", lambda s: not s["lr_decay"])


def _optax(
    name: str, optimizers: str, variants: str, stages: Chain, applies: Condition | None = None, difference: str = ""
) -> OptaxRow:
    settings = {ours.removeprefix("-"): theirs for stage in stages for theirs, ours in stage.row.settings.items()}
    slots = {slot: field for stage in stages for field, slot in stage.row.slots.items()}
    return OptaxRow(
        f"optax.{name}", (*optimizers.split(),), (*variants.split(),), settings, slots, applies, stages, difference
    )


def _rmsprop(scale: str, is_centered: bool) -> list[OptaxRow]:
    """Return rows of RMSprop. PyTorch adds epsilon and applies momentum in another order."""
    here = Condition(f"centered={is_centered}".lower(), lambda s: s["centered"] is is_centered)
    one_decay = Condition(
        f"{here.words}, for Keras without momentum or without weight decay",
        lambda s: here.holds(s) and not (s["variant"] == "keras" and s["momentum"] and s["weight_decay"]),
    )
    inner = _stage("trace", {"nesterov": False}, lambda s: bool(s.momentum))
    nothing = _stage("identity", when=lambda s: not s.momentum and not s.weight_decay)
    outer = _stage("trace", {"nesterov": False}, lambda s: bool(s.momentum) or (False if s.weight_decay else None))
    torch = _with_decay(_stage(scale, {"eps_in_sqrt": False}), inner, momentum=nothing)
    optax = _with_decay(_stage(scale, {"eps_in_sqrt": True}), momentum=outer)
    return [
        _optax("rmsprop", "rmsprop", "torch", torch, here),
        _optax("rmsprop", "rmsprop", "optax keras", optax, one_decay),
    ]


_OPTAX_ADAM, _AMS = _stage("scale_by_adam"), _stage("scale_by_amsgrad")
_OPTAX_ADAMW = (_OPTAX_ADAM, _DECAY_OR_IDENTITY, _RATE)
_RSS, _ADAMAX = _with_decay(_stage("scale_by_rss")), _with_decay(_stage("scale_by_adamax"))
_OPTAX_ADADELTA = _stage("scale_by_adadelta")
_LAMB = (_OPTAX_ADAM, _stage(_DECAY), _stage("scale_by_trust_ratio"), _RATE)
_ADAFACTOR = (
    _stage("scale_by_factored_rms"),
    _stage("clip_by_block_rms"),
    _stage("scale_by_learning_rate", {"flip_sign": False}),
    _stage("scale_by_param_block_rms"),
    _stage(_DECAY, when=lambda s: bool(s.weight_decay)),
    _stage("scale", {"step_size": -1}),
)
_WITH_EPSILON = Condition("with an epsilon, without lr_decay", lambda s: s["eps"] and not s["lr_decay"])

OPTAX_ROWS = [
    _optax("sgd", _SGDS, "optax torch keras", _OPTAX_SGD, Condition("without momentum", lambda s: not s["momentum"])),
    _optax("sgd", _SGDS, "optax torch", _OPTAX_SGD, _NO_DAMPENING),
    _optax("sgd", _SGDS, "keras", _OPTAX_SGD, _NO_DAMPENING, MOMENTUM),
    _optax("adam", "adam amsgrad", "optax torch", _with_decay(_OPTAX_ADAM), _NO_AMSGRAD),
    _optax("adam", "adam amsgrad", "keras", _with_decay(_OPTAX_ADAM), _NO_AMSGRAD, EPSILON),
    _optax("amsgrad", "amsgrad adam", "optax", _with_decay(_AMS), _OPTAX_AMSGRAD),
    _optax("adamw", "adamw", "optax torch", _OPTAX_ADAMW, _NO_AMSGRAD),
    _optax("adamw", "adamw", "keras transformers", _OPTAX_ADAMW, _NO_AMSGRAD, EPSILON),
    _optax("amsgrad", "adamw", "optax", (_AMS, _DECAY_OR_IDENTITY, _RATE), _OPTAX_AMSGRAD),
    _optax("adamax", "adamax", "optax torch", _ADAMAX),
    _optax("adamax", "adamax", "keras", _ADAMAX, None, EPSILON),
    _optax("nadam", "nadam", "optax", _with_decay(_stage("scale_by_adam", {"nesterov": True}))),
    _optax("radam", "radam", "optax", _with_decay(_stage("scale_by_radam"))),
    _optax("adagrad", "adagrad", "optax keras", _RSS, _WITH_EPSILON),
    _optax("adagrad", "adagrad", "optax keras torch", _RSS, _NO_LR_DECAY, EPSILON),
    *_rmsprop("scale_by_rms", False),
    *_rmsprop("scale_by_stddev", True),
    _optax("adadelta", "adadelta", "optax torch", (_DECAY_OR_IDENTITY, _OPTAX_ADADELTA, _RATE)),
    _optax("adadelta", "adadelta", "keras", (_DECAY_OR_IDENTITY, _OPTAX_ADADELTA, _RATE), _NO_DECAY),
    _optax("adadelta", "adadelta", "keras", (_OPTAX_ADADELTA, _stage(_DECAY), _RATE)),
    _optax("adafactor", "adafactor", "optax", _ADAFACTOR),
    _optax("lion", "lion", "optax keras", (_stage("scale_by_lion"), _stage(_DECAY), _RATE)),
    _optax("lamb", "lamb", "optax", _LAMB),
    _optax("lamb", "lamb", "keras", _LAMB, _NO_DECAY),
]  # fmt: skip
"""The first row that fits is written; a transformation is read as the first row."""
