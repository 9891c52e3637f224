"""Losses by name: formulas, inputs that they add to the model, and options.

A loss is the standard's operator where that is exact, else a call of a function with the formula
and a node for the mean or the sum. Definitions and defaults are PyTorch's.
"""

from onward.recipe.losses.definitions import LOSSES, Loss, Target, loss

__all__ = ["LOSSES", "Loss", "Target", "loss"]
