"""The functions that optimizers are made of."""

from __future__ import annotations

from typing import Any

import optax

from onward.frameworks.jax.exact import Rate, exact, rate_of
from onward.frameworks.jax.executed import executed
from onward.frameworks.jax.source.runtime import exact_clip
from onward.run_state.state import ParameterGroup


class Objects:
    """Functions of optax, and ours for what it has none for. What says them in place of calling is in program/."""

    rate_of = staticmethod(rate_of)
    exact_clip = staticmethod(exact_clip)
    executed = staticmethod(executed)

    def exact(self, group: ParameterGroup, rate: Rate) -> optax.GradientTransformation:
        return exact(group.spec, group.parameters, rate)

    def __getattr__(self, name: str) -> Any:
        return getattr(optax, name)


OBJECTS = Objects()
