"""Values that are known during tracing."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend
import numpy as np

from onward.engines.framework import NotOnHost


def concrete_array(tensor: Any) -> np.ndarray:
    """Return a tensor as an array, also within `jax.grad`. Raise `NotOnHost` within `jax.jit`."""
    try:
        return np.asarray(tensor)
    except jax.errors.TracerArrayConversionError:
        pass
    try:
        return np.asarray(jax.extend.core.concrete_or_error(None, tensor))
    except jax.errors.ConcretizationTypeError as error:
        raise NotOnHost from error
