"""Whether engines agree: the same steps on each, compared value by value."""

from onward.agreement.engines import verify
from onward.agreement.report import Difference, Report, Row

__all__ = ["Difference", "Report", "Row", "verify"]
