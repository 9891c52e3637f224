"""Long lines of Python, as a formatter would break them."""

from onward.convert.layout import wrapped

__all__ = ["wrapped"]
