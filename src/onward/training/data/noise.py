"""Inputs of a model that are random, and no data."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onward.errors import DataError, UnknownNameError, near
from onward.recipe.spec import check_options, lookup, parse

KINDS = {"normal": {"mean": 0.0, "std": 1.0}, "uniform": {"low": 0.0, "high": 1.0}}
"""Distributions of numpy's generators, and what they take in this order."""


class Noise:
    """What inputs get that no data are for: by name, a kind such as `"normal:std=0.5"`."""

    def __init__(self, kinds: Mapping[str, str], inputs: Mapping[str, ir.Value], seed: int):
        self._seed = seed
        self._kinds = {}
        for name, kind in kinds.items():
            if name not in inputs:
                raise UnknownNameError(f"there is no input `{name}` that could be noise", hint=near(name, inputs))
            spec = parse(kind)
            numbers = lookup("kind of noise", spec.name, KINDS)
            check_options(f"the noise `{spec.name}`", spec.options, numbers)
            self._kinds[name] = (spec.name, [*{**numbers, **spec.options}.values()], *_form(inputs[name]))

    def __call__(self, epoch: int, batch: int, rows: int) -> dict[str, np.ndarray]:
        """The noise for a batch."""
        made = {}
        for name, (kind, numbers, dtype, shape) in self._kinds.items():
            rng = np.random.default_rng((self._seed, epoch, batch, zlib.crc32(name.encode())))
            made[name] = getattr(rng, kind)(*numbers, (rows, *shape)).astype(dtype)
        return made


def _form(value: ir.Value) -> tuple[np.dtype, tuple[int, ...]]:
    """The type of an input, and the shape of one sample."""
    sizes = [] if value.shape is None else [size for size in value.shape[1:] if isinstance(size, int)]
    is_known = value.shape is not None and len(sizes) == len(value.shape) - 1
    if not is_known or value.dtype is None or not value.dtype.is_floating_point():
        raise DataError(
            f"`{value.name}` cannot be noise: it must be of a floating type, and the shape of a sample be known",
            hint="give it as data",
        )
    return value.dtype.numpy(), tuple(sizes)
