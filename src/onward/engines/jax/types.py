"""Values that are known while a step is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend
import numpy as np

from onward.engines.framework import NotOnHost


def known_array(tensor: Any) -> np.ndarray:
    """A tensor as an array. While it is differentiated it has a value, too; while it is compiled it has none."""
    try:
        return np.asarray(tensor)
    except jax.errors.TracerArrayConversionError:
        pass
    try:
        return np.asarray(jax.extend.core.concrete_or_error(None, tensor))
    except jax.errors.ConcretizationTypeError as error:
        raise NotOnHost from error
