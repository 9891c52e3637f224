"""Recipes: what is added to an inference model to train it."""

from onward.recipe.prepare import Recipe, prepare

__all__ = ["Recipe", "prepare"]
