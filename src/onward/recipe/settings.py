"""Changing what steers training in a file: the numbers are refused that a recipe refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from onward.arguments import Range
from onward.model import Model
from onward.model.state import GROUP_KEY, ROLE_KEY
from onward.recipe.ranges import ANY, NOT_NEGATIVE, OF_OPTIMIZERS, OF_SCHEDULES, OF_UPDATES


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
