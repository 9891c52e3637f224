"""What the numbers that steer training may be, in a recipe and when they are changed in a file later."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from onward.arguments import Range
from onward.model import Model
from onward.model.state import GROUP_KEY, ROLE_KEY

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


# ---- numbers that are changed in a file ------------------------------------------------------------------------------


def check_setting(model: Model, name: str, value: Any, step: int = 0) -> None:
    """Refuse a number that a hyper-parameter, a counter or a scale cannot be; weights can be any that is finite."""
    tensor = model.initializer(name, step).const_value
    within = _range(name, tensor.metadata_props if tensor is not None else {})
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int | float):
            within.check(f"`{name}`", number)


def _range(name: str, tags: Mapping[str, str]) -> Range:
    key = re.sub(r"_\d+$", "", name.rpartition("/")[2])  # without the number that made it unique
    if name in OF_UPDATES:
        return OF_UPDATES[name]
    if tags.get(ROLE_KEY) == "counter":
        return NOT_NEGATIVE
    if tags.get(ROLE_KEY) != "hyper":
        return ANY
    if GROUP_KEY in tags:
        return OF_OPTIMIZERS.get(key, NOT_NEGATIVE)
    return OF_SCHEDULES.get(key, ANY) if name.startswith("schedule/") else ANY
