"""Training models: reading, writing and what is in them."""

from onward.model.core import TRAINING_DOMAIN, Model, Step
from onward.model.serde import Source, load

__all__ = ["TRAINING_DOMAIN", "Model", "Source", "Step", "load"]
