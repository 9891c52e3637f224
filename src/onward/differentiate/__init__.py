"""Reverse-mode differentiation, from graph to graph."""

from onward.differentiate.api import gradient, vjp

__all__ = ["gradient", "vjp"]
