"""Functions that `LambdaLR` multiplies rates with, as words of a recipe: ours, and those of transformers.

A function of transformers is known by its name and its numbers. What is made of these is then compared with what the
function gives, so that another function of that name is found out.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onward.recipe.spec import Spec
from onward.vocabulary.rate_formulas import FOREVER, Factor, Pieces, complete
from onward.vocabulary.transformers import READERS

ENOUGH = 400
"""Steps at which two schedules are compared one by one, and then ever fewer."""


def read_lambda(function: Callable[[int], float], bases: Sequence[float]) -> Pieces | None:
    """The schedules that a function means, or None where that is not known."""
    if isinstance(function, Factor):
        return [(_spec(one), one.get("until", FOREVER)) for one in function.schedules]
    name, numbers = _origin(function)
    reader = READERS.get(name)
    if reader is None or not numbers.keys() <= inspect.signature(reader).parameters.keys():
        return None
    pieces = reader(bases[0], **numbers)
    relative = len(set(bases)) > 1 and any(spec.options.get("min") or spec.options.get("end") for spec, _ in pieces)
    return pieces if not relative and _agrees(function, Factor(bases[0], complete(pieces)), numbers) else None


def _spec(one: Mapping[str, Any]) -> Spec:
    return Spec(one["name"], {key: value for key, value in one.items() if key not in ("name", "until")})


def _origin(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """The name of what made a function, and the numbers that it was made with."""
    if isinstance(function, functools.partial):
        name, numbers = function.func.__name__, dict(function.keywords)
    else:
        name = getattr(function, "__qualname__", type(function).__name__).partition(".")[0]
        numbers = dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}
    name = name.removeprefix("_").removeprefix("get_").removesuffix("_lambda").removesuffix("_lr")
    return name, {key: value for key, value in numbers.items() if isinstance(value, int | float | str)}


def _agrees(function: Callable[[int], float], factor: Factor, numbers: Mapping[str, Any]) -> bool:
    total = int(sum(value for value in numbers.values() if isinstance(value, int | float) and value > 1))
    steps = {*range(ENOUGH), *range(max(total - ENOUGH, 0), total + ENOUGH), *(2**i for i in range(24))}
    for value in numbers.values():
        if isinstance(value, int):
            steps |= {value - 1, value, value + 1}
    return all(math.isclose(factor(t), function(t), rel_tol=1e-9, abs_tol=1e-12) for t in steps if t >= 0)
