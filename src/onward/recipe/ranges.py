"""What the numbers that steer training may be, in a recipe and when they are changed in a file later."""

from __future__ import annotations

from collections.abc import Mapping

from onward.arguments import Range

NOT_NEGATIVE, POSITIVE, ANY = Range(least=0), Range(above=0), Range()
DECAY_RATE = Range(least=0, below=1)

OF_OPTIMIZERS: Mapping[str, Range] = {
    **dict.fromkeys(("beta1", "beta2", "alpha", "rho"), DECAY_RATE),
    **dict.fromkeys(("ns_a", "ns_b", "ns_c"), ANY),
    "beta2_decay": Range(most=0),
    "d": Range(least=1),
}
"""Those of optimizers; what is not named is not negative."""

OF_SCHEDULES: Mapping[str, Range] = {
    **dict.fromkeys(("steps", "size", "period", "timescale", "div_factor", "final_div_factor", "until"), POSITIVE),
    **dict.fromkeys(("warmup", "milestones"), NOT_NEGATIVE),
    **dict.fromkeys(("mult", "every"), Range(least=1)),
    "pct_start": Range(above=0, below=1),
}
"""Those of schedules; what is not named is any number."""

OF_UPDATES: Mapping[str, Range] = {
    "accumulate": Range(least=1),
    "clip/limit": Range(above=0, finite=False),  # infinity measures the norm, and leaves the gradients alone
    "ema/decay": DECAY_RATE,
    "loss_scale": POSITIVE,
    "scaler/scale": POSITIVE,
    "scaler/growth_factor": Range(least=1),
    "scaler/backoff_factor": Range(above=0, most=1),
    "scaler/growth_interval": Range(least=1),
    "scaler/cooldown": NOT_NEGATIVE,
    "scaler/hysteresis": Range(least=1),
    "scaler/min_scale": NOT_NEGATIVE,
}
"""Those of what is around optimizers, by their names in a training step."""
