"""Reverse-mode differentiation, from graph to graph."""

from onward.differentiate.api import gradient, jvp, vjp

__all__ = ["gradient", "jvp", "vjp"]
