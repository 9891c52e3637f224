"""The derivative of each operator, a file per family."""

from onward.rules import elementwise as _elementwise  # noqa: F401 (importing a family registers its rules)
from onward.rules import matrix as _matrix  # noqa: F401
from onward.rules.registry import RULES, NoGradient, Rule, elementwise, gradient, no_gradient

__all__ = ["RULES", "NoGradient", "Rule", "elementwise", "gradient", "no_gradient"]
