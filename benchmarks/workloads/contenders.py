"""Who takes part in the benchmark of training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Contender:
    title: str
    module: str
    variant: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    channels_last: bool = False


CONTENDERS = {
    "onward": Contender("Onward", "on_onward"),
    "torch": Contender("torch", "on_torch"),
    "torch_fused": Contender("torch, fused optimizer", "on_torch", {"fused": True}),
    "torch_compile": Contender("torch.compile", "on_torch", {"compiled": True}),
    "jax": Contender("jax.jit", "on_jax", channels_last=True),
    "tensorflow": Contender("tf.function", "on_tensorflow", channels_last=True),
}
ENGINES = {
    "onward_torch": Contender("Onward on torch", "on_onward", {"engine": "torch"}),
    "onward_jax": Contender("Onward on jax", "on_onward", {"engine": "jax"}),
    "onward_tensorflow": Contender("Onward on tensorflow", "on_onward", {"engine": "tensorflow"}),
}
"""Onward's own engines on the frameworks, which benchmarks/engines.py compares with these."""
ALL = {**CONTENDERS, **ENGINES}
