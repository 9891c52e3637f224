"""Recipes: what is added to a model to train it, and what is changed in it to train it for something else."""

from onward.recipe.head import replace_head
from onward.recipe.lora import add_lora, load_adapter, merge_lora, save_adapter
from onward.recipe.prepare import Recipe, prepare

__all__ = ["Recipe", "add_lora", "load_adapter", "merge_lora", "prepare", "replace_head", "save_adapter"]
