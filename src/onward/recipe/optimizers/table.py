"""The optimizers by name.

    adamw = optimizer("adamw").configure(lr=3e-4, weight_decay=0.1)
    adamw.slots(parameter)                                              # exp_avg, exp_avg_sq
    x, slots = adamw.update(op, x, g, slots, lr=lr, t=t, hyper=hyper)   # one node: onward.AdamW

An update is the standard's own operator where that is exact, else a function of the domain `onward` (see `updates`).
The choice `variant` names the framework whose arithmetic and defaults are meant: the first in the table unless chosen.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onward.errors import RecipeError
from onward.recipe.optimizers import updates
from onward.recipe.optimizers.configuration import Call, ConfiguredOptimizer, Optimizer, Settings, Shape, Slot, Standard
from onward.recipe.optimizers.updates import Update
from onward.recipe.spec import Spec, lookup

__all__ = ["OPTIMIZERS", "ConfiguredOptimizer", "Optimizer", "Slot", "configure", "optimizer"]


def optimizer(name: str) -> Optimizer:
    """The optimizer of that name."""
    return lookup("optimizer", name, OPTIMIZERS)


def configure(spec: Spec) -> ConfiguredOptimizer:
    """The optimizer that a spec names, with its options."""
    return optimizer(spec.name).configure(**spec.options)


# ---- which function it is --------------------------------------------------------------------------------------------


def _with_decay(update: Update, s: Settings) -> Call:
    """Keras decouples every weight decay; the others make it part of the gradient unless told otherwise."""
    if not s.weight_decay:
        return Call(update.plain)
    decoupled = s.variant == "keras" or getattr(s, "decoupled_weight_decay", False)
    return Call(update.decoupled if decoupled else update.coupled)


def _sgd(s: Settings) -> Update:
    if s.nesterov and (not s.momentum or s.dampening):
        raise RecipeError("Nesterov momentum needs a momentum, and no dampening", hint="for example momentum=0.9")
    if not s.momentum:
        return updates.sgd
    if s.variant == "keras":
        return updates.sgd_nesterov_keras if s.nesterov else updates.sgd_momentum_keras
    if s.dampening:
        return updates.sgd_momentum_dampened
    return updates.sgd_nesterov if s.nesterov else updates.sgd_momentum


def _adam(s: Settings) -> Update:
    if s.amsgrad:
        by_variant = {"torch": updates.amsgrad, "optax": updates.amsgrad_optax, "keras": updates.amsgrad_keras}
        return by_variant[s.variant]
    return updates.adam_keras if s.variant == "keras" else updates.adam


def _adamw(s: Settings) -> Call:
    """The class that transformers had, and onnxruntime-training after it, decays the weights last."""
    if s.variant != "transformers":
        return Call(_adam(s).decoupled)
    if s.amsgrad or s.fused:
        what = "amsgrad" if s.amsgrad else "fused"
        raise RecipeError(f"AdamW of transformers has no `{what}`", hint="leave it out, or choose `variant=torch`")
    return Call(updates.adamw_transformers.plain)


def _rmsprop(s: Settings) -> Update:
    torch, keras = {
        (False, False): (updates.rmsprop, updates.rmsprop_keras),
        (False, True): (updates.rmsprop_momentum, updates.rmsprop_momentum_keras),
        (True, False): (updates.rmsprop_centered, updates.rmsprop_centered_keras),
        (True, True): (updates.rmsprop_centered_momentum, updates.rmsprop_centered_momentum_keras),
    }[s.centered, s.momentum > 0]
    return torch if s.variant == "torch" else keras


def _adafactor(s: Settings, shape: Shape | None) -> Call:
    """PyTorch factors over the last two axes; optax over the two largest, unless one of them is small."""
    shape = shape or ()
    if s.variant == "torch":
        if len(shape) < 2:
            return Call(updates.adafactor_vector.plain)
        return Call(updates.adafactor.plain, shapes=_factors(shape, large=len(shape) - 1, small=len(shape) - 2))
    if len(shape) < 2 or sorted(shape)[-2] < s.min_dim_size_to_factor:
        return Call(updates.adafactor_vector_optax.plain)
    small, large = (int(axis) for axis in np.argsort(shape)[-2:])
    axes = {"large": [large], "small": [small]}
    return Call(updates.adafactor_optax.plain, axes, _factors(shape, large=large, small=small))


def _factors(shape: Shape, *, large: int, small: int) -> dict[str, Shape]:
    """The shapes of means over one axis, which stays as 1."""
    return {"row_var": _without_axis(shape, large), "col_var": _without_axis(shape, small)}


def _without_axis(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], 1, *shape[axis + 1 :])


def _muon(s: Settings, shape: Shape | None) -> Call:
    rows, columns = _matrix(shape)
    muon = updates.muon(nesterov=s.nesterov, adjust=s.adjust_lr_fn, steps=s.ns_steps, tall=rows > columns)
    return Call(muon.plain)


def _matrix(shape: Shape | None) -> Shape:
    if shape is not None and len(shape) != 2:
        raise RecipeError(
            f"optimizer `muon` is for matrices, but a parameter has the shape {list(shape)}",
            hint="give what is not a matrix to another optimizer, such as `adamw`",
        )
    return shape or (1, 1)


# ---- where an operator of the standard is the same -------------------------------------------------------------------


def _standard_momentum(s: Settings) -> Standard | None:
    if not s.momentum or s.variant == "keras":
        return None
    mode = "nesterov" if s.nesterov else "standard"
    attributes = {"alpha": s.momentum, "beta": 1 - s.dampening, "norm_coefficient": s.weight_decay, "mode": mode}
    return Standard("Momentum", attributes, behind=1)


def _standard_adagrad(s: Settings) -> Standard | None:
    if s.variant != "torch":
        return None
    attributes = {"epsilon": s.eps, "decay_factor": s.lr_decay, "norm_coefficient": s.weight_decay}
    return Standard("Adagrad", attributes, behind=1)


def _standard_adam(s: Settings) -> Standard | None:
    if s.variant != "keras" or s.amsgrad or s.weight_decay:
        return None
    return Standard("Adam", {"alpha": s.beta1, "beta": s.beta2, "epsilon": s.eps}, behind=0)


# ---- the table -------------------------------------------------------------------------------------------------------

_FLAG = (False, True)
_NEWTON_SCHULZ = {"ns_a": 3.4445, "ns_b": -4.775, "ns_c": 2.0315}


_SGD = Optimizer(
    "sgd",
    "gradient descent, with momentum if that is not 0; as torch.optim.SGD",
    {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0},
    lambda s, shape: _with_decay(_sgd(s), s),
    variants={"torch": {}, "optax": {}, "keras": {"lr": 1e-2}},
    options={"nesterov": _FLAG},
    standard=_standard_momentum,
)
_ADAM = Optimizer(
    "adam",
    "Adam (Kingma and Ba 2015); as torch.optim.Adam",
    {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    lambda s, shape: _with_decay(_adam(s), s),
    variants={"torch": {}, "optax": {}, "keras": {"eps": 1e-7}},
    options={"amsgrad": _FLAG, "decoupled_weight_decay": _FLAG, "fused": _FLAG},
    standard=_standard_adam,
)

_TABLE = [
    _SGD,
    replace(
        _SGD,
        name="momentum",
        summary="gradient descent with momentum; as torch.optim.SGD(momentum=0.9)",
        hyper={**_SGD.hyper, "momentum": 0.9},
    ),
    replace(
        _SGD,
        name="nesterov",
        summary="gradient descent with Nesterov momentum; as torch.optim.SGD(momentum=0.9, nesterov=True)",
        hyper={**_SGD.hyper, "momentum": 0.9},
        options={"nesterov": (True, False)},
    ),
    replace(
        _SGD,
        name="sgdw",
        summary="gradient descent with decoupled weight decay (Loshchilov and Hutter 2019)",
        hyper={**_SGD.hyper, "weight_decay": 1e-2},
        choose=lambda s, shape: Call(_sgd(s).decoupled),
        standard=None,
    ),
    Optimizer(
        "adagrad",
        "Adagrad (Duchi et al. 2011); as torch.optim.Adagrad",
        {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
        lambda s, shape: _with_decay(updates.adagrad if s.variant == "torch" else updates.adagrad_keras, s),
        variants={
            "torch": {},
            "optax": {"initial_accumulator_value": 0.1, "eps": 1e-7},
            "keras": {"lr": 1e-3, "initial_accumulator_value": 0.1, "eps": 1e-7},
        },
        standard=_standard_adagrad,
        initial={"sum": "initial_accumulator_value"},
    ),
    _ADAM,
    replace(
        _ADAM,
        name="adamw",
        summary="Adam with decoupled weight decay (Loshchilov and Hutter 2019); as torch.optim.AdamW",
        hyper={**_ADAM.hyper, "weight_decay": 1e-2},
        choose=lambda s, shape: _adamw(s),
        variants={
            "torch": {},
            "optax": {"weight_decay": 1e-4},
            "transformers": {"eps": 1e-6, "weight_decay": 0.0},
            "keras": {"eps": 1e-7, "weight_decay": 4e-3},
        },
        options={"amsgrad": _FLAG, "fused": _FLAG},
        standard=None,
    ),
    replace(
        _ADAM,
        name="amsgrad",
        summary="Adam that never forgets a large gradient (Reddi et al. 2018); as torch.optim.Adam(amsgrad=True)",
        options={"amsgrad": (True, False), "decoupled_weight_decay": _FLAG, "fused": _FLAG},
    ),
    Optimizer(
        "adamax",
        "Adam with the infinity norm (Kingma and Ba 2015); as torch.optim.Adamax",
        {"lr": 2e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
        lambda s, shape: _with_decay(updates.adamax_keras if s.variant == "keras" else updates.adamax, s),
        variants={"torch": {}, "optax": {}, "keras": {"lr": 1e-3, "eps": 1e-7}},
    ),
    Optimizer(
        "nadam",
        "Adam with Nesterov momentum (Dozat 2016); as torch.optim.NAdam",
        {"lr": 2e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "momentum_decay": 4e-3, "weight_decay": 0.0},
        lambda s, shape: _with_decay(updates.nadam_optax if s.variant == "optax" else updates.nadam, s),
        variants={"torch": {}, "optax": {}, "keras": {"lr": 1e-3, "eps": 1e-7, "momentum_decay": 1.0}},
        options={"decoupled_weight_decay": _FLAG},
        initial={"mu_product": 1.0},
    ),
    Optimizer(
        "radam",
        "Adam that begins as momentum until its variance is known (Liu et al. 2020); as torch.optim.RAdam",
        {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
        lambda s, shape: _with_decay(updates.radam_optax if s.variant == "optax" else updates.radam, s),
        variants={"torch": {}, "optax": {}},
        options={"decoupled_weight_decay": _FLAG},
    ),
    Optimizer(
        "rmsprop",
        "RMSprop (Tieleman and Hinton 2012); as torch.optim.RMSprop",
        {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0},
        lambda s, shape: _with_decay(_rmsprop(s), s),
        variants={"torch": {}, "optax": {"alpha": 0.9}, "keras": {"lr": 1e-3, "alpha": 0.9, "eps": 1e-7}},
        options={"centered": _FLAG},
    ),
    Optimizer(
        "adadelta",
        "Adadelta (Zeiler 2012); as torch.optim.Adadelta",
        {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
        lambda s, shape: _with_decay(updates.adadelta, s),
        variants={"torch": {}, "optax": {}, "keras": {"lr": 1e-3, "rho": 0.95, "eps": 1e-7}},
    ),
    Optimizer(
        "adafactor",
        "Adafactor (Shazeer and Stern 2018), whose slots are rows and columns; as torch.optim.Adafactor in float32",
        {"lr": 1e-2, "beta2_decay": -0.8, "eps1": 2.0**-23, "eps2": 1e-3, "d": 1.0, "weight_decay": 0.0},
        _adafactor,
        variants={"torch": {}, "optax": {"eps1": 1e-30}},
        options={"min_dim_size_to_factor": 128},
    ),
    Optimizer(
        "lion",
        "Lion (Chen et al. 2023), which follows the sign; as optax.lion, with the learning rate of its authors",
        {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 1e-3},
        lambda s, shape: Call(updates.lion.plain),
        variants={"optax": {}, "keras": {"lr": 1e-3, "weight_decay": 0.0}},
    ),
    Optimizer(
        "lamb",
        "LAMB (You et al. 2020): Adam in steps as long as the parameter is large; as optax.lamb, with lr of Keras",
        {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.0},
        lambda s, shape: _with_decay(updates.lamb_keras, s) if s.variant == "keras" else Call(updates.lamb.plain),
        variants={"optax": {}, "keras": {"eps": 1e-7}},
    ),
    Optimizer(
        "muon",
        "Muon (Jordan et al. 2024): orthogonal steps, for matrices; as torch.optim.Muon, in the parameter's own type",
        {"lr": 1e-3, "momentum": 0.95, "eps": 1e-7, "weight_decay": 0.1, **_NEWTON_SCHULZ},
        _muon,
        variants={"torch": {}},
        options={"nesterov": (True, False), "adjust_lr_fn": ("original", "match_rms_adamw"), "ns_steps": 5},
    ),
]
OPTIMIZERS: dict[str, Optimizer] = {entry.name: entry for entry in _TABLE}
