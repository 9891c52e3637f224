"""Training models: their steps, reading and writing."""

from onward.model.core import TRAINING_DOMAIN, Model, Step
from onward.model.serde import Source, load

__all__ = ["TRAINING_DOMAIN", "Model", "Source", "Step", "load"]
