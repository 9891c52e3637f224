"""Whether engines agree: the same steps on each, compared value by value."""

from onward.verification.api import verify
from onward.verification.report import Difference, Report, Row

__all__ = ["Difference", "Report", "Row", "verify"]
