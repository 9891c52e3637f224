"""Losses by name: formulas, inputs that they add to the model, and options.

A loss is the standard's operator where that is exact, else a call of a function whose body holds
the formula. Such a function is not reduced: the mean or the sum after it is a node of its own.
Definitions and defaults are PyTorch's.
"""

from onward.recipe.losses.definitions import LOSSES, Loss, Target, loss

__all__ = ["LOSSES", "Loss", "Target", "loss"]
