"""Checks that computations agree: engines with each other, gradients with finite differences."""

from onward.agreement.gradient_check import check_gradients
from onward.agreement.report import Culprit, Difference, EngineReport, EngineRow, GradientReport, GradientRow, Verdict
from onward.agreement.verification import verify

__all__ = [
    "Culprit",
    "Difference",
    "EngineReport",
    "EngineRow",
    "GradientReport",
    "GradientRow",
    "Verdict",
    "check_gradients",
    "verify",
]
