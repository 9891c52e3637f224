"""Losses by name: what each computes, which inputs it adds to the model, and which options it has.

A loss is the standard's operator where that is exact, else a call of a function whose body holds the formula. Such a
function is not reduced: the mean or the sum after it is a node of its own. Definitions and defaults are PyTorch's.
"""

from onward.recipe.losses.definitions import LOSSES, Loss, Target, loss

__all__ = ["LOSSES", "Loss", "Target", "loss"]
