"""Functions, examples and optimizers that do not go together, said before they are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from onward.errors import DataError, UnsupportedError, first_line
from onward.frameworks.randomness import no_chance

_DECISIONS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""What JAX raises where Python asks for the value of an array."""


def check_function(function: Callable[..., Any], weights: Any, statistics: Any, batch: Any) -> None:
    """Refuse a function that fails with its example, which is the last argument."""
    try:
        with no_chance("the function"):
            jax.eval_shape(function, weights, statistics, batch)
    except _DECISIONS as error:
        raise UnsupportedError(
            f"the function asks in Python for the values of arrays, and a graph cannot: {first_line(error)}",
            hint="choose by `jnp.where` or `jax.lax.cond`, repeat by `jax.lax.scan`",
        ) from error
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        shapes = jax.tree.map(lambda leaf: getattr(leaf, "shape", leaf), batch)
        raise DataError(
            f"the function fails with the example: {type(error).__name__}: {first_line(error)}",
            hint=f"check names, shapes and types of the example: {shapes}",
        ) from error


def check_optimizer(optimizer: Any, state: Any, weights: Any) -> None:
    """Refuse what is no optimizer of optax, and a state that is another's."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise UnsupportedError(
            f"{optimizer!r} is no optimizer of optax", hint="give a transformation, such as `optax.adam(1e-3)`"
        )
    if state is None:
        return
    try:
        jax.eval_shape(optimizer.update, weights, state, weights)
    except (AttributeError, ValueError) as error:
        raise DataError(
            f"the optimizer does not take the state that is given: {first_line(error)}",
            hint="give what its `init` made, after the updates since; or none for a run that begins",
        ) from error
    except TypeError as error:
        raise UnsupportedError(
            f"the optimizer cannot be carried: an update takes more than gradients: {first_line(error)}",
            hint="use one that needs nothing but gradients and parameters",
        ) from error
