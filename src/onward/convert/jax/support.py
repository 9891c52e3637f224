"""What is carried between recipes and optax, as tables of the documentation show it."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """Optimizers of a recipe, and what they are in optax."""

    optimizers: str
    variant: str
    made: str
    """`native`: a chain of optax's own transformations. `exact transform`: one of ours (see exact.py)."""
    example: str

    @property
    def is_native(self) -> bool:
        return self.made == "native"


SUPPORT = [
    Row("sgd, momentum, nesterov, sgdw", "torch, optax", "native", "sgd:momentum=0.9,nesterov=true,weight_decay=0.1"),
    Row("sgd, momentum, sgdw", "torch, with dampening", "exact transform", "sgd:momentum=0.9,dampening=0.5"),
    Row("sgd, sgdw", "keras, without momentum", "native", "sgd:variant=keras,weight_decay=0.1"),
    Row("sgd, momentum, nesterov, sgdw", "keras", "exact transform", "sgd:momentum=0.9,variant=keras"),
    Row("adam, adamw", "torch, optax", "native", "adamw:weight_decay=0.1"),
    Row("adam, adamw", "keras", "exact transform", "adam:variant=keras"),
    Row("adamw", "transformers", "exact transform", "adamw:variant=transformers"),
    Row("amsgrad", "optax", "native", "amsgrad:variant=optax"),
    Row("amsgrad", "torch, keras", "exact transform", "amsgrad"),
    Row("adamax", "torch, optax", "native", "adamax:weight_decay=0.1"),
    Row("adamax", "keras", "exact transform", "adamax:variant=keras"),
    Row("nadam", "optax", "native", "nadam:variant=optax"),
    Row("nadam", "torch, keras", "exact transform", "nadam"),
    Row("radam", "optax", "native", "radam:variant=optax"),
    Row("radam", "torch", "exact transform", "radam"),
    Row("adagrad", "optax, keras", "native", "adagrad:variant=keras,weight_decay=0.1"),
    Row("adagrad", "torch", "exact transform", "adagrad"),
    Row("rmsprop", "torch, optax", "native", "rmsprop:momentum=0.9,centered=true,weight_decay=0.1"),
    Row("rmsprop", "keras", "native", "rmsprop:momentum=0.9,variant=keras"),
    Row(
        "rmsprop",
        "keras, with momentum and weight decay",
        "exact transform",
        "rmsprop:momentum=0.9,weight_decay=0.1,variant=keras",
    ),
    Row("adadelta", "all", "native", "adadelta:weight_decay=0.1,variant=keras"),
    Row("adafactor", "optax", "native", "adafactor:variant=optax"),
    Row("adafactor", "torch", "exact transform", "adafactor"),
    Row("lion", "all", "native", "lion"),
    Row("lamb", "optax; keras without weight decay", "native", "lamb:weight_decay=0.1"),
    Row("lamb", "keras, with weight decay", "exact transform", "lamb:weight_decay=0.1,variant=keras"),
    Row("muon", "torch", "exact transform", "muon"),
    Row("any", "with maximize", "exact transform", "adam:maximize=true"),
]

READ = {
    "sgd": "`sgd`; of Keras where the momentum comes after the rate",
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
    "adafactor": "`adafactor`, but for `multiply_by_parameter_scale=False` and `momentum`",
    "adabelief, adamaxw, adan, fromage, lars, noisy_sgd, novograd, rprop, sign_sgd, sm3, yogi": "traced",
    "lbfgs, polyak_sgd": "refused: they need more than gradients",
}
"""Functions of optax, and what they are read as."""
