"""Recipes: everything that training adds to a model or changes in it."""

from onward.recipe import lora, quantize
from onward.recipe.head import replace_head
from onward.recipe.prepare import Recipe, prepare

__all__ = ["Recipe", "lora", "prepare", "quantize", "replace_head"]
