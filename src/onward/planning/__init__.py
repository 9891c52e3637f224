"""Training on many devices, on paper: does it fit, how is it divided, what must be communicated, how long does it take.

Shapes and types are enough for that: no weight is read.
"""

from onward.planning.plan import Plan, plan
from onward.planning.strategies import STRATEGIES, Collective, Estimate, Memory

__all__ = ["STRATEGIES", "Collective", "Estimate", "Memory", "Plan", "plan"]
