"""Recipes: everything that training adds to a model or changes in it."""
