"""Optimizers: formulas, hyper-parameters, slots, and parameter groups."""

from onward.recipe.optimizers.definition import ConfiguredOptimizer, Optimizer, Slot
from onward.recipe.optimizers.graph_optimizer import FunctionOptimizer
from onward.recipe.optimizers.updates import OPTIMIZERS, configure, optimizer

__all__ = ["OPTIMIZERS", "ConfiguredOptimizer", "FunctionOptimizer", "Optimizer", "Slot", "configure", "optimizer"]
