"""Our optimizers as PyTorch, Keras and optax have them: (name, theirs, settings)."""

from __future__ import annotations

import inspect
from typing import Any

from onward.recipe.optimizers.definition import ConfiguredOptimizer

BETAS = {"beta1": 0.85, "beta2": 0.99, "eps": 1e-3}  # an eps that matters beside gradients of this size


TORCH: list[tuple[str, str, dict[str, Any]]] = [
    ("sgd", "SGD", {}),
    ("sgd", "SGD", {"weight_decay": 0.1, "maximize": True}),
    ("sgd", "SGD", {"momentum": 0.9}),
    ("sgd", "SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("momentum", "SGD", {"momentum": 0.5, "weight_decay": 0.25}),  # a standard operator: all numbers are float32
    ("nesterov", "SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("adagrad", "Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.01, "eps": 1e-6}),
    ("adagrad", "Adagrad", {}),
    ("adam", "Adam", BETAS),
    ("adam", "Adam", {"weight_decay": 0.1}),
    ("adam", "Adam", {**BETAS, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("adamw", "AdamW", {}),
    ("adamw", "AdamW", {**BETAS, "weight_decay": 0.1, "amsgrad": True}),
    ("amsgrad", "Adam", {**BETAS, "amsgrad": True}),
    ("amsgrad", "Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("adamax", "Adamax", BETAS),
    ("adamax", "Adamax", {"weight_decay": 0.1}),
    ("nadam", "NAdam", BETAS),
    ("nadam", "NAdam", {"weight_decay": 0.1, "momentum_decay": 0.1}),
    ("nadam", "NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("radam", "RAdam", BETAS),  # becomes adaptive within the twenty steps
    ("radam", "RAdam", {**BETAS, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("rmsprop", "RMSprop", {}),
    ("rmsprop", "RMSprop", {"alpha": 0.9, "eps": 1e-3, "momentum": 0.8, "weight_decay": 0.1}),
    ("rmsprop", "RMSprop", {"alpha": 0.9, "centered": True}),
    ("rmsprop", "RMSprop", {"alpha": 0.9, "eps": 1e-3, "centered": True, "momentum": 0.8}),
    ("adadelta", "Adadelta", {}),
    ("adadelta", "Adadelta", {"rho": 0.8, "eps": 1e-3, "weight_decay": 0.1}),
    ("adafactor", "Adafactor", {"eps1": 2.0**-52}),
    ("adafactor", "Adafactor", {"eps1": 1e-6, "eps2": 0.5, "d": 2.0, "beta2_decay": -0.5, "weight_decay": 0.1}),
    ("muon", "Muon", {}),
    ("muon", "Muon", {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "momentum": 0.8}),
]


TORCH_NAMES = {"betas": ("beta1", "beta2"), "eps": ("eps1", "eps2"), "ns_coefficients": ("ns_a", "ns_b", "ns_c")}


def torch_arguments(configured: ConfiguredOptimizer, cls: type) -> dict[str, Any]:
    """The arguments of a torch.optim class that mean what our settings mean; kernels are PyTorch's choice."""
    settings = {**configured.values, **configured.options}
    if not settings.get("fused"):
        settings.pop("fused", None)
    arguments = {}
    for name in inspect.signature(cls).parameters:
        if name in settings:
            arguments[name] = settings[name]
        elif name in TORCH_NAMES and TORCH_NAMES[name][0] in settings:
            arguments[name] = tuple(settings[part] for part in TORCH_NAMES[name])
    return arguments


KERAS: list[tuple[str, str, dict[str, Any]]] = [
    ("sgd", "SGD", {}),
    ("sgd", "SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    ("sgd", "SGD", {"momentum": 0.9, "nesterov": True}),
    ("sgdw", "SGD", {"weight_decay": 0.1}),
    ("adagrad", "Adagrad", {"weight_decay": 0.1, "eps": 1e-3}),
    ("adam", "Adam", {}),
    ("adam", "Adam", {"beta1": 0.875, "beta2": 0.96875, "eps": 2.0**-10}),  # a standard operator: all are float32
    ("adam", "Adam", {**BETAS, "weight_decay": 0.1}),
    ("adamw", "AdamW", {}),
    ("adamw", "AdamW", {**BETAS, "amsgrad": True}),
    ("amsgrad", "Adam", {**BETAS, "amsgrad": True}),
    ("adamax", "Adamax", BETAS),
    ("nadam", "Nadam", {**BETAS, "weight_decay": 0.1}),
    ("rmsprop", "RMSprop", {"eps": 1e-3}),
    ("rmsprop", "RMSprop", {"eps": 1e-3, "momentum": 0.8}),
    ("rmsprop", "RMSprop", {"centered": True, "weight_decay": 0.1}),
    ("rmsprop", "RMSprop", {"eps": 1e-3, "centered": True, "momentum": 0.8}),
    ("adadelta", "Adadelta", {"eps": 1e-3, "weight_decay": 0.1}),
    ("lion", "Lion", {}),
    ("lion", "Lion", {"weight_decay": 0.1}),
    ("lamb", "Lamb", {}),
    ("lamb", "Lamb", {**BETAS, "weight_decay": 0.1}),
]


OPTAX: list[tuple[str, str, dict[str, Any]]] = [
    ("sgd", "sgd", {}),
    ("sgd", "sgd", {"momentum": 0.9}),
    ("sgd", "sgd", {"momentum": 0.9, "nesterov": True}),
    ("adagrad", "adagrad", {"eps": 1e-3}),
    ("adam", "adam", BETAS),
    ("adamw", "adamw", {}),
    ("adamw", "adamw", {**BETAS, "weight_decay": 0.1}),
    ("amsgrad", "amsgrad", BETAS),
    ("adamax", "adamax", BETAS),
    ("nadam", "nadam", BETAS),
    ("radam", "radam", BETAS),
    ("rmsprop", "rmsprop", {"eps": 1e-3}),
    ("rmsprop", "rmsprop", {"eps": 1e-3, "momentum": 0.8}),
    ("rmsprop", "rmsprop", {"eps": 1e-3, "centered": True, "momentum": 0.8}),
    ("adadelta", "adadelta", {"rho": 0.8, "eps": 1e-3, "weight_decay": 0.1}),
    ("adafactor", "adafactor", {"min_dim_size_to_factor": 3}),
    ("adafactor", "adafactor", {"min_dim_size_to_factor": 3, "d": 2.0, "weight_decay": 0.1, "eps1": 1e-6}),
    ("lion", "lion", {}),
    ("lamb", "lamb", {}),
    ("lamb", "lamb", {**BETAS, "weight_decay": 0.1}),
]


OPTAX_EXACT = {
    *("sgd:momentum=0.9,variant=keras", "sgd:momentum=0.9,dampening=0.5", "sgd:maximize=true"),
    *("adam:eps=1e-3,variant=keras", "amsgrad:eps=1e-3", "amsgrad:eps=1e-3,variant=keras", "adamax:variant=keras"),
    *("nadam", "nadam:variant=keras", "radam:beta2=0.9", "adagrad:initial_accumulator_value=1e-6", "adafactor"),
    *("lamb:weight_decay=0.1,variant=keras", "rmsprop:momentum=0.9,weight_decay=0.1,variant=keras"),
    *("adamw:variant=transformers", "adamw:eps=1e-3,variant=keras"),
}
"""Recipes that a transformation of Onward executes in optax."""
OPTAX_NATIVE = {
    *("sgd:momentum=0.9,nesterov=true,weight_decay=0.1", "sgdw:momentum=0.9", "sgd:variant=keras,weight_decay=0.1"),
    *("adam:eps=1e-3,weight_decay=0.1", "adamw", "amsgrad:variant=optax", "adamax", "nadam:variant=optax"),
    *("radam:beta2=0.9,variant=optax", "lion", "lamb", "rmsprop:momentum=0.9", "adadelta:weight_decay=0.1"),
    *("rmsprop:momentum=0.9,centered=true,variant=keras", "adagrad:variant=keras,weight_decay=0.1"),
    "adafactor:variant=optax,min_dim_size_to_factor=4",
}
"""Recipes that are a chain of optax's own transformations."""

OPTAX_READ = {
    "sgd": "`sgd`; of Keras if the momentum comes after the learning rate",
    "adam, adamw": "`adam`, `adamw`",
    "nadam, nadamw": "`nadam`",
    "amsgrad": "`amsgrad`",
    "adamax": "`adamax`",
    "radam": "`radam`",
    "lion": "`lion`",
    "lamb": "`lamb`",
    "adagrad": "`adagrad`",
    "adadelta": "`adadelta`",
    "rmsprop": "`rmsprop`; of PyTorch with `eps_in_sqrt=False`",
    "adafactor": "`adafactor`, except `multiply_by_parameter_scale=False` and `momentum`",
    "adabelief, adamaxw, adan, fromage, lars, noisy_sgd, novograd, rprop, sign_sgd, sm3, yogi": "traced",
    "lbfgs, polyak_sgd": "refused: need more than gradients",
}
"""Functions of optax, and what they are read as."""
