"""Recipes: what is added to a model to train it, and what is changed in it to train it for something else."""

from onward.recipe import lora, quantize
from onward.recipe.head import replace_head
from onward.recipe.prepare import Recipe, prepare

__all__ = ["Recipe", "lora", "prepare", "quantize", "replace_head"]
