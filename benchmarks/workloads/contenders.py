"""Who takes part in the benchmark of training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Contender:
    title: str
    module: str
    variant: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    channels_last: bool = False


CONTENDERS = {
    "onward": Contender("Onward", "on_onward"),
    "torch": Contender("torch", "on_torch"),
    "torch_fused": Contender("torch, fused optimizer", "on_torch", {"fused": True}),
    "torch_compile": Contender("torch.compile", "on_torch", {"compiled": True}),
    "jax": Contender("jax.jit", "on_jax", channels_last=True),
    "tensorflow": Contender("tf.function", "on_tensorflow", channels_last=True),
}
