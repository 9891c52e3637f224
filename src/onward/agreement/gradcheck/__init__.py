"""Gradients against differences: is the derivative that Onward computes the one that the model has?"""

from onward.agreement.gradcheck.api import check_gradients
from onward.agreement.gradcheck.report import Culprit, Report, Row, Verdict

__all__ = ["Culprit", "Report", "Row", "Verdict", "check_gradients"]
