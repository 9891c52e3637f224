"""The derivative of each operator, a file per family."""

import importlib

from onward.rules.registry import RULES, NoGradient, Rewrite, Rule, elementwise, gradient, no_gradient, rewrite

FAMILIES = (
    "elementwise",
    "reduction",
    "movement",
    "indexing",
    "matrix",
    "convolution",
    "pooling",
    "normalization",
    "quantization",
    "control",
    "sequence",
    "sampling",
    "recurrent",
    "attention",
    "microsoft",
    "classical",
)

for _family in FAMILIES:  # importing a family registers its rules
    importlib.import_module(f"onward.rules.{_family}")

__all__ = ["FAMILIES", "RULES", "NoGradient", "Rewrite", "Rule", "elementwise", "gradient", "no_gradient", "rewrite"]


def __dir__() -> list[str]:
    return __all__
