"""What optax has of the optimizers of a recipe: the fields of its states, and where its arithmetic is another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

FIELDS: dict[str, dict[str, str]] = {
    "trace": {"trace": "momentum_buffer"},
    "scale_by_adam": {"mu": "exp_avg", "nu": "exp_avg_sq"},
    "scale_by_amsgrad": {"mu": "exp_avg", "nu": "exp_avg_sq", "nu_max": "max_exp_avg_sq"},
    "scale_by_adamax": {"mu": "exp_avg", "nu": "exp_inf"},
    "scale_by_radam": {"mu": "exp_avg", "nu": "exp_avg_sq"},
    "scale_by_lion": {"mu": "exp_avg"},
    "scale_by_rss": {"sum_of_squares": "sum"},
    "scale_by_rms": {"nu": "square_avg"},
    "scale_by_stddev": {"nu": "square_avg", "mu": "grad_avg"},
    "scale_by_adadelta": {"e_g": "square_avg", "e_x": "acc_delta"},
    "scale_by_factored_rms": {"v_row": "row_var", "v_col": "col_var", "v": "variance"},
}
"""By transformation: field -> slot."""

EPSILON, MOMENTUM, ELSE = "epsilon", "momentum", "else"
"""What is another: the place of epsilon; what momentum is multiplied by; anything else, so that state is no use."""


class _Row(NamedTuple):
    names: tuple[str, ...]
    applies: Callable[[Any], Any]
    """To the settings of an optimizer."""
    what: str


_SGD, _ADAM = ("sgd", "momentum", "nesterov", "sgdw"), ("adam", "adamw", "amsgrad")
_ROWS = (
    _Row(_SGD, lambda s: s.momentum and s.dampening, ELSE),
    _Row(_SGD, lambda s: s.momentum and s.variant == "keras", MOMENTUM),
    _Row(_ADAM, lambda s: s.amsgrad and s.variant != "optax", ELSE),
    _Row(_ADAM, lambda s: s.variant in ("keras", "transformers"), EPSILON),
    _Row(("adagrad",), lambda s: s.lr_decay, ELSE),
    _Row(("adagrad",), lambda s: s.variant == "torch" or not s.eps, EPSILON),
    _Row(("adamax",), lambda s: s.variant == "keras", EPSILON),
    _Row(("nadam", "radam", "adafactor"), lambda s: s.variant != "optax", ELSE),
    _Row(("rmsprop",), lambda s: s.variant == "keras" and s.weight_decay and s.momentum, ELSE),
    _Row(("lamb",), lambda s: s.variant == "keras" and s.weight_decay, ELSE),
)
_NAMES = {name for row in _ROWS for name in row.names} | {"adadelta", "lion"}


def difference_from_optax(name: str, settings: Any) -> str | None:
    """Return what optax computes in another way than an optimizer of a recipe; None if its numbers are the same."""
    if name not in _NAMES or settings.maximize:
        return ELSE
    return next((row.what for row in _ROWS if name in row.names and row.applies(settings)), None)
