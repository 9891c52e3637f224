"""The fields of optax's states and the slots of a training model that they are."""

from __future__ import annotations

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
