"""Contenders of the training benchmark: Onward, and the peers in all their fast forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from workloads import Workload
from workloads.architectures import CONVOLUTIONAL


@dataclasses.dataclass(frozen=True)
class Contender:
    title: str
    module: str
    variant: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    channels_last: bool = False
    """True if batches and weights come with channels last."""

    @property
    def keeps_compiled(self) -> bool:
        """True if it caches compiled code on disk, for the next start."""
        return "compiled" in self.variant

    def takes(self, workload: Workload) -> bool:
        """True if it can run a workload. A layout for convolutions is a contender only in models that have them."""
        return "channels_last" not in self.variant or workload.model in CONVOLUTIONAL


CONTENDERS = {
    "onward": Contender("Onward", "on_onward"),
    "torch": Contender("torch", "on_torch"),
    "torch_fused": Contender("torch, fused optimizer", "on_torch", {"fused": True}),
    "torch_channels_last": Contender(
        "torch, fused optimizer, channels_last", "on_torch", {"fused": True, "channels_last": True}
    ),
    "torch_compile": Contender("torch.compile", "on_torch", {"compiled": True}),
    "torch_compile_channels_last": Contender(
        "torch.compile, channels_last", "on_torch", {"compiled": True, "channels_last": True}
    ),
    "jax": Contender("jax.jit", "on_jax", channels_last=True),
    "tensorflow": Contender("tf.function", "on_tensorflow", channels_last=True),
    "tensorflow_xla": Contender("tf.function, XLA", "on_tensorflow", {"jit_compile": True}, channels_last=True),
}
ENGINES = {
    "onward_torch": Contender("Onward on torch", "on_onward", {"engine": "torch"}),
    "onward_jax": Contender("Onward on jax", "on_onward", {"engine": "jax"}),
    "onward_tensorflow": Contender("Onward on tensorflow", "on_onward", {"engine": "tensorflow"}),
}
"""Onward's engines on the frameworks, which benchmarks/engines.py compares with these frameworks."""
ALL = {**CONTENDERS, **ENGINES}
