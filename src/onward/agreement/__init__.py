"""Checks that computations agree: engines with each other, gradients with finite differences."""
